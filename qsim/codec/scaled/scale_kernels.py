"""Numba kernels of scale rules: from a block's amax to its stored scale. Knows no policy of elements.

A rule is a number: 0 Float32Scale, 1 PowerOfTwoScale, then TwoLevelScale by order: 2 exact, 3 te, 4 torchao,
5 four over six (``recipes``, where each is defined). floats is float32 [9]:
    0 fmt.max   1 s_enc   2 s_dec   3 k = s_enc * fl(1/6)   4 pt = g / F   5 F   6 g   7 1 / pt   8 scale_max
steps is int64 [3]: carry, offset of ``exponent_rule``; 1 where four over six sums absolute errors, 0 squared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim.codec.jit import helper
from qsim.codec.numba_kernels import MAGNITUDE, QUIET_NAN, ZERO, magnitude_code
from qsim.codec.scaled.measure_kernels import BAD_NAN, top_of

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
def _number(x: Any, center: Any, row: Any, i: Any, j: Any) -> Any:
    """x[i, j] less its centre; x begins at ``row`` of center [1 or M, 1 or K], which may be empty."""
    if center.size == 0:
        return np.float32(x[i, j])
    return np.float32(x[i, j] - center[min(row + i, center.shape[0] - 1), min(j, center.shape[1] - 1)])


@helper
def _error(x: Any, e: Any, d8: Any, floats: Any, absolute: Any) -> Any:
    """The error of one number under one map of four over six."""
    a = abs(np.float32(x * e))
    # The value of the E2M1 code: nearest even, saturating at 6. (A block with NaN or Inf never comes here.)
    q = np.float32(0.5) * np.float32(np.float32(a > np.float32(0.25)) + np.float32(a >= np.float32(0.75)))
    q = np.float32(q + np.float32(0.5) * np.float32(a > np.float32(1.25)))
    q = np.float32(q + np.float32(0.5) * np.float32(a >= np.float32(1.75)))
    q = np.float32(q + np.float32(a > np.float32(2.5)))
    q = np.float32(q + np.float32(a >= np.float32(3.5)))
    q = np.float32(q + np.float32(2) * np.float32(a > np.float32(5.0)))
    q = -q if x < _NOTHING else q
    diff = np.float32(np.float32(np.float32(np.float32(q * d8) * floats[6]) / floats[5]) - x)
    return abs(diff) if absolute else np.float32(diff * diff)


@helper
def _odd(v: Any) -> Any:
    """A positive float64 in the normal range of float32 as float32, rounded to odd."""
    near = np.float32(v)
    back = np.float64(near)
    u = np.uint32(np.float32(near).view(np.uint32) - (np.uint32(1) if back > v else ZERO))
    return np.uint32(u | (np.uint32(1) if back != v else ZERO)).view(np.float32)


@helper
def _four_over_six(
    amax: Any, x: Any, first: Any, last: Any, center: Any, row: Any, floats: Any, absolute: Any, k: Any
) -> Any:
    """(scale code, multiplier) of the map of columns first:last with the smaller error; a tie goes to 6.

    Errors are summed in float32, in ascending order.
    """
    base = np.float32(np.float32(amax / _SIX) * floats[1])
    code_6, code_4 = _e4m3(base, k), _e4m3(np.float32(base * np.float32(1.5)), k)
    d6, d4 = _e4m3_value(code_6), _e4m3_value(code_4)
    e6, e4 = _inverse(d6, floats[2]), _inverse(d4, floats[2])
    error_6, error_4 = _NOTHING, _NOTHING
    for i in range(x.shape[0]):
        for j in range(first, last):
            v = _number(x, center, row, i, j)
            error_6 = np.float32(error_6 + _error(v, e6, d6, floats, absolute))
            error_4 = np.float32(error_4 + _error(v, e4, d4, floats, absolute))
    return (code_4, e4) if error_4 < error_6 else (code_6, e6)


@helper
def _each_rule(
    rule: Any, top: Any, x: Any, center: Any, row: Any, bk: Any, floats: Any, steps: Any, k: Any, codes: Any, m: Any,
    d: Any,
) -> None:  # fmt: skip
    """Scale code (of rule 0 none), multiplier (and divisor of the exact rule) of finite blocks: one loop a rule."""
    if rule == 0:
        for b in range(top.size):
            scale = _capped(np.float32(floats[0] / np.uint32(top[b]).view(np.float32)))
            m[b] = scale if top[b] > ZERO else _ONE
    elif rule == 1:
        carry, offset = np.uint32(steps[0]), np.int32(steps[1])
        for b in range(top.size):
            carried = np.int32(np.int32(np.uint32(np.uint32(top[b] + carry) >> np.uint32(23))) + offset)
            code = np.uint32(max(np.int32(0), min(np.int32(254), carried)))
            codes[b] = np.uint8(code)
            m[b] = _power(code)
    elif rule == EXACT_RULE:
        for b in range(top.size):
            # amax * scale_max / g in float64, as in ``kernels._encode_exact``; rounded to odd, then once to E4M3.
            wide = np.float64(np.uint32(top[b]).view(np.float32))
            quotient = np.float64(np.float64(wide * np.float64(floats[8])) / np.float64(floats[6]))
            code = _e4m3(_odd(quotient), k) if (top[b] > ZERO) & (floats[6] > _NOTHING) else ZERO
            codes[b] = np.uint8(code)
            m[b] = _ONE if code > ZERO else _NOTHING
            d[b] = np.float64(np.float64(floats[6]) * np.float64(_e4m3_value(code)))  # 0 where the scale is
    elif rule == 3:
        for b in range(top.size):
            code = _e4m3(np.float32(np.uint32(top[b]).view(np.float32) * floats[3]), k)
            codes[b] = np.uint8(code)
            m[b] = _inverse(_e4m3_value(code), floats[2])
    elif rule == 4:
        for b in range(top.size):
            ratio = np.float32(np.float32(np.uint32(top[b]).view(np.float32) / _SIX) / floats[4])
            ratio = _LEAST if top[b] == ZERO else ratio  # 0 / 0 where the whole tensor is zero
            code = _e4m3(ratio if ratio > _LEAST else _LEAST, k)
            codes[b] = np.uint8(code)
            m[b] = _ONE if top[b] == ZERO else np.float32(floats[7] / _e4m3_value(code))
    else:
        for b in range(top.size):
            amax = np.uint32(top[b]).view(np.float32)
            first, last = b * bk, min((b + 1) * bk, x.shape[1])
            code, m[b] = _four_over_six(amax, x, first, last, center, row, floats, steps[2] != 0, k)
            codes[b] = np.uint8(code)


@helper
def _power(code: Any) -> Any:
    """2^(127 - code), the reciprocal of an E8M0 scale; 2^-127 is a subnormal."""
    field = np.uint32(np.uint32(254) - code)
    return np.uint32(np.uint32(field << np.uint32(23)) if field != ZERO else np.uint32(0x00400000)).view(np.float32)


@helper
def _bad_block(rule: Any, bad: Any) -> Any:
    """(scale code, multiplier) of a block with Inf (1) or NaN (2) in it."""
    nan = np.uint32(QUIET_NAN).view(np.float32)
    if rule == 0:
        return ZERO, _ONE
    if rule == 1:
        return (np.uint32(255), nan) if bad == BAD_NAN else (np.uint32(254), _power(np.uint32(254)))
    return _POISON, nan


@helper
def scales_of(
    rule: Any, top: Any, bad: Any, x: Any, center: Any, row: Any, bk: Any, floats: Any, steps: Any, k: Any,
    codes: Any, m: Any, d: Any, counts: Any,
) -> None:  # fmt: skip
    """Of one row of measured blocks: scale codes, multipliers, divisors of the exact rule; zero_scale is counted.

    top [n]: bits of the largest finite magnitudes; bad [n]: 0, 1 (Inf), 2 (NaN). x: the rows of the blocks, from
    ``row`` of center on. k: constants of E4M3FN, saturating. codes [n], but for rule 0, whose stored scale is the
    multiplier; m [n]; d [n] for the exact rule, else empty.
    """
    _each_rule(rule, top, x, center, row, bk, floats, steps, k, codes, m, d)
    if top_of(bad) > ZERO:
        for b in range(top.size):
            if bad[b] > ZERO:
                code, m[b] = _bad_block(rule, bad[b])
                if rule != 0:
                    codes[b] = np.uint8(code)
                if d.size:
                    d[b] = np.float64(m[b])
    zero = ZERO
    for b in range(top.size):
        nothing = (top[b] == ZERO) & (bad[b] == ZERO)
        zero = np.uint32(zero + (np.uint32(1) if nothing | (m[b] == _NOTHING) else ZERO))
    counts[4] += np.int64(zero)
