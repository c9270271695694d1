"""Reduction defects: ranks that part. Rewrites only."""

from __future__ import annotations

from qsim.quant import OpId, TensorRole
from qsim.sim.case import Case
from qsim.sim.defects.edits import unlike
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.events import Consume, Drop, Event, Group, Load, Operand, Reduce, Wait
from qsim.sim.schedule import Feature, ScheduleSpec, slot

_TWO_RANKS = ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2, features=frozenset({Feature.DATA_PARALLEL}))


def group_of_one(case: Case) -> Case:
    """Every rank reduces over a group that it alone is in."""
    schedule: list[Event] = [
        e._replace(group=Group(f"{e.group.name}/rank{e.op.worker_id}", 1)) if isinstance(e, (Reduce, Wait)) else e
        for e in case.schedule
    ]
    return unlike(case, rewritten(case, schedule), "reduction")


def owner_keeps_its_own(case: Case) -> Case:
    """Rank 0 multiplies with its weights as they are; its peers decode what they were sent."""
    schedule: list[Event] = []
    for event in case.schedule:
        if not isinstance(event, Consume) or event.op.worker_id:
            schedule.append(event)
            continue
        left, right = (_undecoded(o) for o in event.operands)
        own = [new for new, old in zip((left, right), event.operands, strict=True) if new is not old]
        schedule += [Load(event.phase, o.of, o.codes) for o in own]
        schedule.append(event._replace(operands=(left, right)))
        if own:
            schedule.append(Drop(event.phase, tuple(o.codes for o in own)))
    return unlike(case, rewritten(case, schedule), "cast of a weight")


def _undecoded(operand: Operand) -> Operand:
    """The weight itself in place of its codes."""
    of: OpId = operand.of
    if of.role_id != TensorRole.WEIGHT or operand.descale is None:
        return operand
    return Operand(of, slot("own", of), None, None, None)


WRONG_GROUP_REDUCTION = Defect(
    id="D30",
    name="wrong_group_reduction",
    kind="reduction",
    tier="S3-S4",
    rewrite=group_of_one,
    breaks=frozenset({"I6"}),
    minimal=_TWO_RANKS,
    needs=frozenset({"ranks"}),
    fixes=("declared_group",),
    wrong_fixes=("wait_before_commit", "same_collectives"),
    story="The amax is reduced, but over the wrong group: here each rank is alone in its own. "
    "Every rank has a scale of its own, and what one gathers from another it decodes with the wrong one.",
    anchors=("Megatron-LM 442", "TransformerEngine 74, 79"),
)
REPLICA_DRIFT = Defect(
    id="D32",
    name="replica_drift",
    kind="reduction",
    tier="S2",
    rewrite=owner_keeps_its_own,
    breaks=frozenset({"I6"}),
    minimal=_TWO_RANKS,
    needs=frozenset({"ranks"}),
    fixes=("decoded_everywhere",),
    wrong_fixes=("declared_group", "keyed_snapshot"),
    story="The rank that owns a weight multiplies with the weight itself, the others with what they decode. "
    "Scales agree to the bit, the values do not: the replicas drift apart by the rounding of the weights.",
)
