"""State, workers, ranks, checkpoints: every defect breaks exactly its row on every host, or says why it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from qsim.errors import CaseError, UsageError
from qsim.sim import (
    DEFECTS,
    FIXES,
    PRESETS,
    Cadence,
    Case,
    Feature,
    Linear,
    Order,
    ScheduleSpec,
    Scores,
    broken,
    build_case,
    judge,
)
from tests.unit.sim_cases import POLICY, recipe_of

THREE = (Linear(0, True), Scores(1), Linear(2, True))
CATALOGUE = {  # the catalogue's rows, written a second time: the literals in the code must agree
    "D06": ("shared_roles", "scope", {"I4"}),
    "D08": ("torn_read", "concurrency", {"I7"}),
    "D09": ("concurrent_double_commit", "concurrency", {"I3"}),
    "D10": ("lost_update", "concurrency", {"I3"}),
    "D11": ("late_async_reduction", "concurrency", {"I6"}),
    "D12": ("scratch_reuse", "concurrency", {"I4", "I7"}),
    "D22": ("update_never_fires", "liveness", {"I12"}),
    "D23": ("update_in_wrong_place", "liveness", {"I5"}),
    "D24": ("foreign_observation", "observation", {"I5"}),
    "D25": ("last_microbatch_wins", "algebra", {"I5"}),
    "D26": ("non_max_merge", "algebra", {"I11"}),
    "D27": ("commit_cadence", "algebra", {"I3"}),
    "D28": ("zero_roll", "algebra", {"I5"}),
    "D29": ("nonfinite_latch", "algebra", {"I12"}),
    "D30": ("wrong_group_reduction", "reduction", {"I6"}),
    "D31": ("reduction_membership", "liveness", {"I12"}),
    "D32": ("replica_drift", "reduction", {"I6"}),
    "D33": ("restore_skew", "persistence", {"I8", "I9"}),
    "D34": ("dangling_state", "identity", {"I12"}),
    "D35": ("rerun_without_rollback", "persistence", {"I3"}),
    "D36": ("recipe_key_collision", "identity", {"I4"}),
    "D37": ("dual_layout_double_observe", "timing", {"I3"}),
    "D38": ("frozen_by_capture", "liveness", {"I12"}),
}
VARIANTS = {
    ("D22", "frozen_layer"): {"I12"},
    ("D22", "token_taken"): {"I12"},
    ("D24", "calibration"): {"I5"},
    ("D24", "padding"): {"I5"},
    ("D24", "graph_capture"): {"I5"},
    ("D26", "mean"): {"I11"},
    ("D26", "clip"): {"I11"},
    ("D26", "decay"): {"I11"},
    ("D28", "clamp"): {"I5"},
    ("D29", "propagate"): {"I12"},
    ("D29", "invert"): {"I12"},
    ("D33", "descale"): {"I7", "I8"},  # the first begin after the load reads a torn pair
    ("D33", "stash_lost"): {"I2", "I8", "I10"},  # recompute finds no entry, and takes the live state
    ("D33", "state_left_out"): {"I3", "I8"},  # the chain of epochs begins again
    ("D33", "not_loaded"): {"I3", "I8"},
    ("D38", "extra"): {"I3"},
}
FIXED_BY = {
    "D06": {"per_owner_state"},
    "D08": {"atomic_commit", "fail_closed_to_one_worker", "per_worker_state"},
    "D09": {"merged_commit", "commit_of_own_unit", "per_worker_state"},
    "D10": {"compare_and_set", "atomic_commit", "fail_closed_to_one_worker", "per_worker_state"},
    "D11": {"wait_before_commit"},
    "D12": {"own_buffers", "fail_closed_to_one_worker"},
    "D22": {"commit_every_unit", "commit_of_own_unit"},
    "D23": {"commit_of_own_unit"},
    "D24": {"ignore_foreign", "commit_of_own_unit"},
    "D25": {"max_merge"},
    "D26": {"max_merge"},
    "D27": {"merged_commit", "commit_of_own_unit"},
    "D28": {"skip_zero"},
    "D29": {"finite_rule"},
    "D30": {"declared_group"},
    "D31": {"same_collectives"},
    "D32": {"decoded_everywhere"},
    "D33": {"rebuild_on_load"},
    "D34": {"one_storage", "per_owner_state"},
    "D35": {"rollback", "merged_commit", "commit_of_own_unit"},
    "D36": {"per_owner_state"},
    "D37": {"observe_once"},
    "D38": {"commit_every_unit", "commit_of_own_unit"},
}
VARIANT_FIXED_BY = {
    ("D33", "descale"): "rebuild_on_load",
    ("D33", "not_loaded"): "rebuild_on_load",
    ("D33", "state_left_out"): "save_everything",
    ("D38", "extra"): "observe_once",
    ("D26", "clip"): "max_merge",
    ("D28", "clamp"): "skip_zero",
    ("D29", "propagate"): "finite_rule",
    ("D24", "graph_capture"): "ignore_foreign",
    ("D22", "token_taken"): "commit_every_unit",
}
NEW_FIXES = [
    "commit_every_unit",
    "commit_of_own_unit",
    "ignore_foreign",
    "observe_once",
    "max_merge",
    "finite_rule",
    "skip_zero",
    "one_storage",
    "rebuild_on_load",
    "save_everything",
    "rollback",
    "atomic_commit",
    "fail_closed_to_one_worker",
    "own_buffers",
    "wait_before_commit",
    "declared_group",
    "same_collectives",
    "decoded_everywhere",
]
SHAPES = [*((name, "") for name in CATALOGUE), *VARIANTS]
SINGLES = [(order, fs) for fs in [(), *((f,) for f in Feature)] for order in Order]  # orders of a feature side by side
PAIRS = [(order, fs) for order in Order for fs in itertools.combinations(Feature, 2)]


def verdict(case: Case) -> set[str]:
    return set(broken(judge(case)))


def wanted(defect_id: str, variant: str) -> set[str]:
    return VARIANTS[defect_id, variant] if variant else CATALOGUE[defect_id][2]


def spec_of(order: Order, features: tuple[Feature, ...]) -> ScheduleSpec | None:
    """A family: small, but with two microbatches a worker, and layers enough for its pipeline. None: impossible."""
    ranks = any("parallel" in feature for feature in features)
    try:
        return ScheduleSpec(
            steps=3, microbatches=4 if ranks or order is Order.INTERLEAVED else 2,
            layers=4 if order is Order.INTERLEAVED else 2, workers=2 if ranks else 1,
            order=order, features=frozenset(features),
        )  # fmt: skip
    except UsageError:
        return None


def host_of(defect_id: str, variant: str, spec: ScheduleSpec, preset: str = "seed_correct") -> Case:
    """The unrewritten host; CaseError or UsageError where there is none."""
    defect = DEFECTS[defect_id]
    grown = defect.host(spec, variant)
    body = THREE if "two sites" in defect.needs else THREE[:2]
    cadence = defect.cadence if preset == "seed_correct" else None
    return build_case(
        grown, body=body, preset=PRESETS[preset], recipe=recipe_of("delayed"), cadence=cadence, policy=POLICY
    )


def hosts(defect_id: str, variant: str) -> Iterator[ScheduleSpec]:
    """Every single feature in one of the five orders, and every 61st pair; which ones depends on the defect."""
    start = SHAPES.index((defect_id, variant))
    rare = 9 if variant else 1
    singles = [(o, f) for at, (o, f) in enumerate(SINGLES) if (at + at // 5 + start) % (5 * rare) == 0]
    for order, features in [*singles, *PAIRS[start::61]]:
        spec = spec_of(order, features)
        if spec is not None:
            yield spec


@pytest.mark.parametrize("defect_id", CATALOGUE)
def test_a_literal_says_what_the_row_of_the_catalogue_says(defect_id: str) -> None:
    defect = DEFECTS[defect_id]
    assert CATALOGUE[defect_id] == (defect.name, defect.kind, set(defect.breaks))
    assert {v for d, v in VARIANTS if d == defect_id} == {v.name for v in defect.variants}
    assert all(VARIANTS[defect_id, v.name] == v.breaks for v in defect.variants)
    assert FIXED_BY[defect_id] == set(defect.fixes)
    assert 2 == defect.story.count(". ") + defect.story.endswith(".")
    assert defect.wrong_fixes


@pytest.mark.parametrize(("defect_id", "variant"), SHAPES)
def test_a_defect_breaks_its_row_on_its_minimal_schedule(defect_id: str, variant: str) -> None:
    preset = "te_fused" if variant == "stash_lost" else "seed_correct"
    spec = DEFECTS[defect_id].minimal
    if variant == "stash_lost":  # one microbatch: with more the queue of this preset mispairs by itself
        spec = replace(spec, microbatches=1)
    case = host_of(defect_id, variant, replace(spec, features=frozenset()) if variant else spec, preset)
    assert set() == verdict(case)
    assert wanted(defect_id, variant) == verdict(DEFECTS[defect_id].apply(case, variant))


@pytest.mark.parametrize(("defect_id", "variant"), SHAPES)
def test_a_defect_breaks_its_row_on_every_host_or_says_what_is_in_its_way(defect_id: str, variant: str) -> None:
    hosted, refused = 0, []
    for spec in hosts(defect_id, variant):
        try:
            case = DEFECTS[defect_id].apply(host_of(defect_id, variant, spec), variant)
        except (CaseError, UsageError) as error:
            refused.append(str(error))
            continue
        hosted += 1
        assert wanted(defect_id, variant) == verdict(case), spec
    reasons = ("needs feature", "excludes", "needs schedule", "no queue", "needs recompute")
    assert [] == [why for why in refused if not any(reason in why for reason in reasons)]
    assert (variant == "stash_lost") == (hosted == 0)  # seed_correct has no queue to lose


@pytest.mark.parametrize("preset", ["te_fused", "te_unfused", "torchao_delayed", "flax", "te_jax", "msamp"])
def test_on_the_plain_schedules_of_a_real_system_a_defect_adds_its_row_or_says_why_not(preset: str) -> None:
    hosted = set()
    for number, (defect_id, variant) in enumerate(SHAPES):
        order = tuple(Order)[number % 5]
        spec = ScheduleSpec(steps=3, microbatches=4, layers=4 if order is Order.INTERLEAVED else 2, order=order)
        case = host_of(defect_id, variant, spec, preset)
        by_itself = PRESETS[preset].breaks_on(case.context.traits)
        try:
            made = DEFECTS[defect_id].apply(case, variant)
        except CaseError:
            continue
        hosted.add(defect_id)
        assert wanted(defect_id, variant) | by_itself == verdict(made), (defect_id, variant, order)
    assert {"D06", "D11", "D30", "D31", "D32", "D33", "D35", "D36", "D37"} <= hosted  # the others may be refused


@pytest.mark.parametrize("defect_id", CATALOGUE)
def test_only_its_fixes_silence_a_defect_and_its_wrong_fixes_do_not(defect_id: str) -> None:
    defect = DEFECTS[defect_id]
    assert not set(defect.wrong_fixes) & FIXED_BY[defect_id]
    assert set(defect.wrong_fixes) | FIXED_BY[defect_id] <= FIXES.keys()
    large = ScheduleSpec(steps=3, layers=3, microbatches=4, workers=defect.minimal.workers)
    for spec in (defect.minimal, large):
        case = defect.apply(host_of(defect_id, "", spec))
        silent = {name for name, fix in FIXES.items() if not verdict(fix.rewrite(case))}
        assert FIXED_BY[defect_id] == silent, spec


@pytest.mark.parametrize(("defect_id", "variant"), VARIANT_FIXED_BY)
def test_a_variant_has_a_fix_too(defect_id: str, variant: str) -> None:
    spec = replace(DEFECTS[defect_id].minimal, features=frozenset())
    case = DEFECTS[defect_id].apply(host_of(defect_id, variant, spec), variant)
    assert set() == verdict(FIXES[VARIANT_FIXED_BY[defect_id, variant]].rewrite(case))


def test_lost_queues_come_back_with_the_whole_checkpoint() -> None:
    case = host_of("D33", "stash_lost", ScheduleSpec(steps=2, layers=2), "te_fused")
    lost = DEFECTS["D33"].apply(case, "stash_lost")
    assert {"I2", "I8", "I10"} == verdict(lost)
    assert set() == verdict(FIXES["rebuild_on_load"].rewrite(lost))
    with pytest.raises(CaseError, match="no queue holds an entry at a checkpoint"):
        DEFECTS["D33"].apply(host_of("D33", "stash_lost", ScheduleSpec(steps=2)), "stash_lost")


@pytest.mark.parametrize("fix", NEW_FIXES)
def test_a_fix_leaves_correct_cases_correct(fix: str) -> None:
    for order, features in SINGLES[NEW_FIXES.index(fix) :: 7]:
        spec = spec_of(order, features)
        if spec is None:
            continue
        for cadence in (Cadence.MICROBATCH, Cadence.STEP):
            case = build_case(
                spec, body=THREE[:2], preset=PRESETS["seed_correct"], recipe=recipe_of("delayed"), cadence=cadence
            )
            assert set() == verdict(FIXES[fix].rewrite(case)), spec


def test_ranks_agree_commit_by_commit_and_not_only_unit_by_unit() -> None:
    # two commits a unit on each rank, each folding in what the group saw: that is I3's matter, the scales agree
    spec = DEFECTS["D11"].minimal
    case = host_of("D27", "", replace(spec, microbatches=4))
    assert 2 == case.context.ranks
    assert {"I3"} == verdict(DEFECTS["D27"].apply(case))


def test_a_host_gets_ranks_and_microbatches_and_the_features_of_a_variant() -> None:
    assert ScheduleSpec(
        steps=1, layers=1, microbatches=2, workers=2, features=frozenset({Feature.DATA_PARALLEL})
    ) == DEFECTS["D30"].host(ScheduleSpec(steps=1, layers=1))
    shared = ScheduleSpec(steps=1, layers=1, workers=2, features=frozenset({Feature.TENSOR_PARALLEL}))
    assert replace(shared, microbatches=2) == DEFECTS["D30"].host(shared)
    assert 4 == DEFECTS["D25"].host(ScheduleSpec(microbatches=2, workers=2)).microbatches
    assert {"padding"} == DEFECTS["D24"].host(ScheduleSpec(), "padding").features
    assert {"evaluation"} == DEFECTS["D24"].host(ScheduleSpec()).features
    assert {"save_restore"} == DEFECTS["D33"].host(ScheduleSpec(), "descale").features


def test_a_host_that_a_defect_excludes_is_refused_by_host_and_by_apply() -> None:
    rerun = ScheduleSpec(workers=2, microbatches=2, features=frozenset({Feature.RERUN, Feature.DATA_PARALLEL}))
    with pytest.raises(CaseError, match="D31 reduction_membership excludes rerun"):
        DEFECTS["D31"].host(rerun)
    case = build_case(rerun, body=THREE[:2], preset=PRESETS["seed_correct"], recipe=recipe_of("delayed"))
    with pytest.raises(CaseError, match="D31 reduction_membership excludes rerun"):
        DEFECTS["D31"].apply(case)


def test_a_preset_with_the_rule_already_is_refused_by_the_defect_that_brings_it() -> None:
    for defect_id, preset, rule in (("D25", "torchao_delayed", "merge rule LAST"), ("D28", "flax", "zero rule ROLL")):
        case = host_of(defect_id, "", ScheduleSpec(steps=2, microbatches=2), preset)
        with pytest.raises(CaseError, match=rule):
            DEFECTS[defect_id].apply(case)
    mispaired = host_of("D22", "", ScheduleSpec(microbatches=2), "te_fused")
    with pytest.raises(CaseError, match="breaks I2, I10 by itself"):
        DEFECTS["D22"].apply(mispaired)


def test_a_wrong_fix_leaves_what_its_blind_spot_is() -> None:
    left = {  # an epoch that is checked says nothing of a pair; a merge of two layouts folds one tensor in twice
        ("D08", "compare_and_set"): {"I7"},
        ("D12", "descale_in_the_data"): {"I4"},
        ("D33", "save_everything"): {"I8", "I9"},
        ("D37", "merged_commit"): {"I5"},
    }
    for (defect_id, fix), expected in left.items():
        case = DEFECTS[defect_id].apply(host_of(defect_id, "", DEFECTS[defect_id].minimal))
        assert expected == verdict(FIXES[fix].rewrite(case))
