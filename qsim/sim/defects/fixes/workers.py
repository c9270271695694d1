"""Repairs of what workers and ranks do to each other. Knows no defect by name."""

from __future__ import annotations

import itertools

from qsim.quant import OpId
from qsim.sim.case import Case
from qsim.sim.defects.edits import lives_of
from qsim.sim.defects.model import rewritten
from qsim.sim.events import (
    Commit,
    Compute,
    Consume,
    Drop,
    Event,
    Fetch,
    Group,
    Load,
    Observe,
    Operand,
    Part,
    Phase,
    Quantize,
    Reduce,
    Slot,
    Store,
    Wait,
)
from qsim.sim.schedule import slot


def atomic_commit(case: Case) -> Case:
    """A commit reads, merges and writes all parts of a state in one step."""
    bases = {e.base for e in case.schedule if isinstance(e, Store)}
    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Fetch(into=into) if into in bases:
                continue
            case Store(part=Part.DESCALE):
                continue
            case Store(phase, op, cell, _, obs, fold):
                schedule.append(Commit(phase, op, cell, obs, fold))
            case _:
                schedule.append(event)
    return rewritten(case, schedule)


def fail_closed_to_one_worker(case: Case) -> Case:
    """More than one worker on shared states: they run one after the other, pass by pass. Ranks share none."""
    if case.context.ranks > 1:
        return case
    schedule: list[Event] = []
    for start, stop in _stretches(case):
        first: dict[object, int] = {}
        keyed: list[tuple[tuple[int, int], Event]] = []
        key, run, begun = (0, 0), 0, set[Event]()
        for event in case.schedule[start:stop]:
            if isinstance(event, Load) and event.phase is Phase.FORWARD:
                if event in begun:  # the step is run again
                    run, begun = run + 1, set()
                begun.add(event)
            op = _op_of(event)
            # what frees a slot, and what a commit itself looks at, goes with the event before it
            if op is not None and not (isinstance(event, (Load, Observe)) and event.phase is Phase.UPDATE):
                part = run, op.logical_step, op.microbatch - op.worker_id, _pass_of(event)
                key = first.setdefault(part, len(first)), op.worker_id
            keyed.append((key, event))
        schedule += [event for _, event in sorted(keyed, key=lambda pair: pair[0])]
    return rewritten(case, schedule)


def _stretches(case: Case) -> list[tuple[int, int]]:
    """Parts of a schedule between events that concern every worker."""
    walls = [at for at, event in enumerate(case.schedule) if _op_of(event) is None and not isinstance(event, Drop)]
    cuts = sorted({0, len(case.schedule), *walls, *(at + 1 for at in walls), *(a for a, _ in lives_of(case))})
    return list(itertools.pairwise(cuts))


def _op_of(event: Event) -> OpId | None:
    if isinstance(event, Load):
        return event.key
    if isinstance(event, Compute):
        return event.at
    op = getattr(event, "op", None)
    return op if isinstance(op, OpId) else None


def _pass_of(event: Event) -> Phase:
    return Phase.BACKWARD if event.phase is Phase.RECOMPUTE else event.phase


def own_buffers(case: Case) -> Case:
    """Every cast writes a buffer of its own; a consumer reads the one of the operation that it means."""
    writers: dict[Slot, dict[OpId, None]] = {}
    for event in case.schedule:
        if isinstance(event, Quantize):
            writers.setdefault(event.out, {})[event.op._replace(logical_step=0)] = None
    shared = {name: tuple(ops) for name, ops in writers.items() if len(ops) > 1}

    def own(name: Slot, op: OpId) -> Slot:
        return slot("codes.own", op) if name in shared else name

    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Quantize(op=op, out=out):
                event = event._replace(out=own(out, op))
            case Consume():
                event = event.with_operands(lambda o: o._replace(codes=own(o.codes, o.of)))
            case Drop(slots=slots):
                freed = [own(name, op) for name in slots for op in shared.get(name, (OpId(0),))]
                event = event._replace(slots=tuple(freed))
            case _:
                pass
        schedule.append(event)
    return rewritten(case, schedule)


