"""What rewrites of reads share: whose cell, which cache, another entry into recompute. Holds no defect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from qsim.quant import OpId, StateKey
from qsim.sim.case import Case
from qsim.sim.defects.model import rewritten
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Group,
    Mode,
    Observe,
    Operand,
    Phase,
    Quantize,
    Reduce,
    Restore,
    Slot,
    Stash,
    Take,
    Wait,
)
from qsim.sim.schedule import queue_of, slot


def cells_of(case: Case) -> dict[OpId, StateKey]:
    """Which cell each op's state lies in, as the schedule has it."""
    return {e.op: e.cell for e in case.schedule if isinstance(e, Begin)}


def replayed_ops(case: Case) -> frozenset[OpId]:
    """The operations that recompute casts again."""
    return frozenset(e.op for e in case.schedule if isinstance(e, Quantize) and e.phase is Phase.RECOMPUTE)


def caches_of(case: Case) -> dict[OpId, Slot]:
    """The cache that is read for each weight, by the operation that fills it."""
    consumers = (e for e in case.schedule if isinstance(e, Consume))
    return {o.of: o.codes for e in consumers for o in e.operands if o.cached}


def is_own_gemm(consumer: Consume, operand: Operand) -> bool:
    """True for the forward GEMM of the visit that cast this operand: it reads what was just made, cached or not."""
    return consumer.phase is Phase.FORWARD and consumer.op._replace(role_id=operand.of.role_id) == operand.of


class _Due(NamedTuple):
    phase: Phase
    op: OpId
    cell: StateKey
    seen: Slot


class Committing:
    """Writes the commits of operations that commit in the call: at once, or when all ranks have handed in."""

    def __init__(self, case: Case) -> None:
        self._context = case.context
        self._waiting: dict[tuple[int, ...], list[_Due]] = {}

    def commit(self, phase: Phase, op: OpId, cell: StateKey, seen: Slot) -> Iterator[Event]:
        """The commit of one observation; ranks reduce, and the last to come releases all of them."""
        ranks = self._context.ranks
        if ranks == 1:
            yield Commit(phase, op, cell, (seen,), self._context.fold)
            return
        mates = self._waiting.setdefault((op.layer_id, op.site, op.role_id, op.visit), [])
        mates.append(_Due(phase, op, cell, seen))
        group = Group(f"{cell._replace(worker_id=-1)}/call/v{op.visit}", ranks)
        yield Reduce(phase, op, group, seen)
        if len(mates) == ranks:
            yield from (Wait(one.phase, one.op, group, slot("obs.call", one.op)) for one in mates)
            for one in mates:
                yield Commit(one.phase, one.op, one.cell, (slot("obs.call", one.op),), self._context.fold)
            mates.clear()


def replay_with(case: Case, enter: Callable[[Quantize], Iterable[Event]]) -> Case:
    """Each cast of recompute becomes the events of ``enter``; whoever decodes its codes names the metadata that they
    were then made with, and frees it with the old.
    """
    made: dict[Slot, tuple[Slot, Slot]] = {}
    freed: dict[Slot, Slot] = {}

    def renamed(operand: Operand) -> Operand:
        old, new = made.get(operand.codes, ("", ""))
        return operand.renamed(lambda name: new if name == old else name)

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Quantize) and event.phase is Phase.RECOMPUTE:
            for one in enter(event):
                schedule.append(one)
                if isinstance(one, Quantize):
                    made[one.out], freed[event.by] = (event.by, one.by), one.by
        elif isinstance(event, Consume):
            schedule.append(event.with_operands(renamed))
        elif isinstance(event, Drop):
            also = (freed[name] for name in event.slots if name in freed)
            schedule.append(event._replace(slots=tuple(dict.fromkeys((*event.slots, *also)))))
        else:
            schedule.append(event)
    return rewritten(case, schedule)


def through_queue(
    case: Case, take: Take, *, put: Collection[OpId] | None = None, taken: Collection[OpId] | None = None
) -> Case:
    """Metadata goes to recompute through one queue a module: forward stashes after each begin, recompute restores.

    put: operations that forward stashes; taken: those that recompute restores; all that it casts where None.
    """
    cells, replayed = cells_of(case), replayed_ops(case)
    put, taken = replayed if put is None else put, replayed if taken is None else taken

    def entered(event: Quantize) -> Iterator[Event]:
        op = event.op
        if op in taken:
            meta = slot("snap.r", op)
            yield Restore(event.phase, op, queue_of(cells[op]), meta, take, cells[op])
            event = event._replace(by=meta)
        yield event

    schedule: list[Event] = []
    for event in case.schedule:
        schedule.append(event)
        if isinstance(event, Begin) and event.phase is Phase.FORWARD and event.op in put:
            schedule.append(Stash(event.phase, event.op, queue_of(event.cell), event.into))
    return replay_with(rewritten(case, schedule), entered)


def begun_again(case: Case, event: Quantize, cell: StateKey) -> Iterator[Event]:
    """A cast of recompute that reads the live state as it is now, and encodes with that."""
    op, meta, seen = event.op, slot("snap.r", event.op), slot("obs.r", event.op)
    if case.recipe_of(op).may_need_observation:
        yield Observe(event.phase, op, event.src, None, seen)
    yield Begin(event.phase, op, cell, meta, seen if case.recipe_of(op).may_need_observation else None)
    yield event._replace(by=meta)


def in_modes(case: Case, change: Callable[[Quantize], Mode]) -> Case:
    """Each cast runs in the mode that ``change`` gives it."""
    return rewritten(case, [e._replace(mode=change(e)) if isinstance(e, Quantize) else e for e in case.schedule])


def without(case: Case, gone: Callable[[Event], bool]) -> Case:
    """The case less the events that are ``gone``."""
    return rewritten(case, [event for event in case.schedule if not gone(event)])
