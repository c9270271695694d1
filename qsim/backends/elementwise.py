"""exp and log of float32 arrays with the same bits everywhere. Knows no owner, no scale and no reduction.

A mathematical library may differ from another by the last bit of float64, and numpy's differs between processors. Here
there is none: float64 additions, multiplications and one division, each rounded by IEEE 754, and integer steps on the
bits, so that processor, threads, layout and array module do not matter. A float64 value is off by less than 2^-51 of
itself, and is rounded once. So exp is correctly rounded for every float32 number, and log for all but five, given in
``LOG_MISROUNDED``, whose logarithm is nearer to a tie than a float64 can tell (all 2^32 patterns were tried, with
the doubtful ones computed at 160 bits).

Reduction and reconstruction are Cody and Waite's (Software Manual for the Elementary Functions, 1980): x = k ln 2 + r
and e^x = 2^k e^r; x = 2^e m, s = (m-1)/(m+1) and ln x = e ln 2 + 2 atanh(s). The polynomials were made for this file by
the Remez exchange. ``elementwise_kernels`` has the numbers, and the same steps fused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim.arrays import F32, F64
from qsim.backends import elementwise_kernels as k

LOG_MISROUNDED = (0x3C413D3A, 0x41178FEB, 0x4C5D65A5, 0x65D890D3, 0x6F31A8EC)
"""Bits of the float32 numbers whose ``log`` is the second nearest float32 number."""


def exp(x: F32, xp: Any) -> F32:
    """e^x of a float32 array of the module ``xp``: float32, x's shape, C order.

    Ties to even, subnormals kept, Inf from 88.72284 up, +0 below -103.98. e^0 = 1, e^-Inf = +0; NaN is 7fc00000.
    """
    with np.errstate(all="ignore"):  # Inf and what lies under a NaN are results here
        wide = x.reshape(-1).astype(np.float64)
        narrow = exp_wide(wide, xp).astype(np.float32)
        out: F32 = xp.where(xp.isnan(wide), k.QUIET_NAN, narrow).reshape(x.shape)
    return out


def log(x: F32, xp: Any) -> F32:
    """ln x of a float32 array of the module ``xp``: float32, x's shape, C order.

    Ties to even. ln 1 = +0, ln +-0 = -Inf, ln Inf = Inf; of a negative number or NaN the NaN 7fc00000.
    """
    with np.errstate(all="ignore"):
        wide = x.reshape(-1).astype(np.float64)
        narrow = log_wide(wide).astype(np.float32)
        narrow = xp.where(wide < k.INF, narrow, wide.astype(np.float32))
        narrow = xp.where(wide > k.ZERO, narrow, np.float32(-np.inf))
        out: F32 = xp.where(wide >= k.ZERO, narrow, k.QUIET_NAN).reshape(x.shape)
    return out


def exp_wide(x: F64, xp: Any) -> F64:
    """e^x in float64, x limited to where float32 is neither 0 nor Inf; noise where x is NaN."""
    x = xp.where(x < k.LOWEST, k.LOWEST, x)
    x = xp.where(x > k.HIGHEST, k.HIGHEST, x)
    shifted = x * k.PER_LN2 + k.ROUNDER
    power = shifted - k.ROUNDER
    r = (x - power * k.LN2_UPPER) - power * k.LN2_LOWER
    z = r * r
    w = z * z
    low = (r * k.E1 + k.E0) + z * (r * k.E3 + k.E2)
    high = (r * k.E5 + k.E4) + z * (r * k.E7 + k.E6)
    q = low + w * (high + w * (r * k.E9 + k.E8))
    mantissa: F64 = (r + z * q) + k.ONE
    bits = mantissa.view(np.int64) + (shifted.view(np.int64) << k.FIELD)
    return bits.view(np.float64)


def log_wide(x: F64) -> F64:
    """ln x in float64 where x is positive, finite and normal; noise elsewhere."""
    bits = x.view(np.int64)
    field = (bits + k.SPLIT) >> k.FIELD
    e: F64 = (field | k.BIASED).view(np.float64) - k.BIAS
    f: F64 = (bits - ((field - k.ZEROED) << k.FIELD)).view(np.float64) - k.ONE
    s = f / (f + k.TWO)
    z = s * s
    w = z * z
    p = (z * k.L1 + k.L0) + w * ((z * k.L3 + k.L2) + w * ((z * k.L5 + k.L4) + w * k.L6))
    return e * k.LN2_UPPER + (s * k.TWO + (s * z * p + e * k.LN2_LOWER))
