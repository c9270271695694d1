"""Timing defects: the right state, read or advanced at the wrong time. Rewrites only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from qsim.errors import CaseError
from qsim.quant import OpId, TensorRole
from qsim.sim.case import Case
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.defects.rewriting import (
    Committing,
    begun_again,
    caches_of,
    cells_of,
    in_modes,
    is_own_gemm,
    replay_with,
    replayed_ops,
    through_queue,
)
from qsim.sim.events import (
    METADATA_FIELDS,
    Begin,
    Commit,
    Consume,
    Event,
    Fetch,
    Mode,
    Observe,
    Operand,
    Phase,
    Quantize,
    Take,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Feature, Order, ScheduleSpec, slot

Reader = Callable[[Consume, Operand], bool]

_OVERLAPPING = (Order.FORWARD_FIRST, Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.ZERO_BUBBLE)
"""Orders in which the forward of another microbatch comes between forward and backward of one."""
_KEEPS_NO_SLOT = frozenset({"queue", "reread"})
"""Presets that do not keep forward's snapshot in a slot of its own for recompute."""


def _of_no_cache(_: Consume, operand: Operand) -> bool:
    """What a cache hands out is of another time anyway: that is a defect of its own."""
    return not operand.cached


def decode_with_live(case: Case, fields: tuple[str, ...], reader: Reader = _of_no_cache) -> Case:
    """Consumers take ``fields`` of the operands that ``reader`` names from the live state, fetched just before."""
    cells = cells_of(case)
    if not cells:
        raise CaseError("a schedule that casts nothing has no decode to get wrong; use another preset")
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Consume):
            operands = list(event.operands)
            for at, operand in enumerate(event.operands):
                if operand.descale is not None and reader(event, operand):
                    live = slot("live", operand.of)
                    schedule.append(Fetch(event.phase, operand.of, cells[operand.of], live))
                    operands[at] = operand.renamed(lambda _, live=live: live, fields)  # type: ignore[misc]
            event = event._replace(operands=(operands[0], operands[1]))
        schedule.append(event)
    return rewritten(case, schedule)


def recompute_as_new(case: Case) -> Case:
    """Recompute goes through the quantizer again: it begins, observes and commits as if it were forward."""
    cells, committing = cells_of(case), Committing(case)

    def entered(event: Quantize) -> Iterator[Event]:
        op, meta, seen = event.op, slot("snap.r", event.op), slot("obs.r", event.op)
        yield from begun_again(case, event, cells[op])
        if not case.recipe_of(op).may_need_observation:
            yield Observe(event.phase, op, event.src, meta, seen)
        yield from committing.commit(event.phase, op, cells[op], seen)

    return replay_with(case, entered)


def _in_backward(consumer: Consume, operand: Operand) -> bool:
    """Operands that forward cast, read in recompute or backward; a gradient is read where it is made."""
    later = consumer.phase in (Phase.RECOMPUTE, Phase.BACKWARD)
    return later and operand.of.role_id != TensorRole.GRAD_OUTPUT and not operand.cached


def _of_a_cache(consumer: Consume, operand: Operand) -> bool:
    """Hits of a weight cache; the GEMM of the visit that filled it reads its own cast."""
    return operand.cached and not is_own_gemm(consumer, operand)


def begin_in_recompute(case: Case) -> Case:
    """Recompute reads the state when it runs, not when forward did; it observes and commits nothing."""
    cells = cells_of(case)
    return replay_with(case, lambda event: begun_again(case, event, cells[event.op]))


def leave_the_unreached(case: Case) -> Case:
    """Forward stashes for every cast; recompute takes back at the GEMMs, and ends before the last of them."""
    casts = {e.op for e in case.schedule if isinstance(e, Begin) and e.phase is Phase.FORWARD}
    again = (e for e in case.schedule if isinstance(e, Consume) and e.phase is Phase.RECOMPUTE)
    reached = {o.of for e in again for o in e.operands}
    return through_queue(case, Take.KEYED, put=casts - caches_of(case).keys(), taken=reached)


def commit_in_recompute(case: Case) -> Case:
    """The commit of what forward observed hangs on its recompute: it fires as often as that runs."""
    replayed, held = replayed_ops(case), dict[OpId, Commit]()
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Commit) and event.phase is Phase.FORWARD and event.op in replayed:
            held[event.op] = event._replace(phase=Phase.RECOMPUTE)
            continue
        schedule.append(event)
        if isinstance(event, Quantize) and event.phase is Phase.RECOMPUTE and event.op in held:
            schedule.append(held[event.op])
    return rewritten(case, schedule)


