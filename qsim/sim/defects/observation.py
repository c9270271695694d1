"""Observation defects: what is looked at that should not be, or twice. Rewrites only."""

from __future__ import annotations

from functools import partial

from qsim.quant import MergeRule, StateKey
from qsim.sim.case import Case
from qsim.sim.defects.edits import TRAINED, require_rule, unlike
from qsim.sim.defects.model import Defect, Variant, rewritten
from qsim.sim.events import Commit, Drop, Event, Group, Observe, Phase, Quantize, Reduce, Slot, Wait
from qsim.sim.schedule import Feature, ScheduleSpec, slot


def fold_in_foreign(case: Case, phase: Phase) -> Case:
    """A pass that trains nothing observes too, and the next commit of each owner folds that in. Ranks reduce it."""
    require_rule(case, "merge", MergeRule.MAX)  # where the last one wins, the next training observation overwrites it
    looked = {e.op for e in case.schedule if isinstance(e, Observe) and e.phase is phase}
    pending: dict[StateKey, list[Observe]] = {}
    schedule: list[Event] = []
    for event in case.schedule:
        seen: Observe | None = None
        match event:
            case Quantize(at, op, src, by) if at is phase and op not in looked:
                seen = Observe(phase, op, src, by, slot(f"obs.{phase.value}", op))
                schedule += [event, seen]
            case Observe(at) if at is phase:
                seen = event
                schedule.append(event)
            case Commit(cell=cell) if cell in pending:
                found = pending.pop(cell)
                names = tuple(o.into for o in found)
                if case.context.ranks > 1:
                    names = tuple(slot(f"obs.group.{phase.value}", o.op) for o in found)
                    schedule += [Wait(phase, o.op, _group(case, o), n) for o, n in zip(found, names, strict=True)]
                schedule.append(event._replace(obs=(*names, *event.obs)))
            case Drop(at, slots) if at is phase:
                kept = {o.into for group in pending.values() for o in group}
                schedule.append(event._replace(slots=tuple(name for name in slots if name not in kept)))
            case _:
                schedule.append(event)
        if seen is not None:
            pending.setdefault(case.context.scope(seen.op), []).append(seen)
            if case.context.ranks > 1:
                schedule.append(Reduce(phase, seen.op, _group(case, seen), seen.into))
    return unlike(case, rewritten(case, schedule), f"pass of phase {phase.value} with casts of its own")


def _group(case: Case, seen: Observe) -> Group:
    """The round in which the ranks meet for an observation of a pass that trains nothing."""
    owner = case.context.scope(seen.op)._replace(worker_id=-1)
    return Group(f"{owner}/{seen.phase.value}/t{seen.op.logical_step}", case.context.ranks)


def _column(name: Slot) -> Slot:
    return f"column.{name}"


def observed_in_both_layouts(case: Case) -> Case:
    """Every cast is made a second time for the other layout, and that one is observed and committed as well."""
    twice: set[Slot] = set()
    schedule: list[Event] = []
    for event in case.schedule:
        schedule.append(event)
        match event:
            case Quantize(phase, op, src, by, out) if phase in TRAINED:
                seen = slot(f"obs.{phase.value}", op)
                schedule.append(event._replace(out=_column(out)))
                schedule.append(Observe(phase, op, src, by, _column(seen)))
                schedule.append(Drop(phase, (_column(out),)))
                twice.add(seen)
            case Reduce(group=group, obs=obs) if obs in twice:
                schedule.append(event._replace(group=_other_round(group), obs=_column(obs)))
            case Wait(group=group, into=into):
                schedule.append(event._replace(group=_other_round(group), into=_column(into)))
                twice.add(into)
            case Commit(obs=obs):
                schedule.append(event._replace(obs=tuple(_column(name) for name in obs)))
            case _:
                pass
    return unlike(case, rewritten(case, schedule), "cast")


def _other_round(group: Group) -> Group:
    return group._replace(name=f"{group.name}/column")


FOREIGN_OBSERVATION = Defect(
    id="D24",
    name="foreign_observation",
    kind="observation",
    tier="S1 FP8, S3 FP4",
    rewrite=partial(fold_in_foreign, phase=Phase.EVALUATE),
    breaks=frozenset({"I5"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.EVALUATION})),
    needs=frozenset({Feature.EVALUATION.value}),
    fixes=("ignore_foreign", "commit_of_own_unit"),
    wrong_fixes=("skip_zero", "merged_commit"),
    variants=tuple(
        Variant(
            name=feature.value,
            rewrite=partial(fold_in_foreign, phase=phase),
            breaks=frozenset({"I5"}),
            needs=frozenset({feature.value}),
        )
        for feature, phase in (
            (Feature.CALIBRATION, Phase.CALIBRATE),
            (Feature.PADDING, Phase.PADDING),
            (Feature.GRAPH_CAPTURE, Phase.CAPTURE),
        )
    ),
    story="A pass that trains nothing is observed like training, and the next commit folds its amax in. "
    "One large evaluation batch lowers the scale for as many commits as the window is long.",
    anchors=("torchtitan 4148",),
)
DUAL_LAYOUT_DOUBLE_OBSERVE = Defect(
    id="D37",
    name="dual_layout_double_observe",
    kind="timing",
    tier="S2-S3",
    rewrite=observed_in_both_layouts,
    breaks=frozenset({"I3"}),
    fixes=("observe_once",),
    wrong_fixes=("merged_commit", "keyed_snapshot"),
    story="A tensor is cast by rows for one GEMM and by columns for another, and each cast observes and commits. "
    "The amax is the same, so the numbers stay right until the window, half as long, forgets a maximum too early.",
)
