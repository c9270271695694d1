"""Figures over seeds: medians, tails, shares, comparisons, each with an interval. Knows numbers only.

The unit is the seed: steps of one run lean on each other, seeds do not. NaN means "not measured": it is left out, and
the number of values that were measured is told. What is not finite is inf, and ranks last; nothing averages ratios.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qsim.arrays import F64
from qsim.severity.intervals import median_interval, proportion_interval


class Spread(NamedTuple):
    """A quantity over seeds: order statistics only, so that inf stays inf.

    low, high: hold the median with ``coverage`` at least. All NaN (coverage 0) where nothing was measured.
    """

    median: float
    low: float
    high: float
    coverage: float
    p90: float
    lowest: float
    highest: float
    measured: int


class Share(NamedTuple):
    """hits of trials, both counted in seeds, with exact (Clopper-Pearson) 95% bounds."""

    hits: int
    trials: int
    low: float
    high: float


class Duel(NamedTuple):
    """In how many seeds the first of two runs is worse, with exact 95% bounds of that share. A tie is not worse."""

    worse: int
    tied: int
    trials: int
    low: float
    high: float


class Bounds(NamedTuple):
    """Two ends that promise nothing about coverage."""

    low: float
    high: float


def order_statistic(values: Sequence[float], *, percent: int) -> float:
    """The smallest value with at least ``percent`` (1..100) of all values at or below it; NaN for no values.

    The inverse of the empirical distribution: never between two values. The rank is an integer product, for 0.07 * 100
    is more than 7 in float64.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return float(ordered[-(-percent * len(ordered) // 100) - 1])


def measured(values: Sequence[float]) -> list[float]:
    """The values that are not NaN, in order."""
    return [value for value in values if not math.isnan(value)]


def spread(values: Sequence[float]) -> Spread:
    """Median with its interval by order statistics, 90th percentile and range of the measured values."""
    there = measured(values)
    low, high, coverage = median_interval(there)
    return Spread(
        median=order_statistic(there, percent=50),
        low=low,
        high=high,
        coverage=coverage,
        p90=order_statistic(there, percent=90),
        lowest=min(there, default=math.nan),
        highest=max(there, default=math.nan),
        measured=len(there),
    )


def share(flags: Sequence[bool]) -> Share:
    """How many seeds have it."""
    hits, trials = sum(flags), len(flags)
    low, high, _ = proportion_interval(hits, trials)
    return Share(hits, trials, low, high)


def duel(differences: Sequence[float]) -> Duel:
    """Differences of two runs, a seed: above 0 the first is worse. NaN is left out."""
    there = measured(differences)
    worse = sum(value > 0 for value in there)
    low, high, _ = proportion_interval(worse, len(there))
    return Duel(worse, sum(value == 0 for value in there), len(there), low, high)


def resampled_mean(counts: Sequence[int], *, level: float = 0.95) -> Bounds:
    """The percentile bootstrap of the mean of whole numbers over seeds, in closed form: nothing is drawn.

    The total of n draws with replacement has the n-fold convolution of the counts' distribution; the bounds are its
    quantiles, divided by n. With few seeds it covers less than ``level``, and equal counts give no width at all; the
    exact bounds of ``share`` are there for that. Counts are 0 or more.
    """
    n = len(counts)
    if n == 0:
        return Bounds(math.nan, math.nan)
    total: F64 = np.ones(1)
    for _ in range(n):
        wider = np.zeros(len(total) + max(counts))
        for count, seeds in sorted(Counter(counts).items()):
            wider[count : count + len(total)] += total * (seeds / n)
        total = wider
    tail, slack = (1.0 - level) / 2.0, 1e-12  # a probability that is the tail but for rounding is the tail
    reached: F64 = np.cumsum(total)
    low, high = (int(np.argmax(reached >= p - slack)) for p in (tail, 1.0 - tail))
    return Bounds(low / n, high / n)
