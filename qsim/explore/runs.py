"""A run: a list of worker numbers, one a scheduling choice, and the case that it stands for. Searches nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from qsim.errors import UsageError
from qsim.explore.space import Space
from qsim.explore.threads import case_of, threads
from qsim.sim import SCOPES, Case, Context, Violation, check, records_of
from qsim.sim.events import Event

Choices = tuple[int, ...]
"""The worker that runs its next piece, for each scheduling choice."""


def interleaved(space: Space, choices: Sequence[int]) -> Case:
    """The run as an ordinary case: its schedule is the interleaved tuple. It may stop before the threads end.

    Raises UsageError where a choice names no worker, or one that has nothing left.
    """
    case = case_of(space)
    context = Context(scope=SCOPES[space.declared], unit=space.cadence)
    return Case(
        schedule=tuple(_events(space, choices)), recipe=case.recipe, policy=case.policy, context=context
    )  # fmt: skip


def _events(space: Space, choices: Sequence[int]) -> Iterator[Event]:
    workers = threads(space)
    done = [0] * len(workers)
    for at, worker in enumerate(choices):
        if not 0 <= worker < len(workers):
            raise UsageError(f"choice {at} of the run is worker {worker}; the space has 0..{len(workers) - 1}")
        thread = workers[worker]
        if done[worker] == len(thread.pieces):
            raise UsageError(f"choice {at} of the run is worker {worker}, which has ended; choose another worker")
        piece = thread.pieces[done[worker]]
        yield from thread.events[piece.start : piece.stop]
        done[worker] += 1


def completed(space: Space, choices: Sequence[int]) -> Choices:
    """The run until every thread has ended, without a further preemption: the last worker first, then by number."""
    left = [len(thread.pieces) for thread in threads(space)]
    for worker in choices:
        left[worker] -= 1
    last = choices[-1] if choices else 0
    order = (last, *(worker for worker in range(len(left)) if worker != last))
    return (*choices, *(worker for worker in order for _ in range(left[worker])))


def preemptions(space: Space, choices: Sequence[int]) -> int:
    """How often a worker is left before it has ended."""
    left = [len(thread.pieces) for thread in threads(space)]
    count = 0
    for before, after in itertools.pairwise(choices):
        left[before] -= 1
        count += before != after and left[before] > 0
    return count


def judge(case: Case) -> tuple[Violation, ...]:
    """The invariants on a run, by its records: the same judge as the simulator's."""
    return check(records_of(case), scope=case.context.scope, unit=case.context.unit)
