"""Repairs of what is read back: queues, weight caches, contexts. Knows no defect by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from qsim.quant import OpId, StateKey
from qsim.sim.case import Case
from qsim.sim.defects.fixes.general import keyed_snapshot
from qsim.sim.defects.model import rewritten
from qsim.sim.defects.rewriting import Committing, caches_of, in_modes
from qsim.sim.events import (
    PLAIN,
    Allocate,
    Begin,
    Commit,
    Consume,
    Event,
    Load,
    LoadState,
    Mode,
    Observe,
    Operand,
    Optimize,
    Phase,
    Quantize,
    Restore,
    Slot,
    Stash,
    Take,
    Wait,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Order, slot


def _taking(case: Case, take: Take) -> Case:
    return rewritten(case, [e._replace(take=take) if isinstance(e, Restore) else e for e in case.schedule])


def keyed_stash(case: Case) -> Case:
    """What comes out of a queue is the entry of the operation that asks for it."""
    return _taking(case, Take.KEYED)


def lifo_under_flush(case: Case) -> Case:
    """After a flush, where the last microbatch comes back first, a queue gives its newest entry."""
    return _taking(case, Take.LIFO) if Order.FORWARD_FIRST.value in case.context.traits else case


def fifo_under_1f1b(case: Case) -> Case:
    """In a pipeline, where the first microbatch comes back first, a queue gives its oldest entry."""
    return _taking(case, Take.FIFO) if "pipeline" in case.context.traits else case


def paired_stash(case: Case) -> Case:
    """One plan for both sides: forward puts in exactly what recompute will take out."""
    asked = {e.op: e for e in case.schedule if isinstance(e, Restore)}
    held: set[OpId] = {e.op for e in case.schedule if isinstance(e, Stash)}
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Stash) and event.op not in asked:
            continue
        schedule.append(event)
        if isinstance(event, Begin) and event.phase is Phase.FORWARD and event.op in asked.keys() - held:
            schedule.append(Stash(event.phase, event.op, asked[event.op].queue, event.into))
    return rewritten(case, schedule)


def own_descale_in_cache(case: Case) -> Case:
    """A cache holds codes and the metadata that they were made with; a hit decodes with those."""
    made_with: dict[Slot, Slot] = {}

    def own(o: Operand) -> Operand:
        by = made_with.get(o.codes)
        if not o.cached or by is None:
            return o
        return o._replace(descale=by, version=by, center=None if o.center is None else by)

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Quantize):
            made_with[event.out] = event.by
        schedule.append(event.with_operands(own) if isinstance(event, Consume) else event)
    return rewritten(case, schedule)


def refill_cache(case: Case) -> Case:
    """Every step casts its weights into their caches, before anybody reads them."""
    return _cast_every_step(_kept_casts(case))


def forward_with_gradients(case: Case) -> Case:
    """Forward of a checkpoint runs with gradients on, as recompute does, so nothing that it casts is thrown away."""

    def mode(event: Quantize) -> Mode:
        return event.mode._replace(grad=True) if event.phase is Phase.FORWARD else event.mode

    return in_modes(_kept_casts(case), mode)


def _kept_casts(case: Case) -> Case:
    """A weight that is cast for a cache is written to that cache, and its own GEMM reads it there."""
    caches = caches_of(case)
    moved = {
        e.out: caches[e.op]
        for e in case.schedule
        if isinstance(e, Quantize) and e.op in caches and e.out != caches[e.op]
    }

    def kept(o: Operand) -> Operand:
        return o._replace(codes=moved[o.codes], cached=True) if o.codes in moved else o

    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Quantize(out=out) if out in moved:
                schedule.append(event._replace(out=moved[out]))
            case Allocate(slots=slots) if set(slots) <= set(moved.values()):
                continue
            case Consume():
                schedule.append(event.with_operands(kept))
            case _:
                schedule.append(event)
    return rewritten(case, schedule)


class _Refill:
    """Casts a weight anew, as its first cast did, and commits what it saw once in its unit."""

    def __init__(self, case: Case) -> None:
        self._case, self._committing = case, Committing(case)
        self._begun = {e.op: e for e in case.schedule if isinstance(e, Begin)}
        self._cast = {e.op: e for e in case.schedule if isinstance(e, Quantize)}
        self._due: list[tuple[OpId, StateKey, Slot]] = []

    def cast(self, made: OpId, op: OpId) -> Iterator[Event]:
        """The events of ``op``, which casts the weight that ``made`` cast in another step."""
        begin, quantize, seen = self._begun[made], self._cast[made], slot("obs.f", op)
        yield Load(Phase.FORWARD, op, quantize.src)
        if self._case.recipe_of(op).may_need_observation:
            yield Observe(Phase.FORWARD, op, quantize.src, None, seen)
        yield begin._replace(op=op)
        yield quantize._replace(op=op)
        if not self._case.recipe_of(op).may_need_observation:
            yield Observe(Phase.FORWARD, op, quantize.src, begin.into, seen)
        if self._case.context.unit is Cadence.MICROBATCH:
            yield from self._committing.commit(Phase.FORWARD, op, begin.cell, seen)
        elif self._case.context.unit is Cadence.STEP:
            self._due.append((op, begin.cell, seen))

    def end(self) -> Iterator[Event]:
        """The commits of a step that ends: one an owner, or one a rank after a reduction."""
        if self._case.context.ranks > 1:
            for op, cell, seen in self._due:
                yield from self._committing.commit(Phase.UPDATE, op, cell, seen)
        else:
            for cell in dict.fromkeys(cell for _, cell, _ in self._due):
                mine = [(op, seen) for op, its, seen in self._due if its == cell]
                seen_by_all = tuple(seen for _, seen in mine)
                yield Commit(Phase.UPDATE, mine[-1][0], cell, seen_by_all, self._case.context.fold)
        self._due.clear()


def _cast_every_step(case: Case) -> Case:
    """Casts are inserted where a step reads a cache that it has not filled."""
    refill, fresh = _Refill(case), dict[Slot, OpId]()
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Consume):
            for operand in event.operands:
                wanted = operand.of._replace(logical_step=event.op.logical_step)
                if operand.cached and operand.of != wanted and fresh.get(operand.codes) != wanted:
                    schedule += refill.cast(operand.of, wanted)
                    fresh[operand.codes] = wanted
            event = event.with_operands(partial(_of_its_step, event.op.logical_step))
        elif isinstance(event, (Optimize, LoadState)):
            schedule += refill.end()
            fresh.clear()
        schedule.append(event)
    return rewritten(case, schedule)


def _of_its_step(step: int, operand: Operand) -> Operand:
    return operand._replace(of=operand.of._replace(logical_step=step)) if operand.cached else operand


def same_context(case: Case) -> Case:
    """Recompute enters the context that forward ran in, and the caller says which phase it is: nobody guesses."""
    forward = {e.op: e.mode for e in case.schedule if isinstance(e, Quantize) and e.phase is Phase.FORWARD}

    def mode(event: Quantize) -> Mode:
        taken = forward.get(event.op, PLAIN) if event.phase is Phase.RECOMPUTE else event.mode
        return taken._replace(detected=None)

    return in_modes(case, mode)


def functional_state(case: Case) -> Case:
    """State in, state out: an operation observes and commits once, where it ran first; recompute is given what forward
    began with.
    """
    return keyed_snapshot(_commits_in_forward(case))


def _commits_in_forward(case: Case) -> Case:
    """Commits that recompute makes of what forward saw come where forward had seen and cast all of it, once."""
    written: dict[Slot, int] = {}
    cast: dict[OpId, int] = {}
    moved: dict[int, list[Event]] = {}
    done: dict[tuple[OpId, StateKey], int] = {}
    schedule: list[Event | None] = list(case.schedule)
    for at, event in enumerate(case.schedule):
        match event:
            case Observe(into=into) | Wait(into=into) if event.phase is Phase.FORWARD:
                written[into] = at
            case Quantize(phase=Phase.FORWARD, op=op):
                cast[op] = at
            case Commit(phase=Phase.RECOMPUTE, op=op, cell=cell, obs=obs) if all(name in written for name in obs):
                place = max(cast[op], *(written[name] for name in obs))
                if done.get((op, cell)) != place:
                    moved.setdefault(place, []).append(event._replace(phase=Phase.FORWARD))
                done[op, cell], schedule[at] = place, None
            case _:
                pass
    made: list[Event] = []
    for at, one in enumerate(schedule):
        made += [] if one is None else [one]
        made += moved.get(at, [])
    return rewritten(case, made)
