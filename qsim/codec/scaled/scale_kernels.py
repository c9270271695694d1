"""Numba kernels of scale rules: from a block's amax to its stored scale. Knows no policy of elements.

A rule is a number: 0 Float32Scale, 1 PowerOfTwoScale, then TwoLevelScale by order: 2 exact, 3 te, 4 torchao,
5 four over six (``recipes``, where each is defined). floats is float32 [9]:
    0 fmt.max   1 s_enc   2 s_dec   3 k = s_enc * fl(1/6)   4 pt = g / F   5 F   6 g   7 1 / pt   8 scale_max
steps is int64 [3]: carry, offset of ``exponent_rule``; 1 where four over six sums absolute errors, 0 squared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.codec.numba_kernels import MAGNITUDE, QUIET_NAN, ZERO, load, magnitude_code
from qsim.codec.scaled.measure_kernels import BAD_NAN

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, U32

_F4, _F8, _U4, _I8 = numba.float32, numba.float64, numba.uint32, numba.int64

EXACT_RULE = 2
"""The rule whose elements are divided in float64."""

_MAX = np.float32(np.finfo(np.float32).max)
_ONE, _SIX, _NOTHING = np.float32(1), np.float32(6), np.float32(0)
_LEAST = np.float32(2.0**-6)
_POISON = np.uint32(0x7F)
_REBIAS = np.float32(2.0**120)  # float32 has bias 127, E4M3FN 7


@helper
def _capped(v: Any) -> Any:
    """min(v, FLT_MAX) of a positive v, Inf included."""
    return v if v < _MAX else _MAX


@helper
def _e4m3(v: Any, k: Any) -> Any:
    """E4M3FN code of a non-negative number, nearest even, saturating."""
    return np.uint32(magnitude_code(np.uint32(np.float32(v).view(np.uint32) & MAGNITUDE), k) & np.uint32(255))


@helper
def _e4m3_value(code: Any) -> Any:
    """Value of a non-negative E4M3FN code: its fields moved to those of float32, then the difference of the biases.

    A subnormal code becomes a subnormal float32, and the product by a power of two is exact.
    """
    return np.float32(np.uint32(np.uint32(code) << np.uint32(20)).view(np.float32) * _REBIAS)


@helper
def _inverse(d8: Any, s_dec: Any) -> Any:
    """min(1 / (d8 * s_dec), FLT_MAX); 0 where d8 is 0."""
    e = _capped(np.float32(_ONE / np.float32(d8 * s_dec)))
    return e if d8 > _NOTHING else _NOTHING


@helper
def _map_error(block: Any, e: Any, d8: Any, floats: Any, absolute: Any) -> Any:
    """Sum of the errors of one map of four over six, in float32, in ascending order."""
    total = _NOTHING
    for j in range(block.shape[1]):
        x = np.float32(block[0, j])
        a = abs(np.float32(x * e))
        # The value of the E2M1 code: nearest even, saturating at 6. (A block with NaN or Inf never comes here.)
        q = np.float32(0.5) * np.float32(np.float32(a > np.float32(0.25)) + np.float32(a >= np.float32(0.75)))
        q = np.float32(q + np.float32(0.5) * np.float32(a > np.float32(1.25)))
        q = np.float32(q + np.float32(0.5) * np.float32(a >= np.float32(1.75)))
        q = np.float32(q + np.float32(a > np.float32(2.5)))
        q = np.float32(q + np.float32(a >= np.float32(3.5)))
        q = np.float32(q + np.float32(2) * np.float32(a > np.float32(5.0)))
        q = -q if x < _NOTHING else q
        value = np.float32(np.float32(np.float32(q * d8) * floats[6]) / floats[5])
        diff = np.float32(value - x)
        total = np.float32(total + (abs(diff) if absolute else np.float32(diff * diff)))
    return total


@helper
def _odd(v: Any) -> Any:
    """A positive float64 in the normal range of float32 as float32, rounded to odd."""
    near = np.float32(v)
    back = np.float64(near)
    u = np.uint32(np.float32(near).view(np.uint32) - (np.uint32(1) if back > v else ZERO))
    return np.uint32(u | (np.uint32(1) if back != v else ZERO)).view(np.float32)


@helper
def _four_over_six(amax: Any, block: Any, floats: Any, absolute: Any, k: Any) -> Any:
    """(scale code, multiplier) of the map with the smaller error; a tie goes to 6."""
    base = np.float32(np.float32(amax / _SIX) * floats[1])
    code_6, code_4 = _e4m3(base, k), _e4m3(np.float32(base * np.float32(1.5)), k)
    d6, d4 = _e4m3_value(code_6), _e4m3_value(code_4)
    e6, e4 = _inverse(d6, floats[2]), _inverse(d4, floats[2])
    e, d8, least = e6, d6, _NOTHING
    for attempt in range(2):  # one call in the code for both maps
        error = _map_error(block, e, d8, floats, absolute)
        if attempt == 0:
            e, d8, least = e4, d4, error
        elif error < least:
            return code_4, e4
    return code_6, e6


@helper
def _each_rule(
    rule: Any, top: Any, bad: Any, x: Any, bk: Any, floats: Any, steps: Any, k: Any, stored: Any, m: Any, d: Any
) -> None:
    """Stored scale, multiplier (and divisor of the exact rule) of finite blocks: one plain loop a rule."""
    if rule == 0:
        for b in range(top.size):
            scale = _capped(np.float32(floats[0] / np.uint32(top[b]).view(np.float32)))
            m[b] = scale if top[b] > ZERO else _ONE
            stored[b] = np.float32(m[b]).view(np.uint32)
    elif rule == 1:
        carry, offset = np.uint32(steps[0]), np.int32(steps[1])
        for b in range(top.size):
            carried = np.int32(np.int32(np.uint32(np.uint32(top[b] + carry) >> np.uint32(23))) + offset)
            code = np.uint32(max(np.int32(0), min(np.int32(254), carried)))
            stored[b] = code
            m[b] = _power(code)
    elif rule == EXACT_RULE:
        for b in range(top.size):
            # amax * scale_max / g in float64, as in ``kernels._encode_exact``; rounded to odd, then once to E4M3.
            wide = np.float64(np.uint32(top[b]).view(np.float32))
            quotient = np.float64(np.float64(wide * np.float64(floats[8])) / np.float64(floats[6]))
            code = _e4m3(_odd(quotient), k) if (top[b] > ZERO) & (floats[6] > _NOTHING) else ZERO
            stored[b] = code
            m[b] = _ONE if code > ZERO else _NOTHING
            d[b] = np.float64(np.float64(floats[6]) * np.float64(_e4m3_value(code)))  # 0 where the scale is
    elif rule == 3:
        for b in range(top.size):
            code = _e4m3(np.float32(np.uint32(top[b]).view(np.float32) * floats[3]), k)
            stored[b] = code
            m[b] = _inverse(_e4m3_value(code), floats[2])
    elif rule == 4:
        for b in range(top.size):
            ratio = np.float32(np.float32(np.uint32(top[b]).view(np.float32) / _SIX) / floats[4])
            ratio = _LEAST if top[b] == ZERO else ratio  # 0 / 0 where the whole tensor is zero
            code = _e4m3(ratio if ratio > _LEAST else _LEAST, k)
            stored[b] = code
            m[b] = _ONE if top[b] == ZERO else np.float32(floats[7] / _e4m3_value(code))
    else:
        for b in range(top.size):
            amax = np.uint32(top[b]).view(np.float32)
            block = x[:, b * bk : (b + 1) * bk]
            stored[b], m[b] = _four_over_six(amax, block, floats, steps[2] != 0, k)


@helper
def _power(code: Any) -> Any:
    """2^(127 - code), the reciprocal of an E8M0 scale; 2^-127 is a subnormal."""
    field = np.uint32(np.uint32(254) - code)
    return np.uint32(np.uint32(field << np.uint32(23)) if field != ZERO else np.uint32(0x00400000)).view(np.float32)


@helper
def _bad_block(rule: Any, bad: Any) -> Any:
    """(stored scale, multiplier) of a block with Inf (1) or NaN (2) in it."""
    nan = np.uint32(QUIET_NAN).view(np.float32)
    if rule == 0:
        return np.float32(_ONE).view(np.uint32), _ONE
    if rule == 1:
        return (np.uint32(255), nan) if bad == BAD_NAN else (np.uint32(254), _power(np.uint32(254)))
    return _POISON, nan


@helper
def scales_of(
    rule: Any, top: Any, bad: Any, worst: Any, x: Any, bk: Any, floats: Any, steps: Any, k: Any,
    stored: Any, m: Any, d: Any, counting: Any, counts: Any,
) -> None:  # fmt: skip
    """Of one row of measured blocks: stored scales (float32 bits, or codes), multipliers, divisors of the exact rule.

    top [n]: bits of the largest finite magnitudes; bad [n]: 0, 1 (Inf), 2 (NaN), ``worst`` the largest of them.
    k: constants of E4M3FN, saturating. stored, m: [n] or longer; d the same for the exact rule, else empty.
    """
    _each_rule(rule, top, bad, x, bk, floats, steps, k, stored, m, d)
    if worst > ZERO:
        for b in range(top.size):
            if bad[b] > ZERO:
                stored[b], m[b] = _bad_block(rule, bad[b])
                if d.size:
                    d[b] = np.float64(m[b])
    if counting:
        for b in range(top.size):
            nothing = (top[b] == ZERO) & (bad[b] == ZERO)
            counts[4] += np.int64(1) if nothing | (m[b] == _NOTHING) else np.int64(0)


@kernel(
    read(_F4, 2),
    _I8,
    _I8,
    _I8,
    read(_U4, 2),
    read(_U4, 2),
    read(_F4, 1),
    read(_I8, 1),
    read(_U4, 1),
    write(_U4, 2),
    write(_F4, 2),
    write(_F8, 2),
    write(_I8, 1),
)
def scale_blocks(
    x: F32,
    bm: int,
    bk: int,
    rule: int,
    top: U32,
    bad: U32,
    floats: F32,
    steps: I64,
    scale_constants: U32,
    stored: U32,
    multiplier: F32,
    divisor: F64,
    counts: I64,
) -> None:
    """``scales_of`` for every row of blocks of a grid; zero_scale blocks are added to counts[4]."""
    k = load(scale_constants)
    for band in range(top.shape[0]):
        tile = x[band * bm : (band + 1) * bm]
        worst = ZERO
        for b in range(bad.shape[1]):
            worst = max(worst, bad[band, b])
        scales_of(
            rule, top[band], bad[band], worst, tile, bk, floats, steps, k, stored[band], multiplier[band],
            divisor[band], True, counts,
        )  # fmt: skip
