"""Numba kernels of scaled casts: blocks encoded with what their scales say. Knows no recipe and no policy.

x is float32 [M, K]; blocks of bm x bk elements tile it from the top left, tails smaller; a grid [gm, gk] has one
entry a block. Every constant and every step is wrapped, as in ``qsim.codec.numba_kernels``; indices into an array are
unsigned where a loop must stay free of the test for negative ones. counts is int64 [5]: saturated, flushed, nan, inf,
zero_scale (``BlockCounts``); kernels add to it where ``counting``, in a loop of its own over what is in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.codec.numba_kernels import (
    BLOCK,
    INF,
    MAGNITUDE,
    ONE,
    ZERO,
    ask_ahead,
    load,
    magnitude_code,
    signed,
    whole_code,
)
from qsim.codec.scaled.measure_kernels import GROUP, larger, magnitude

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, U8, U32

_F4, _F8, _U1, _U4, _I8 = numba.float32, numba.float64, numba.uint8, numba.uint32, numba.int64
_BOOL = numba.boolean


@helper
def _encode_piece(source: Any, m: Any, k: Any, target: Any) -> None:
    """Codes of RN(source * m), m one number an element; at most BLOCK elements.

    The plain loop is right for finite products of a format with -0; else the piece is gone over again.
    """
    top = MAGNITUDE
    if k[7] != ZERO:
        top = ZERO
        for i in range(source.size):
            y = np.float32(np.float32(source[i] * m[i])).view(np.uint32)
            mag = np.uint32(y & MAGNITUDE)
            top = larger(top, mag)
            target[i] = np.uint8(signed(magnitude_code(mag, k), y, k))
    if top >= INF:
        for i in range(source.size):
            x_bits = np.float32(source[i]).view(np.uint32)
            x_mag = np.uint32(x_bits & MAGNITUDE)
            endless = (np.float32(m[i]).view(np.uint32) == INF) & (x_mag == ZERO)  # 0 * Inf: a zero stays a zero
            y = x_bits if endless else np.float32(np.float32(source[i] * m[i])).view(np.uint32)
            # The sign of a NaN made by arithmetic differs between processors, so only x's own NaN has one.
            nan_sign = np.uint32(x_bits >> np.uint32(31)) if x_mag > INF else ZERO
            target[i] = np.uint8(whole_code(y, nan_sign, k))


@helper
def _count_piece(source: Any, m: Any, k: Any, counts: Any) -> None:
    """Add what ``_encode_piece`` does to these elements: saturated, flushed, nan, inf."""
    saturated, flushed, nan, inf = ZERO, ZERO, ZERO, ZERO
    for i in range(source.size):
        mag, x_mag = magnitude(np.float32(source[i] * m[i])), magnitude(source[i])
        saturated = np.uint32(saturated + (ONE if (mag >= k[4]) & (mag <= INF) & (x_mag < INF) else ZERO))
        flushed = np.uint32(flushed + (ONE if (mag <= k[5]) & (x_mag != ZERO) else ZERO))
        nan = np.uint32(nan + (ONE if x_mag > INF else ZERO))
        inf = np.uint32(inf + (ONE if x_mag == INF else ZERO))
    counts[0] += np.int64(saturated)
    counts[1] += np.int64(flushed)
    counts[2] += np.int64(nan)
    counts[3] += np.int64(inf)


@helper
def _encode_exact(source: Any, divisor: Any, full_range: Any, k: Any, target: Any, counts: Any) -> None:
    """E2M1 codes of source * full_range / divisor, the exact quotient rounded once (nearest even, saturating).

    Both sides are exact in float64 (24 + 5 and 24 + 4 bits). A quotient that is no threshold of E2M1 (3 bits)
    differs from it by 2^-32 of it or more, so its float64 rounding lies on the same side; one that is, is exact.
    divisor 0, a scale of 0: codes 0 without sign. divisor NaN, a poisoned block: the code of NaN.
    """
    for i in range(source.size):
        x = source[i]
        bits = np.float32(x).view(np.uint32)
        mag = np.uint32(bits & MAGNITUDE)
        a = np.float64(np.float64(np.float64(abs(x)) * full_range) / divisor) if divisor != 0.0 else 0.0
        low = np.uint8(a > 0.25) + np.uint8(a >= 0.75) + np.uint8(a > 1.25) + np.uint8(a >= 1.75)
        code = np.uint8(low + np.uint8(a > 2.5) + np.uint8(a >= 3.5) + np.uint8(a > 5.0))
        if divisor > 0.0:
            code = np.uint8(code | np.uint8(np.uint32(bits >> np.uint32(28)) & np.uint32(8)))
        if a != a:
            code = np.uint8(k[9] if (mag > INF) & (bits > MAGNITUDE) else k[8])
        target[i] = code
        counts[0] += np.int64(1) if a >= 7.0 else np.int64(0)
        counts[1] += np.int64(1) if (a <= 0.25) & (mag != ZERO) else np.int64(0)
        counts[2] += np.int64(1) if mag > INF else np.int64(0)
        counts[3] += np.int64(1) if mag == INF else np.int64(0)


@helper
def _spread(m: Any, start: Any, stop: Any, bk: Any, spread: Any) -> Any:
    """The multiplier of every element start..stop-1 of a row; True where one of them is 0."""
    zero = False
    if bk == 1:
        for i in range(stop - start):
            spread[i] = m[start + i]
            zero = zero | (spread[i] == np.float32(0))
        return zero
    for b in range(start // bk, (stop - 1) // bk + 1):
        value = m[b]
        zero = zero | (value == np.float32(0))
        first, last = max(b * bk, start) - start, min((b + 1) * bk, stop) - start
        whole = (last - first) // GROUP
        for group in range(whole):
            at = np.uint64(first + group * GROUP)
            for i in range(GROUP):
                spread[at + np.uint64(i)] = value
        for i in range(first + whole * GROUP, last):
            spread[i] = value
    return zero


@helper
def _encode_row(
    x: Any, bk: Any, m: Any, d: Any, full_range: Any, k: Any, spread: Any, line: Any, counting: Any, counts: Any
) -> None:
    """Codes of one row into ``line``; block b has the multiplier m[b], or the divisor d[b] where d is not empty.

    m = 0, a scale of 0, gives codes 0 without sign. spread: scratch float32 [BLOCK], the multiplier of every
    element, so that a short block needs no loop of its own.
    """
    if d.size:
        for start in range(0, x.size, bk):
            stop = min(start + bk, x.size)
            _encode_exact(x[start:stop], d[start // bk], full_range, k, line[start:stop], counts)
        return
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        ask_ahead(x, start)
        zero = _spread(m, start, stop, bk, spread)
        _encode_piece(x[start:stop], spread, k, line[start:stop])
        if counting:
            _count_piece(x[start:stop], spread, k, counts)
        if zero:
            for i in range(start, stop):
                if m[i // bk] == np.float32(0):
                    line[i] = np.uint8(0)


@helper
def _pack_row(line: Any, packed: Any) -> None:
    """Two codes a byte, even element low; an odd tail is padded with 0."""
    pairs = line.size // 2
    for j in range(pairs):
        packed[j] = np.uint8(line[2 * j] | np.uint8(line[2 * j + 1] << np.uint8(4)))
    if line.size % 2:
        packed[pairs] = line[line.size - 1]


@kernel(
    read(_F4, 2), _I8, _I8, read(_F4, 2), read(_F8, 2), _F8, read(_U4, 1), _BOOL, _BOOL, write(_U1, 2), write(_I8, 1)
)
def encode_blocks(
    x: F32,
    bm: int,
    bk: int,
    multiplier: F32,
    divisor: F64,
    full_range: float,
    constants: U32,
    packed: bool,
    counting: bool,
    codes: U8,
    counts: I64,
) -> None:
    """Codes of RN(x * multiplier of its block), or of the exact quotient where a divisor is given.

    multiplier [gm, gk]; divisor [gm, gk] or [gm, 0] for none; codes [M, K], or [M, (K + 1) // 2] where packed.
    """
    k = load(constants)
    spread = np.empty(BLOCK, np.float32)
    line = np.empty(x.shape[1] if packed else 0, np.uint8)
    for row in range(x.shape[0]):
        m, d = multiplier[row // bm], divisor[row // bm]
        into = line if packed else codes[row]
        _encode_row(x[row], bk, m, d, full_range, k, spread, into, counting, counts)
        if packed:
            _pack_row(line, codes[row])
