"""What an accumulator lost: sums against the exact sums, rounded once. Knows no model and no data."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from qsim.arrays import F32, F64


class AccumulationError(NamedTuple):
    """The error of one matrix of sums against the exact ones.

    rel_error: ‖acc - exact‖ / ‖exact‖. bias: mean (acc - exact) / mean |exact|, negative where magnitude of positive
    sums is lost. worst: the largest |acc - exact| / |exact|. differ: share of outputs with other bits than exact's
    (0 equals -0). nonfinite: number of outputs that are not finite; rel_error and worst are inf then, bias NaN.
    """

    rel_error: float
    bias: float
    worst: float
    differ: float
    nonfinite: int


def accumulation_error(acc: F32, exact: F32) -> AccumulationError:
    """Errors over all outputs. Sums are correctly rounded (fsum), so no order and no machine shows in them."""
    bad = int(acc.size - np.isfinite(acc).sum())
    differ = float(np.mean(acc != exact))
    if bad:
        return AccumulationError(rel_error=math.inf, bias=math.nan, worst=math.inf, differ=differ, nonfinite=bad)
    wide: F64 = exact.astype(np.float64).ravel()
    error: F64 = acc.astype(np.float64).ravel() - wide  # exact, but for sums 2^29 apart
    magnitude = np.abs(wide)
    return AccumulationError(
        rel_error=math.sqrt(_ratio(math.fsum(error * error), math.fsum(wide * wide))),
        bias=_ratio(math.fsum(error), math.fsum(magnitude)),
        worst=max(_ratio(e, m) for e, m in zip(np.abs(error).tolist(), magnitude.tolist(), strict=True)),
        differ=differ,
        nonfinite=0,
    )


def _ratio(error: float, size: float) -> float:
    """error / size; nothing of nothing is 0, something of nothing inf."""
    if size == 0.0:
        return math.copysign(math.inf, error) if error else 0.0
    return error / size
