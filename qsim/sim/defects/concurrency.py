"""Concurrency defects: two workers mutate one state. Interleaving is the order of the tuple. Rewrites only."""

from __future__ import annotations

from qsim.errors import CaseError
from qsim.quant import MergeRule, OpId, StateKey
from qsim.sim.case import Case
from qsim.sim.defects.edits import require_one_unit_a_commit, unlike
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    LoadState,
    Observe,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restart,
    SaveState,
    Slot,
    Store,
    Wait,
)
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Feature, ScheduleSpec, slot


def _workers(case: Case) -> int:
    workers = 1 + max(e.op.worker_id for e in case.schedule if isinstance(e, Commit))
    if workers < 2:
        raise CaseError("a concurrency defect needs schedule.workers >= 2 (and microbatches a multiple of it)")
    return workers


def commit_per_worker(case: Case) -> Case:
    """Each worker commits what it saw itself, where one merged commit was due."""
    _workers(case)
    if case.context.fold.merge is MergeRule.LAST:
        raise CaseError(
            "where the last observation of a unit speaks alone, a commit a worker is another mistake, or none"
        )
    return split_by_worker(case)


def split_by_worker(case: Case) -> Case:
    """Every merged commit becomes one commit a worker, of that worker's own observations."""
    seen_by = {e.into: e.op.worker_id for e in case.schedule if isinstance(e, Observe)}
    schedule: list[Event] = []
    for event in case.schedule:
        if isinstance(event, Commit) and len(event.obs) > 1:
            for worker in sorted({seen_by[name] for name in event.obs}):
                mine = tuple(name for name in event.obs if seen_by[name] == worker)
                schedule.append(event._replace(op=event.op._replace(worker_id=worker), obs=mine))
        else:
            schedule.append(event)
    return rewritten(case, schedule)


def read_then_write(case: Case) -> Case:
    """Commits of workers on one cell are torn: all of them read before the first of them writes."""
    workers = _workers(case)
    require_one_unit_a_commit(case)
    schedule: list[Event] = []
    waiting: dict[object, list[Commit]] = {}
    for event in case.schedule:
        if not isinstance(event, Commit):
            schedule.append(event)
            continue
        mates = waiting.setdefault(event.cell, [])
        mates.append(event)
        schedule.append(Fetch(event.phase, event.op, event.cell, _base(event)))
        if len(mates) == workers:
            schedule += [Store(e.phase, e.op, e.cell, _base(e), e.obs, e.fold) for e in mates]
            mates.clear()
    return rewritten(case, schedule)


def _base(event: Commit) -> Slot:
    return slot("base", event.op)


def torn_write(case: Case) -> Case:
    """A commit writes its scale, and its descale only after another worker has begun on the pair."""
    require_one_unit_a_commit(case)
    late: dict[int, list[Event]] = {}
    torn: dict[int, list[Event]] = {}
    touch: dict[StateKey, tuple[int, Event]] = {}  # by cell: the next event on it
    for at in reversed(range(len(case.schedule))):
        event = case.schedule[at]
        match event:
            case SaveState() | LoadState() | Restart():
                touch.clear()  # a checkpoint waits for writes under way
            case Commit(phase, op, cell, obs, fold):
                where, next_one = touch.get(cell, (-1, event))
                if isinstance(next_one, Begin) and next_one.op.worker_id != op.worker_id:
                    torn[at] = [
                        Fetch(phase, op, cell, _base(event)),
                        Store(phase, op, cell, _base(event), obs, fold, Part.SCALE),
                    ]
                    late[where] = [Store(phase, op, cell, _base(event), obs, fold, Part.DESCALE)]
                touch[cell] = at, event
            case Begin(cell=cell) | Fetch(cell=cell) | Store(cell=cell):
                touch[cell] = at, event
            case _:
                pass
    schedule: list[Event] = []
    for at, event in enumerate(case.schedule):
        schedule += torn.get(at, [event])
        schedule += late.get(at, [])
    return unlike(case, rewritten(case, schedule), "commit that another worker's begin follows")


def commit_before_wait(case: Case) -> Case:
    """Every rank starts its reduction and commits its own observation; what the reduction brings comes too late."""
    own = {(e.op, e.group.name): e.obs for e in case.schedule if isinstance(e, Reduce)}
    schedule: list[Event] = []
    waits: list[Wait] = []
    mine: dict[Slot, Slot] = {}
    for event in case.schedule:
        if isinstance(event, Wait):
            mine[event.into] = own[event.op, event.group.name]
            waits.append(event)
            continue
        if isinstance(event, Commit):
            event = event._replace(obs=tuple(mine.get(name, name) for name in event.obs))
        elif waits:
            schedule += waits
            waits = []
        schedule.append(event)
    return unlike(case, rewritten(case, [*schedule, *waits]), "reduction")


