"""Classes of runs: two runs are of one class where they differ in the order of independent pieces alone.

These are Mazurkiewicz traces. A sleep set holds the workers whose next piece was tried before at this place and
commutes with all pieces since: to run it now would repeat a class. A worker that can go on stays able to, and what it
may wait for depends on what lets it go on; so each class has exactly one run that no sleep set cuts off
(P. Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996). Which run that is depends on
the pieces done and the sleep set, not on the state; so the classes are counted over (pieces done, sleep set), without
walking through them. Knows no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qsim.explore.program import Program, State, advance, independent
from qsim.explore.runs import Choices

Place = tuple[int, ...]
Sleep = frozenset[int]


def class_runs(program: Program) -> Iterator[tuple[Choices, int]]:
    """One run of every class, with its verdict flags."""
    commute = _commuting(program)

    def walk(state: State, choices: Choices, sleep: Sleep) -> Iterator[tuple[Choices, int]]:
        place = program.place(state)
        left = program.ready(place)
        if not left:
            yield choices, state[program.flags]
        for worker, asleep in _awake(place, left, sleep, commute):
            yield from walk(advance(program, state, worker), (*choices, worker), asleep)

    yield from walk(program.start, (), frozenset())


COUNTED = 400_000
"""Steps from one pair of pieces done and sleep set to the next that a count may take: about a second."""


def count_classes(program: Program, *, budget: int = COUNTED) -> int | None:
    """How many classes there are: ``class_runs`` without the runs. None where it takes more steps than ``budget``."""
    commute, lengths = _commuting(program), program.lengths
    level: dict[tuple[Place, Sleep], int] = {((0,) * program.workers, frozenset()): 1}
    taken = 0
    for _ in range(sum(lengths)):
        taken += len(level) * program.workers
        if taken > budget:
            return None
        after: dict[tuple[Place, Sleep], int] = {}
        for (place, sleep), runs in level.items():
            for worker, asleep in _awake(place, program.ready(place), sleep, commute):
                key = (*place[:worker], place[worker] + 1, *place[worker + 1 :]), asleep
                after[key] = after.get(key, 0) + runs
        level = after
    return sum(level.values())


class _Commuting(NamedTuple):
    """number: by worker and piece, which pieces touch the same. table: which numbers commute."""

    number: tuple[tuple[int, ...], ...]
    table: tuple[tuple[bool, ...], ...]

    def both(self, worker: int, piece: int, other: int, its: int) -> bool:
        """True where the pieces of two workers commute."""
        return self.table[self.number[worker][piece]][self.number[other][its]]


def _commuting(program: Program) -> _Commuting:
    known: dict[frozenset[tuple[object, bool]], int] = {}
    number = tuple(tuple(known.setdefault(t, len(known)) for t in thread) for thread in program.touches)
    return _Commuting(number, tuple(tuple(independent(a, b) for b in known) for a in known))


def _awake(place: Place, left: list[int], sleep: Sleep, commute: _Commuting) -> Iterator[tuple[int, Sleep]]:
    """Each worker to try at a place, and who sleeps after it."""
    tried = set(sleep)
    for worker in left:
        if worker in sleep:
            continue
        asleep = frozenset(w for w in tried if commute.both(worker, place[worker], w, place[w]))
        yield worker, asleep
        tried.add(worker)
