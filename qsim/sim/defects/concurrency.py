"""Concurrency defects: two workers mutate one state. Interleaving is the order of the tuple. Rewrites only."""

from __future__ import annotations

from qsim.errors import CaseError
from qsim.sim.case import Case
from qsim.sim.defects.model import Defect, rewritten
from qsim.sim.events import Commit, Event, Fetch, Observe, Slot, Store
from qsim.sim.presets import Cadence
from qsim.sim.schedule import ScheduleSpec, slot


def _workers(case: Case) -> int:
    workers = 1 + max(e.op.worker_id for e in case.schedule if isinstance(e, Commit))
    if workers < 2:
        raise CaseError("a concurrency defect needs schedule.workers >= 2 (and microbatches a multiple of it)")
    return workers


def commit_per_worker(case: Case) -> Case:
    """Each worker commits what it saw itself, where one merged commit was due."""
    _workers(case)
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


CONCURRENT_DOUBLE_COMMIT = Defect(
    id="D09",
    name="concurrent_double_commit",
    kind="concurrency",
    tier="S2-S3",
    rewrite=commit_per_worker,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2),
    needs=frozenset({"workers"}),
    cadence=Cadence.STEP,
    fixes=("merged_commit", "per_worker_state"),
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
    cadence=Cadence.MICROBATCH,
    fixes=("compare_and_set", "per_worker_state"),
    wrong_fixes=("keyed_snapshot",),
    story="Both workers read the state, then both write its successor: the first write is lost. "
    "The epoch counts one commit where two were made, and one amax never happened.",
    anchors=("TransformerEngine 1723",),
)
