"""A worker's program: its own events of a case, in order, cut where another worker could see a difference.

Builds threads from a space; orders nothing between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from qsim.errors import CaseError
from qsim.explore.footprints import footprint, mailbox
from qsim.explore.space import NO_DEFECT, PARTS, Codes, Commits, Space
from qsim.explore.waiting import Needs, ready
from qsim.formats import get_format
from qsim.quant import OpId, StateKey, TensorRole, make_recipe
from qsim.sim import PRESETS, SCOPES, Case, Defect, Feature, Reads, ScheduleSpec, build_case, get_defect
from qsim.sim.events import (
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    Group,
    Observe,
    Operand,
    Part,
    Quantize,
    Reduce,
    Schedule,
    Slot,
    Store,
    Wait,
)
from qsim.sim.schedule import slot

FORMAT = "e4m3"
"""Of the cases that a search builds. No version depends on it, so no verdict does."""


class Piece(NamedTuple):
    """What one scheduling choice runs: events start..stop-1 of a thread, of which at most one is shared.

    touches: what that event touches (cells, slots, places) and two workers share, each with True where it is written.
    needs: what must be done before, as pairs of a worker and its number of pieces: a wait needs all that it waits for.
    """

    start: int
    stop: int
    touches: tuple[tuple[StateKey | Slot, bool], ...]
    needs: Needs = ()


class Thread(NamedTuple):
    """A worker's events in program order, and the pieces they are cut into."""

    worker: int
    events: Schedule
    pieces: tuple[Piece, ...]


def whole(event: Commit, ranks: int) -> tuple[Event, ...]:
    """The commit as it is: one indivisible event."""
    return (event,)


def read_and_write(event: Commit, ranks: int) -> tuple[Event, ...]:
    """The commit as a read of the state and a write of its successor."""
    base = slot("base", event.op)
    store = Store(event.phase, event.op, event.cell, base, event.obs, event.fold)
    return Fetch(event.phase, event.op, event.cell, base), store


def read_and_write_parts(event: Commit, ranks: int) -> tuple[Event, ...]:
    """The commit as a read, and a write of each part of the pair."""
    fetch, store = read_and_write(event, ranks)
    assert isinstance(store, Store), "as it was just made"
    return fetch, store._replace(part=Part.SCALE), store._replace(part=Part.DESCALE)


def reduced(event: Commit, ranks: int) -> tuple[Event, ...]:
    """The commit of a rank: hand in what was seen, wait for what all have seen, fold that in."""
    sends, waits, merged = _collective(event, ranks)
    return *sends, *waits, event._replace(obs=merged)


def committed_before_the_wait(event: Commit, ranks: int) -> tuple[Event, ...]:
    """The same with a commit of what this rank has seen, before it has waited."""
    sends, waits, _ = _collective(event, ranks)
    return *sends, event, *waits


def _collective(event: Commit, ranks: int) -> tuple[list[Reduce], list[Wait], tuple[Slot, ...]]:
    """One round for each observation: the n-th of a rank meets the n-th of the others."""
    op = event.op._replace(worker_id=0, microbatch=0)
    called = f"{slot('group', op)}/t{op.logical_step}/{event.phase.value}"
    rounds = [Group(f"{called}/{at}", ranks) for at in range(len(event.obs))]
    merged = tuple(f"{slot('obs.group', event.op)}/{event.phase.value}/{at}" for at in range(len(event.obs)))
    sends = [Reduce(event.phase, event.op, group, name) for group, name in zip(rounds, event.obs, strict=True)]
    waits = [Wait(event.phase, event.op, group, name) for group, name in zip(rounds, merged, strict=True)]
    return sends, waits, merged


COMMITS: Mapping[Commits, Callable[[Commit, int], tuple[Event, ...]]] = MappingProxyType(
    {
        Commits.ATOMIC: whole,
        Commits.SPLIT: read_and_write,
        Commits.TORN: read_and_write_parts,
        Commits.REDUCED: reduced,
        Commits.ASYNC: committed_before_the_wait,
    }
)
"""What a commit is in events, by mode and by the number of ranks."""


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
        case = _with(defect, case)
    return case


def _with(defect: Defect, case: Case) -> Case:
    """The case with a defect. Units and sizes are the space's to choose; what it can never have is refused."""
    never = {feature.value for feature in Feature} | {"ranks"}
    if missing := (defect.needs & never) - case.context.traits:
        raise CaseError(
            f"{defect.id} {defect.name} needs {', '.join(sorted(missing))}: no space of the explorer has it"
        )
    made = defect.rewrite(case)
    if made == case:
        raise CaseError(f"{defect.id} {defect.name} finds nothing to change in this space")
    return made


