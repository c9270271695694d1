"""Numba kernels of exp and log, and their numbers. Knows no shape and no device; ``elementwise`` says what they are.

Both run in float64 by additions, multiplications, one division and integer steps on the bits, in the order written;
nothing is contracted (fastmath is off), so any processor, vector width and thread count gives the same bits. There is
no branch: a loop of them becomes vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import F32

_F4 = numba.float32

QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)
INF = np.float64(np.inf)
ZERO = np.float64(0.0)
ONE = np.float64(1.0)
TWO = np.float64(2.0)

# float64 + ROUNDER rounds to an integer, ties to even, and leaves it in the low bits of the sum: 1.5 * 2^52.
ROUNDER = np.float64(6755399441055744.0)
FIELD = np.int64(52)  # the exponent field starts here

# exp: outside these bounds float32 is 0 (e^-110 < 2^-150) or Inf, and inside 2^k is a normal float64.
LOWEST = np.float64(-110.0)
HIGHEST = np.float64(100.0)
PER_LN2 = np.float64.fromhex("0x1.71547652b82fep+0")  # 1 / ln 2
# ln 2 in two parts; the upper one has 36 bits: k * LN2_UPPER is exact for |k| < 2^17.
LN2_UPPER = np.float64.fromhex("0x1.62e42fefa0000p-1")
LN2_LOWER = np.float64.fromhex("0x1.cf79abc9e3b3ap-40")
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2 + 2^-30: minimax of the relative error of e^r, 2^-57.9.
E0 = np.float64.fromhex("0x1.000000000000ap-1")
E1 = np.float64.fromhex("0x1.55555555554fap-3")
E2 = np.float64.fromhex("0x1.555555555088dp-5")
E3 = np.float64.fromhex("0x1.1111111127b9dp-7")
E4 = np.float64.fromhex("0x1.6c16c1842649ap-10")
E5 = np.float64.fromhex("0x1.a01a012a68a5dp-13")
E6 = np.float64.fromhex("0x1.a0199a173a47fp-16")
E7 = np.float64.fromhex("0x1.71df253d4cb8ap-19")
E8 = np.float64.fromhex("0x1.28ad685899042p-22")
E9 = np.float64.fromhex("0x1.ad7f759565aaap-26")

# log: x = 2^e m with m in [sqrt(1/2), sqrt(2)). SPLIT is what takes the bits of sqrt(1/2) to those of 1.
SPLIT = np.int64(0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
BIASED = np.int64(0x4330000000000000)  # 2^52: in the low bits of a float64 of its binade stands an integer
BIAS = np.float64(2.0**52 + 1023.0)
ZEROED = np.int64(0x3FF)
# (2 atanh(s) - 2 s) / s^3 in z = s^2 on |s| <= (sqrt(2)-1)/(sqrt(2)+1): minimax of the relative error, 2^-59.5.
L0 = np.float64.fromhex("0x1.5555555555592p-1")
L1 = np.float64.fromhex("0x1.999999997fdbbp-2")
L2 = np.float64.fromhex("0x1.24924941f0ffep-2")
L3 = np.float64.fromhex("0x1.c71c52097291dp-3")
L4 = np.float64.fromhex("0x1.74663ee5494c3p-3")
L5 = np.float64.fromhex("0x1.39a1baf053272p-3")
L6 = np.float64.fromhex("0x1.2f056202f9b55p-3")


@helper
def exp_wide(x: Any) -> Any:
    """e^x in float64 for a float64 x; noise where x is NaN."""
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    t = x * PER_LN2 + ROUNDER
    k = t - ROUNDER
    r = (x - k * LN2_UPPER) - k * LN2_LOWER
    z = r * r
    w = z * z
    low = (E0 + E1 * r) + z * (E2 + E3 * r)
    high = (E4 + E5 * r) + z * (E6 + E7 * r)
    q = low + w * (high + w * (E8 + E9 * r))
    p = ONE + (r + z * q)
    # t's low bits are k; shifted into the field they add k to the exponent of p, which is in [0.7, 1.5).
    bits = np.float64(p).view(np.int64) + (np.float64(t).view(np.int64) << FIELD)
    return np.int64(bits).view(np.float64)


@helper
def log_wide(x: Any) -> Any:
    """ln x in float64 for a positive finite normal float64 x; noise elsewhere."""
    bits = np.float64(x).view(np.int64)
    field = (bits + SPLIT) >> FIELD  # e + 1023: the sign bit is clear
    e = np.int64(field | BIASED).view(np.float64) - BIAS
    m = np.int64(bits - ((field - ZEROED) << FIELD)).view(np.float64)
    f = m - ONE
    s = f / (f + TWO)
    z = s * s
    w = z * z
    p = (L0 + L1 * z) + w * ((L2 + L3 * z) + w * ((L4 + L5 * z) + w * L6))
    return e * LN2_UPPER + (TWO * s + (s * z * p + e * LN2_LOWER))


@helper
def exp_one(x: Any) -> Any:
    """e^x of a float32 x, rounded once; of NaN 7fc00000."""
    y = np.float32(exp_wide(np.float64(x)))
    return y if x == x else QUIET_NAN


@helper
def log_one(x: Any) -> Any:
    """ln x of a float32 x, rounded once; of a negative number or NaN 7fc00000."""
    v = np.float64(x)
    y = np.float32(log_wide(v))
    y = y if v < INF else np.float32(v)
    y = y if v != ZERO else np.float32(-INF)
    return y if v >= ZERO else QUIET_NAN


@kernel(read(_F4, 1), write(_F4, 1))
def exp(x: F32, out: F32) -> None:
    """out[i] = e^x[i]; see ``elementwise.exp``."""
    for i in range(x.size):
        out[i] = exp_one(x[i])


@kernel(read(_F4, 1), write(_F4, 1))
def log(x: F32, out: F32) -> None:
    """out[i] = ln x[i]; see ``elementwise.log``."""
    for i in range(x.size):
        out[i] = log_one(x[i])
