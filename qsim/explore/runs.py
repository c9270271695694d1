"""A run: a list of worker numbers, one a scheduling choice, and the case that it stands for. Searches nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from qsim.errors import UsageError
from qsim.explore.space import Space
from qsim.explore.threads import Thread, case_of, threads
from qsim.explore.waiting import Needs, ready
from qsim.sim import SCOPES, Case, Context
from qsim.sim.events import Event

Choices = tuple[int, ...]
"""The worker that runs its next piece, for each scheduling choice."""


def interleaved(space: Space, choices: Sequence[int]) -> Case:
    """The run as an ordinary case: its schedule is the interleaved tuple. It may stop before the threads end.

    Raises UsageError where a choice names no worker, or one that has nothing left.
    """
    case = case_of(space)
    return Case(
        schedule=tuple(_events(space, choices)), recipe=case.recipe, policy=case.policy, context=context_of(space)
    )  # fmt: skip


def context_of(space: Space) -> Context:
    """What the runs of a space are held against."""
    mine = case_of(space).context
    return Context(
        scope=SCOPES[space.declared], unit=space.cadence, fold=mine.fold, ranks=space.ranks, traits=mine.traits
    )  # fmt: skip


def _events(space: Space, choices: Sequence[int]) -> Iterator[Event]:
    workers = threads(space)
    needs, done = _needs(workers), [0] * len(workers)
    for at, worker in enumerate(choices):
        if not 0 <= worker < len(workers):
            raise UsageError(f"choice {at} of the run is worker {worker}; the space has 0..{len(workers) - 1}")
        thread = workers[worker]
        if done[worker] == len(thread.pieces):
            raise UsageError(f"choice {at} of the run is worker {worker}, which has ended; choose another worker")
        if worker not in ready(needs, done):
            raise UsageError(f"choice {at} of the run is worker {worker}, which waits for others; choose another")
        piece = thread.pieces[done[worker]]
        yield from thread.events[piece.start : piece.stop]
        done[worker] += 1


def _needs(workers: Sequence[Thread]) -> list[list[Needs]]:
    return [[piece.needs for piece in thread.pieces] for thread in workers]


def can_run(space: Space, choices: Sequence[int]) -> bool:
    """Whether each choice names a worker that can go on."""
    needs = _needs(threads(space))
    done = [0] * len(needs)
    for worker in choices:
        if worker not in ready(needs, done):
            return False
        done[worker] += 1
    return True


def completed(space: Space, choices: Sequence[int]) -> Choices:
    """The run until every thread has ended, without a further preemption: the last worker first, then by number."""
    needs = _needs(threads(space))
    done, run = [0] * len(needs), list(choices)
    for worker in choices:
        done[worker] += 1
    while can := ready(needs, done):
        worker = run[-1] if run and run[-1] in can else can[0]
        run.append(worker)
        done[worker] += 1
    return tuple(run)


def preemptions(space: Space, choices: Sequence[int]) -> int:
    """How often a worker is left that could go on: it has not ended, and waits for nobody."""
    needs = _needs(threads(space))
    done, count = [0] * len(needs), 0
    for before, after in itertools.pairwise(choices):
        done[before] += 1
        count += before != after and before in ready(needs, done)
    return count
