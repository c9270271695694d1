"""Liveness defects: a state that never moves, or moves elsewhere in time; a rank that is missing. Rewrites only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qsim.quant import StateKey, TensorRole
from qsim.sim.case import Case
from qsim.sim.defects.edits import lives_of, require_correct, unlike
from qsim.sim.defects.model import Defect, Variant, rewritten
from qsim.sim.events import (
    Commit,
    Content,
    Drop,
    Event,
    Load,
    Observe,
    Phase,
    Reduce,
    Restart,
    Slot,
    Store,
    Wait,
)
from qsim.sim.invariants import unit_of
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Feature, ScheduleSpec, slot

_GRADIENT = int(TensorRole.GRAD_OUTPUT)


def without_commits(case: Case, dead: Callable[[StateKey], bool], missing: str) -> Case:
    """The cells that are ``dead`` are observed, and never advanced."""
    require_correct(case)
    kept: list[Event] = [e for e in case.schedule if not (isinstance(e, (Commit, Store)) and dead(e.cell))]
    return unlike(case, rewritten(case, kept), missing)


def no_commit(case: Case) -> Case:
    """Nothing is ever committed."""
    return without_commits(case, lambda cell: True, "commit")


def frozen_layer(case: Case) -> Case:
    """The first layer's states are never committed: its weights do not train, so nobody thought of its scales."""
    return without_commits(case, lambda cell: cell.layer_id == 0, "commit of layer 0")


def token_taken(case: Case) -> Case:
    """The states of gradients are never committed: a module without backward has taken the token that starts it."""
    return without_commits(case, lambda cell: cell.role_id == _GRADIENT, "gradients with a state")


def first_module_commits_all(case: Case) -> Case:
    """The states of all gradients are committed when the last layer, the first in backward, is done.

    What the lower layers observe after it waits for the next unit; a buffer that nothing was observed into is 0.
    """
    triggers = _triggers(case)
    pending: dict[StateKey, list[Slot]] = {}
    schedule: list[Event] = []
    for at, event in enumerate(case.schedule):
        if isinstance(event, Restart):
            pending.clear()
        elif isinstance(event, Observe) and _of_gradient(event):
            pending.setdefault(case.context.scope(event.op), []).append(event.into)
        if not (isinstance(event, Commit) and event.cell.role_id == _GRADIENT):
            schedule.append(event)
        for commit in triggers.get(at, ()):
            seen = tuple(dict.fromkeys(pending.pop(commit.cell, ())))
            if not seen:
                schedule += _untouched(commit)
                seen = (slot("obs.zero", commit.op),)
            schedule.append(commit._replace(obs=seen))
    return unlike(case, rewritten(case, schedule), "gradients of lower layers with a state")


def _of_gradient(event: Observe) -> bool:
    return event.op.role_id == _GRADIENT and event.phase is Phase.BACKWARD


def _triggers(case: Case) -> dict[int, list[Commit]]:
    """By the place of the last layer's last observation of a unit: the commits of gradients that the unit has."""
    unit, found = case.context.unit, dict[int, list[Commit]]()
    layers = [e.op.layer_id for e in case.schedule if isinstance(e, Observe) and _of_gradient(e)]
    for start, stop in lives_of(case):
        ends: dict[object, int] = {}
        commits: dict[object, list[Commit]] = {}
        for at in range(start, stop):
            event = case.schedule[at]
            if isinstance(event, Observe) and _of_gradient(event) and event.op.layer_id == max(layers):
                ends[unit_of(event.op, unit)] = at
            elif isinstance(event, Commit) and event.cell.role_id == _GRADIENT:
                commits.setdefault(unit_of(event.op, unit), []).append(event)
        for key, due in commits.items():
            found.setdefault(ends[key], []).extend(due)
    return found


def _untouched(commit: Commit) -> Iterator[Event]:
    """The amax buffer of a state that nothing was observed into: it holds the 0 that it was cleared to."""
    op, zeros = commit.op, slot("x.zero", commit.op)
    yield Load(Phase.UPDATE, op, zeros, Content.EMPTY)
    yield Observe(Phase.UPDATE, op, zeros, None, slot("obs.zero", op))
    yield Drop(Phase.UPDATE, (zeros,))


