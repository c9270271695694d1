"""The correct protocol over the GEMMs of any schedule: what one that was written by hand is measured against.

It keeps the GEMMs, their order and their tensors, and nothing else of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from qsim.quant import InitialScale, MergeRule, OpId, Timing
from qsim.sim.case import Case
from qsim.sim.events import Begin, Commit, Consume, Content, Drop, Event, Load, Observe, Operand, Phase, Quantize, Slot
from qsim.sim.invariants import unit_of
from qsim.sim.presets import Cadence

TRAINING = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)


def _slot(kind: str, op: OpId) -> Slot:
    return f"{kind}/{'.'.join(str(field) for field in op)}"


def correct_twin(case: Case) -> Case:
    """Every operand is frozen, encoded and observed once before its first GEMM, and later encoded with that snapshot;
    one commit an owner ends its unit, after the last first use of it. An operand that was never cast stays so.
    """
    return replace(case, schedule=tuple(_twin(case)))


def high_precision_twin(case: Case) -> Case:
    """The same GEMMs over the tensors themselves."""
    schedule, contents = list[Event](), _contents(case)
    for event in _gemms(case):
        ops = [operand.of for operand in event.operands]
        schedule += [Load(event.phase, op, _slot("x", op), contents.get(op, Content.NORMAL)) for op in ops]
        schedule += [
            event.with_operands(lambda operand: _raw(operand.of)),
            Drop(event.phase, tuple(_slot("x", op) for op in ops)),
        ]
    return replace(case, schedule=tuple(schedule))


def _gemms(case: Case) -> list[Consume]:
    return [event for event in case.schedule if isinstance(event, Consume) and event.phase in TRAINING]


def _contents(case: Case) -> dict[OpId, Content]:
    return {event.key: event.content for event in case.schedule if isinstance(event, Load)}


def _raw(op: OpId) -> Operand:
    return Operand(op, _slot("x", op), None, None, None)


def _twin(case: Case) -> Iterator[Event]:
    gemms, contents = _gemms(case), _contents(case)
    scope, unit = case.context.scope, case.context.unit
    fold = case.context.fold._replace(merge=MergeRule.MAX, amount=None)
    ends: dict[object, int] = {}  # owner and unit -> the GEMM after which it commits
    begun: set[OpId] = set()
    for i, event in enumerate(gemms):
        for operand in event.operands:
            if operand.descale is not None and operand.of not in begun and event.phase is not Phase.RECOMPUTE:
                ends[scope(operand.of), unit_of(operand.of, unit)] = i
                begun.add(operand.of)
    begun.clear()
    seen: dict[object, list[Slot]] = {}
    for i, event in enumerate(gemms):
        for op in dict.fromkeys(operand.of for operand in event.operands):
            yield Load(event.phase, op, _slot("x", op), contents.get(op, Content.NORMAL))
        for op in dict.fromkeys(operand.of for operand in event.operands if operand.descale is not None):
            if op not in begun:
                yield from _begun(case, event.phase, op)
                begun.add(op)
                if event.phase is not Phase.RECOMPUTE:
                    seen.setdefault((scope(op), unit_of(op, unit)), []).append(_slot("obs", op))
            yield Quantize(event.phase, op, _slot("x", op), _slot("snap", op), _slot("codes", op))
        yield event.with_operands(partial(_decoded, case))
        yield Drop(event.phase, tuple(_slot(kind, o.of) for o in event.operands for kind in ("x", "codes")))
        for operand in event.operands:
            key = scope(operand.of), unit_of(operand.of, unit)
            if unit is not Cadence.NEVER and ends.get(key) == i and key in seen:
                yield Commit(event.phase, operand.of, scope(operand.of), tuple(seen.pop(key)), fold)


def _begun(case: Case, phase: Phase, op: OpId) -> Iterator[Event]:
    """Observe and begin; current scaling wants the observation first, another recipe with the snapshot."""
    now = case.recipe.timing is Timing.CURRENT or case.recipe.initial_rule is not InitialScale.GIVEN
    src, snap, obs = _slot("x", op), _slot("snap", op), _slot("obs", op)
    if now:
        yield Observe(phase, op, src, None, obs)
    yield Begin(phase, op, case.context.scope(op), snap, obs if now else None)
    if not now:
        yield Observe(phase, op, src, snap, obs)


def _decoded(case: Case, operand: Operand) -> Operand:
    if operand.descale is None:
        return _raw(operand.of)
    snap = _slot("snap", operand.of)
    return Operand(operand.of, _slot("codes", operand.of), snap, snap if case.recipe.centred else None, snap)
