"""Numba kernels of the order-independent sums behind a mean. Knows no format and no shape rule.

x is viewed as [rows, L]; row p adds to slot row slot_of[p] of the results [slots, Ls], Ls 1 or L.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, stretch, write
from qsim.codec.numba_kernels import INF, MAGNITUDE, ZERO
from qsim.codec.rows_kernels import SPAN, ask_ahead_of_span

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I32, I64, U32

RINT64 = np.float64(6755399441055744.0)  # 1.5 * 2^52: adding it leaves rint(v) in the low bits, |v| < 2^51
RINT64_BITS = np.int64(0x4338000000000000)

_F4, _F8, _U4 = numba.float32, numba.float64, numba.uint32
_I4, _I8 = numba.int32, numba.int64


@helper
def _top_of(source: Any) -> Any:
    """The largest magnitude of a row, NaN and Inf included."""
    best = ZERO
    for start in range(0, source.size, SPAN):
        ask_ahead_of_span(source, start)
        part = stretch(source, start, min(SPAN, source.size - start))
        for i in range(part.size):
            best = np.uint32(max(np.int32(best), np.int32(np.uint32(part[i] & MAGNITUDE))))
    return best


@helper
def _finite_part(source: Any) -> Any:
    """(largest finite magnitude, number of finite elements) of a row with NaN or Inf."""
    best, finite = ZERO, np.int64(0)
    for i in range(source.size):
        mag = np.uint32(source[i] & MAGNITUDE)
        best = max(best, mag if mag < INF else ZERO)
        finite += np.int64(1) if mag < INF else np.int64(0)
    return best, finite


@helper
def _one_a_row(x_bits: U32, slot_of: I64, top: U32, count: I64) -> None:
    """``sums_amax`` where a row has one slot."""
    for row in range(x_bits.shape[0]):
        source = stretch(x_bits, row * x_bits.shape[1], x_bits.shape[1])
        best, finite = _top_of(source), np.int64(source.size)
        if best >= INF:
            best, finite = _finite_part(source)
        top[slot_of[row], 0] = max(top[slot_of[row], 0], best)
        count[slot_of[row], 0] += finite


@helper
def _one_an_element(x_bits: U32, slot_of: I64, top: U32, count: I64) -> None:
    """``sums_amax`` where an element of a row has a slot of its own."""
    for row in range(x_bits.shape[0]):
        source = stretch(x_bits, row * x_bits.shape[1], x_bits.shape[1])
        slots, counts = top[slot_of[row]], count[slot_of[row]]
        for i in range(source.size):
            mag = np.uint32(source[i] & MAGNITUDE)
            slots[i] = max(slots[i], mag if mag < INF else ZERO)
            counts[i] += np.int64(1) if mag < INF else np.int64(0)


@kernel(read(_U4, 2), read(_I8, 1), write(_U4, 2), write(_I8, 2))
def sums_amax(x_bits: U32, slot_of: I64, top: U32, count: I64) -> None:
    """Largest finite magnitude (as bits) and number of finite elements of every slot.

    x_bits [rows, L]; row p adds to slot row slot_of[p] of top, count [slots, Ls], Ls 1 or L; they are 0 before.
    Where each element has a slot, all are taken for finite, and gone over again where one is not.
    """
    rows, length = x_bits.shape
    if top.shape[1] == 1:
        _one_a_row(x_bits, slot_of, top, count)
        return
    rows_of_slot, best = np.zeros(top.shape[0], np.int64), ZERO
    for row in range(rows):
        rows_of_slot[slot_of[row]] += np.int64(1)
        source, slots = stretch(x_bits, row * length, length), stretch(top, slot_of[row] * length, length)
        for i in range(source.size):
            slots[i] = np.uint32(max(np.int32(slots[i]), np.int32(np.uint32(source[i] & MAGNITUDE))))
    for slot in range(top.shape[0]):
        best = max(best, _top_of(stretch(top, slot * length, length)))
    if best >= INF:
        top[:, :] = ZERO
        _one_an_element(x_bits, slot_of, top, count)
        return
    for slot in range(top.shape[0]):
        count[slot, :] = rows_of_slot[slot]


@kernel(read(_U4, 2), write(_I4, 2), write(_F8, 2))
def sums_scale(top: U32, exponent: I32, unit: F64) -> None:
    """exponent = floor(log2 amax) from bits, -149 for amax 0; unit = 2^(40 - exponent), exact."""
    for row in range(top.shape[0]):
        for i in range(top.shape[1]):
            amax = np.float64(np.uint32(top[row, i]).view(np.float32))  # a float32 subnormal becomes normal
            field = np.int64(np.float64(amax).view(np.int64) >> np.int64(52)) - np.int64(1023)
            k = max(field, np.int64(-149))  # the field of 0.0 gives -1023
            exponent[row, i] = np.int32(k)
            unit[row, i] = np.int64(np.int64(np.int64(1063) - k) << np.int64(52)).view(np.float64)


@helper
def _units(x: Any, unit: Any) -> Any:
    """rint(x * unit) as int64, ties to even; 0 for NaN and Inf. unit is a power of two, |x * unit| < 2^41.

    The product is exact in float64. Adding 1.5 * 2^52 rounds it to an integer (nearest even) in the low bits.
    """
    finite = np.uint32(np.float32(x).view(np.uint32) & MAGNITUDE) < INF
    v = np.float64(np.float64(x) * unit)
    n = np.int64(np.float64(np.float64(v + RINT64)).view(np.int64) - RINT64_BITS)
    return n if finite else np.int64(0)


@kernel(read(_F4, 2), read(_I8, 1), read(_F8, 2), write(_I8, 2))
def sums_total(x: F32, slot_of: I64, unit: F64, total: I64) -> None:
    """Add rint(x * unit) to the slots; shapes as in ``sums_amax``, unit [slots, Ls] = 2^(40 - exponent)."""
    rows, length = x.shape
    row = 0
    while row < rows:
        slot, at = slot_of[row], row * length
        source = stretch(x, at, length)
        if total.shape[1] == 1:
            u, acc = unit[slot, 0], np.int64(0)
            for i in range(length):
                acc += _units(source[i], u)
            total[slot, 0] += acc
            row += 1
            continue
        slot_unit, slot_total = stretch(unit, slot * length, length), stretch(total, slot * length, length)
        if (row + 4 <= rows) and (slot_of[row + 1] == slot) & (slot_of[row + 2] == slot) & (slot_of[row + 3] == slot):
            second, third = stretch(x, at + length, length), stretch(x, at + 2 * length, length)
            fourth = stretch(x, at + 3 * length, length)  # the slots are read and written once for four
            for i in range(length):
                u = slot_unit[i]
                first_two = _units(source[i], u) + _units(second[i], u)
                slot_total[i] += first_two + (_units(third[i], u) + _units(fourth[i], u))
            row += 4
        else:
            for i in range(length):
                slot_total[i] += _units(source[i], slot_unit[i])
            row += 1


@kernel(read(_I8, 1), read(_I4, 1), read(_I8, 1), write(_F4, 1))
def sums_mean(total: I64, exponent: I32, count: I64, mean: F32) -> None:
    """``qsim.codec.means.mean_of``, slot by slot: RN32(RN64(RN64(total) / count) * 2^(exponent - 40)), never -0."""
    for i in range(total.size):
        unit = np.int64(np.int64(np.int64(exponent[i]) + np.int64(983)) << np.int64(52)).view(np.float64)
        quotient = np.float64(np.float64(total[i]) / np.float64(max(count[i], np.int64(1))))
        found = np.float64(quotient * unit) if count[i] != 0 else np.float64(0)
        mean[i] = np.float32(np.float32(found) + np.float32(0))


@kernel(read(_I8, 1), read(_I4, 1), read(_I4, 1), write(_I8, 1))
def sums_merge(total: I64, exponent: I32, common: I32, merged: I64) -> None:
    """Add rint(total / 2^(common - exponent)), ties to even, to ``merged``: one part of ``means.merge_sums``.

    common >= exponent. |total| <= 2^63, so from a shift of 64 on the quotient is at most one half, a tie to 0.
    """
    for i in range(total.size):
        shift = np.int64(np.int64(common[i]) - np.int64(exponent[i]))
        s = min(shift, np.int64(63))
        floor = np.int64(total[i] >> s)
        rest = np.int64(total[i] - np.int64(floor << s))
        half = np.int64(np.int64(1) << max(s - np.int64(1), np.int64(0)))
        up = (s > 0) and (rest > half or (rest == half and floor & np.int64(1) == 1))
        if shift <= 63:
            merged[i] += floor + (np.int64(1) if up else np.int64(0))
