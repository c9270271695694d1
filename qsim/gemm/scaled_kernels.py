"""Numba kernels around a scaled product: decoded values in, one rounding out. Know no recipe and no BLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import cached, helper, kernel, read, write
from qsim.gemm.numba_kernels import _rest_of_product

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, U8, Bool

_F4, _F8, _U1, _I8, _BOOL = numba.float32, numba.float64, numba.uint8, numba.int64, numba.boolean

LOW_BITS = np.int64((1 << 29) - 1)
HALF_BIT = np.int64(1 << 28)
SMALL = np.float64(2.0**-125)
"""Below this a float32 may be subnormal, and its ties lie elsewhere."""


@kernel(read(_U1, 2), read(_F8, 1), read(_F8, 2), _I8, _I8, write(_F8, 2))
def scaled_values(codes: U8, table: F64, scales: F64, bm: int, bk: int, out: F64) -> None:
    """out [M, K] = table[code] * the scale of its block of bm x bk; scales [gm, gk], or [0, 0] for none."""
    for row in range(codes.shape[0]):
        source, target = codes[row], out[row]
        if scales.size == 0:
            for k in range(source.size):
                target[k] = table[source[k]]
            continue
        own = scales[row // bm]
        for block in range(own.size):
            scale = own[block]
            for k in range(block * bk, min((block + 1) * bk, source.size)):
                target[k] = table[source[k]] * scale


@kernel(read(_U1, 2), read(_F4, 1), write(_F4, 2))
def narrow_values(codes: U8, table: F32, out: F32) -> None:
    """out [M, K] = table[code], float32."""
    for row in range(codes.shape[0]):
        source, target = codes[row], out[row]
        for k in range(source.size):
            target[k] = table[source[k]]


@helper
def _rounded_product(s: Any, f: Any) -> Any:
    """RN32(s * f): the product rounded to odd, then once to float32."""
    high = np.float64(s * f)
    rest = _rest_of_product(s, f, high) if abs(high) < np.inf else 0.0
    word = np.float64(high).view(np.int64)
    if (rest != 0.0) & ((word & np.int64(1)) == np.int64(0)):
        away = (rest > 0.0) == (high > 0.0)
        word = word + np.int64(1) if away else word - np.int64(1)
    return np.float32(np.int64(word).view(np.float64))


@cached
def finish_exact(S: Any, unit: float, row_factor: F64, column_factor: F64, out: F32) -> None:
    """out [M, N] = RN32(S * unit * row_factor [M] * column_factor [N]), one rounding of the exact product.

    S: exact sums, float64, float32 or int32, in units of a power of two. The factors are float32 numbers: their product
    is exact in float64. An exact 0 is +0.
    """
    for i in range(S.shape[0]):
        source, target = S[i], out[i]
        own = row_factor[i]
        suspect = False
        for j in range(source.size):
            high = np.float64(np.float64(np.float64(source[j]) * unit) * np.float64(own * column_factor[j]))
            # Rounding twice goes wrong only where the first rounding lands on a tie of the second.
            tie = (np.float64(high).view(np.int64) & LOW_BITS) == HALF_BIT
            suspect = suspect | tie | ((abs(high) < SMALL) & (high != 0.0)) | (high != high)
            target[j] = np.float32(high + 0.0)
        if suspect:
            for j in range(source.size):
                s, f = np.float64(np.float64(source[j]) * unit), np.float64(own * column_factor[j])
                # An exact 0 is +0; what rounds to 0 keeps its sign.
                target[j] = np.float32(0) if (s == 0.0) | ((f == 0.0) & (s == s)) else _rounded_product(s, f)


@cached
def finish_bounded(
    S: F64, row_bound: F64, column_norm: F64, row_factor: F64, column_factor: F64, divisor: float, out: F32, left: Bool
) -> int:
    """out [M, N] = RN32(exact * row_factor * column_factor / divisor), where |S - exact| <= row_bound * column_norm.

    left: True where that does not decide it. Returns how many are left. An exact 0 (S and bound 0) is +0.
    """
    count = 0
    for i in range(S.shape[0]):
        own, bound = row_factor[i], row_bound[i]
        for j in range(S.shape[1]):
            factor = np.float64(own * column_factor[j])
            t = np.float64(np.float64(S[i, j] * factor) / divisor)
            # Product and quotient are rounded, each by half a unit in 2^53; so are d and the ends.
            d = np.float64(
                np.float64(np.float64(bound * column_norm[j]) * abs(factor)) / divisor + np.float64(abs(t) * 2.0**-51)
            ) * np.float64(1.0 + 2.0**-40)
            d = np.float64(0) if (bound == 0.0) & (factor == 1.0) & (divisor == 1.0) else d
            low, high = np.float32(t - d), np.float32(t + d)
            out[i, j] = np.float32(t + 0.0)
            proven = (low == high) & ((abs(t) > d) | (d == 0.0))
            left[i, j] = not proven
            count += not proven
    return count
