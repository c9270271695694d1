"""Timing defects: the right state, read or advanced at the wrong time. Rewrites only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from qsim.errors import CaseError
from qsim.quant import OpId, StateKey, Timing
from qsim.sim.case import Case
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.events import (
    METADATA_FIELDS,
    Begin,
    Commit,
    Consume,
    Event,
    Fetch,
    Observe,
    Operand,
    Phase,
    Quantize,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import slot


def _cells(case: Case) -> dict[OpId, StateKey]:
    """Which cell each op's state lies in, as the schedule has it."""
    return {e.op: e.cell for e in case.schedule if isinstance(e, Begin)}


def decode_with_live(case: Case, fields: tuple[str, ...]) -> Case:
    """Consumers take ``fields`` of their metadata from the live state, fetched just before the GEMM."""
    cells = _cells(case)
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Consume):
            operands = []
            for operand in event.operands:
                if operand.descale is None:
                    raise CaseError("a schedule that casts nothing has no decode to get wrong; use another preset")
                live = slot("live", operand.of)
                schedule.append(Fetch(event.phase, operand.of, cells[operand.of], live))
                operands.append(operand.renamed(lambda _, live=live: live, fields))  # type: ignore[misc]
            event = event._replace(operands=(operands[0], operands[1]))
        schedule.append(event)
    return rewritten(case, schedule)


def recompute_as_new(case: Case) -> Case:
    """Recompute goes through the quantizer again: it begins, observes and commits as if it were forward."""
    cells, current = _cells(case), case.recipe.timing is Timing.CURRENT

    def entered(event: Quantize) -> Iterator[Event]:
        op, meta, seen = event.op, slot("snap.r", event.op), slot("obs.r", event.op)
        if current:
            yield Observe(event.phase, op, event.src, None, seen)
        yield Begin(event.phase, op, cells[op], meta, seen if current else None)
        yield event._replace(by=meta)
        if not current:
            yield Observe(event.phase, op, event.src, meta, seen)
        yield Commit(event.phase, op, cells[op], (seen,), case.context.fold)

    def renamed(operand: Operand) -> Operand:
        if not operand.codes.startswith("codes.r/"):
            return operand
        old, new = slot("snap", operand.of), slot("snap.r", operand.of)
        return operand.renamed(lambda name: new if name == old else name)

    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Quantize) and event.phase is Phase.RECOMPUTE:
            schedule += entered(event)
        elif isinstance(event, Consume):
            left, right = event.operands
            schedule.append(event._replace(operands=(renamed(left), renamed(right))))
        else:
            schedule.append(event)
    return rewritten(case, schedule)


def _both(case: Case) -> Case:
    return decode_with_live(recompute_as_new(case), METADATA_FIELDS)


CONSUME_AFTER_ADVANCE = Defect(
    id="D01",
    name="consume_after_advance",
    kind="timing",
    tier="S3",
    rewrite=partial(decode_with_live, fields=METADATA_FIELDS),
    breaks=frozenset({"I1"}),
    cadence=Cadence.MICROBATCH,
    fixes=("descale_in_the_data", "keyed_snapshot"),
    wrong_fixes=("per_owner_state",),
    story="The state advances between encode and GEMM, and the GEMM reads the live descale. "
    "Forward and recompute are wrong alike, so comparing them shows nothing.",
    anchors=("the article, bug class one", "TransformerEngine 1083, 1491"),
)
RECOMPUTE_ADVANCES = Defect(
    id="D02",
    name="recompute_advances",
    kind="timing",
    tier="S2-S3",
    rewrite=recompute_as_new,
    breaks=frozenset({"I2", "I3", "I5"}),
    needs=frozenset({"recompute"}),
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_snapshot",),
    wrong_fixes=("descale_in_the_data", "per_owner_state"),
    story="Backward's recompute calls the quantizer again: it encodes with the next scale and commits a second "
    "time. The recomputed tensor is another one, and the history holds every amax twice.",
    anchors=("the article", "TransformerEngine 3213", "lightning-thunder 1424"),
)
CONSUME_AND_RECOMPUTE_ADVANCE = Defect(
    id="D03",
    name="consume_and_recompute_advance",
    kind="timing",
    tier="S3",
    rewrite=_both,
    breaks=frozenset({"I1", "I2", "I3", "I5"}),
    needs=frozenset({"recompute"}),
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_snapshot",),
    wrong_fixes=("descale_in_the_data", "per_owner_state"),
    story="D01 and D02 together, the article's whole bug: encode at t, decode at t+1; again in recompute, "
    "encode at t+1, decode at t+2.",
    anchors=("the article",),
)
STALE_CENTER = Defect(
    id="D07",
    name="stale_center",
    kind="timing",
    tier="S3-S4",
    rewrite=partial(decode_with_live, fields=("center",)),
    breaks=frozenset({"I1", "I7"}),
    cadence=Cadence.MICROBATCH,
    needs=frozenset({"centre"}),
    fixes=("descale_in_the_data", "keyed_snapshot"),
    wrong_fixes=("per_owner_state",),
    story="The residual was taken about the old centre, the decode adds the new one. "
    "The error is additive: a shift of the whole tensor, large where |mean| exceeds sigma.",
    anchors=("the article, the mean-centred variant",),
)
STALE_SCALE = Defect(
    id="stale_scale",
    name="stale_scale",
    kind="contrast",
    tier="S3",
    rewrite=partial(decode_with_live, fields=("descale", "version")),
    breaks=frozenset({"I1", "I7"}),
    cadence=Cadence.MICROBATCH,
    needs=frozenset({"centre"}),
    fixes=("descale_in_the_data", "keyed_snapshot"),
    wrong_fixes=("per_owner_state",),
    story="The other half of D07, for comparison: the decode takes the new descale and the old centre. "
    "Not in the catalogue; it puts a price on the multiplicative half alone.",
)
