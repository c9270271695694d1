"""Intervals that assume nothing about the distribution. Knows numbers only.

Everything is conditional on the capture: replicas resample the same rows, so an interval says how far other
seeds would move the figure, not how far other data would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """low <= estimate <= high; coverage is what the bounds hold with at least (0.0 for a single value)."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Order statistics that hold the median with probability >= level, the narrowest symmetric pair.

    With r = 1, 2, ... the pair (x_(r), x_(n+1-r)) covers with 1 - 2 P(Binomial(n, 1/2) < r). Where even the
    extremes cover less (n < 6 at 95%), they are returned with the coverage they have. Inf ranks highest.
    """
    ordered = sorted(math.inf if math.isnan(v) else v for v in values)  # what is no number ranks worst
    n = len(ordered)
    if n == 0:
        return Interval(math.nan, math.nan, 0.0)
    best = 1
    for rank in range(1, n // 2 + 1):
        if _coverage(n, rank) >= level:
            best = rank
    return Interval(ordered[best - 1], ordered[n - best], _coverage(n, best))


def _coverage(n: int, rank: int) -> float:
    below = sum(math.comb(n, i) for i in range(rank))
    return max(0.0, 1.0 - float(2 * below / (1 << n)))


def proportion_interval(hits: int, trials: int, *, level: float = 0.95) -> Interval:
    """Exact (Clopper-Pearson) bounds of a proportion; 0 of 60 still means up to 6%."""
    from scipy.special import betaincinv

    if trials == 0:
        return Interval(0.0, 1.0, level)
    tail = (1.0 - level) / 2.0
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1.0 - tail))
    return Interval(low, high, level)
