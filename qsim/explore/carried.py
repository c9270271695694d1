"""A run carried over to another protocol: each worker's events of the one, in the order of the other. Judges nothing.

Events are matched by what they are for (phase, operation, what they do), so a protocol with fewer or other events in
between can follow: what has no match waits for the next event of its worker that has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from qsim.explore.footprints import footprint
from qsim.explore.rows import Walked, walked
from qsim.explore.runs import Choices, completed, context_of, interleaved
from qsim.explore.space import Space
from qsim.explore.threads import case_of, threads
from qsim.explore.waiting import ready
from qsim.sim import Case
from qsim.sim.events import Consume, Event, Fetch, Phase, Schedule

Key = tuple[object, ...]


def carried(space: Space, steps: Sequence[Walked]) -> Case:
    """All events of the threads of ``space``, in the order of ``steps``; for a run's own space that run itself."""
    case = case_of(space)
    schedule = tuple(_events(space, steps))
    return Case(schedule=schedule, recipe=case.recipe, policy=case.policy, context=context_of(space))


def same_order(other: Space, space: Space, choices: Sequence[int]) -> Case:
    """What ``other`` does in the order of a run of ``space``: event by event, or by turns where workers wait."""
    run = completed(space, choices)
    if other.commit.ranked:
        return interleaved(other, followed(other, run))
    return carried(other, tuple(walked(space, run)))


def step_by_step(space: Space) -> Case:
    """All workers one after the other within each step, and the commits of the update phase when all have ended it."""
    by_step: dict[tuple[int, bool], list[Event]] = {}
    for thread in threads(space):
        step = 0
        for event in thread.events:
            op = footprint(event).op
            step = step if op is None else op.logical_step  # a drop belongs to what was before it
            by_step.setdefault((step, event.phase is Phase.UPDATE), []).append(event)
    case = case_of(space)
    schedule = tuple(event for _, events in sorted(by_step.items()) for event in events)
    return Case(schedule=schedule, recipe=case.recipe, policy=case.policy, context=context_of(space))


def followed(space: Space, choices: Sequence[int]) -> Choices:
    """An order of workers as far as ``space`` can follow it, to the end of all threads: a worker that has ended, or
    waits for others, is passed over, and what is left runs by the workers' numbers.
    """
    needs = [[piece.needs for piece in thread.pieces] for thread in threads(space)]
    done, run = [0] * len(needs), list[int]()
    for worker in choices:
        if worker in ready(needs, done):
            done[worker] += 1
            run.append(worker)
    while can := ready(needs, done):
        done[can[0]] += 1
        run.append(can[0])
    return tuple(run)


def _events(space: Space, steps: Sequence[Walked]) -> Iterator[Event]:
    programs = [thread.events for thread in threads(space)]
    places = [{key: at for at, key in enumerate(_keys(events))} for events in programs]
    done = [0] * len(programs)
    seen: list[Counter[Key]] = [Counter() for _ in programs]
    for worker, event, _ in steps:
        key = _numbered(event, seen[worker])
        at = places[worker].get(key, -1)
        if at >= done[worker]:
            yield from programs[worker][done[worker] : at + 1]
            done[worker] = at + 1
    for worker, events in enumerate(programs):
        yield from events[done[worker] :]


def _keys(events: Schedule) -> list[Key]:
    seen: Counter[Key] = Counter()
    return [_numbered(event, seen) for event in events]


def _numbered(event: Event, seen: Counter[Key]) -> Key:
    """The key of an event and how often it was there before: an op may be loaded twice in a phase."""
    key = _key(event)
    seen[key] += 1
    return (*key, seen[key])


def _key(event: Event) -> Key:
    """What an event is for. A split commit takes its turn where it writes; buffers may be called otherwise."""
    mark = footprint(event)
    if mark.writes_cell:
        return "commit", event.phase, mark.op
    told: object = None
    if isinstance(event, Consume):
        told = event.gemm
    elif isinstance(event, Fetch):
        told = event.into.split("/", 1)[0]  # a base and a live read are different things
    elif mark.op is None:
        told = mark.puts
    return type(event).__name__, event.phase, mark.op, told
