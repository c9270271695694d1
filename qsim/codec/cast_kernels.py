"""Numba kernel of a cast and its way back in one pass: codes, counts, decoded values. Knows no policy, no shape rule.

The contract of ``numba_kernels`` holds. Rounding has the value of a code at hand before it has the code: what one
float32 addition rounded, less its anchor. So the way back costs a subtraction, a product and a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.decode_kernels import decode_block, load_decoder
from qsim.codec.jit import helper, kernel, read, read_only, stretch, write
from qsim.codec.numba_kernels import (
    INF,
    LOW5,
    MAGNITUDE,
    ONE,
    SIGN,
    ZERO,
    is_finite,
    load,
    quantize_block,
    signed,
)
from qsim.codec.rows_kernels import SPAN, ask_ahead_of_span, centers_of, rows_together, spread_centers

if TYPE_CHECKING:
    from qsim.arrays import F32, I64, U8, U32

_F4, _U1, _U4, _I8 = numba.float32, numba.uint8, numba.uint32, numba.int64


@helper
def _cast_plain(x: Any, c: Any, s: Any, k: Any) -> Any:
    """``_quantize_plain``, and the value of the code: the steps of ``magnitude_code``, with what they round kept.

    The rounded sum and its anchor are multiples of one unit and less than a factor of 2 apart: their difference is
    exact. Right where overflow saturates, for else the code that stands for it has another value.
    """
    r = np.float32(x - c)
    y = np.float32(np.float32(r * s)).view(np.uint32)
    r_mag, y_mag = np.uint32(np.float32(r).view(np.uint32) & MAGNITUDE), np.uint32(y & MAGNITUDE)
    saturated = ONE if np.int32(y_mag) >= np.int32(k[4]) else ZERO
    flushed = ONE if (np.int32(y_mag) <= np.int32(k[5])) & (r_mag != ZERO) else ZERO
    m = np.uint32(min(np.int32(y_mag), np.int32(k[3])))
    field = np.uint32(max(np.int32(m & INF), np.int32(k[1])))
    anchor = np.uint32(field + k[2]).view(np.float32)
    rounded = np.float32(np.uint32(m).view(np.float32) + anchor)
    code = np.uint32(np.uint32(np.float32(rounded).view(np.uint32)) + np.uint32(field >> np.uint32(k[0] & LOW5)))
    magnitude = np.uint32(np.float32(np.float32(rounded - anchor)).view(np.uint32))
    value = np.uint32(magnitude | np.uint32(y & SIGN)).view(np.float32)
    return signed(code, y, k), r_mag, saturated, flushed, value


@helper
def _cast_block(source: Any, centers: Any, added: Any, s: Any, d: Any, k: Any, target: Any, out: Any) -> Any:
    """Codes of one block into ``target``, what they decode to into ``out``; as ``quantize_block`` returns.

    Right where the magnitude that it returns is finite: then so is every x and every centre, and no NaN can arise.
    """
    top, saturated, flushed = ZERO, ZERO, ZERO
    if centers.size == 1:
        c, a = centers[0], added[0]
        for i in range(source.size):
            code, mag, is_sat, is_flush, value = _cast_plain(source[i], c, s, k)
            target[i] = np.uint8(code)
            out[i] = np.float32(np.float32(value * d) + a)
            top = np.uint32(max(np.int32(top), np.int32(mag)))
            saturated = np.uint32(saturated + is_sat)
            flushed = np.uint32(flushed + is_flush)
    else:
        for i in range(source.size):
            code, mag, is_sat, is_flush, value = _cast_plain(source[i], centers[i], s, k)
            target[i] = np.uint8(code)
            out[i] = np.float32(np.float32(value * d) + added[i])
            top = np.uint32(max(np.int32(top), np.int32(mag)))
            saturated = np.uint32(saturated + is_sat)
            flushed = np.uint32(flushed + is_flush)
    return top, np.int64(saturated), np.int64(flushed), np.int64(0), np.int64(0)


@kernel(
    read(_F4, 3), read(_F4, 2), read(_F4, 2), read(_I8, 1), read(_F4, 1), read(_F4, 1),
    read(_U4, 1), read(_U4, 1), read(_F4, 1), write(_U1, 3), write(_F4, 3), write(_F4, 1), write(_I8, 2),
)  # fmt: skip
def quantize_and_decode(
    x: F32, center: F32, added: F32, row_of: I64, scale: F32, descale: F32,
    encoder: U32, decoder: U32, table: F32, codes: U8, out: F32, amax: F32, counts: I64,
) -> None:  # fmt: skip
    """``numba_kernels.quantize``, and ``decode_kernels.decode`` of its codes with ``descale`` and ``added``.

    added: the centre again, or without one the -0 that changes nothing where ``center`` is the +0.
    """
    k, back = load(encoder), load_decoder(decoder)
    replicas, rows, length = x.shape
    group = rows_together(rows, length)
    beside, owners = np.empty(group * length if group > 1 else 0, np.float32), np.full(group, -1, np.int64)
    product = np.empty(table.size, np.float32)
    saturates = (back[5] != ZERO) and np.uint32(k[3]) == np.float32(table[back[5]]).view(np.uint32)
    for replica in range(replicas):
        s, d = scale[replica], descale[replica]
        plain = saturates and is_finite(s) and is_finite(d)
        for code in range(table.size):
            product[code] = np.float32(table[code] * d)
        top, saturated, flushed, nan, inf = ZERO, np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for row in range(replica * rows, (replica + 1) * rows, group):
            size = min(group, (replica + 1) * rows - row) * length
            if group > 1:
                spread_centers(center, row_of, row, owners, length, beside)
            for start in range(0, size, SPAN):
                at, many = row * length + start, min(SPAN, size - start)
                ask_ahead_of_span(x, at)
                off = read_only(beside[:many]) if group > 1 else centers_of(center, row_of[row], start, many)
                on = read_only(beside[:many]) if group > 1 else centers_of(added, row_of[row], start, many)
                source, target, into = stretch(x, at, many), stretch(codes, at, many), stretch(out, at, many)
                found = INF, np.int64(0), np.int64(0), np.int64(0), np.int64(0)
                if plain:
                    found = _cast_block(source, off, on, s, d, k, target, into)
                if found[0] >= INF:
                    found = quantize_block(source, off, s, k, target)
                    decode_block(target, on, d, back, product, into)
                top = max(top, found[0])
                saturated, flushed = saturated + found[1], flushed + found[2]
                nan, inf = nan + found[3], inf + found[4]
        amax[replica] = np.uint32(top).view(np.float32)
        counts[0, replica], counts[1, replica] = saturated, flushed
        counts[2, replica], counts[3, replica] = nan, inf
