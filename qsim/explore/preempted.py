"""Search by preemptions: all runs that leave a worker before its end at most so often, with the least run of each kind.

A state here is the pieces and versions, and who ran last; of the runs that lead to one, the fewest preemptions
count, so a bound costs no more states than there are. Knows no event.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from qsim.arrays import I64
from qsim.explore.program import Program
from qsim.explore.result import Kind
from qsim.explore.runs import Choices
from qsim.explore.vectors import Grown, Rows, first_of_each, grown, ready_rows, start_rows, successors, widest

Counts = np.ndarray[tuple[int], np.dtype[Any]]


class Least(NamedTuple):
    """The run with the fewest events up to a violation, of those the one with the fewest preemptions."""

    events: int
    preemptions: int
    choices: Choices


class Bounded(NamedTuple):
    """states: how many were visited; whole: whether all runs within the bound were covered."""

    states: int
    whole: bool
    least: dict[Kind, Least]


class _Candidate(NamedTuple):
    """Ordered by what is to be least; then where its last piece starts."""

    events: int
    preemptions: int
    level: int
    row: int
    worker: int


class _Frontier(NamedTuple):
    """States of one level: rows whose flags field holds who ran last, plus one; preemptions so far; events done."""

    rows: Rows
    preemptions: I64
    events: I64


class _Search:
    """One search: what is wanted, what was found, and who came from whom."""

    def __init__(self, program: Program, wanted: Collection[Kind], most: int | None) -> None:
        self.program, self.wanted, self.most = program, frozenset(wanted), most
        ends = [np.array(ends, np.int64) for ends in program.ends]
        self.sizes = [after[1:] - after[:-1] for after in ends]  # events by piece
        self.best: dict[Kind, _Candidate] = {}
        self.levels: list[tuple[I64, Counts]] = []

    def limit(self) -> int | None:
        """Events beyond which no run can be better than those found; None where a kind is still missing."""
        return max((c.events for c in self.best.values()), default=0) if self.best.keys() == self.wanted else None

    def next_level(self, level: int, now: _Frontier) -> _Frontier:
        """All successors within the bounds, of those alike the one with the fewest preemptions."""
        program, last = self.program, now.rows[:, self.program.flags].astype(np.int64) - 1
        busy = np.zeros(len(last), np.bool_)
        for worker in range(program.workers):
            busy |= (last == worker) & ready_rows(program, now.rows, worker)
        parts = [self._successors(level, now, group, busy & (last != group.worker)) for group in self._grown(now)]
        rows = np.concatenate([part.rows for part, _, _ in parts])
        preemptions = np.concatenate([part.preemptions for part, _, _ in parts])
        kept = first_of_each(rows, preemptions) if len(rows) else np.zeros(0, np.int64)
        parents = np.concatenate([parents for _, parents, _ in parts])[kept]
        workers = np.concatenate([np.full(len(parents), worker, np.uint8) for _, parents, worker in parts])[kept]
        self.levels.append((parents, workers))
        return _Frontier(rows[kept], preemptions[kept], np.concatenate([part.events for part, _, _ in parts])[kept])

    def _grown(self, now: _Frontier) -> list[Grown]:
        return list(grown(self.program, now.rows))

    def _successors(
        self, level: int, now: _Frontier, group: Grown, preempts: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> tuple[_Frontier, I64, int]:
        worker, before = group.worker, now.events[group.parents]
        preemptions = now.preemptions[group.parents] + preempts[group.parents]
        within = np.ones(len(preemptions), np.bool_) if self.most is None else preemptions <= self.most
        for mark in group.raised:
            if mark.kind in self.wanted:
                where = np.flatnonzero(within if mark.where is None else within & mark.where)
                self._offer(mark.kind, level, group, where, before + mark.at, preemptions)
        done = group.rows[:, self.program.done(worker)].astype(np.int64)
        events, limit = before + self.sizes[worker][done - 1], self.limit()
        if limit is not None:
            within = within & (events < limit)
        kept = np.flatnonzero(within)
        rows = group.rows[kept]
        rows[:, self.program.flags] = worker + 1
        return _Frontier(rows, preemptions[kept], events[kept]), group.parents[kept], worker

    def _offer(self, kind: Kind, level: int, group: Grown, where: I64, events: I64, preemptions: I64) -> None:
        if not where.size:
            return
        at = where[np.lexsort((preemptions[where], events[where]))[0]]
        offer = _Candidate(int(events[at]), int(preemptions[at]), level, int(group.parents[at]), group.worker)
        if kind not in self.best or offer[:2] < self.best[kind][:2]:
            self.best[kind] = offer

    def runs(self) -> dict[Kind, Least]:
        """What was found, as runs."""
        return {kind: self._run(found) for kind, found in self.best.items()}

    def _run(self, found: _Candidate) -> Least:
        path, row = [found.worker], found.row
        for parents, workers in reversed(self.levels[: found.level]):
            path.append(int(workers[row]))
            row = int(parents[row])
        return Least(found.events, found.preemptions, tuple(reversed(path)))


def preemption_bounded(program: Program, *, most: int | None, wanted: Collection[Kind], budget: int) -> Bounded:
    """All runs with at most ``most`` preemptions (None: all runs), as far as they can give a lesser run of ``wanted``.

    At most about ``budget`` states are visited: the level that goes beyond it is the last.
    """
    search, states = _Search(program, wanted, most), 1
    rows = start_rows(program)
    now = _Frontier(rows, np.zeros(1, np.int64), np.zeros(1, np.int64))
    for level in range(sum(program.lengths)):
        if states > budget or successors(program, now.rows) > widest(program, now.rows, budget):
            break
        if not len(now.rows):
            return Bounded(states, True, search.runs())
        now = search.next_level(level, now)
        states += len(now.rows)
    whole = len(search.levels) == sum(program.lengths)
    return Bounded(states, whole, search.runs())
