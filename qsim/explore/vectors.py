"""Many states at once: rows of small integers, one array operation an instruction. The fast twin of ``program``.

Every piece adds one to the count of pieces done, so a state lies on one level alone, and equal states meet within
their level: a search keeps no table of all states seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from qsim.arrays import I64
from qsim.explore.program import (
    After,
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
    Queue,
    Raise,
    Set,
    Term,
)
from qsim.explore.result import Kind

Rows = np.ndarray[tuple[int, int], np.dtype[Any]]
"""States, one a row, in the fields of the program."""
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Column = np.ndarray[Any, np.dtype[Any]]
Words = np.ndarray[tuple[int, int], np.dtype[np.uint64]]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that one word alone is mixed without loss
_HALF = np.uint64(32)


LEVEL_BYTES = 1 << 28


class Raised(NamedTuple):
    """Rows in which a piece raises ``kind``, with its events up to then. All rows where ``where`` is None."""

    kind: Kind
    at: int
    where: Mask | None


class Grown(NamedTuple):
    """Rows after a piece of one worker: which rows they come from, whose piece it was, and what it raised."""

    rows: Rows
    parents: I64
    worker: int
    raised: tuple[Raised, ...]


def start_rows(program: Program) -> Rows:
    """The start as one row, in the narrowest type that holds every field."""
    kind = np.uint8 if program.largest < 256 else np.uint16
    return np.array([program.start], kind)


def grown(program: Program, rows: Rows) -> Iterator[Grown]:
    """All successors, by worker and instructions: pieces with equal ones are run together."""
    for worker, code in enumerate(program.code):
        numbers = program.numbers[worker]
        number = np.where(ready_rows(program, rows, worker), np.array(numbers)[rows[:, program.done(worker)]], -1)
        for at in np.flatnonzero(np.bincount(number + 1)[1:]).tolist():  # those there are, and none that has ended
            parents = np.flatnonzero(number == at)
            after = rows[parents]
            raised = tuple(advance_rows(program, after, worker, code[numbers.index(at)]))
            yield Grown(after, parents, worker, raised)


def ready_rows(program: Program, rows: Rows, worker: int) -> Mask:
    """Where a worker can run its next piece."""
    done = rows[:, program.done(worker)]
    ready: Mask = done < program.lengths[worker]
    for piece, needs in enumerate(program.needs[worker]):
        for other, count in needs:
            ready &= (done != piece) | (rows[:, program.done(other)] >= count)
    return ready


def successors(program: Program, rows: Rows) -> int:
    """How many successors the rows have, before any are found to be alike."""
    return sum(int(ready_rows(program, rows, w).sum()) for w in range(program.workers))


def widest(program: Program, rows: Rows, budget: int) -> int:
    """How many successors a level may have: they are held in memory before those alike are merged."""
    return min(2 * budget, LEVEL_BYTES // (rows.itemsize * len(program.start)))


def advance_rows(program: Program, rows: Rows, worker: int, instructions: tuple[Instruction, ...]) -> Iterator[Raised]:
    """Run one piece of ``worker`` on every row in place, and say what it raises: consume it to the end."""
    flags = rows[:, program.flags]
    raised = []
    for do in instructions:
        match do:
            case Set(field, value):
                rows[:, field] = value
            case Move(field, source, add):
                np.add(rows[:, source], rows.dtype.type(add), out=rows[:, field])
            case Push(queue):
                _push(rows, queue)
            case Pop(queue, newest):
                _pop(rows, queue, newest=newest)
            case Differ() | Outside() | Foreign() | Mixed() | After() | Raise():
                where = _where(program, rows, worker, do)
                if where is None or where.any():
                    raised.append(Raised(do.kind, do.at, where))
    for mark in raised:
        bit = rows.dtype.type(program.bit(mark.kind))
        flags |= bit if mark.where is None else mark.where * bit
        yield mark
    rows[:, program.done(worker)] += 1


def _push(rows: Rows, queue: Queue) -> None:
    every, at = np.arange(len(rows)), _length(rows, queue)
    rows[every, queue.versions + at] = rows[:, queue.out]
    rows[every, queue.ops + at] = rows[:, queue.out + 1]


def _pop(rows: Rows, queue: Queue, *, newest: bool) -> None:
    every, end = np.arange(len(rows)), _length(rows, queue) - 1
    for out, first in ((queue.out, queue.versions), (queue.out + 1, queue.ops)):
        if newest:
            rows[:, out] = rows[every, first + end]
            rows[every, first + end] = 0
            continue
        last = first + queue.size - 1
        rows[:, out] = rows[:, first]
        rows[:, first:last] = rows[:, first + 1 : last + 1].copy()
        rows[:, last] = 0


def _length(rows: Rows, queue: Queue) -> I64:
    length: I64 = (rows[:, queue.ops : queue.versions] != 0).sum(axis=1)
    return length


def _where(program: Program, rows: Rows, worker: int, do: Judging) -> Mask | None:
    match do:
        case Differ(left, right):
            differ: Mask = rows[:, left] != rows[:, right]
            return differ
        case Outside(field, least, below):
            return (rows[:, field] < least) | (rows[:, field] >= below)
        case Foreign(field, allowed):
            return ~np.isin(rows[:, field], np.array(allowed, rows.dtype))
        case Mixed(versions, ops):
            return _mixed(*(_term(rows, term) for term in (*versions, *ops)))
        case After(first):
            done = [rows[:, program.done(w)] > count for w, count in first if w != worker]
            after: Mask = np.logical_or.reduce(done)
            return after
        case Raise():
            return None


def _term(rows: Rows, term: Term) -> Column:
    return np.full(len(rows), term.number) if term.field is None else rows[:, term.field]


def _mixed(left: Column, right: Column, one: Column, other: Column) -> Mask:
    mixed: Mask = (left == right) & (left != 0) & (one != other) & (one != 0) & (other != 0)
    return mixed


def words(rows: Rows) -> Words:
    """Rows as words of 64 bits: a row has a whole number of them."""
    return np.ascontiguousarray(rows).view(np.uint64)


def first_of_each(rows: Rows, rank: I64 | None = None) -> I64:
    """The index of one row of each distinct kind: with ``rank``, of those alike one of the lowest rank.

    Rows are sorted by a mix of their words and compared with their neighbours as a whole, so a clash of mixes merges
    nothing; where one is seen, the words themselves are sorted.
    """
    packed = words(rows)
    mixed = packed[:, 0] * _MIX
    for at in range(1, packed.shape[1]):
        mixed = (mixed ^ (mixed >> _HALF) ^ packed[:, at]) * _MIX
    # Stable: which of several rows alike is kept must not depend on the machine.
    order = np.argsort(mixed, kind="stable") if rank is None else np.lexsort((rank, mixed))
    apart = _apart(packed, order)
    sorted_mixes = mixed[order]
    if np.any(apart & (sorted_mixes[1:] == sorted_mixes[:-1])):
        keys = tuple(packed[:, at] for at in range(packed.shape[1]))
        order = np.lexsort(keys if rank is None else (rank, *keys))
        apart = _apart(packed, order)
    return order[np.concatenate(([True], apart))]


def _apart(packed: Words, order: I64) -> Mask:
    ordered = packed[order]
    apart: Mask = (ordered[1:] != ordered[:-1]).any(axis=1)
    return apart


def sorted_blocks(program: Program, rows: Rows) -> Rows:
    """Rows with the workers' blocks in order: of states that differ in the workers' numbers alone one remains."""
    size = program.block * rows.dtype.itemsize
    width = program.block * program.workers
    if size <= 8:
        unit = np.dtype(f"u{size}")
        blocks = np.ascontiguousarray(rows[:, :width]).view(unit)
        blocks.sort(axis=1)
        rows[:, :width] = blocks.view(rows.dtype)
        return rows
    blocks = np.ascontiguousarray(rows[:, :width]).view(np.uint64).reshape(len(rows), program.workers, -1)
    for last in range(program.workers - 1, 0, -1):  # exchanges of neighbours: workers are few
        for at in range(last):
            left, right = blocks[:, at].copy(), blocks[:, at + 1].copy()
            swap = _greater(left, right)[:, None]
            blocks[:, at], blocks[:, at + 1] = np.where(swap, right, left), np.where(swap, left, right)
    rows[:, :width] = blocks.reshape(len(rows), -1).view(rows.dtype)
    return rows


def _greater(left: Words, right: Words) -> Mask:
    greater = np.zeros(len(left), np.bool_)
    equal = np.ones(len(left), np.bool_)
    for at in range(left.shape[1]):
        greater |= equal & (left[:, at] > right[:, at])
        equal &= left[:, at] == right[:, at]
    return greater