def _draw_again(event: Quantize) -> Mode:
    return event.mode._replace(bits=1) if event.phase is Phase.RECOMPUTE else event.mode


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
    fixes=("descale_in_the_data", "keyed_snapshot", "functional_state"),
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
    excludes=_KEEPS_NO_SLOT,
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_snapshot", "functional_state"),
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
    excludes=_KEEPS_NO_SLOT,
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_snapshot", "functional_state"),
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
    fixes=("descale_in_the_data", "keyed_snapshot", "functional_state"),
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
    fixes=("descale_in_the_data", "keyed_snapshot", "functional_state"),
    wrong_fixes=("per_owner_state",),
    story="The other half of D07, for comparison: the decode takes the new descale and the old centre. "
    "Not in the catalogue; it puts a price on the multiplicative half alone.",
)
LIVE_READ_IN_BACKWARD = Defect(
    id="D13",
    name="live_read_in_backward",
    kind="timing",
    tier="S3",
    rewrite=partial(decode_with_live, fields=METADATA_FIELDS, reader=_in_backward),
    breaks=frozenset({"I1"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2),
    needs=frozenset({"accumulation"}),
    orders=_OVERLAPPING,
    cadence=Cadence.MICROBATCH,
    fixes=("descale_in_the_data", "keyed_snapshot", "functional_state"),
    wrong_fixes=("per_owner_state", "own_descale_in_cache"),
    story="Forward's GEMMs decode with what they encoded with, but recompute and backward read the live descale, and "
    "other microbatches have committed since. Forward is right to the bit; only gradients are wrong, by the ratio of "
    "two scales.",
    anchors=("TransformerEngine 657, 659, 591", "TransformerEngine 1597"),
)
CACHED_WEIGHT_MOVING_DESCALE = Defect(
    id="D14",
    name="cached_weight_moving_descale",
    kind="timing",
    tier="S2 (S4 cold)",
    rewrite=partial(decode_with_live, fields=METADATA_FIELDS, reader=_of_a_cache),
    breaks=frozenset({"I1", "I9"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, features=frozenset({Feature.WEIGHT_CACHE})),
    needs=frozenset({"weight_cache", "accumulation"}),
    cadence=Cadence.MICROBATCH,
    fixes=("own_descale_in_cache", "descale_in_the_data", "keyed_snapshot", "functional_state"),
    wrong_fixes=("refill_cache", "per_owner_state"),
    story="The codes of a weight are cached in the first microbatch, its descale is not: after the commit every hit "
    "decodes old codes with the live descale. The first microbatch's own GEMM is right to the bit, all that follow "
    "are off by one gain.",
    anchors=("TransformerEngine 1047",),
)
EARLY_STOP_PARTIAL_REPLAY = Defect(
    id="D19",
    name="early_stop_partial_replay",
    kind="timing",
    tier="S2-S3",
    rewrite=leave_the_unreached,
    breaks=frozenset({"I10"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.EARLY_STOP})),
    needs=frozenset({"early_stop", "recompute"}),
    excludes=_KEEPS_NO_SLOT,
    fixes=("paired_stash", "keyed_snapshot", "functional_state"),
    wrong_fixes=("keyed_stash", "fifo_under_1f1b"),
    story="Forward stashes for every GEMM, but recompute stops as soon as backward has what it needs and never takes "
    "the last entries out. The numbers are right as long as nobody else takes from that queue, while it grows by one "
    "entry a module and microbatch.",
    anchors=("lifecycle facts, section 4",),
)
MULTI_REPLAY = Defect(
    id="D20",
    name="multi_replay",
    kind="timing",
    tier="S2-S3",
    rewrite=commit_in_recompute,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.NESTED})),
    needs=frozenset({"nested"}),
    cadence=Cadence.MICROBATCH,
    fixes=("functional_state", "merged_commit", "commit_of_own_unit", "observe_once"),
    wrong_fixes=("keyed_snapshot", "per_owner_state"),
    story="The owner commits when recompute runs, on the belief that it runs once: under nested checkpoints it runs "
    "twice and the same amax is folded in twice. Every read is paired, and the window forgets twice as fast.",
    anchors=("TransformerEngine 3296",),
)
DEFERRED_READ = Defect(
    id="D39",
    name="deferred_read",
    kind="timing",
    tier="S3",
    rewrite=begin_in_recompute,
    breaks=frozenset({"I2"}),
    needs=frozenset({"recompute"}),
    excludes=_KEEPS_NO_SLOT,
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_snapshot", "functional_state"),
    wrong_fixes=("descale_in_the_data", "per_owner_state"),
    story="The read of the state was planned before the commit and runs after it: recompute encodes with the next "
    "epoch and decodes with the same. Each pass is paired and the history is right, but backward differentiates "
    "another tensor than forward used.",
    anchors=("pytorch 197039",),
)
FRESH_RANDOM_BITS = Defect(
    id="D41",
    name="fresh_random_bits",
    kind="timing",
    tier="S2-S3",
    rewrite=partial(in_modes, change=_draw_again),
    breaks=frozenset({"I2", "I13"}),
    needs=frozenset({"recompute"}),
    fixes=("same_context",),
    wrong_fixes=("keyed_snapshot", "descale_in_the_data"),
    story="Recompute draws new random words: under stochastic rounding its codes differ from forward's at the same "
    "scale. Every version agrees, so only the words that were drawn tell it, and under nearest rounding no number "
    "does.",
    anchors=("lifecycle facts, section 4",),
)
