"""Searches by chance, each a pure function of a seed: random priorities (PCT) and a random walk. Proves nothing.

Source: S. Burckhardt, P. Kothari, M. Musuvathi, S. Nagarakatte, "A randomized scheduler with probabilistic
guarantees of finding bugs", ASPLOS 2010.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from qsim.explore.program import Program
from qsim.explore.runs import Choices
from qsim.philox import Purpose, RandomStream


def random_priorities(program: Program, *, runs: int, depth: int, seed: int) -> Iterator[Choices]:
    """Runs by PCT: the worker of the highest priority runs; at depth - 1 places the one that runs drops to the end.

    Priorities and places are drawn anew for each run.
    """
    count, total = program.workers, sum(program.lengths)
    for run in range(runs):
        words = RandomStream(seed, Purpose.SCHEDULE, step=run).words(count + depth - 1).tolist()
        priority = [(depth, word, worker) for worker, word in enumerate(words[:count])]
        drops: dict[int, list[int]] = {}
        for rank, word in enumerate(words[count:]):
            drops.setdefault(_below(total, word), []).append(rank)
        yield tuple(_by_priority(program, priority, drops))


def _by_priority(program: Program, priority: list[tuple[int, int, int]], drops: dict[int, list[int]]) -> Iterator[int]:
    place = [0] * program.workers
    for at in range(sum(program.lengths)):
        can = program.ready(place)
        worker = max(can, key=priority.__getitem__)
        for rank in drops.get(at, ()):  # before its piece: it is the one that the next piece would belong to
            priority[worker] = (rank, 0, worker)
            worker = max(can, key=priority.__getitem__)
        place[worker] += 1
        yield worker


def chance_of_a_run(program: Program, depth: int) -> Fraction:
    """At least so likely does one run of PCT meet a violation that ``depth`` constraints of order bring about."""
    return Fraction(1, program.workers * sum(program.lengths) ** (depth - 1))


def random_walk(program: Program, *, runs: int, seed: int) -> Iterator[Choices]:
    """Runs that choose among the workers that can go on, each as likely as the others."""
    for run in range(runs):
        place, choices = [0] * program.workers, list[int]()
        for word in RandomStream(seed, Purpose.SCHEDULE, step=run).words(sum(program.lengths)).tolist():
            awake = program.ready(place)
            choices.append(awake[_below(len(awake), word)])
            place[choices[-1]] += 1
        yield tuple(choices)


def _below(count: int, word: int) -> int:
    """A number in 0..count-1 from a 32-bit word; the bias is below count / 2^32."""
    return count * word >> 32