def rank_left_out(case: Case) -> Case:
    """The last rank takes no part in the reductions of one owner, and never commits it."""
    waits = [e for e in case.schedule if isinstance(e, Wait)]
    if not waits:
        return unlike(case, case, "reduction")
    out = max(waits, key=lambda e: e.op.worker_id).op
    left = out.layer_id, out.site, out.role_id, out.worker_id
    kept: list[Event] = [e for e in case.schedule if not (isinstance(e, (Reduce, Wait, Commit)) and e.op[2:6] == left)]
    return rewritten(case, kept)


def commits_twice_in_a_replay(case: Case) -> Case:
    """Each replay of the graph commits, and the host commits the same observations again."""
    schedule: list[Event] = []
    for event in case.schedule:
        schedule += [event, event] if isinstance(event, Commit) else [event]
    return unlike(case, rewritten(case, schedule), "commit")


UPDATE_NEVER_FIRES = Defect(
    id="D22",
    name="update_never_fires",
    kind="liveness",
    tier="S1; S3 for small gradients",
    rewrite=no_commit,
    breaks=frozenset({"I12"}),
    fixes=("commit_every_unit", "commit_of_own_unit"),
    wrong_fixes=("finite_rule", "merged_commit"),
    variants=(
        Variant(name="frozen_layer", rewrite=frozen_layer, breaks=frozenset({"I12"})),
        Variant(name="token_taken", rewrite=token_taken, breaks=frozenset({"I12"}), needs=frozenset({"gradients"})),
    ),
    story="Amaxes are observed and never committed, so the scale keeps its initial value for ever. "
    "The format's range is wasted at first; small gradients go to zero later.",
    anchors=("TransformerEngine 1190, 1254", "NeMo 8780", "TransformerEngine 2063, 784"),
)
UPDATE_IN_WRONG_PLACE = Defect(
    id="D23",
    name="update_in_wrong_place",
    kind="liveness",
    tier="S2",
    rewrite=first_module_commits_all,
    breaks=frozenset({"I5"}),
    minimal=ScheduleSpec(steps=1, layers=2),
    needs=frozenset({"gradients", "several layers"}),
    excludes=frozenset({Feature.DATA_PARALLEL.value, Feature.TENSOR_PARALLEL.value}),  # there a commit ends a pass
    cadence=Cadence.MICROBATCH,
    fixes=("commit_of_own_unit",),
    wrong_fixes=("ignore_foreign", "merged_commit"),
    story="The states of all gradients are committed when the last layer, the first in backward, is done: what lower "
    "layers observe after it is folded in one unit later, and the first unit folds in a 0. The next cast still finds "
    "the scale that is due; a unit is lost at a checkpoint, and where the rule lets the 0 into the window.",
)
REDUCTION_MEMBERSHIP = Defect(
    id="D31",
    name="reduction_membership",
    kind="liveness",
    tier="S4",
    rewrite=rank_left_out,
    breaks=frozenset({"I12"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2, workers=2, features=frozenset({Feature.DATA_PARALLEL})),
    needs=frozenset({"ranks"}),
    excludes=frozenset({Feature.RERUN.value}),  # a step that hangs is not run again
    fixes=("same_collectives",),
    wrong_fixes=("declared_group", "commit_every_unit"),
    story="One rank does not take part in the reduction of one owner, and the others wait for it. "
    "A real job hangs, or pairs this reduction with the next; here the wait is named and the rank's scale never moves.",
    anchors=("Megatron-LM 485", "TransformerEngine 825, 648"),
)
FROZEN_BY_CAPTURE = Defect(
    id="D38",
    name="frozen_by_capture",
    kind="liveness",
    tier="S2-S3",
    rewrite=no_commit,
    breaks=frozenset({"I12"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.GRAPH_CAPTURE})),
    needs=frozenset({Feature.GRAPH_CAPTURE.value}),
    fixes=("commit_every_unit", "commit_of_own_unit"),
    wrong_fixes=("finite_rule", "merged_commit"),
    variants=(Variant(name="extra", rewrite=commits_twice_in_a_replay, breaks=frozenset({"I3"})),),
    story="The commits lie outside the captured graph, so its replays observe and never commit. "
    "The scale is the one of the capture for ever; where graph and host both commit, every amax enters twice.",
    anchors=("vLLM 25513",),
)