def wait_before_commit(case: Case) -> Case:
    """A commit of observations whose reduction is under way waits for its end, and folds in what that brings."""
    ends = {(e.op, e.group.name): e.into for e in case.schedule if isinstance(e, Wait)}
    under_way: dict[Slot, Slot] = {}  # own observation -> what its reduction will bring
    held: list[Commit] = []
    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Reduce(op=op, group=group, obs=obs) if (op, group.name) in ends:
                under_way[obs] = ends[op, group.name]
            case Commit(obs=obs) if any(name in under_way for name in obs):
                held.append(event._replace(obs=tuple(under_way.get(name, name) for name in obs)))
                continue
            case Wait(into=into):
                under_way = {own: brought for own, brought in under_way.items() if brought != into}
                schedule.append(event)
                pending = set(under_way.values())
                schedule += [e for e in held if not pending & set(e.obs)]
                held = [e for e in held if pending & set(e.obs)]
                continue
            case _:
                pass
        schedule.append(event)
    return rewritten(case, schedule)


def declared_group(case: Case) -> Case:
    """The n-th reduction of an owner on one rank meets the n-th on every other rank of the declared group."""
    counts: dict[tuple[type, object, int], int] = {}

    def group(event: Reduce | Wait) -> Group:
        replica = case.context.scope(event.op)._replace(worker_id=-1)
        key = type(event), replica, event.op.worker_id
        counts[key] = counts.get(key, -1) + 1
        return Group(f"{replica}/{counts[key]}", case.context.ranks)

    schedule: list[Event] = [e._replace(group=group(e)) if isinstance(e, (Reduce, Wait)) else e for e in case.schedule]
    return rewritten(case, schedule)


def same_collectives(case: Case) -> Case:
    """Every rank takes part in every reduction of its group, and commits what that brings."""
    seen = {e.op: e.into for e in case.schedule if isinstance(e, Observe)}
    senders: dict[str, set[int]] = {}
    for event in case.schedule:
        if isinstance(event, Reduce):
            senders.setdefault(event.group.name, set()).add(event.op.worker_id)

    def absent(event: Reduce | Wait) -> list[OpId]:
        """The operations of the ranks that leave this round out, though they have observed as well."""
        if event.group.size < 2 or event.op.worker_id != min(senders[event.group.name]):
            return []
        others = set(range(case.context.ranks)) - senders[event.group.name]
        return [peer for rank in sorted(others) for peer in _peers(event.op, rank) if peer in seen]

    brought: dict[Slot, list[tuple[int, Slot]]] = {}
    schedule: list[Event] = []
    for event in case.schedule:
        schedule.append(event)
        match event:
            case Reduce():
                schedule += [event._replace(op=peer, obs=seen[peer]) for peer in absent(event)]
            case Wait(into=into):
                for peer in absent(event):
                    schedule.append(event._replace(op=peer, into=slot("obs.group", peer)))
                    brought.setdefault(into, []).append((peer.worker_id, slot("obs.group", peer)))
            case Commit(op=op, cell=cell, obs=obs):
                for rank in sorted({rank for name in obs for rank, _ in brought.get(name, ())}):
                    names = tuple(n for name in obs for r, n in brought.pop(name, ()) if r == rank)
                    peer = next(p for p in _peers(op, rank) if p in seen)
                    schedule.append(event._replace(op=peer, cell=cell._replace(worker_id=rank), obs=names))
            case _:
                pass
    return rewritten(case, schedule)


def _peers(op: OpId, rank: int) -> tuple[OpId, OpId]:
    """What the same operation is on another rank: of the microbatch beside it, or of the same one."""
    moved = op._replace(worker_id=rank)
    return moved._replace(microbatch=op.microbatch - op.worker_id + rank), moved


def decoded_everywhere(case: Case) -> Case:
    """A tensor that was cast is read by every consumer as its codes say, on its owner too."""
    cached = {o.codes for e in case.schedule if isinstance(e, Consume) for o in e.operands if o.cached}
    made: dict[OpId, Quantize] = {}

    def decoded(o: Operand) -> Operand:
        cast = made.get(o.of)
        if o.descale is not None or cast is None:
            return o
        center = cast.by if case.recipe_of(cast.op).centred else None
        return Operand(o.of, cast.out, cast.by, center, cast.by, cast.out in cached)

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Quantize):
            made[event.op] = event
        elif isinstance(event, Consume):
            event = event.with_operands(decoded)
        schedule.append(event)
    return rewritten(case, schedule)
