"""Numba kernels of the tensor-core models. Know no format, no scale format and no model by name.

A product's value is exact in the working type (float32 where its few bits allow, else float64), and so are the powers
of two beside it, the quotient by 2^(E - F), the truncated terms and their sum: no step rounds but where the model does.
What is not finite needs no case of its own: its power is 0, so it takes no part in E, and arithmetic gives Inf and NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import F32, F64

WIDTH = 256
"""Outputs whose chains run side by side."""

_F4, _F8, _I8, _BOOL = numba.float32, numba.float64, numba.int64, numba.boolean

FRACTION = 52
FIELD = np.int64(0x7FF0000000000000)
LEAST_F32, LEAST_F16 = np.float64(2.0**-126), np.float64(2.0**-14)
TINY_F32, PER_TINY_F32 = np.float64(2.0**-149), np.float64(2.0**149)
END_F32, END_F16 = np.float64(2.0**128), np.float64(65536.0)
ZERO, ONE, INFINITE = np.float64(0), np.float64(1), np.float64(np.inf)


@helper
def _power_of(c: Any, half: Any) -> Any:
    """2^exponent of an accumulator, clamped at its lowest binade; 0 for 0, Inf and NaN."""
    field = np.int64(np.float64(c).view(np.int64) & FIELD)
    power = np.int64(field).view(np.float64)
    least = LEAST_F16 if half else LEAST_F32
    power = power if power > least else least
    return power if (c != ZERO) & (field < FIELD) else ZERO


@helper
def _nearest_half(v: Any) -> Any:
    """v rounded to float16, ties to even; v is exact."""
    power = np.int64(np.float64(abs(v)).view(np.int64) & FIELD).view(np.float64)
    unit = np.float64((power if power > LEAST_F16 else LEAST_F16) * np.float64(2.0**-10))
    rounded = np.float64(np.rint(v / unit) * unit)
    if abs(rounded) >= END_F16:
        rounded = np.float64(np.copysign(INFINITE, v))
    return np.float64(rounded + ZERO) if abs(v) < INFINITE else v


@helper
def _result(total: Any, unit: Any, keep: Any, half: Any) -> Any:
    """total * unit as the step leaves it: to nearest float16, or its mantissa cut by the mask ``keep``, a float32."""
    if half:
        return _nearest_half(np.float64(total * unit))
    cut = np.int64(np.float64(total).view(np.int64) & keep).view(np.float64) if abs(total) < INFINITE else total
    v = np.float64(cut * unit)
    if abs(v) < LEAST_F32:
        v = np.float64(np.trunc(np.float64(v * PER_TINY_F32)) * TINY_F32)
    if abs(v) >= END_F32:
        v = np.float64(np.copysign(INFINITE, v))
    return np.float64(v + ZERO)  # an exact 0 is +0


@helper
def _late(c: Any, s: Any, half: Any) -> Any:
    """RN(c + s)."""
    if half:
        return _nearest_half(np.float64(c + s))
    return np.float64(np.float32(np.float32(np.float32(c) + np.float32(s)) + np.float32(0)))


@helper
def _larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@helper
def _step(
    a: Any, pa: Any, b: Any, pb: Any, first: Any, last: Any, start: Any, width: Any, c: Any, fraction: Any, keep: Any,
    half: Any, zero: Any, one: Any, top: Any, unit: Any, total: Any,
) -> None:  # fmt: skip
    """One step for outputs start..start+width-1 of a row: c [WIDTH] is what was and what is. zero, one: of the type.

    a, pa [K], b, pb [K, N], of a multiple of 4 k; top, unit, total: scratch [WIDTH]; fraction: 2^F.
    """
    for j in range(width):
        top[j] = _power_of(c[j], half)
    for k in range(first, last, 4):
        p0, p1, p2, p3 = pa[k], pa[k + 1], pa[k + 2], pa[k + 3]
        r0, r1, r2, r3 = (
            pb[k, start : start + width], pb[k + 1, start : start + width], pb[k + 2, start : start + width],
            pb[k + 3, start : start + width],
        )  # fmt: skip
        for j in range(r0.size):
            low, high = _larger(p0 * r0[j], p1 * r1[j]), _larger(p2 * r2[j], p3 * r3[j])
            top[j] = _larger(top[j], _larger(low, high))
    for j in range(width):
        unit[j] = fraction / top[j] if top[j] > zero else one
        total[j] = np.trunc(c[j] * unit[j])
    for k in range(first, last, 4):
        x0, x1, x2, x3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        r0, r1, r2, r3 = (
            b[k, start : start + width], b[k + 1, start : start + width], b[k + 2, start : start + width],
            b[k + 3, start : start + width],
        )  # fmt: skip
        for j in range(r0.size):
            u = unit[j]
            low = np.trunc((x0 * r0[j]) * u) + np.trunc((x1 * r1[j]) * u)
            high = np.trunc((x2 * r2[j]) * u) + np.trunc((x3 * r3[j]) * u)
            total[j] = total[j] + (low + high)  # exact: in any order
    for j in range(width):
        c[j] = _result(np.float64(total[j]), np.float64(ONE / np.float64(unit[j])), keep, half)


@helper
def _row(
    a: Any, pa: Any, b: Any, pb: Any, first: Any, last: Any, products: Any, depth: Any, late: Any, fraction: Any,
    keep: Any, half: Any, zero: Any, one: Any, out: Any, s: Any, c: Any, top: Any, unit: Any, total: Any,
) -> None:  # fmt: skip
    """Chains of one row of outputs, out [N] float64 from and to; an instruction is ``depth`` k where c enters late."""
    for start in range(0, out.size, WIDTH):
        width = min(WIDTH, out.size - start)
        for j in range(width):
            c[j] = out[start + j]
        for at in range(first, last, depth):
            end = min(at + depth, last)
            if late:
                for j in range(width):
                    s[j] = c[j]
                    c[j] = zero
            for step in range(at, end, products):
                stop = min(step + products, end)
                _step(a, pa, b, pb, step, stop, start, width, c, fraction, keep, half, zero, one, top, unit, total)
            if late:
                for j in range(width):
                    c[j] = _late(np.float64(s[j]), np.float64(c[j]), half)
        for j in range(width):
            out[start + j] = c[j]


@kernel(
    read(_F8, 2), read(_F8, 2), read(_F8, 2), read(_F8, 2), _I8, _I8, _I8, _I8, _BOOL, _F8, _I8, _BOOL, write(_F8, 2)
)
def chains(
    a: F64, pa: F64, b: F64, pb: F64, first: int, last: int, products: int, depth: int, late: bool, fraction: float,
    result: int, half: bool, out: F64,
) -> None:  # fmt: skip
    """out [M, N]: c on entry, on return the chain over k first..last-1 of a [M, K] and b [K, N] that began with it.

    pa, pb: 2^exponent of every element, 0 for zeros and what is not finite. fraction: 2^F. out: float32 (or float16)
    values; NaN is any NaN.
    """
    keep = np.int64(~((np.int64(1) << np.int64(FRACTION - result)) - np.int64(1)))
    s, c = np.zeros(WIDTH), np.zeros(WIDTH)
    top, unit, total = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for m in range(out.shape[0]):
        _row(
            a[m], pa[m], b, pb, first, last, products, depth, late, fraction, keep, half, ZERO, ONE, out[m], s, c,
            top, unit, total,
        )  # fmt: skip


@kernel(read(_F8, 2), read(_F8, 2), read(_F8, 3), read(_F8, 3), _I8, _I8, _BOOL, _F8, _I8, _BOOL, write(_F8, 2))
def paired_chains(
    a: F64, pa: F64, b: F64, pb: F64, products: int, depth: int, late: bool, fraction: float, result: int, half: bool,
    out: F64,
) -> None:  # fmt: skip
    """``chains`` of row r of a [R, K] with row r of b [R, K, 1] alone; out [R, 1]."""
    keep = np.int64(~((np.int64(1) << np.int64(FRACTION - result)) - np.int64(1)))
    s, c = np.zeros(WIDTH), np.zeros(WIDTH)
    top, unit, total = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for r in range(out.shape[0]):
        _row(
            a[r], pa[r], b[r], pb[r], 0, a.shape[1], products, depth, late, fraction, keep, half, ZERO, ONE, out[r],
            s, c, top, unit, total,
        )  # fmt: skip


@kernel(
    read(_F4, 2), read(_F4, 2), read(_F4, 2), read(_F4, 2), _I8, _I8, _I8, _I8, _BOOL, _F8, _I8, _BOOL, write(_F8, 2)
)
def narrow_chains(
    a: F32, pa: F32, b: F32, pb: F32, first: int, last: int, products: int, depth: int, late: bool, fraction: float,
    result: int, half: bool, out: F64,
) -> None:  # fmt: skip
    """``chains`` in float32, where products have few bits and every sum stays below 2^24 units."""
    keep = np.int64(~((np.int64(1) << np.int64(FRACTION - result)) - np.int64(1)))
    s, c = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    top, unit, total = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    zero, one = np.float32(0), np.float32(1)
    for m in range(out.shape[0]):
        _row(
            a[m], pa[m], b, pb, first, last, products, depth, late, np.float32(fraction), keep, half, zero, one,
            out[m], s, c, top, unit, total,
        )  # fmt: skip


@kernel(read(_F8, 2), read(_F8, 2), _I8, read(_F8, 2), read(_F8, 2), _I8, write(_F8, 2), write(_F8, 2))
def group_row(
    a: F64, b: F64, row: int, alpha: F64, beta: F64, group: int, terms: F64, powers: F64
) -> None:  # fmt: skip
    """Terms of grouped products of one row of outputs: terms, powers [K / group, N].

    a [M, K], b [K, N]; alpha [M, 2 * groups], beta [2 * groups, N]: values of the scales of every group, then their
    powers of two. A term is the exact sum of ``group`` products times both scales; its power is theirs, a zero's is 0.
    """
    groups, columns = terms.shape
    for g in range(groups):
        term, power = terms[g], powers[g]
        for j in range(columns):
            term[j] = ZERO
        for k in range(g * group, (g + 1) * group):
            x, line = a[row, k], b[k]
            for j in range(columns):
                term[j] += x * line[j]
        scale, own = alpha[row, g], alpha[row, groups + g]
        values, others = beta[g], beta[groups + g]
        for j in range(columns):
            term[j] = np.float64(term[j] * np.float64(scale * values[j]))
            power[j] = own * others[j] if (term[j] != ZERO) & (abs(term[j]) < INFINITE) else ZERO
