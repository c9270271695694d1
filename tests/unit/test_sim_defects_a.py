"""Defects of timing and identity: exact verdicts on every family of schedules, and only their fixes silence them."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest

from qsim.errors import CaseError, UsageError
from qsim.quant import TensorRole
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
from qsim.sim.control import Control, apply
from qsim.sim.events import Allocate, Begin, Commit, Load, Observe, Quantize, Reduce, Restore, Stash, Take, Wait
from tests.unit.defect_cases_a import CATALOGUE, FIXED_BY, OLDER, SHAPES, host_of
from tests.unit.sim_cases import WITH_GRADIENTS, case_of, recipe_of

THREE = (Linear(0, True), Scores(1), Linear(2, True))


def verdict(case: Case) -> set[str]:
    return set(broken(judge(case)))


# ---- verdicts ------------------------------------------------------------------------------------------------


def family(order: Order, features: tuple[Feature, ...]) -> ScheduleSpec | None:
    """A small schedule that has room for what the features do; None for an impossible one."""
    workers = 2 if {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL} & set(features) else 1
    layers = 4 if order is Order.INTERLEAVED else 2
    steps = 3 if {Feature.SAVE_RESTORE, Feature.WEIGHT_CACHE} & set(features) else 2
    sizes = {"steps": steps, "microbatches": 2 * workers, "layers": layers, "workers": workers, "order": order}
    try:
        return ScheduleSpec(**sizes, features=frozenset(features))
    except UsageError:
        return None


PLAIN_AND_SINGLE = [
    f for o in Order for k in (0, 1) for fs in itertools.combinations(Feature, k) if (f := family(o, fs))
]
PAIRS = [f for o in Order for fs in itertools.combinations(Feature, 2) if (f := family(o, fs))]


@cache
def hosted(spec: ScheduleSpec, preset: str, cadence: Cadence | None) -> Case:
    return build_case(spec, body=THREE, preset=PRESETS[preset], recipe=recipe_of("centred"), cadence=cadence)


def outcomes(shape: tuple[str, str], specs: list[ScheduleSpec], preset: str = "seed_correct") -> tuple[int, int]:
    """How many of these families host a defect and break exactly its row, and how many refuse it with a reason."""
    defect = DEFECTS[shape[0]].shaped(shape[1])
    hosts = refused = 0
    for spec in specs:
        case = hosted(spec, preset, defect.cadence if preset == "seed_correct" else None)
        reason = [*(defect.needs - case.context.traits), *(defect.excludes & case.context.traits)]
        orders = {order.value for order in defect.orders}
        reason += orders if orders and not orders & case.context.traits else []
        reason += ["once a"] if defect.cadence not in (None, case.context.unit) else []
        if reason:
            with pytest.raises(CaseError, match="|".join(reason)):
                DEFECTS[shape[0]].apply(case, shape[1])
            refused += 1
            continue
        bad = DEFECTS[shape[0]].apply(case, shape[1])
        due = {**CATALOGUE, **OLDER}[shape] | PRESETS[preset].breaks_on(case.context.traits)
        assert due == verdict(bad), (shape, spec)
        hosts += 1
    return hosts, refused


HOSTS = {  # of the 95 families with at most one feature: how many host it, counted by hand from needs and orders
    "D01": 95, "D02": 90, "D03": 90, "D04": 95, "D07": 95,
    "D05": 4 * 17,  # four orders; without recompute and with "selective" it is refused
    "D13": 4 * 19,
    "D14": 5, "D15": 5, "D16": 5, "D19": 5, "D20": 5,
    "D17": 17, "D17 entered_twice": 4, "D17 newest_under_1f1b": 3 * 17,
    "D18": 90, "D18 after_commit": 90, "D21": 90, "D21 precision": 90, "D39": 90,
    "D40": 90, "D40 grad_mode": 90, "D40 call_stack": 90, "D41": 90,
}  # fmt: skip


@pytest.mark.parametrize("shape", [*OLDER, *SHAPES], ids=" ".join)
def test_a_defect_breaks_exactly_its_row_on_every_order_and_feature_or_says_why_not(shape: tuple[str, str]) -> None:
    assert 95 == len(PLAIN_AND_SINGLE)
    due = HOSTS[" ".join(shape).strip()]
    assert (due, 95 - due) == outcomes(shape, PLAIN_AND_SINGLE)


@pytest.mark.parametrize("shape", [*OLDER, *SHAPES], ids=" ".join)
def test_a_defect_breaks_exactly_its_row_on_pairs_of_features_or_says_why_not(shape: tuple[str, str]) -> None:
    first = [*OLDER, *SHAPES].index(shape)
    needed = {feature.value for feature in Feature} & DEFECTS[shape[0]].shaped(shape[1]).needs
    able = [spec for spec in PAIRS if needed <= spec.traits()]
    hosts, _ = outcomes(shape, able[first % 7 :: max(1, len(able) // 8)])
    assert hosts > 0


@pytest.mark.parametrize("preset", ["te_fused", "te_unfused", "torchao_delayed", "flax", "te_jax", "msamp"])
def test_a_defect_adds_exactly_its_row_to_what_a_preset_breaks_or_says_why_not(preset: str) -> None:
    some = [
        family(order, features)
        for order in (Order.FORWARD_FIRST, Order.ALTERNATE)
        for features in ((), (Feature.WEIGHT_CACHE,))
    ]
    found = {" ".join(shape).strip(): outcomes(shape, [s for s in some if s], preset)[0] for shape in [*OLDER, *SHAPES]}
    once_a_step = preset in ("torchao_delayed", "flax")
    assert (0 if once_a_step else 4) == found["D01"]
    assert (4 if preset in ("te_jax", "msamp") else 0) == found["D02"] == found["D39"]
    assert (2, 2) == (found["D15"], found["D16"])
    assert (0 if once_a_step else 4) == found["D18 after_commit"]
    assert (4 if preset == "flax" else 0) == found["D18"]
    assert {4} == {found[name] for name in ("D21", "D40", "D41")}


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
@pytest.mark.parametrize("recipe", ["delayed", "current", "centred"])
def test_a_defect_breaks_its_row_on_its_minimal_schedule(shape: tuple[str, str], recipe: str) -> None:
    case = host_of(shape, recipe=recipe)
    assert set() == verdict(case)
    assert CATALOGUE[shape] == DEFECTS[shape[0]].shaped(shape[1]).breaks
    assert CATALOGUE[shape] == verdict(DEFECTS[shape[0]].apply(case, shape[1]))


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_a_smaller_schedule_cannot_host_it(shape: tuple[str, str]) -> None:
    defect, minimal = DEFECTS[shape[0]], DEFECTS[shape[0]].shaped(shape[1]).minimal
    smaller = [{name: getattr(minimal, name) - 1} for name in ("steps", "layers", "microbatches")]
    smaller += [{"features": minimal.features - {feature}} for feature in minimal.features]
    for less in smaller:
        try:
            case = host_of(shape, **less)
        except UsageError:
            continue
        with pytest.raises(CaseError):
            defect.apply(case, shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_only_its_fixes_silence_a_defect(shape: tuple[str, str]) -> None:
    defect = DEFECTS[shape[0]]
    if not shape[1]:
        assert FIXED_BY[shape] == set(defect.fixes)
        assert defect.wrong_fixes
        assert not set(defect.wrong_fixes) & FIXED_BY[shape]
    for grown in ({}, {"steps": 3, "layers": 3, "microbatches": 4}):
        bad = defect.apply(host_of(shape, **grown), shape[1])
        silent = {name for name, fix in FIXES.items() if not verdict(fix.rewrite(bad))}
        assert FIXED_BY[shape] == silent, grown


@pytest.mark.parametrize(
    "feature", [Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL, Feature.SAVE_RESTORE, Feature.RERUN]
)
@pytest.mark.parametrize("cadence", [Cadence.MICROBATCH, Cadence.STEP])
def test_a_stale_cache_is_refilled_on_ranks_and_across_restarts(feature: Feature, cadence: Cadence) -> None:
    workers = 2 if "parallel" in feature else 1
    spec = ScheduleSpec(
        steps=4, layers=2, microbatches=4, workers=workers, features=frozenset({feature, Feature.WEIGHT_CACHE})
    )
    case = case_of(recipe_of("delayed"), spec=spec, cadence=cadence, body=WITH_GRADIENTS)
    bad = DEFECTS["D15"].apply(case)
    assert {"I9"} == verdict(bad)
    mended = FIXES["refill_cache"].rewrite(bad)
    assert set() == verdict(mended)
    for kind in (Load, Begin, Quantize, Observe, Commit, Reduce, Wait):
        due = Counter(e[1:2] for e in case.schedule if isinstance(e, kind))  # by operation
        assert due == Counter(e[1:2] for e in mended.schedule if isinstance(e, kind)), kind.__name__


RIGHT = [name for name in FIXES if name not in ("single_snapshot", "per_worker_state")]


@pytest.mark.parametrize("preset", ["seed_correct", "te_fused"])
@pytest.mark.parametrize("features", [(), (Feature.WEIGHT_CACHE,), (Feature.EARLY_STOP,), (Feature.RERUN,)], ids=str)
def test_a_right_fix_leaves_correct_cases_correct(preset: str, features: tuple[Feature, ...]) -> None:
    for order in (Order.FORWARD_FIRST, Order.ALTERNATE, Order.ONE_F_ONE_B):
        spec = ScheduleSpec(steps=2, layers=2, microbatches=2, order=order, features=frozenset(features))
        case = case_of(recipe_of("delayed"), spec=spec, preset=preset, body=WITH_GRADIENTS)
        faults = set(PRESETS[preset].breaks_on(case.context.traits))
        assert order is Order.FORWARD_FIRST or not faults
        assert [] == [name for name in RIGHT if not verdict(FIXES[name].rewrite(case)) <= faults]


def test_a_queue_in_the_order_of_backward_mends_a_preset_that_has_the_wrong_one() -> None:
    spec = ScheduleSpec(steps=2, layers=2, microbatches=2)
    flush = case_of(recipe_of("delayed"), spec=spec, preset="te_fused")
    assert {"I2", "I10"} == verdict(flush)
    assert set() == verdict(FIXES["lifo_under_flush"].rewrite(flush))
    mended = FIXES["lifo_under_flush"].rewrite(flush)
    assert mended == FIXES["fifo_under_1f1b"].rewrite(mended)  # no pipeline, so it changes nothing


def test_a_variant_has_a_host_of_its_own() -> None:
    small = ScheduleSpec(steps=1, layers=1)
    assert ScheduleSpec(steps=1, layers=1, microbatches=2) == DEFECTS["D17"].host(small)
    twice = DEFECTS["D17"].shaped("entered_twice")
    assert ScheduleSpec(steps=1, layers=1, order=Order.ALTERNATE, features=frozenset({Feature.TWICE})) == twice.host(
        small
    )
    with pytest.raises(CaseError, match='no variant "entered_thrice"; known: entered_twice, newest_under_1f1b'):
        DEFECTS["D17"].shaped("entered_thrice")


def test_a_variant_excludes_what_its_defect_does_not() -> None:
    shared = ScheduleSpec(
        steps=1, layers=1, microbatches=2, workers=2, order=Order.ALTERNATE, features=frozenset({Feature.TWICE})
    )
    case = case_of(recipe_of("delayed"), spec=shared, cadence=Cadence.MICROBATCH)
    with pytest.raises(CaseError, match="D17 stash_mispairing excludes shared states"):
        DEFECTS["D17"].apply(case, "entered_twice")
    assert "shared states" not in DEFECTS["D17"].excludes


def test_a_host_with_an_excluded_feature_is_refused_by_name() -> None:
    nested = ScheduleSpec(steps=1, layers=1, microbatches=2, features=frozenset({Feature.NESTED}))
    for refused in (
        lambda: DEFECTS["D17"].host(nested),
        lambda: DEFECTS["D17"].apply(case_of(recipe_of("delayed"), spec=nested)),
    ):
        with pytest.raises(CaseError, match="D17 stash_mispairing excludes nested"):
            refused()
    with pytest.raises(CaseError, match="D39 deferred_read excludes queue"):
        DEFECTS["D39"].apply(case_of(recipe_of("delayed"), preset="te_fused"))
    plain = ScheduleSpec(steps=1, layers=1, microbatches=2, features=frozenset({Feature.NO_CHECKPOINT}))
    case = case_of(recipe_of("delayed"), spec=plain)  # no gradients, so no backward reads
    with pytest.raises(CaseError, match="D13 live_read_in_backward finds nothing to change"):
        DEFECTS["D13"].apply(case)


def test_a_story_has_two_sentences_and_a_report_behind_it() -> None:
    for defect_id in {defect_id for defect_id, _ in SHAPES}:
        story = DEFECTS[defect_id].story
        assert 2 == story.count(". ") + story.endswith("."), defect_id
        assert DEFECTS[defect_id].anchors


@pytest.mark.parametrize("shape", [("D02", ""), ("D17", ""), ("D39", "")], ids=" ".join)
def test_metadata_that_recompute_has_to_itself_is_freed_with_that_of_forward(shape: tuple[str, str]) -> None:
    control = Control()
    for event in DEFECTS[shape[0]].apply(host_of(shape)).schedule:
        apply(control, event)
    assert [] == [name for name in control.slots if name.startswith("snap")]


# ---- events: the rewrite is the mistake that its story tells ---------------------------------------------------


def test_a_queue_takes_in_forward_order_what_backward_asks_for_in_reverse() -> None:
    case = DEFECTS["D17"].apply(host_of(("D17", "")))
    puts = [e.op.microbatch for e in case.schedule if isinstance(e, Stash) and (e.op.site, e.op.role_id) == (0, 0)]
    asks = [e.op.microbatch for e in case.schedule if isinstance(e, Restore) and (e.op.site, e.op.role_id) == (0, 0)]
    assert ([0, 1], [1, 0]) == (puts, asks)
    assert {Take.FIFO} == {e.take for e in case.schedule if isinstance(e, Restore)}


def test_early_stop_leaves_the_entries_of_the_gemm_that_it_does_not_reach() -> None:
    case = DEFECTS["D19"].apply(host_of(("D19", "")))
    put = [e.op.site for e in case.schedule if isinstance(e, Stash)]
    taken = [e.op.site for e in case.schedule if isinstance(e, Restore)]
    assert ([0, 0, 1, 1], [0, 0]) == (put, taken)


def test_a_stale_cache_is_cast_once_in_each_process() -> None:
    def casts(**grown) -> list[int]:
        case = DEFECTS["D15"].apply(host_of(("D15", ""), **grown))
        return [
            e.op.logical_step for e in case.schedule if isinstance(e, Quantize) and e.op.role_id == TensorRole.WEIGHT
        ]

    assert [0] == casts(steps=4)
    assert [0, 1] == casts(steps=4, features=frozenset({Feature.WEIGHT_CACHE, Feature.SAVE_RESTORE}))


def test_an_unfilled_cache_is_reserved_and_the_cast_that_is_lost_is_freed() -> None:
    case = DEFECTS["D16"].apply(host_of(("D16", ""), microbatches=3))
    lost = [e for e in case.schedule if isinstance(e, Quantize) and e.out.startswith("lost")]
    assert [TensorRole.WEIGHT] == [TensorRole(e.op.role_id) for e in lost]
    assert [("cache/m0/w0/L0/s0/r1",)] == [e.slots for e in case.schedule if isinstance(e, Allocate)]
    assert {0} == {e.op.microbatch for e in case.schedule if isinstance(e, Quantize) and not e.mode.grad}


def test_a_commit_that_hangs_on_recompute_fires_as_often_as_that_runs() -> None:
    case = DEFECTS["D20"].apply(host_of(("D20", "")))
    commits = [(e.phase.value, e.op.site, e.op.role_id) for e in case.schedule if isinstance(e, Commit)]
    forward = [(0, 0), (0, 1), (1, 3), (1, 4)]
    nested = [("r", *at) for at in forward]
    assert sorted([*nested, *nested, ("b", 0, 2)]) == sorted(commits)


def test_a_deferred_read_begins_in_recompute_and_observes_nothing_there() -> None:
    case = DEFECTS["D39"].apply(host_of(("D39", ""), recipe="delayed"))
    kinds = [type(e).__name__ for e in case.schedule if e.phase.value == "r"]
    assert {"Load", "Begin", "Quantize", "Consume", "Drop"} == set(kinds)
    assert 4 == sum(isinstance(e, Begin) for e in case.schedule if e.phase.value == "r")
