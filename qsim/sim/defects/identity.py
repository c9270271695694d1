"""Identity defects: the right value under another name, or in another context. Rewrites only."""

from __future__ import annotations

from functools import partial

from qsim.quant import OpId
from qsim.sim.case import Case
from qsim.sim.defects.model import Defect, Variant, rewritten
from qsim.sim.defects.rewriting import (
    caches_of,
    in_modes,
    is_own_gemm,
    replayed_ops,
    through_queue,
    without,
)
from qsim.sim.events import (
    Allocate,
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Load,
    Mode,
    Observe,
    Operand,
    Phase,
    Quantize,
    Reduce,
    Restart,
    Restore,
    Slot,
    Stash,
    Take,
    Wait,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import OTHER_FORMAT, Feature, Order, ScheduleSpec, slot

_KEEPS_NO_SLOT = frozenset({"queue", "reread"})
_PIPELINES = (Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.ZERO_BUBBLE)


def fill_once(case: Case) -> Case:
    """A weight is cast while its cache is empty: in the first step of a process, and never again."""
    caches, filled, due = caches_of(case), dict[Slot, OpId](), dict[OpId, OpId]()
    for event in case.schedule:
        if isinstance(event, Restart):
            filled.clear()
        elif isinstance(event, Quantize) and event.op in caches:
            due[event.op] = filled.setdefault(event.out, event.op)
    gone = {op for op, made in due.items() if made != op}

    def hit(operand: Operand) -> Operand:
        return operand._replace(of=due[operand.of]) if operand.cached else operand

    def is_gone(event: Event) -> bool:
        match event:
            case Load(key=op) | Begin(op=op) | Quantize(op=op) | Observe(op=op):
                return op in gone
            case Commit(op=op) | Reduce(op=op) | Wait(op=op):
                return op in gone
            case _:
                return False

    kept = without(case, is_gone).schedule
    return rewritten(case, [e.with_operands(hit) if isinstance(e, Consume) else e for e in kept])


def lose_the_cast(case: Case) -> Case:
    """The microbatch that should fill the caches runs forward without gradients, so what it casts is not kept."""
    caches = caches_of(case)
    first = {(op.logical_step, op.microbatch, op.worker_id) for op in caches}

    def own(operand: Operand) -> Operand:
        if operand.cached:
            return operand._replace(codes=slot("lost", operand.of), cached=False)
        return operand

    schedule: list[Event] = []
    for event in case.schedule:
        match event:
            case Quantize(phase=Phase.FORWARD, op=op) if (op.logical_step, op.microbatch, op.worker_id) in first:
                event = event._replace(mode=event.mode._replace(grad=False))
                if op in caches:
                    schedule.append(Allocate(event.phase, op, (event.out,)))
                    event = event._replace(out=slot("lost", op))
                schedule.append(event)
            case Consume(operands=operands) if any(o.cached and is_own_gemm(event, o) for o in operands):
                schedule.append(event.with_operands(own))
                schedule.append(Drop(event.phase, tuple(slot("lost", o.of) for o in operands if o.cached)))
            case _:
                schedule.append(event)
    return rewritten(case, schedule)


def gate_off_in_forward(case: Case) -> Case:
    """Recompute takes out of the queue what forward, its gate being off, never put in."""
    queued = any(isinstance(event, Restore) for event in case.schedule)
    case = case if queued else through_queue(case, Take.KEYED)
    return without(case, lambda event: isinstance(event, Stash) and event.phase is Phase.FORWARD)


def _default_recipe(case: Case) -> Case:
    """Recompute runs outside the region that chose the format: E5M2 where forward had E4M3, else E4M3."""

    def mode(event: Quantize) -> Mode:
        if event.phase is not Phase.RECOMPUTE:
            return event.mode
        chosen = event.mode.fmt or case.recipe_of(event.op).fmt_of(event.op).name
        return event.mode._replace(fmt="float8_e4m3fn" if chosen != "float8_e4m3fn" else OTHER_FORMAT)

    return in_modes(case, mode)


def _not_enabled(event: Quantize) -> Mode:
    return event.mode._replace(enabled=False) if event.phase is Phase.RECOMPUTE else event.mode


def _taken_for(phase: Phase, event: Quantize) -> Mode:
    """Recompute is taken for ``phase``."""
    return event.mode._replace(detected=phase) if event.phase is Phase.RECOMPUTE else event.mode


def _by_gradient_mode(case: Case) -> Case:
    """Forward of a checkpoint runs without gradients, and that is what a proxy takes for an evaluation."""
    replayed = replayed_ops(case)

    def mode(event: Quantize) -> Mode:
        proxied = event.phase is Phase.FORWARD and event.op in replayed
        return event.mode._replace(detected=Phase.EVALUATE) if proxied else event.mode

    return in_modes(case, mode)


_CACHED = frozenset({Feature.WEIGHT_CACHE})

STALE_WEIGHT_CACHE = Defect(
    id="D15",
    name="stale_weight_cache",
    kind="identity",
    tier="S3",
    rewrite=fill_once,
    breaks=frozenset({"I9"}),
    minimal=ScheduleSpec(steps=2, layers=1, features=_CACHED),
    needs=frozenset({"weight_cache", "later steps"}),
    fixes=("refill_cache",),
    wrong_fixes=("own_descale_in_cache", "keyed_snapshot"),
    story="The optimizer changes the weights and the cache keeps the cast of the first step: codes and descale belong "
    "to each other, but not to the weights. The error is zero in the first step and grows with the way that the "
    "weights have gone.",
    anchors=("Primus 983", "PaddleFleet 1523"),
)
CACHE_UNFILLED_IN_NO_GRAD = Defect(
    id="D16",
    name="cache_unfilled_in_no_grad",
    kind="identity",
    tier="S4",
    rewrite=lose_the_cast,
    breaks=frozenset({"I9", "I13"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, features=_CACHED),
    needs=frozenset({"weight_cache", "accumulation", "recompute"}),
    fixes=("forward_with_gradients",),
    wrong_fixes=("same_context", "refill_cache"),
    story="A checkpoint runs the first forward without gradients, so its cast of the weights is thrown away, and every "
    "later GEMM reads a cache that nobody has filled. It takes accumulation, recompute and a cache together, and it "
    "gives NaN in FP8.",
    anchors=("TransformerEngine 539", "Megatron-LM 607"),
)
STASH_MISPAIRING = Defect(
    id="D17",
    name="stash_mispairing",
    kind="identity",
    tier="S2-S3",
    rewrite=partial(through_queue, take=Take.FIFO),
    breaks=frozenset({"I2", "I10"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2),
    needs=frozenset({"accumulation", "recompute"}),
    excludes=_KEEPS_NO_SLOT | {"nested"},  # the second of two recomputes finds its entry gone: another mistake
    orders=(Order.FORWARD_FIRST,),
    cadence=Cadence.MICROBATCH,
    fixes=("keyed_stash", "lifo_under_flush", "keyed_snapshot", "functional_state"),
    wrong_fixes=("fifo_under_1f1b", "paired_stash"),
    variants=(
        Variant(
            name="entered_twice",
            rewrite=partial(through_queue, take=Take.FIFO),
            breaks=frozenset({"I10"}),  # both visits have one epoch: the entry is another's, its value is not
            minimal=ScheduleSpec(steps=1, layers=1, order=Order.ALTERNATE, features=frozenset({Feature.TWICE})),
            needs=frozenset({"twice", "recompute"}),
            # workers on one state share its queue: the entry may then be of another unit, and of another epoch
            excludes=_KEEPS_NO_SLOT | {"nested", "shared states"},
            orders=(Order.ALTERNATE, *_PIPELINES),
        ),
        Variant(
            name="newest_under_1f1b",
            rewrite=partial(through_queue, take=Take.LIFO),
            breaks=frozenset({"I2", "I10"}),
            minimal=ScheduleSpec(steps=1, layers=2, microbatches=2, order=Order.ONE_F_ONE_B),
            orders=_PIPELINES,
        ),
    ),
    story="One queue a module carries scales from forward to recompute, oldest first, and backward comes in the other "
    "order after a flush: the last microbatch gets the scales of the first. Each pass is paired in itself, the two are "
    "not the same tensor.",
    anchors=("lifecycle facts, section 2",),
)
STASH_GATE_MISMATCH = Defect(
    id="D18",
    name="stash_gate_mismatch",
    kind="identity",
    tier="S2-S4",
    rewrite=gate_off_in_forward,
    breaks=frozenset({"I10"}),
    needs=frozenset({"recompute"}),
    excludes=frozenset({"reread"}),
    cadence=Cadence.STEP,
    fixes=("paired_stash", "keyed_snapshot", "functional_state"),
    wrong_fixes=("keyed_stash", "lifo_under_flush"),
    variants=(
        Variant(
            name="after_commit",
            rewrite=gate_off_in_forward,
            breaks=frozenset({"I2", "I10"}),
            cadence=Cadence.MICROBATCH,
        ),
    ),
    story="Another condition gates the stash in forward than the restore in recompute, which finds nothing and goes on "
    "with the live state. With one commit a step that is by luck the same value; with one a microbatch it is the next.",
    anchors=("TransformerEngine 3284", "TransformerEngine 3394"),
)
CONTEXT_DRIFT = Defect(
    id="D21",
    name="context_drift",
    kind="identity",
    tier="S2-S3",
    rewrite=_default_recipe,
    breaks=frozenset({"I13"}),
    needs=frozenset({"recompute"}),
    fixes=("same_context",),
    wrong_fixes=("keyed_snapshot", "per_owner_state"),
    variants=(Variant(name="precision", rewrite=partial(in_modes, change=_not_enabled), breaks=frozenset({"I13"})),),
    story="Recompute runs outside the region that forward ran in, and casts to the default format with forward's "
    "scale. The scale is right and the tensor is another one, so gradients belong to a forward that never happened.",
    anchors=("TransformerEngine 1568", "TransformerEngine 24", "Megatron-LM 7538"),
)
PHASE_BY_PROXY = Defect(
    id="D40",
    name="phase_by_proxy",
    kind="identity",
    tier="S2",
    rewrite=partial(in_modes, change=partial(_taken_for, Phase.FORWARD)),
    breaks=frozenset({"I13"}),
    needs=frozenset({"recompute"}),
    fixes=("same_context",),
    wrong_fixes=("keyed_snapshot", "per_owner_state"),
    variants=(
        Variant(name="grad_mode", rewrite=_by_gradient_mode, breaks=frozenset({"I13"})),
        Variant(
            name="call_stack",
            rewrite=partial(in_modes, change=partial(_taken_for, Phase.BACKWARD)),
            breaks=frozenset({"I13"}),
        ),
    ),
    story="The quantizer guesses its phase from a thread-local flag, which the thread of backward does not have, and "
    "takes recompute for forward. No number is wrong yet: it is the cause of a second commit or a second stash.",
    anchors=("TransformerEngine 3213",),
)
