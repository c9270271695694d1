"""Means by order-independent fixed-point sums. Knows no format, no centre and no owner.

A column of float32 numbers with largest magnitude a, k = floor(log2 a), becomes integers
n = rint(x * 2^(40 - k)); integers add in any order to the same total. |n| < 2^41, so 2^22 of them fit in
64 bits, and that is the limit on how many elements one mean runs over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsim.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsim.arrays import F32, F64, I32, I64

FRACTION_BITS = 40
"""An element at the column's exponent k is counted in units of 2^(k - 40)."""

LOWEST_EXPONENT = -149
"""Exponent of a column without a non-zero finite element: the least one, so it never raises a common one."""

MAX_COUNT = 1 << 22
"""Most elements that one mean may run over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Order-independent sums for a mean: ``total`` int64 units of 2^(exponent - 40), over ``count`` elements.

    total, exponent, count: int64, int32, int64, all of the centre's shape (lead + rest with reduced axes 1).
    exponent is floor(log2 amax) of the reduced finite elements, subnormal ones included, and -149 where all
    are zero or there is none. Non-finite elements are left out of total and count.
    """

    total: I64
    exponent: I32
    count: I64


def power_of_two(exponent: I32) -> F64:
    """2^exponent in float64, exact, from bits; exponent in -1022..1023."""
    return ((np.asarray(exponent).astype(np.int64) + 1023) << 52).view(np.float64)


def check_count(count: int) -> None:
    """UsageError where one mean would run over more than 2^22 elements."""
    if count > MAX_COUNT:
        raise UsageError(
            f"a mean over {count} elements: at most {MAX_COUNT} (2^22) fit in 64-bit sums; "
            "take the mean over fewer axes or over blocks"
        )


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """One sum over the elements of all ``parts`` (equal shapes), at the largest of their exponents.

    Each total is rounded once (ties to even) to the common unit, then integers add: the order of ``parts``
    cannot matter. Merging merged sums rounds twice, so merge all of them in one call. UsageError for no
    parts, unequal shapes, or more than 2^22 elements in one mean.
    """
    if not parts:
        raise UsageError("merge_sums of no sums: pass at least one")
    shapes = {part.total.shape for part in parts}
    if len(shapes) > 1:
        raise UsageError(f"merge_sums of unequal shapes {sorted(shapes)}: merge sums of one centre")
    count = np.sum(np.stack([part.count for part in parts]), axis=0, dtype=np.int64)
    check_count(int(count.max(initial=0)))
    exponent = np.max(np.stack([part.exponent for part in parts]), axis=0)
    shifted = [_shift_ties_even(part.total, exponent - part.exponent) for part in parts]
    total = np.sum(np.stack(shifted), axis=0, dtype=np.int64)
    return Sums(total=np.asarray(total), exponent=np.asarray(exponent, np.int32), count=np.asarray(count))


def mean_of(sums: Sums) -> F32:
    """RN32(RN64(RN64(total) / count) * 2^(exponent - 40)); 0.0 where count is 0; never -0. float32."""
    empty = sums.count == 0
    quotient = sums.total.astype(np.float64) / np.where(empty, 1, sums.count).astype(np.float64)
    scaled = quotient * power_of_two(sums.exponent - np.int32(FRACTION_BITS))  # exact: no float64 underflow
    mean = np.asarray(np.where(empty, 0.0, scaled)).astype(np.float32)
    return np.asarray(mean + np.float32(0), np.float32)  # a negative underflow is -0; adding +0 makes it +0


def _shift_ties_even(total: I64, shift: I32) -> I64:
    """rint(total / 2^shift) with ties to even, shift >= 0, in integers."""
    # |total| <= 2^63, so from 64 on the quotient is at most one half, a tie to 0; 63 is handled by parts.
    s = np.minimum(shift, 63).astype(np.int64)
    floor = total >> s
    rest = total - (floor << s)  # in [0, 2^s)
    half = np.int64(1) << np.maximum(s - 1, 0)
    up = (s > 0) & ((rest > half) | ((rest == half) & (floor & 1 == 1)))
    return np.asarray(np.where(shift > 63, 0, floor + up), np.int64)
