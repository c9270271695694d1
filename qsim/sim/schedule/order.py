"""The order of passes in one step: which part of the layers runs forward or backward for which batch. No event."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import NamedTuple

from qsim.sim.schedule.spec import CHUNKS, Order, ScheduleSpec


class Kind(Enum):
    """What a pass does."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recompute with it
    WEIGHTS = "weights"  # gradients of weights that a zero-bubble pipeline has put off


class Pass(NamedTuple):
    """One part of the layers for one batch (the b-th microbatch of every worker)."""

    kind: Kind
    batch: int
    part: int


def parts_of(spec: ScheduleSpec) -> tuple[range, ...]:
    """The layers of each part, in order; sizes differ by at most one."""
    cuts = [spec.layers * i // spec.chunks for i in range(spec.chunks + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(cuts))


def passes_of(spec: ScheduleSpec) -> tuple[Pass, ...]:
    """All passes of one step, in order."""
    batches = range(spec.batches)
    match spec.order:
        case Order.ALTERNATE:
            return tuple(Pass(kind, b, 0) for b in batches for kind in (Kind.FORWARD, Kind.BACKWARD))
        case Order.FORWARD_FIRST:
            forward = [Pass(Kind.FORWARD, b, 0) for b in batches]
            return (*forward, *(Pass(Kind.BACKWARD, b, 0) for b in reversed(batches)))
        case Order.ONE_F_ONE_B | Order.ZERO_BUBBLE:
            return _clocked([_stage(spec, s) for s in range(spec.stages)], spec.chunks)
        case Order.INTERLEAVED:
            return _clocked([_interleaved(spec, s) for s in range(spec.stages)], spec.chunks)


def _stage(spec: ScheduleSpec, stage: int) -> list[Pass]:
    """1F1B of one stage: stages - 1 - stage forwards to warm up. Zero bubble (ZB-H1): a weight pass comes ``stage``
    backwards after its own, the rest at the end."""
    warm = min(spec.stages - 1 - stage, spec.batches)
    plan = [Pass(Kind.FORWARD, b, stage) for b in range(warm)]
    put_off: list[Pass] = []
    for b in range(spec.batches):
        if warm + b < spec.batches:
            plan.append(Pass(Kind.FORWARD, warm + b, stage))
        plan.append(Pass(Kind.BACKWARD, b, stage))
        if spec.order is Order.ZERO_BUBBLE:
            put_off.append(Pass(Kind.WEIGHTS, b, stage))
            if len(put_off) > stage:
                plan.append(put_off.pop(0))
    return plan + put_off


def _interleaved(spec: ScheduleSpec, stage: int) -> list[Pass]:
    """Megatron's interleaved 1F1B of one stage: chunk c of the stage is part c * stages + stage."""
    stages, total = spec.stages, spec.batches * CHUNKS

    def at(kind: Kind, k: int) -> Pass:
        chunk = k // stages % CHUNKS
        batch = k // (stages * CHUNKS) * stages + k % stages
        return Pass(kind, batch, (chunk if kind is Kind.FORWARD else CHUNKS - 1 - chunk) * stages + stage)

    warm = min(total, (stages - stage - 1) * 2 + (CHUNKS - 1) * stages)
    plan = [at(Kind.FORWARD, k) for k in range(warm)]
    for k in range(total):
        if warm + k < total:
            plan.append(at(Kind.FORWARD, warm + k))
        plan.append(at(Kind.BACKWARD, k))
    return plan


def _clocked(plans: list[list[Pass]], parts: int) -> tuple[Pass, ...]:
    """One order of all stages: in each tick every stage does its next pass if what it needs was done before."""
    done: set[Pass] = set()
    found: list[Pass] = []
    heads = [0] * len(plans)
    while any(head < len(plan) for head, plan in zip(heads, plans, strict=True)):
        tick = []
        for stage, plan in enumerate(plans):
            if heads[stage] < len(plan) and _needs(plan[heads[stage]], parts) <= done:
                tick.append(plan[heads[stage]])
                heads[stage] += 1
        assert tick, "a pipeline order that waits for itself"
        done.update(tick)
        found += tick
    return tuple(found)


def _needs(one: Pass, parts: int) -> set[Pass]:
    match one.kind:
        case Kind.FORWARD:
            return {one._replace(part=one.part - 1)} if one.part else set()
        case Kind.BACKWARD:
            later = {one._replace(part=one.part + 1)} if one.part + 1 < parts else set()
            return later | {one._replace(kind=Kind.FORWARD)}
        case Kind.WEIGHTS:
            return {one._replace(kind=Kind.BACKWARD)}
