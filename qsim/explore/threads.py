"""A worker's program: its own events of a case, in order, cut where another worker could see a difference.

Builds threads from a space; orders nothing between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from qsim.errors import CaseError
from qsim.explore.footprints import footprint
from qsim.explore.space import NO_DEFECT, PARTS, Codes, Commits, Space
from qsim.formats import get_format
from qsim.quant import OpId, StateKey, TensorRole, make_recipe
from qsim.sim import PRESETS, SCOPES, Case, Reads, ScheduleSpec, build_case, get_defect
from qsim.sim.events import Commit, Consume, Drop, Event, Fetch, Operand, Quantize, Schedule, Slot, Store
from qsim.sim.schedule import slot

FORMAT = "e4m3"
"""Of the cases that a search builds. No version depends on it, so no verdict does."""


class Piece(NamedTuple):
    """What one scheduling choice runs: events start..stop-1 of a thread, of which at most one is shared.

    touches: the cells and slots of that event which two workers share, each with True where it is written.
    """

    start: int
    stop: int
    touches: tuple[tuple[StateKey | Slot, bool], ...]


class Thread(NamedTuple):
    """A worker's events in program order, and the pieces they are cut into."""

    worker: int
    events: Schedule
    pieces: tuple[Piece, ...]


def whole(event: Commit) -> tuple[Event, ...]:
    """The commit as it is: one indivisible event."""
    return (event,)


def read_and_write(event: Commit) -> tuple[Event, ...]:
    """The commit as a read of the state and a write of its successor."""
    base = slot("base", event.op)
    return Fetch(event.phase, event.op, event.cell, base), Store(event.phase, event.op, event.cell, base, event.obs)


COMMITS: Mapping[Commits, Callable[[Commit], tuple[Event, ...]]] = MappingProxyType(
    {Commits.ATOMIC: whole, Commits.SPLIT: read_and_write}
)
"""What a commit is in events, by mode."""


@lru_cache(maxsize=64)
def case_of(space: Space) -> Case:
    """The case that the threads are cut from: all workers in step, as build_case orders them, rewritten.

    Raises CaseError where preset, recipe and defect do not fit.
    """
    preset, part = PRESETS[space.preset], PARTS[space.part]
    recipe = make_recipe(space.recipe, fmt=get_format(FORMAT))
    if preset.reads is Reads.RAW:
        raise CaseError(f'preset "{preset.name}" casts nothing, so there is no state to explore; use another preset')
    case = build_case(
        ScheduleSpec(steps=space.steps, layers=space.layers, microbatches=space.workers, workers=space.workers),
        body=part.body,
        preset=preset,
        recipe=recipe,
        scope=SCOPES[space.scope],
        cadence=space.cadence,
    )
    if space.defect != NO_DEFECT:
        defect = get_defect(space.defect)
        defect.require(preset, recipe)
        case = defect.rewrite(case)
    return case


@lru_cache(maxsize=64)
def threads(space: Space) -> tuple[Thread, ...]:
    """Each worker's program. A worker commits what it saw itself: no worker waits for another."""
    schedule = tuple(_cast_only(case_of(space).schedule, PARTS[space.part].cast))
    if space.codes is Codes.SCRATCH:
        schedule = tuple(_in_scratch(schedule))
    programs = [tuple(_own(schedule, worker, COMMITS[space.commit])) for worker in range(space.workers)]
    return cut(programs)


def cut(programs: Sequence[Schedule]) -> tuple[Thread, ...]:
    """Programs as threads, cut where they share something."""
    shared = shared_names(programs)
    return tuple(Thread(worker, events, _cut(events, shared)) for worker, events in enumerate(programs))


def _cast_only(schedule: Schedule, roles: frozenset[TensorRole]) -> Iterator[Event]:
    """The schedule with operands of other roles left in high precision: no cast, no state, no decode."""

    def operand(o: Operand) -> Operand:
        return o if o.of.role_id in roles else Operand(o.of, slot("x", o.of), None, None, None)

    for event in schedule:
        if isinstance(event, Consume):
            left, right = event.operands
            yield event._replace(operands=(operand(left), operand(right)))
            continue
        mark = footprint(event)
        moves_state = mark.cell is not None or mark.takes
        if mark.op is None or mark.op.role_id in roles or not moves_state:
            yield event


def _scratch(op: OpId) -> Slot:
    return f"scratch/s{op.site}/r{op.role_id}"


def _in_scratch(schedule: Schedule) -> Iterator[Event]:
    """The schedule with the codes of every worker, layer and phase in one slot a GEMM operand.

    What freed the codes frees nothing now, and falls away with the thread: nobody filled those slots.
    """
    codes = {event.out: event.op for event in schedule if isinstance(event, Quantize)}

    def operand(o: Operand) -> Operand:
        return o._replace(codes=_scratch(o.of)) if o.codes in codes else o

    for event in schedule:
        match event:
            case Quantize(op=op):
                yield event._replace(out=_scratch(op))
            case Consume(operands=(left, right)):
                yield event._replace(operands=(operand(left), operand(right)))
            case _:
                yield event


def _own(schedule: Schedule, worker: int, commit: Callable[[Commit], tuple[Event, ...]]) -> Iterator[Event]:
    """The events of one worker. Of a commit that merges over workers it keeps its own part."""
    by: dict[Slot, OpId] = {}  # who filled a slot last
    for event in schedule:
        mark = footprint(event)
        if isinstance(event, Commit):
            seen = tuple(name for name in event.obs if by[name].worker_id == worker)
            if seen:
                yield from commit(event._replace(op=by[seen[-1]], obs=seen))
        elif isinstance(event, Drop):
            mine = tuple(name for name in event.slots if name in by and by[name].worker_id == worker)
            if mine:
                yield Drop(event.phase, mine)
        elif mark.op is not None and mark.op.worker_id == worker:
            yield event
        if mark.op is not None:
            by.update(dict.fromkeys(mark.puts, mark.op))


def shared_names(programs: Sequence[Schedule]) -> frozenset[StateKey | Slot]:
    """Cells and slots that two workers touch and at least one writes: where an order can make a difference."""
    users: dict[StateKey | Slot, set[int]] = {}
    written: set[StateKey | Slot] = set()
    for worker, events in enumerate(programs):
        for event in events:
            for name, write in _touched(event):
                users.setdefault(name, set()).add(worker)
                if write:
                    written.add(name)
    return frozenset(name for name in written if len(users[name]) > 1)


def _touched(event: Event) -> Iterator[tuple[StateKey | Slot, bool]]:
    mark = footprint(event)
    if mark.cell is not None:
        yield mark.cell, mark.writes_cell
    yield from ((name, True) for name in mark.puts)
    yield from ((name, False) for name in mark.takes if name not in mark.puts)


def _cut(events: Schedule, shared: frozenset[StateKey | Slot]) -> tuple[Piece, ...]:
    """One piece a shared event: it and the thread's own events after it, before the first also those ahead of it."""
    marks = [tuple((name, write) for name, write in _touched(event) if name in shared) for event in events]
    points = [at for at, mark in enumerate(marks) if mark] or [0]
    starts = [0, *points[1:]]
    stops = [*points[1:], len(events)]
    return tuple(Piece(start, stop, marks[at]) for start, stop, at in zip(starts, stops, points, strict=True))
