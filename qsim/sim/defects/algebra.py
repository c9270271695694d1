"""Algebra defects: how observations become the next state, and how often. Rewrites only."""

from __future__ import annotations

from functools import partial

from qsim.quant import MergeRule, NonFiniteRule, ZeroRule
from qsim.sim.case import Case
from qsim.sim.defects.edits import require_rule, unlike, with_fold, writers_of
from qsim.sim.defects.model import Defect, Variant, rewritten
from qsim.sim.events import Commit, Event, Slot
from qsim.sim.presets import Cadence
from qsim.sim.schedule import Feature, ScheduleSpec

BOUND = 1.0
"""What a clipping of gradients leaves of an amax."""

DECAY = 0.5
"""What a decaying maximum keeps of the newest entry of the window."""


def merged_by(case: Case, rule: MergeRule, amount: float | None = None) -> Case:
    """Commits merge by another rule than max."""
    require_rule(case, "merge", MergeRule.MAX)
    return with_fold(case, merge=rule, amount=amount)


def zeros_by(case: Case, rule: ZeroRule) -> Case:
    """Commits let an amax of 0 in."""
    require_rule(case, "zero", ZeroRule.SKIP)
    return with_fold(case, zero=rule)


def nonfinite_by(case: Case, rule: NonFiniteRule) -> Case:
    """Commits let Inf and NaN in."""
    require_rule(case, "nonfinite", NonFiniteRule.FINITE)
    return with_fold(case, nonfinite=rule)


def commit_per_microbatch(case: Case) -> Case:
    """Each microbatch commits what it saw as soon as it has seen it, where one commit a step was due."""
    require_rule(case, "merge", MergeRule.MAX)
    gone: set[int] = set()
    early: dict[int, list[Event]] = {}
    for at, event, written in writers_of(case):
        if not isinstance(event, Commit):
            continue
        batches: dict[int, list[Slot]] = {}
        for name in event.obs:
            batches.setdefault(written[name][1].op.microbatch, []).append(name)
        if len(batches) < 2:
            continue
        gone.add(at)
        for names in batches.values():
            where, last = written[names[-1]]
            early.setdefault(where, []).append(event._replace(phase=last.phase, op=last.op, obs=tuple(names)))
    schedule: list[Event] = []
    for at, event in enumerate(case.schedule):
        schedule += [] if at in gone else [event]
        schedule += early.get(at, [])
    return unlike(case, rewritten(case, schedule), "commit of several microbatches")


LAST_MICROBATCH_WINS = Defect(
    id="D25",
    name="last_microbatch_wins",
    kind="algebra",
    tier="S3",
    rewrite=partial(merged_by, rule=MergeRule.LAST),
    breaks=frozenset({"I5"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2),
    needs=frozenset({"accumulation"}),
    cadence=Cadence.STEP,
    fixes=("max_merge",),
    wrong_fixes=("merged_commit", "keyed_snapshot"),
    story="Each microbatch overwrites the amax of the one before it, so the last one speaks for the step. "
    "Where an earlier one was larger, the next step saturates.",
    anchors=("marin 7659",),
)
NON_MAX_MERGE = Defect(
    id="D26",
    name="non_max_merge",
    kind="algebra",
    tier="S3-S4",
    rewrite=partial(merged_by, rule=MergeRule.SUM),
    breaks=frozenset({"I11"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2),
    needs=frozenset({"accumulation"}),
    cadence=Cadence.STEP,
    fixes=("max_merge",),
    wrong_fixes=("merged_commit", "finite_rule"),
    variants=(
        Variant(name="mean", rewrite=partial(merged_by, rule=MergeRule.MEAN), breaks=frozenset({"I11"})),
        Variant(name="clip", rewrite=partial(merged_by, rule=MergeRule.CLIP, amount=BOUND), breaks=frozenset({"I11"})),
        Variant(
            name="decay", rewrite=partial(merged_by, rule=MergeRule.DECAY, amount=DECAY), breaks=frozenset({"I11"})
        ),
    ),
    story="The state is treated as a gradient: amaxes of microbatches are summed, averaged, clipped or decayed. "
    "A sum over n microbatches wastes up to log2(n) bits of range; a mean or a clip saturates.",
    anchors=("flax 3623", "praxis 40", "keras 19534", "MaxText 672"),
)
COMMIT_CADENCE = Defect(
    id="D27",
    name="commit_cadence",
    kind="algebra",
    tier="S2",
    rewrite=commit_per_microbatch,
    breaks=frozenset({"I3"}),
    minimal=ScheduleSpec(steps=1, layers=1, microbatches=2),
    needs=frozenset({"accumulation"}),
    cadence=Cadence.STEP,
    fixes=("merged_commit", "commit_of_own_unit"),
    wrong_fixes=("commit_every_unit", "keyed_snapshot"),
    story="One commit a step is declared, and every microbatch commits. "
    "With n microbatches a window of H entries looks back on H/n steps.",
)
ZERO_ROLL = Defect(
    id="D28",
    name="zero_roll",
    kind="algebra",
    tier="S2, S4",
    rewrite=partial(zeros_by, rule=ZeroRule.ROLL),
    breaks=frozenset({"I5"}),
    minimal=ScheduleSpec(steps=2, layers=1, features=frozenset({Feature.IDLE_EXPERT})),
    needs=frozenset({Feature.IDLE_EXPERT.value}),
    fixes=("skip_zero",),
    wrong_fixes=("finite_rule", "max_merge"),
    variants=(Variant(name="clamp", rewrite=partial(zeros_by, rule=ZeroRule.CLAMP), breaks=frozenset({"I5"})),),
    story="A layer that received no tokens observes an amax of 0, and the 0 enters the window. "
    "The window remembers less; where an eps stands for the 0, the scale explodes when nothing else is left in it.",
    anchors=("TransformerEngine 825, 648",),
)
NONFINITE_LATCH = Defect(
    id="D29",
    name="nonfinite_latch",
    kind="algebra",
    tier="S2-S3",
    rewrite=partial(nonfinite_by, rule=NonFiniteRule.LATCH),
    breaks=frozenset({"I12"}),
    minimal=ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.OVERFLOW})),
    needs=frozenset({Feature.OVERFLOW.value}),
    fixes=("finite_rule",),
    wrong_fixes=("skip_zero", "max_merge"),
    variants=(
        Variant(
            name="propagate", rewrite=partial(nonfinite_by, rule=NonFiniteRule.PROPAGATE), breaks=frozenset({"I12"})
        ),
        Variant(name="invert", rewrite=partial(nonfinite_by, rule=NonFiniteRule.INVERT), breaks=frozenset({"I12"})),
    ),
    story="One Inf enters the window and speaks for it until it leaves: H commits in which no tensor moves the scale. "
    "Where the rule computes with it instead, the scale becomes 0, NaN or its own reciprocal.",
)
