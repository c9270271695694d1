"""Every interleaving, one after the other: the slowest engine, and the one that the others are held against."""

from __future__ import annotations

from collections.abc import Iterator
from math import factorial, prod

from qsim.explore.program import Program, State, advance
from qsim.explore.runs import Choices


def all_runs(program: Program) -> Iterator[tuple[Choices, int]]:
    """Every complete run with its verdict flags, in the order of the choices."""
    yield from _from(program, program.start, ())


def _from(program: Program, state: State, choices: Choices) -> Iterator[tuple[Choices, int]]:
    left = program.left(state)
    if not left:
        yield choices, state[program.flags]
    for worker in left:
        yield from _from(program, advance(program, state, worker), (*choices, worker))


def count_schedules(program: Program) -> int:
    """How many there are: the multinomial coefficient of the threads' pieces, unless some worker has to wait."""
    if not any(needs for mine in program.needs for needs in mine):
        return factorial(sum(program.lengths)) // prod(factorial(length) for length in program.lengths)
    level = {(0,) * program.workers: 1}
    for _ in range(sum(program.lengths)):
        after: dict[tuple[int, ...], int] = {}
        for place, runs in level.items():
            for worker in program.ready(place):
                key = (*place[:worker], place[worker] + 1, *place[worker + 1 :])
                after[key] = after.get(key, 0) + runs
        level = after
    return sum(level.values())


def reached(program: Program) -> set[State]:
    """Every state that some run goes through, by a plain set of tuples: the slow twin of ``breadth``."""
    seen, frontier = {program.start}, [program.start]
    while frontier:
        after = {advance(program, state, worker) for state in frontier for worker in program.left(state)}
        seen |= after
        frontier = list(after)
    return seen