@lru_cache(maxsize=64)
def threads(space: Space) -> tuple[Thread, ...]:
    """Each worker's program. A worker commits what it saw itself: no worker waits for another."""
    schedule = tuple(_cast_only(case_of(space).schedule, PARTS[space.part].cast))
    if space.codes is Codes.SCRATCH:
        schedule = tuple(_in_scratch(schedule))
    mode = COMMITS[space.commit]

    def commit(event: Commit) -> tuple[Event, ...]:
        return mode(event, space.workers)

    return cut([tuple(_own(schedule, worker, commit)) for worker in range(space.workers)])


def cut(programs: Sequence[Schedule]) -> tuple[Thread, ...]:
    """Programs as threads, cut where they share something. CaseError for ranks that would wait for ever."""
    shared = shared_names(programs)
    pieces = [_cut(events, shared) for events in programs]
    sent = _sent_by(programs, pieces)
    found = tuple(
        Thread(worker, events, tuple(_with_needs(events, piece, sent) for piece in mine))
        for worker, (events, mine) in enumerate(zip(programs, pieces, strict=True))
    )
    needs, done = [[piece.needs for piece in thread.pieces] for thread in found], [0] * len(found)
    while can := ready(needs, done):  # who can go on stays able to, so one order tells of all
        done[can[0]] += 1
    if done != [len(mine) for mine in needs]:
        raise CaseError("workers wait for each other for ever: they meet in different orders")
    return found


def _sent_by(programs: Sequence[Schedule], pieces: Sequence[tuple[Piece, ...]]) -> dict[str, dict[int, int]]:
    """By group and worker the pieces that must be done until what the worker hands in is there."""
    sent: dict[str, dict[int, int]] = {}
    for worker, (events, mine) in enumerate(zip(programs, pieces, strict=True)):
        for number, piece in enumerate(mine, 1):
            for event in events[piece.start : piece.stop]:
                if isinstance(event, Reduce):
                    sent.setdefault(event.group.name, {})[worker] = number
    return sent


def _with_needs(events: Schedule, piece: Piece, sent: Mapping[str, Mapping[int, int]]) -> Piece:
    needs: dict[int, int] = {}
    for event in events[piece.start : piece.stop]:
        if isinstance(event, Wait) and mailbox(event.group.name) in dict(piece.touches):
            there = sent.get(event.group.name, {})
            if len(there) != event.group.size:
                raise CaseError(
                    f"reduction {event.group.name} waits for {event.group.size} ranks and {len(there)} take part: no "
                    "worker could ever go on"
                )
            needs |= {worker: max(count, needs.get(worker, 0)) for worker, count in there.items()}
    return piece._replace(needs=tuple(sorted(needs.items())))


def reduces_of(programs: Sequence[Schedule]) -> dict[str, list[Observe]]:
    """What is handed in to each group: the events that saw it."""
    found: dict[str, list[Observe]] = {}
    for events in programs:
        saw: dict[Slot, Observe] = {}
        for event in events:
            if isinstance(event, Observe):
                saw[event.into] = event
            elif isinstance(event, Reduce):
                found.setdefault(event.group.name, []).append(saw[event.obs])
    return found


def _cast_only(schedule: Schedule, roles: frozenset[TensorRole]) -> Iterator[Event]:
    """The schedule with operands of other roles left in high precision: no cast, no state, no decode."""

    def operand(o: Operand) -> Operand:
        return o if o.of.role_id in roles else Operand(o.of, slot("x", o.of), None, None, None)

    for event in schedule:
        if isinstance(event, Consume):
            yield event.with_operands(operand)
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
        elif mark.op is None:
            raise CaseError(f"{type(event).__name__} is of all workers at once; the explorer does not follow it")
        elif mark.op.worker_id == worker:
            yield event
        if mark.op is not None:
            by.update(dict.fromkeys(mark.puts, mark.op))


def shared_names(programs: Sequence[Schedule]) -> frozenset[StateKey | Slot]:
    """Cells, slots and places that two workers touch and one writes: where an order can make a difference."""
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
    if mark.place:
        yield mark.place, mark.writes_place


def _cut(events: Schedule, shared: frozenset[StateKey | Slot]) -> tuple[Piece, ...]:
    """One piece a shared event: it and the thread's own events after it, before the first also those ahead of it."""
    marks = [tuple((name, write) for name, write in _touched(event) if name in shared) for event in events]
    points = [at for at, mark in enumerate(marks) if mark] or [0]
    starts = [0, *points[1:]]
    stops = [*points[1:], len(events)]
    return tuple(Piece(start, stop, marks[at]) for start, stop, at in zip(starts, stops, points, strict=True))
