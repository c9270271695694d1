"""Intervals against brute force and against published Clopper-Pearson bounds."""

import math
from collections import Counter
from fractions import Fraction
from itertools import product

import pytest

from qsim.severity.intervals import median_interval, proportion_interval

INF = math.inf


def exact_coverage(n, rank):
    """Share of the 2^n ways to fall on either side of the median that the pair (rank, n + 1 - rank) holds."""
    below = Counter(sum(side) for side in product((0, 1), repeat=n))
    return Fraction(sum(below[k] for k in range(rank, n - rank + 1)), 2**n)


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_median_interval_is_the_narrowest_symmetric_pair_that_covers(n, level):
    enough = [rank for rank in range(1, n // 2 + 1) if exact_coverage(n, rank) >= level]
    rank = max(enough, default=1)
    values = [float(v * v) for v in range(n)]
    got = median_interval(values[::-1], level=level)
    assert (values[rank - 1], values[n - rank]) == (got.low, got.high)
    assert exact_coverage(n, rank) == Fraction(got.coverage)


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_fewer_than_six_values_give_the_extremes_and_admit_their_coverage(n, coverage):
    values = [3.0, 1.0, 4.0, 1.5, 9.0][:n]
    assert (min(values), max(values), coverage) == median_interval(values)


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (60, 22)])
def test_ranks_at_95_percent_are_those_of_the_sign_test_table(n, rank):
    got = median_interval([float(v) for v in range(1, n + 1)])
    assert (rank, n + 1 - rank) == (got.low, got.high)
    assert got.coverage >= 0.95


def test_no_value_gives_no_interval():
    got = median_interval([])
    assert math.isnan(got.low)
    assert math.isnan(got.high)
    assert got.coverage == 0.0


def test_inf_ranks_highest_and_stays_inf():
    assert (INF, 1.0) == (median_interval([1.0, INF, 2.0]).high, median_interval([1.0, INF, 2.0]).low)
    mostly = median_interval([INF] * 8 + [1.0, 2.0])
    assert (2.0, INF) == (mostly.low, mostly.high)  # n = 10: ranks 2 and 9
    few = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, INF])
    assert (2.0, 8.0) == (few.low, few.high)  # n = 9: ranks 2 and 8, one Inf is outside


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 60, 0.0, 0.0596), (5, 20, 0.0866, 0.4910), (60, 60, 0.9404, 1.0), (1, 10, 0.0025, 0.4450)],
)
def test_proportion_bounds_are_those_of_the_tables(hits, trials, low, high):
    got = proportion_interval(hits, trials)
    assert (low, high) == (round(got.low, 4), round(got.high, 4))


def test_no_hit_of_n_is_bounded_by_the_closed_form():
    for n in (1, 3, 60, 1000):
        assert math.isclose(1 - 0.025 ** (1 / n), proportion_interval(0, n).high, rel_tol=1e-12)


def at_least(hits, trials, p):
    return math.fsum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(hits, trials + 1))


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_at_each_bound_the_binomial_tail_is_half_of_what_the_level_leaves(level):
    """The definition of Clopper and Pearson: P(X >= hits) at the low bound, P(X <= hits) at the high one."""
    tail = (1 - level) / 2
    for trials in (1, 2, 7, 19):
        for hits in range(trials + 1):
            got = proportion_interval(hits, trials, level=level)
            assert level == got.coverage
            if hits > 0:
                assert math.isclose(tail, at_least(hits, trials, got.low), rel_tol=1e-9)
            if hits < trials:
                assert math.isclose(tail, 1 - at_least(hits + 1, trials, got.high), rel_tol=1e-9)


def test_no_trial_says_nothing():
    assert (0.0, 1.0, 0.95) == proportion_interval(0, 0)
