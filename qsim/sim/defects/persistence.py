"""Persistence defects: what a checkpoint leaves out, or is read back too late. Rewrites only."""

from __future__ import annotations

from functools import partial

from qsim.errors import CaseError
from qsim.quant import StateKey
from qsim.sim.case import Case
from qsim.sim.control import Control, apply
from qsim.sim.defects.edits import unlike
from qsim.sim.defects.model import Defect, Variant, rewritten
from qsim.sim.events import (
    Begin,
    Compute,
    Consume,
    Event,
    Load,
    LoadState,
    Observe,
    Phase,
    Quantize,
    Restart,
    SaveState,
    Stash,
)
from qsim.sim.schedule import CHECKPOINT, Feature, ScheduleSpec

_PARTS = ("state", "descale", "weights", "queues")


def cast_before_load(case: Case) -> Case:
    """The new process casts its weights into the cache before it reads the checkpoint."""
    cached = {o.of for e in case.schedule if isinstance(e, Consume) for o in e.operands if o.cached}
    schedule: list[Event] = []
    early: set[object] = set()  # the casts of the next step are made already
    restarted = False  # nothing but a model was made since the process began
    for at, event in enumerate(case.schedule):
        restarted = isinstance(event, Restart) or (restarted and isinstance(event, (Load, Compute, LoadState)))
        if restarted and isinstance(event, LoadState):
            step = next(
                e.key.logical_step for e in case.schedule[at:] if isinstance(e, Load) and e.phase is Phase.FORWARD
            )
            early = {op for op in cached if op.logical_step == step}
            schedule += [e for e in case.schedule[at:] if _fills(e) in early]
        elif _fills(event) in early:
            continue
        schedule.append(event)
    return unlike(case, rewritten(case, schedule), "cached cast after a restart")


def _fills(event: Event) -> object:
    """The operation whose cast this event is part of, in forward; None for the others."""
    match event:
        case Load(Phase.FORWARD, key):
            return key
        case Begin(Phase.FORWARD, op) | Quantize(Phase.FORWARD, op) | Observe(Phase.FORWARD, op):
            return op
        case _:
            return None


def load_without(case: Case, part: str) -> Case:
    """A checkpoint is read back without one of its parts."""
    schedule: list[Event] = [
        e._replace(parts=tuple(p for p in e.parts if p != part)) if isinstance(e, LoadState) else e
        for e in case.schedule
    ]
    return unlike(case, rewritten(case, schedule), "checkpoint")


def not_loaded(case: Case) -> Case:
    """The new process starts from nothing."""
    kept: list[Event] = [e for e in case.schedule if not isinstance(e, LoadState)]
    return unlike(case, rewritten(case, kept), "checkpoint")


def first_layer_not_saved(case: Case) -> Case:
    """The states of the first layer are left out of the checkpoint."""

    def kept(cells: tuple[StateKey, ...]) -> tuple[StateKey, ...]:
        return tuple(cell for cell in cells if cell.layer_id != 0)

    schedule: list[Event] = [e._replace(cells=kept(e.cells)) if isinstance(e, SaveState) else e for e in case.schedule]
    return unlike(case, rewritten(case, schedule), "checkpoint")


def stash_lost(case: Case) -> Case:
    """The job moves to another process before the first backward, with all its tensors and without its queues."""
    saves = [e for e in case.schedule if isinstance(e, SaveState)]
    control, stashed = Control(), False
    for at, event in enumerate(case.schedule):
        if stashed and event.phase in (Phase.RECOMPUTE, Phase.BACKWARD) and any(control.queues.values()):
            moved: list[Event] = [
                saves[0],
                Restart(Phase.UPDATE, (*control.slots, CHECKPOINT)),
                LoadState(Phase.UPDATE, CHECKPOINT, tuple(p for p in _PARTS if p != "queues")),
            ]
            return rewritten(case, [*case.schedule[:at], *moved, *case.schedule[at:]])
        stashed = stashed or isinstance(event, Stash)
        apply(control, event)
    raise CaseError(
        "no queue holds an entry at a checkpoint: recompute finds its metadata in slots; take preset te_fused"
    )


def without_rollback(case: Case) -> Case:
    """A step is run again on the state that its first run has left."""
    kept: list[Event] = [e for e in case.schedule if not isinstance(e, LoadState)]
    return unlike(case, rewritten(case, kept), "rerun")


_RESTORED = frozenset({Feature.SAVE_RESTORE.value})

RESTORE_SKEW = Defect(
    id="D33",
    name="restore_skew",
    kind="persistence",
    tier="S3-S4",
    rewrite=cast_before_load,
    breaks=frozenset({"I8", "I9"}),
    minimal=ScheduleSpec(
        steps=2, layers=1, features=frozenset({Feature.SAVE_RESTORE, Feature.WEIGHT_CACHE})
    ),
    needs=_RESTORED | {Feature.WEIGHT_CACHE.value},
    fixes=("rebuild_on_load",),
    wrong_fixes=("save_everything", "descale_in_the_data"),
    variants=(
        Variant(
            name="descale", rewrite=partial(load_without, part="descale"), breaks=frozenset({"I7", "I8"}),
            needs=_RESTORED,
        ),
        Variant(
            name="stash_lost", rewrite=stash_lost, breaks=frozenset({"I2", "I8", "I10"}),
            needs=_RESTORED | {"recompute"},
        ),
        Variant(
            name="state_left_out", rewrite=first_layer_not_saved, breaks=frozenset({"I3", "I8"}), needs=_RESTORED
        ),
        Variant(name="not_loaded", rewrite=not_loaded, breaks=frozenset({"I3", "I8"}), needs=_RESTORED),
    ),
    story="After a restart the parameters are cast before the checkpoint is read, with a state that is not theirs. "
    "The cache serves those codes for a whole step: the weights of before the load, on the scale of a new process.",
    anchors=("TransformerEngine 123, 771, 982",),
)  # fmt: skip
RERUN_WITHOUT_ROLLBACK = Defect(
    id="D35",
    name="rerun_without_rollback",
    kind="persistence",
    tier="S2",
    rewrite=without_rollback,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.RERUN})),
    needs=frozenset({Feature.RERUN.value}),
    fixes=("rollback", "merged_commit", "commit_of_own_unit"),
    wrong_fixes=("save_everything", "keyed_snapshot"),
    story="A step is thrown away and run again, and the state keeps what the first run has committed. "
    "The rerun encodes with other scales than the run it repeats, and every amax enters twice.",
)
