"""Repairs of snapshots, commits and owners, as rewrites of whatever case they are given. Knows no defect by name."""

from __future__ import annotations

from dataclasses import replace

from qsim.quant import OpId
from qsim.sim.case import Case
from qsim.sim.defects.concurrency import split_by_worker
from qsim.sim.defects.model import rewritten
from qsim.sim.defects.rewriting import caches_of
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Event,
    Fetch,
    Observe,
    Operand,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restore,
    SaveState,
    Slot,
    Stash,
    Store,
    Wait,
)
from qsim.sim.invariants import unit_of
from qsim.sim.schedule import slot
from qsim.sim.scopes import LAYER_WORKER

_ACTS = (Begin, Commit, Fetch, Store, Restore)


def _store_bases(case: Case) -> set[Slot]:
    return {e.base for e in case.schedule if isinstance(e, Store)}


def _whole_bases(case: Case) -> set[Slot]:
    """Bases of the stores that write everything at once."""
    return {e.base for e in case.schedule if isinstance(e, Store) and e.part is Part.ALL}


def descale_in_the_data(case: Case) -> Case:
    """Every consumer decodes with the metadata that its codes were made with; live reads go."""
    bases, made_with = _store_bases(case), dict[Slot, Slot]()

    def paired(o: Operand) -> Operand:
        if o.descale is None:
            return o
        by = made_with.get(o.codes, o.descale)  # nothing was written to a buffer that was only allocated
        return o._replace(descale=by, version=by, center=None if o.center is None else by)

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Fetch) and event.into not in bases:
            continue
        if isinstance(event, Quantize):
            made_with[event.out] = event.by
        elif isinstance(event, Consume):
            event = event.with_operands(paired)
        schedule.append(event)
    return rewritten(case, schedule)


def keyed_snapshot(case: Case) -> Case:
    """Forward snapshots each op under its own key; recompute reads that key and begins, observes, commits nothing.

    No queue is left, and the snapshot of a weight cache stays with its codes.
    """
    cached = caches_of(case)
    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Begin(phase=Phase.RECOMPUTE) | Observe(phase=Phase.RECOMPUTE) | Commit(phase=Phase.RECOMPUTE):
                continue
            case Reduce(phase=Phase.RECOMPUTE) | Wait(phase=Phase.RECOMPUTE) | Stash() | Restore():
                continue
            case Begin(op=op) if op not in cached:
                schedule.append(event._replace(into=slot("snap", op)))
            case Quantize(op=op) | Observe(op=op) if event.by is not None and op not in cached:
                schedule.append(event._replace(by=slot("snap", op)))
            case _:
                schedule.append(event)
    return descale_in_the_data(rewritten(case, schedule))


def per_owner_state(case: Case) -> Case:
    """Every owner that was declared gets a state of its own, and a snapshot slot of its own."""
    owners = tuple(dict.fromkeys(case.context.scope(e.op) for e in case.schedule if isinstance(e, _ACTS)))
    writers: dict[Slot, set[OpId]] = {}
    for event in case.schedule:
        if isinstance(event, Begin):
            writers.setdefault(event.into, set()).add(event.op._replace(logical_step=0))
    shared = {name for name, ops in writers.items() if len(ops) > 1}

    def own(name: Slot, op: OpId) -> Slot:
        return slot("snap", op) if name in shared else name

    def operand(o: Operand) -> Operand:
        return o.renamed(lambda name: own(name, o.of))

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, _ACTS):
            event = event._replace(cell=case.context.scope(event.op))
        elif isinstance(event, SaveState) and set(event.cells) != set(owners):
            event = event._replace(cells=owners)
        if isinstance(event, Begin) and event.into in shared:
            event = event._replace(into=slot("snap", event.op))
        elif isinstance(event, (Quantize, Observe)) and event.by is not None:
            event = event._replace(by=own(event.by, event.op))
        elif isinstance(event, Consume):
            event = event.with_operands(operand)
        schedule.append(event)
    return rewritten(case, schedule)


def merged_commit(case: Case) -> Case:
    """All commits of one owner and unit become one, at the place of the last."""
    unit, last, merged = case.context.unit, dict[object, int](), dict[object, tuple[Slot, ...]]()
    keys: dict[int, object] = {}
    for i, event in enumerate(case.schedule):
        if isinstance(event, Commit):
            keys[i] = event.cell, event.op[2:5], unit_of(event.op, unit)
            last[keys[i]] = i
            merged[keys[i]] = merged.get(keys[i], ()) + event.obs
    schedule: list[Event] = []
    for i, event in enumerate(case.schedule):
        if isinstance(event, Commit):
            if last[keys[i]] != i:
                continue
            event = event._replace(obs=tuple(dict.fromkeys(merged[keys[i]])))
        schedule.append(event)
    return rewritten(case, schedule)


def compare_and_set(case: Case) -> Case:
    """A write whose base is no longer the live epoch is refused and done again: each store is an atomic commit.

    A part of a torn commit is written on the live epoch, so nothing refuses it.
    """
    bases = _whole_bases(case)
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Fetch) and event.into in bases:
            continue
        if isinstance(event, Store) and event.part is Part.ALL:
            event = Commit(event.phase, event.op, event.cell, event.obs, event.fold)
        schedule.append(event)
    return rewritten(case, schedule)


def per_worker_state(case: Case) -> Case:
    """Each worker has its own copy of every state, commits what it saw itself, and that is what is declared."""
    case = split_by_worker(case)
    schedule: list[Event] = [
        e._replace(cell=e.cell._replace(worker_id=e.op.worker_id))
        if isinstance(e, (Begin, Commit, Fetch, Store))
        else e
        for e in case.schedule
    ]
    return replace(rewritten(case, schedule), context=replace(case.context, scope=LAYER_WORKER))
