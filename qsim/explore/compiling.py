"""From a space to a program: names become numbers, each thread is lowered, fields are placed. Searches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from qsim.errors import CaseError
from qsim.explore.lowering import Lowering
from qsim.explore.names import Declared, Names, names_of
from qsim.explore.program import (
    After,
    Code,
    Differ,
    Foreign,
    Instruction,
    Judging,
    Mixed,
    Move,
    Outside,
    Pop,
    Program,
    Push,
    Raise,
    Set,
    Term,
)
from qsim.explore.result import Kind, kind_of
from qsim.explore.runs import completed, interleaved
from qsim.explore.space import Space
from qsim.explore.threads import Thread, threads
from qsim.explore.versions import Read
from qsim.sim import SCOPES, judge

ORDERLESS = (
    Kind.MISSING_COMMIT,
    Kind.OBSERVATIONS,
    Kind.LEFT_IN_QUEUE,
    Kind.ALGEBRA,
    Kind.FROZEN,
    Kind.HELD_UP,
    Kind.CONTEXT,
)
"""Kinds that count over whole units, or look at one worker alone: every order of the same events has the same verdict,
so one run decides."""
UNFOLLOWED = (Kind.PERSISTENCE, Kind.CACHE)
"""Kinds that no instruction stands for: a space that shows one is refused."""


@lru_cache(maxsize=16)
def compiled(space: Space) -> Program:
    """The program of ``space``. Raises CaseError for events that it cannot follow."""
    sequential = {kind_of(v) for v in judge(interleaved(space, completed(space, ())))}
    for kind in UNFOLLOWED:
        if kind in sequential:
            raise CaseError(f"space {space.text()} breaks {kind.invariant} ({kind.meaning}), which no search follows")
    ending = tuple(kind for kind in ORDERLESS if kind in sequential)
    return assembled(threads(space), Declared(SCOPES[space.declared], space.cadence, space.ranks), ending)


def assembled(workers: Sequence[Thread], declared: Declared, ending: tuple[Kind, ...]) -> Program:
    """The program of threads, whatever space they come from. ending: kinds that every complete run has."""
    names = names_of(workers, declared)
    codes, registers = [], 0
    for thread in workers:
        last_use: dict[Read, int] = {}
        first_pass = Lowering(thread, names, last_use)
        first_pass.code(ending)
        second = Lowering(thread, names, first_pass.uses)
        codes.append(second.code(ending))
        registers = max(registers, second.registers)
    return _placed(workers, names, codes, registers)


def _placed(workers: Sequence[Thread], names: Names, codes: Sequence[Code], registers: int) -> Program:
    """Give every field its place: the workers' blocks, then flags, cells and slots, then padding.

    A block is padded to 1, 2, 4 or a multiple of 8 fields, and the whole to a multiple of 8, so that blocks and
    rows are whole words.
    """
    block = 1 + registers
    block = next((size for size in (1, 2, 4) if block <= size), -(-block // 8) * 8)
    base = block * len(workers)
    placed = [[[_at(do, w, block, base) for do in piece] for piece in code] for w, code in enumerate(codes)]
    used = {do.kind for code in codes for piece in code for do in piece if isinstance(do, Judging)}
    kinds = tuple(kind for kind in Kind if kind in used)
    start = [0] * (-(-(base + names.fields) // 8) * 8)
    for cell, field in (*names.cells.items(), *names.descales.items()):
        start[base + field] = names.first[cell]
    versions = sum(names.versions.values())
    largest = max(versions, names.stranger(), (1 << len(kinds)) - 1, *(len(thread.pieces) for thread in workers))
    # A visit casts 4 operands and commits each twice at most, and a cell has one version more than commits.
    assert largest < 1 << 16, "a space has at most MAX_VISITS visits of a layer"
    return Program(
        code=tuple(tuple(tuple(piece) for piece in code) for code in placed),
        numbers=tuple(_numbers(code) for code in codes),
        ends=tuple((0, *(piece.stop for piece in thread.pieces)) for thread in workers),
        touches=tuple(tuple(frozenset(piece.touches) for piece in thread.pieces) for thread in workers),
        needs=tuple(tuple(piece.needs for piece in thread.pieces) for thread in workers),
        kinds=kinds,
        start=tuple(start),
        block=block,
        flags=base,
        largest=largest,
        symmetric=all(
            (code, [piece.needs for piece in thread.pieces]) == (codes[0], [piece.needs for piece in workers[0].pieces])
            for code, thread in zip(codes, workers, strict=True)
        ),
    )


def _numbers(code: Code) -> tuple[int, ...]:
    known: dict[tuple[Instruction, ...], int] = {}
    return (*(known.setdefault(piece, len(known)) for piece in code), -1)


def _at(do: Instruction, worker: int, block: int, base: int) -> Instruction:
    def place(field: int) -> int:
        return base + field if field >= 0 else block * worker - field

    def term(t: Term) -> Term:
        return t if t.field is None else Term(place(t.field))

    match do:
        case Push(queue) | Pop(queue):
            return do._replace(queue=queue._replace(out=place(queue.out)))
        case Mixed(versions, ops):
            return do._replace(versions=(term(versions[0]), term(versions[1])), ops=(term(ops[0]), term(ops[1])))
        case Set(field) | Outside(field) | Foreign(field):
            return do._replace(field=place(field))
        case Move(field, source):
            return do._replace(field=place(field), source=place(source))
        case Differ(left, right):
            return do._replace(left=place(left), right=place(right))
        case After() | Raise():
            return do