def one_scratch(case: Case) -> Case:
    """Workers encode into one buffer an operand, in step: the last one's codes lie there when any multiplies."""
    last = _workers(case) - 1
    cached = {o.codes for e in case.schedule if isinstance(e, Consume) for o in e.operands if o.cached}
    own: dict[Slot, OpId] = {}
    for event in case.schedule:
        if isinstance(event, Quantize) and event.phase is Phase.FORWARD and event.out not in cached:
            own[event.out] = event.op

    def shared(op: OpId) -> OpId:
        return op._replace(worker_id=0, microbatch=op.microbatch - op.worker_id)

    def scratch(name: Slot) -> Slot:
        return slot("scratch", shared(own[name])) if name in own else name

    schedule: list[Event] = []
    held: dict[OpId, list[Event]] = {}  # by GEMM of the last worker: what the others do when it has encoded too
    holding: OpId | None = None
    for event in case.schedule:
        match event:
            case Quantize(out=out):
                event = event._replace(out=scratch(out))
            case Consume(operands=(left, right)):
                operands = left._replace(codes=scratch(left.codes)), right._replace(codes=scratch(right.codes))
                event = event._replace(operands=operands)
            case Drop(slots=slots):  # the buffer is free when its last user is done
                kept = tuple(s for s in slots if s not in own or own[s].worker_id == last)
                event = event._replace(slots=tuple(scratch(s) for s in kept))
            case _:
                pass
        if isinstance(event, Consume) and event.phase is Phase.FORWARD:
            if event.op.worker_id < last:
                holding = shared(event.op)
                held.setdefault(holding, []).append(event)
                continue
            schedule += held.pop(shared(event.op), [])
        elif isinstance(event, Drop) and holding is not None:
            held[holding].append(event)
            holding = None
            continue
        holding = None
        schedule.append(event)
    return rewritten(case, schedule)


_RANKS = frozenset({Feature.DATA_PARALLEL.value, Feature.TENSOR_PARALLEL.value})
"""Ranks have states and buffers of their own: nothing to race for."""

CONCURRENT_DOUBLE_COMMIT = Defect(
    id="D09",
    name="concurrent_double_commit",
    kind="concurrency",
    tier="S2-S3",
    rewrite=commit_per_worker,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2),
    needs=frozenset({"workers"}),
    excludes=_RANKS,
    cadence=Cadence.STEP,
    fixes=("merged_commit", "commit_of_own_unit", "per_worker_state"),
    wrong_fixes=("keyed_snapshot",),
    story="Two workers share one state and each commits its own observation, where one merged commit was due. "
    "The window fills twice as fast, and its newest entry is whichever worker came last.",
    anchors=("the article, the third failure mode",),
)
LOST_UPDATE = Defect(
    id="D10",
    name="lost_update",
    kind="concurrency",
    tier="S2-S3",
    rewrite=read_then_write,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2),
    needs=frozenset({"workers"}),
    excludes=_RANKS,
    cadence=Cadence.MICROBATCH,
    fixes=("compare_and_set", "atomic_commit", "fail_closed_to_one_worker", "per_worker_state"),
    wrong_fixes=("keyed_snapshot",),
    story="Both workers read the state, then both write its successor: the first write is lost. "
    "The epoch counts one commit where two were made, and one amax never happened.",
    anchors=("TransformerEngine 1723",),
)
TORN_READ = Defect(
    id="D08",
    name="torn_read",
    kind="concurrency",
    tier="S3",
    rewrite=torn_write,
    breaks=frozenset({"I7"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2),
    needs=frozenset({"workers"}),
    excludes=_RANKS,
    cadence=Cadence.MICROBATCH,
    fixes=("atomic_commit", "fail_closed_to_one_worker", "per_worker_state"),
    wrong_fixes=("compare_and_set", "keyed_snapshot"),
    story="A commit writes the scale and then the descale, and another worker reads the pair between the two. "
    "It encodes with the new scale and decodes with the old descale: every value is off by the ratio of the two.",
)
LATE_ASYNC_REDUCTION = Defect(
    id="D11",
    name="late_async_reduction",
    kind="concurrency",
    tier="S2-S3",
    rewrite=commit_before_wait,
    breaks=frozenset({"I6"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2, features=frozenset({Feature.DATA_PARALLEL})),
    needs=frozenset({"ranks"}),
    fixes=("wait_before_commit",),
    wrong_fixes=("declared_group", "merged_commit"),
    story="The reduction of the amax is started, and the commit does not wait for it: each rank folds in what it saw "
    "itself. The result of the reduction arrives after its use, and the scales of the ranks part.",
    anchors=("TransformerEngine 728, 118",),
)
SCRATCH_REUSE = Defect(
    id="D12",
    name="scratch_reuse",
    kind="concurrency",
    tier="S4",
    rewrite=one_scratch,
    breaks=frozenset({"I4", "I7"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2),
    needs=frozenset({"workers"}),
    excludes=_RANKS | {"dataflow"},  # a GEMM cannot wait for another worker's cast where its own layer waits for it
    cadence=Cadence.STEP,  # with a commit between the two casts they are of two epochs, and pairing breaks instead
    fixes=("own_buffers", "fail_closed_to_one_worker"),
    wrong_fixes=("descale_in_the_data", "keyed_snapshot"),
    story="Two streams encode into one scratch buffer: the second has written its codes before the first multiplies. "
    "The first decodes the other's tensor, with metadata that fit by accident.",
)
