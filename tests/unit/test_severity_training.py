"""The price of a defect over training, by hand: small logs whose every figure can be worked out on paper."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest

from qsim.errors import UsageError
from qsim.severity.seeds import duel, measured, order_statistic, resampled_mean, share, spread
from qsim.severity.training import measure_training
from qsim.severity.training_record import NEVER, OwnerCommits, ReplayStep, TrainSeverity
from qsim.sweep.identity import _decoded, encode_record
from qsim.training.log import TrainLog
from tests.unit.training_logs import log, point, run, step_log

INF, NAN = math.inf, math.nan


def same(expected: tuple[float, ...], actual: tuple[float, ...]) -> bool:
    """Equal, where NaN equals NaN."""
    return len(expected) == len(actual) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(expected, actual, strict=True)
    )


def measure(norms: list[list[float]], twin: list[list[float]]) -> TrainSeverity:
    return measure_training(run(norms), run(twin))


# ---- figures over seeds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1.0), (50, 2.0), (51, 3.0), (75, 3.0), (76, INF), (90, INF), (100, INF)]
)
def test_an_order_statistic_is_one_of_the_values(percent: int, expected: float) -> None:
    assert expected == order_statistic([3.0, INF, 1.0, 2.0], percent=percent)


def test_the_rank_is_not_moved_by_rounding() -> None:
    """0.07 * 100 is above 7 in float64, and would give the eighth value."""
    assert 7.0 == order_statistic([float(n) for n in range(1, 101)], percent=7)
    assert math.isnan(order_statistic([], percent=50))


def test_what_was_not_measured_is_left_out_and_counted() -> None:
    got = spread([4.0, NAN, 1.0, INF, 2.0, NAN])
    assert (2.0, 1.0, INF, 0.875, INF, 1.0, INF, 4) == got
    assert [4.0, INF] == measured([4.0, NAN, INF])
    assert 18.0 == spread([float(n) for n in range(1, 21)]).p90
    assert 0 == spread([NAN]).measured
    assert math.isnan(spread([NAN]).median)


def test_a_spread_keeps_inf_and_never_makes_nan() -> None:
    got = spread([1.0, INF, INF, INF, 2.0])
    assert (INF, 1.0, INF, INF) == (got.median, got.low, got.high, got.p90)


def test_a_share_of_seeds_has_exact_bounds() -> None:
    got = share([False] * 5)
    assert (0, 5, 0.0) == got[:3]
    assert math.isclose(1 - 0.025 ** (1 / 5), got.high, rel_tol=1e-12)  # 52%
    assert (3, 5) == share([True, False, True, True, False])[:2]


def test_a_tie_is_not_worse_and_what_is_unmeasured_does_not_count() -> None:
    got = duel([0.5, 0.0, -0.25, INF, NAN, -INF])
    assert (2, 1, 5) == got[:3]
    assert (share([True, True, False, False, False])[2:]) == got[3:]


def brute_force(counts: list[int], percent: Fraction) -> Fraction:
    """The smallest mean of n draws with at least ``percent`` of all n^n resamples at or below it."""
    n = len(counts)
    ways = Counter(sum(drawn) for drawn in itertools.product(counts, repeat=n))
    reached = Fraction(0)
    for total in sorted(ways):
        reached += Fraction(ways[total], n**n)
        if reached >= percent:
            return Fraction(total, n)
    raise AssertionError


@pytest.mark.parametrize("counts", [[0, 1], [3], [18, 19, 19, 20, 20], [0, 0, 0, 0, 7], [4, 4, 2, 2, 4], [0, 0, 0]])
@pytest.mark.parametrize("level", [0.95, 0.5])
def test_the_bootstrap_in_closed_form_is_that_of_all_resamples(counts: list[int], level: float) -> None:
    tail = (1 - Fraction(str(level))) / 2
    got = resampled_mean(counts, level=level)
    assert (float(brute_force(counts, tail)), float(brute_force(counts, 1 - tail))) == got


# ---- skipped and non-finite steps -------------------------------------------------------------------------


def test_skips_and_nonfinite_steps_are_counted_a_seed() -> None:
    steps = [
        step_log(0, [1.0, INF, 1.0, 1.0], skipped=[False, True, False, False]),
        step_log(1, [1.0, NAN, 1.0, 1.0], skipped=[False, True, True, False]),  # the third: skipped though finite
        step_log(2, [1.0] * 4, loss=[2.0, 2.0, INF, 2.0], finite_loss=[True] * 4, skipped=[False] * 4),
        step_log(3, [1.0] * 4, finite_loss=[True, True, True, False], skipped=[False] * 4),
    ]
    got = measure_training(log(steps), run([[1.0] * 4] * 4))
    assert (0, 2, 1, 0) == got.skipped
    assert (0, 2, 1, 1) == got.nonfinite
    assert (2, 4) == got.any_skipped[:2]
    assert (3, 4) == got.any_nonfinite[:2]
    assert (4, 2, 3, 4) == got.applied


def test_every_step_of_both_runs_is_kept_as_it_was_logged() -> None:
    mine = log([step_log(5, [1.0, INF], loss=[2.0, 3.0]), step_log(6, [4.0, 5.0], loss=[NAN, 6.0])])
    twin = log([step_log(5, [7.0, 8.0], loss=[9.0, INF]), step_log(6, [INF, 10.0], loss=[11.0, 12.0])])
    first, second = measure_training(mine, twin).steps
    assert (5, (1.0, INF), (7.0, 8.0)) == (first.step, first.grad_norm, first.twin_norm)
    assert ((2.0, 3.0), (9.0, INF)) == (first.loss, first.twin_loss)
    assert ((False, True), (False, False)) == (first.skipped, first.twin_skipped)
    assert ((False, True), (False, True)) == (first.nonfinite, first.twin_nonfinite)
    assert ((False, False), (True, False)) == (second.skipped, second.twin_skipped)
    assert ((True, False), (True, False)) == (second.nonfinite, second.twin_nonfinite)


def test_the_share_of_skipped_steps_is_one_number_a_seed() -> None:
    """Four seeds of ten steps that skip 0, 5, 10 and 5: forty steps are not forty trials."""
    rows = [[1.0] * 10, [INF] * 5 + [1.0] * 5, [INF] * 10, [1.0, INF] * 5]
    got = measure_training(run(rows), run([[1.0] * 10] * 4))
    assert (0, 5, 10, 5) == got.skipped
    assert (0.5, 0.0, 1.0, 0.875) == got.skipped_share[:4]
    low, high = resampled_mean([0, 5, 10, 5])
    assert (low / 10, high / 10) == got.skipped_mean
    assert (0.125, 0.875) == got.skipped_mean  # of 256 resamples 3.5% are at or below 5 of 40
    assert (3, 4) == got.any_skipped[:2]


def test_tokens_of_skipped_steps_are_not_applied() -> None:
    steps = [step_log(0, [1.0, INF], tokens=100), step_log(1, [INF, INF], tokens=10), step_log(2, [1.0, 1.0], tokens=1)]
    got = measure_training(log(steps), log([step_log(i, [1.0, 1.0]) for i in range(3)]))
    assert (111, (101, 1)) == (got.tokens, got.tokens_applied)


# ---- gradient norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "twin", "expected"),
    [
        ([1.0, 8.0, 2.0], [1.0, 1.0, 2.0], 4.0),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 2.0], 0.5),
        ([1.0, INF, 1.0], [1.0, 1.0, 2.0], INF),
        ([1.0, NAN, 1.0], [1.0, 1.0, 2.0], INF),
        ([1.0, 1.0, 1.0], [1.0, NAN, 2.0], 0.0),
        ([INF, 1.0, 1.0], [1.0, NAN, 2.0], NAN),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 1.0),
        ([0.0, 0.5, 0.0], [0.0, 0.0, 0.0], INF),
    ],
)
def test_the_spike_ratio_is_that_of_the_largest_norms(mine: list[float], twin: list[float], expected: float) -> None:
    assert same((expected,), measure([mine], [twin]).spike)


def test_spike_ratios_are_of_the_same_seed_and_summed_up_by_order() -> None:
    twin = [[1.0, 1.0], [2.0, 1.0], [4.0, 4.0], [1.0, 0.5], [8.0, 1.0]]
    mine = [[1.0, 3.0], [2.0, 10.0], [4.0, INF], [1.0, 1.0], [8.0, 64.0]]
    got = measure(mine, twin)
    assert (3.0, 5.0, INF, 1.0, 8.0) == got.spike
    assert (5.0, 1.0, INF, 0.9375, INF) == spread(got.spike)[:5]  # a mean of ratios would be inf


def test_a_step_is_a_spike_above_three_times_the_twins_own_median() -> None:
    """The median of (1, 2, 100, 5) is the lower one of the two in the middle: 2. Three times it is no spike yet."""
    got = measure([[6.0, 6.5, 100.0, INF]], [[1.0, 2.0, 100.0, 5.0]])
    assert ((3,), (1,)) == (got.above, got.above_twin)
    assert (1,) == got.first_bad


def test_a_twin_that_is_mostly_nonfinite_leaves_nonfinite_steps_as_spikes() -> None:
    got = measure([[1e30, INF, 1.0]], [[INF, NAN, 1.0]])
    assert ((1,), (2,)) == (got.above, got.above_twin)


def test_ratios_of_norms_are_taken_step_by_step_where_both_are_finite() -> None:
    mine = [[2.0, 3.0, INF, 8.0, 16.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 6]
    twin = [[1.0, 1.0, 1.0, 1.0, NAN, 1.0], [1.0, 2.0, 4.0, 0.25, 0.0, 1.0], [1.0] * 6]
    got = measure(mine, twin)
    assert (3.0, 1.0, 0.0) == got.norm_ratio  # of 2 3 8 5, of 1 1/2 1/4 4 inf 1, of 0
    assert (8.0, INF, 0.0) == got.norm_ratio_p90
    assert (2 / 6, 0.0, 0.0) == got.left_out
    assert (-INF, 0.0, math.log2(3.0)) == tuple(
        getattr(got.log2_norm_ratio, x) for x in ("lowest", "median", "highest")
    )


def test_a_seed_without_a_finite_pair_has_no_ratio() -> None:
    got = measure([[INF, 1.0], [4.0, 4.0]], [[1.0, INF], [2.0, 2.0]])
    assert same((NAN, 2.0), got.norm_ratio)
    assert (1.0, 1.0, 1) == (got.log2_norm_ratio.median, got.log2_norm_ratio.p90, got.log2_norm_ratio.measured)
    assert (1.0, 0.0) == got.left_out


# ---- first bad step ---------------------------------------------------------------------------------------


def test_the_first_bad_step_is_skipped_nonfinite_or_a_spike() -> None:
    steps = [
        step_log(10, [1.0] * 4),
        step_log(11, [1.0, 1.0, 3.5, 1.0], skipped=[True, False, False, False]),
        step_log(12, [9.0, 1.0, 9.0, 3.0], loss=[2.0, NAN, 2.0, 2.0], skipped=[False] * 4),
    ]
    got = measure_training(log(steps), log([step_log(i, [1.0] * 4) for i in (10, 11, 12)]))
    assert (11, 12, 11, NEVER) == got.first_bad
    assert (11.0, 11.0, INF) == (got.first_bad_step.median, got.first_bad_step.low, got.first_bad_step.high)


# ---- losses -----------------------------------------------------------------------------------------------


def test_the_held_out_gap_ranks_what_is_no_number_worst() -> None:
    norms = [[1.0]] * 6
    mine = run(norms, final_loss=[2.0, INF, NAN, 2.0, NAN, INF])
    twin = run(norms, final_loss=[1.5, 2.0, 2.0, NAN, NAN, NAN])
    got = measure_training(mine, twin)
    assert same((0.5, INF, INF, -INF, NAN, 0.0), got.final_gap)
    assert (3, 1, 5) == got.worse[:3]


def test_the_late_gap_is_a_difference_of_means_over_the_last_quarter() -> None:
    losses = [[9.0, 9.0]] * 6 + [[1.0, 3.0], [2.0, 5.0]]  # 8 steps: the last two
    twin = [[0.0, 0.0]] * 6 + [[1.0, 1.0], [1.0, 1.0]]
    got = measure_training(
        log([step_log(i, [1.0, 1.0], loss=loss) for i, loss in enumerate(losses)]),
        log([step_log(i, [1.0, 1.0], loss=loss) for i, loss in enumerate(twin)]),
    )
    assert (0.5, 3.0) == got.late_gap
    assert (2, 0, 2) == got.late_worse[:3]


def test_a_run_shorter_than_four_steps_is_judged_by_its_last() -> None:
    mine = log([step_log(i, [1.0], loss=[loss]) for i, loss in enumerate([8.0, 4.0, 2.0])])
    assert (1.0,) == measure_training(mine, log([step_log(i, [1.0], loss=[1.0]) for i in range(3)])).late_gap


def test_a_late_loss_that_is_no_number_is_worst_and_two_of_them_tie() -> None:
    mine = log([step_log(0, [1.0] * 3, loss=[NAN, -INF, 1.0], skipped=[False] * 3)])
    twin = log([step_log(0, [1.0] * 3, loss=[1.0, INF, NAN], skipped=[False] * 3)])
    got = measure_training(mine, twin)
    assert (INF, 0.0, -INF) == got.late_gap
    assert (1, 1, 3) == got.late_worse[:3]


# ---- state, replay, commits -------------------------------------------------------------------------------


def test_drift_is_the_difference_of_log2_scales_owner_by_owner() -> None:
    norms = [[1.0]] * 2
    mine = run(norms, seeds=[7, 8], scales={"a": [3.0, 4.0], "b": [-2.0, 1.0], "shared": [0.0, 0.0]})
    twin = run(norms, seeds=[7, 8], scales={"b": [3.0, 1.5], "a": [2.0, 4.0], "c": [1.0, 1.0]})
    got = measure_training(mine, twin)
    assert {"a": (1.0, 0.0), "b": (-5.0, -0.5)} == {owner.owner: owner.log2 for owner in got.drift}
    assert 0.5 == got.drift_median  # of 0 0.5 1 5
    assert (-5.0, "b", 7) == got.drift_largest
    assert ("c", "shared") == got.unmatched


@pytest.mark.parametrize(
    ("mine", "twin", "expected"),
    [(INF, 1.0, INF), (1.0, INF, -INF), (INF, INF, 0.0), (NAN, 1.0, INF), (NAN, NAN, INF), (-INF, INF, -INF)],
)
def test_a_scale_that_is_no_number_drifts_without_end(mine: float, twin: float, expected: float) -> None:
    got = measure_training(run([[1.0]], scales={"a": [mine]}), run([[1.0]], scales={"a": [twin]}))
    assert (expected,) == got.drift[0].log2


def test_without_a_common_owner_there_is_no_drift() -> None:
    got = measure_training(run([[1.0]], scales={"shared": [1.0]}), run([[1.0]], scales={"a": [1.0]}))
    assert () == got.drift
    assert math.isnan(got.drift_median)
    assert "" == got.drift_largest.owner


def test_replay_counts_the_points_that_differ_and_the_steps_that_have_any() -> None:
    matched = [
        point(0, "m0.w0.L0.qkv", [True, False, True]),
        point(0, "m0.w0.L1.qkv", [True, False, True]),
        point(0, "m0.w0.L2.qkv", [True, True, True]),
        point(3, "m0.w0.L0.qkv", [False, False, True]),
        point(3, "m0.w0.L1.qkv", [True, False, True]),
    ]
    norms = [[1.0]] * 3
    got = measure_training(run(norms, matched=matched), run(norms))
    assert (
        ReplayStep(step=0, points=3, differing=(0, 2, 0)),
        ReplayStep(step=3, points=2, differing=(1, 2, 0)),
    ) == got.replay
    assert (0.5, 1.0, 0.0) == got.replay_share
    assert same((NAN, NAN, NAN), measure_training(run(norms), run(norms)).replay_share)


def test_commits_are_held_against_the_twins_owner_by_owner() -> None:
    mine = run([[1.0]], commits={"a": 8, "shared": 3})
    twin = run([[1.0]], commits={"a": 4, "b": 4})
    got = measure_training(mine, twin)
    assert (
        OwnerCommits(owner="a", actual=8, expected=4),
        OwnerCommits(owner="b", actual=0, expected=4),
        OwnerCommits(owner="shared", actual=3, expected=0),
    ) == got.commits
    assert (11, 8) == (got.commits_actual, got.commits_expected)


# ---- the pair ---------------------------------------------------------------------------------------------


def test_a_run_against_itself_costs_nothing() -> None:
    twin = run(
        [[1.0, 2.0, 1.0], [1.0, 5.0, 1.0]],
        scales={"a": [1.0, -INF]},
        commits={"a": 3},
        final_loss=[1.0, 2.0],
        matched=[point(0, "p", [True, True])],
    )
    got = measure_training(twin, twin)
    assert (1.0, 1.0) == got.spike == got.norm_ratio == got.norm_ratio_p90
    assert (0.0, 0.0) == got.final_gap == got.late_gap == got.left_out == got.drift[0].log2 == got.replay_share
    assert (0, 1) == got.above == got.above_twin  # a twin's own spike is no cost of the run's
    assert (0, 2, 2) == got.worse[:3]
    assert (True, True) == got.identical
    assert got.as_expected


def test_identical_is_told_by_the_digests_and_the_verdict_by_the_rules() -> None:
    mine = run([[1.0]] * 2, digest=["x", "y"], broken=["I1", "I2"], expected=["I2"])
    got = measure_training(mine, run([[1.0]] * 2, digest=["x", "z"]))
    assert (True, False) == got.identical
    assert (("I1", "I2"), 2, False) == (got.broken, got.violations, got.as_expected)
    again = measure_training(run([[1.0]], broken=["I2", "I1"], expected=["I1", "I2"]), run([[1.0]]))
    assert again.as_expected


def test_a_replica_costs_what_it_costs_alone() -> None:
    mine, twin = [[1.0, 8.0, INF, 2.0], [3.0, 1.0, 1.0, 9.0]], [[1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 3.0, 1.0]]
    both = measure(mine, twin)
    for i in range(2):
        alone = measure([mine[i]], [twin[i]])
        for name in ("nonfinite", "skipped", "first_bad", "norm_ratio", "norm_ratio_p90", "left_out", "spike"):
            assert getattr(both, name)[i] == getattr(alone, name)[0], name
        for name in ("above", "above_twin", "late_gap", "tokens_applied"):
            assert getattr(both, name)[i] == getattr(alone, name)[0], name


@pytest.mark.parametrize(
    ("mine", "twin", "message"),
    [
        (run([[1.0]] * 2, seeds=[0, 1]), run([[1.0]] * 2, seeds=[1, 0]), r"seeds \[0, 1\], its twin \[1, 0\]"),
        (run([[1.0, 1.0]]), run([[1.0]]), "logged 2 steps, its twin 1"),
        (log([step_log(0, [1.0])]), log([step_log(1, [1.0])]), "the same steps"),
        (log([]), log([]), "one at least"),
        (run([[1.0]]), run([[1.0]], final_loss=[]), "the final loss has 0 values for 1 seeds in the twin"),
        (log([step_log(4, [1.0, 1.0], loss=[1.0])], seeds=[0, 1], final_loss=[1.0, 1.0], digest=["", ""]),
         log([step_log(4, [1.0, 1.0])]), "grad_norm of step 4 has 2 values|loss of step 4 has 1 values"),
        (run([[1.0]], scales={"a": [1.0, 2.0]}), run([[1.0]]), "the scale of a has 2 values"),
        (run([[1.0]], matched=[point(2, "p", [True, True])]), run([[1.0]]), "matched point p of step 2 has 2 values"),
    ],
)  # fmt: skip
def test_runs_that_are_no_pair_are_refused(mine: TrainLog, twin: TrainLog, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_training(mine, twin)


def test_a_severity_can_be_kept_in_a_journal() -> None:
    """The journal's text knows structs, tuples, words and numbers, and every float: no dict, no None."""
    mine = run([[1.0, INF]], scales={"a": [NAN]}, commits={"a": 1}, matched=[point(0, "p", [False])])
    got = measure_training(mine, run([[1.0, 2.0]], scales={"a": [1.0]}))
    text = encode_record(got)  # type: ignore[arg-type]
    assert text == encode_record(_decoded(text, TrainSeverity))  # type: ignore[arg-type]
