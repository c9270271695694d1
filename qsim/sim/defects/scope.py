"""Scope defects: the state has the wrong owner. Rewrites only."""

from __future__ import annotations

from qsim.quant import ANY, OpId
from qsim.sim.case import Case
from qsim.sim.defects.edits import unlike, with_cells
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.defects.rewriting import caches_of
from qsim.sim.events import (
    Begin,
    Consume,
    Drop,
    Event,
    Observe,
    Operand,
    Quantize,
    Slot,
    Stash,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import ScheduleSpec


def share_over_layers(case: Case) -> Case:
    """One state serves all layers: every cell forgets its layer."""
    return with_cells(case, lambda cell: cell._replace(layer_id=ANY))


def _shared_slot(op: OpId) -> Slot:
    return f"snap/shared/s{op.site}/r{op.role_id}"


def one_snapshot(case: Case) -> Case:
    """One snapshot slot a site and role, for the whole model: what forward's last layer left is what stays.

    The snapshot of a weight cache stays with its codes.
    """
    cached = caches_of(case)
    keyed = {e.into for e in case.schedule if isinstance(e, Begin) and e.op not in cached}

    def operand(o: Operand) -> Operand:
        return o.renamed(lambda name: _shared_slot(o.of) if name in keyed else name)

    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Begin(op=op, into=into) if into in keyed:
                schedule.append(event._replace(into=_shared_slot(op)))
            case Quantize(op=op, by=by) | Observe(op=op, by=by) if by in keyed:
                schedule.append(event._replace(by=_shared_slot(op)))
            case Stash(op=op, slot=name) if name in keyed:
                schedule.append(event._replace(slot=_shared_slot(op)))
            case Consume():
                schedule.append(event.with_operands(operand))
            case Drop(slots=slots):
                schedule.append(event._replace(slots=tuple(s for s in slots if s not in keyed)))
            case _:
                schedule.append(event)
    return rewritten(case, schedule)


def _shared_with_one_snapshot(case: Case) -> Case:
    return one_snapshot(share_over_layers(case))


def share_over_roles(case: Case) -> Case:
    """One state serves all roles of a GEMM: every cell forgets its role."""
    return unlike(case, with_cells(case, lambda cell: cell._replace(role_id=ANY)), "state")


SHARED_SCOPE = Defect(
    id="D04",
    name="shared_scope",
    kind="scope",
    tier="S3",
    rewrite=share_over_layers,
    breaks=frozenset({"I4"}),
    needs=frozenset({"several layers"}),
    fixes=("per_owner_state",),
    wrong_fixes=("single_snapshot", "keyed_snapshot"),
    minimal=ScheduleSpec(steps=1, layers=2),
    story="One scale serves every layer: each encodes with what another layer left behind. "
    "Forward goes up through the layers and recompute comes down, so the neighbours differ.",
    anchors=("the article, bug class two",),
)
SNAPSHOT_ON_SHARED_SCOPE = Defect(
    id="D05",
    name="snapshot_on_shared_scope",
    kind="scope",
    tier="S3-S4",
    rewrite=_shared_with_one_snapshot,
    breaks=frozenset({"I2", "I4"}),
    needs=frozenset({"several layers", "recompute"}),
    # A queue or a live read carries the metadata past the one slot. What backward decodes later than the recompute
    # that made it (forward's codes, weight gradients put off) finds the slot overwritten: I1 and I7 besides.
    excludes=frozenset({"queue", "reread", "selective", "zero_bubble"}),
    cadence=Cadence.MICROBATCH,  # with one commit a step the shared epoch stands still and replays agree
    fixes=("per_owner_state",),
    wrong_fixes=("keyed_snapshot",),
    minimal=ScheduleSpec(steps=1, layers=2),
    story="The first attempted repair of D04: a snapshot, but one for all layers. "
    "It preserves the wrong owner's value faithfully: recompute of every layer uses the last layer's scale.",
    anchors=("the article, the first fix",),
)
SHARED_ROLES = Defect(
    id="D06",
    name="shared_roles",
    kind="scope",
    tier="S4",
    rewrite=share_over_roles,
    breaks=frozenset({"I4"}),
    needs=frozenset({"gradients"}),
    fixes=("per_owner_state",),
    wrong_fixes=("keyed_snapshot", "merged_commit"),
    story="Activations, weights and gradients of a GEMM share one state, whose amax is whichever came last. "
    "With two formats the range differs too: 448 against 57344, so a gradient's scale overflows an activation.",
)
