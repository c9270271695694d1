"""From a space to a program: names become numbers, each thread is lowered, fields are placed. Searches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from qsim.errors import CaseError
from qsim.explore.footprints import footprint
from qsim.explore.lowering import Key, Lowering, Names, Read
from qsim.explore.program import After, Code, Differ, Foreign, Instruction, Judging, Move, Outside, Program, Raise, Set
from qsim.explore.result import Kind, kind_of
from qsim.explore.runs import completed, interleaved, judge
from qsim.explore.space import Space
from qsim.explore.threads import Thread, shared_names, threads
from qsim.quant import OpId, StateKey
from qsim.sim import SCOPES, Cadence, Scope
from qsim.sim.events import Commit, Slot, Store
from qsim.sim.invariants import unit_of

ORDERLESS = (Kind.MISSING_COMMIT, Kind.OBSERVATIONS)
"""Kinds that count over whole units: every order of the same events has the same verdict, so one run decides."""


@lru_cache(maxsize=16)
def compiled(space: Space) -> Program:
    """The program of ``space``. Raises CaseError for events that it cannot follow."""
    sequential = {kind_of(v) for v in judge(interleaved(space, completed(space, ())))}
    ending = tuple(kind for kind in ORDERLESS if kind in sequential)
    return assembled(threads(space), SCOPES[space.declared], space.cadence, ending)


def assembled(workers: Sequence[Thread], scope: Scope, unit: Cadence, ending: tuple[Kind, ...]) -> Program:
    """The program of threads, whatever space they come from.

    scope, unit: declared. ending: kinds that every complete run has, whatever the order.
    """
    names = _names(workers, scope, unit)
    codes, registers = [], 0
    for thread in workers:
        last_use: dict[Read, int] = {}
        first_pass = Lowering(thread, names, last_use)
        first_pass.code(ending)
        second = Lowering(thread, names, first_pass.uses)
        codes.append(second.code(ending))
        registers = max(registers, second.registers)
    return _placed(workers, names, codes, registers)


def _names(workers: Sequence[Thread], scope: Scope, unit: Cadence) -> Names:
    shared = shared_names([thread.events for thread in workers])
    writes: dict[StateKey, int] = {}
    slots: dict[Slot, int] = {}
    writers: dict[OpId, int] = {}
    for thread in workers:
        for event in thread.events:
            mark = footprint(event)
            if mark.cell is not None:
                writes[mark.cell] = writes.get(mark.cell, 0) + mark.writes_cell
            for name in (*mark.puts, *mark.takes):
                if name in shared:
                    slots.setdefault(name, len(slots))
            if mark.op is not None and any(name in shared for name in mark.puts):
                writers.setdefault(mark.op, len(writers) + 1)
            if isinstance(event, (Commit, Store)) and any(name in shared for name in event.obs):
                raise CaseError("workers share an observation; the explorer follows shared states, codes and snapshots")
    first, number = dict[StateKey, int](), 1
    for cell, count in writes.items():
        first[cell], number = number, number + count + 1
    cells = {cell: 1 + at for at, cell in enumerate(c for c in writes if c in shared)}
    return Names(
        first=first,
        versions={cell: count + 1 for cell, count in writes.items()},
        cells=cells,
        slots={name: 1 + len(cells) + 2 * at for name, at in slots.items()},
        writers=writers,
        first_commit=_first_commits(workers, scope, unit),
        scope=scope,
        unit=unit,
    )


def _first_commits(workers: Sequence[Thread], scope: Scope, unit: Cadence) -> Mapping[Key, Mapping[int, int]]:
    first: dict[Key, dict[int, int]] = {}
    for thread in workers:
        for number, piece in enumerate(thread.pieces):
            for event in thread.events[piece.start : piece.stop]:
                if isinstance(event, (Commit, Store)):
                    key = scope(event.op), unit_of(event.op, unit)
                    first.setdefault(key, {}).setdefault(thread.worker, number)
    return first


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
    start = [0] * (-(-(base + 1 + len(names.cells) + 2 * len(names.slots)) // 8) * 8)
    for cell, field in names.cells.items():
        start[base + field] = names.first[cell]
    versions = sum(names.versions.values())
    largest = max(versions, len(names.writers), (1 << len(kinds)) - 1, *(len(thread.pieces) for thread in workers))
    # A visit casts 4 operands and commits each twice at most, and a cell has one version more than commits.
    assert largest < 1 << 16, "a space has at most MAX_VISITS visits of a layer"
    return Program(
        code=tuple(tuple(tuple(piece) for piece in code) for code in placed),
        numbers=tuple(_numbers(code) for code in codes),
        ends=tuple((0, *(piece.stop for piece in thread.pieces)) for thread in workers),
        touches=tuple(tuple(frozenset(piece.touches) for piece in thread.pieces) for thread in workers),
        kinds=kinds,
        start=tuple(start),
        block=block,
        flags=base,
        largest=largest,
        symmetric=all(code == codes[0] for code in codes),
    )


def _numbers(code: Code) -> tuple[int, ...]:
    known: dict[tuple[Instruction, ...], int] = {}
    return (*(known.setdefault(piece, len(known)) for piece in code), -1)


def _at(do: Instruction, worker: int, block: int, base: int) -> Instruction:
    def place(field: int) -> int:
        return base + field if field >= 0 else block * worker - field

    match do:
        case Set(field) | Outside(field) | Foreign(field):
            return do._replace(field=place(field))
        case Move(field, source):
            return do._replace(field=place(field), source=place(source))
        case Differ(left, right):
            return do._replace(left=place(left), right=place(right))
        case After() | Raise():
            return do
