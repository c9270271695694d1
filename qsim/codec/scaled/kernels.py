"""The Numba kernel of scaled casts: blocks measured, scaled, encoded and packed. Knows no recipe and no policy.

x is float32 [M, K]; blocks of bm x bk elements tile it from the top left, tails smaller; a grid [gm, gk] has one
entry a block. Every constant and every step is wrapped, as in ``qsim.codec.numba_kernels``. counts is int64 [5]:
saturated, flushed, nan, inf, zero_scale (``BlockCounts``); the first four are added where ``counting``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, prefetch, read, read_only, write
from qsim.codec.lanes_kernels import (
    E2M1_TIES,
    LANES,
    count_lanes,
    encode_exact_lanes,
    encode_exact_packed_lanes,
    encode_lanes,
    encode_packed_lanes,
)
from qsim.codec.numba_kernels import AHEAD, INF, MAGNITUDE, ONE, ZERO, load, whole_code
from qsim.codec.scaled.measure_kernels import larger, measure_band, raise_band, subtract_center, top_of
from qsim.codec.scaled.scale_kernels import scales_of

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, U8, U32

_F4, _F8, _U1, _U4, _I8 = numba.float32, numba.float64, numba.uint8, numba.uint32, numba.int64
_BOOL = numba.boolean

PART = 2048
"""Elements of a row that are encoded, then counted; gone over again where one of them is no finite number."""


@helper
def _put(code: Any, codes: Any, i: Any, packed: Any) -> None:
    """Code of element i; in ascending order where two share a byte."""
    if not packed:
        codes[i] = np.uint8(code)
    elif i % 2 == 0:
        codes[i // 2] = np.uint8(code)
    else:
        codes[i // 2] = np.uint8(codes[i // 2] | np.uint8(np.uint8(code) << np.uint8(4)))


@helper
def _one(x: Any, factor: Any, k: Any, counts: Any) -> Any:
    """Code of RN(x * factor), whatever they are; counted. factor 0, a scale of 0, gives code 0 without sign."""
    x_bits, y = np.float32(x).view(np.uint32), np.float32(np.float32(x * factor)).view(np.uint32)
    x_mag, mag = np.uint32(x_bits & MAGNITUDE), np.uint32(y & MAGNITUDE)
    counts[0] += np.int64(1) if (mag >= k[4]) & (mag <= INF) & (x_mag < INF) else np.int64(0)
    counts[1] += np.int64(1) if (mag <= k[5]) & (x_mag != ZERO) else np.int64(0)
    counts[2] += np.int64(1) if x_mag > INF else np.int64(0)
    counts[3] += np.int64(1) if x_mag == INF else np.int64(0)
    endless = (np.float32(factor).view(np.uint32) == INF) & (x_mag == ZERO)  # 0 * Inf: a zero stays a zero
    # The sign of a NaN made by arithmetic differs between processors, so only x's own NaN has one.
    nan_sign = np.uint32(x_bits >> np.uint32(31)) if x_mag > INF else ZERO
    code = whole_code(x_bits if endless else y, nan_sign, k)
    return code if factor != np.float32(0) else ZERO


@helper
def _one_exact(x: Any, divisor: Any, full_range: Any, k: Any, counts: Any) -> Any:
    """E2M1 code of x * full_range / divisor, the exact quotient rounded once (nearest even, saturating); counted.

    ``_Lanes.exact_codes`` says why this is exact. divisor 0, a scale of 0: code 0 without sign. divisor NaN, a
    poisoned block: the code of NaN.
    """
    bits = np.float32(x).view(np.uint32)
    mag = np.uint32(bits & MAGNITUDE)
    a, code = np.float64(np.float64(abs(x)) * full_range), ZERO
    for tie in range(7):
        bound = np.float64(divisor * E2M1_TIES[tie])
        above = a >= bound if tie % 2 else a > bound
        code = np.uint32(code + (ONE if above & (divisor > 0.0) else ZERO))
    if divisor > 0.0:
        code = np.uint32(code | (np.uint32(bits >> np.uint32(28)) & np.uint32(8)))
    if (divisor != divisor) | (mag > INF):
        code = np.uint32(k[9] if (mag > INF) & (bits > MAGNITUDE) else k[8])
    counts[0] += np.int64(1) if (divisor > 0.0) & (a >= np.float64(divisor * 7.0)) else np.int64(0)
    small = (divisor == 0.0) | (a <= np.float64(divisor * 0.25))
    counts[1] += np.int64(1) if small & (mag != ZERO) & (mag < INF) else np.int64(0)
    counts[2] += np.int64(1) if mag > INF else np.int64(0)
    counts[3] += np.int64(1) if mag == INF else np.int64(0)
    return code


@helper
def _one_by_one(x: Any, first: Any, last: Any, factors: Any, k: Any, packed: Any, codes: Any, counts: Any) -> None:
    """Codes of any x[first:last] and any factor; factors: one for all, or one a column."""
    for i in range(first, last):
        _put(_one(x[i], factors[i if factors.size > 1 else 0], k, counts), codes, i, packed)


@helper
def _add_counts(both: Any, counts: Any) -> None:
    """What ``count_lanes`` returned, or the sum of less than 2^16 / LANES of them."""
    counts[0] += np.int64(both & np.uint32(0xFFFF))
    counts[1] += np.int64(both >> np.uint32(16))


@helper
def _encode_run(
    x: Any, origin: Any, ahead: Any, first: Any, blocks: Any, groups: Any, m: Any, b: Any, k: Any, packed: Any,
    counting: Any, codes: Any, counts: Any,
) -> None:  # fmt: skip
    """Codes of some blocks of ``groups`` times LANES elements from x[first] on, block b the first of them.

    Of less than 2^16 elements in all. See ``measure_band`` for origin and ahead.
    """
    odd, least, at = ZERO, np.float32(1), first
    if packed:
        for j in range(blocks):
            factor = m[b + j]
            least = min(least, factor)
            for _ in range(groups):
                prefetch(origin, at + ahead)
                odd = np.uint32(odd | encode_packed_lanes(x, at, factor, k, codes))
                at += LANES
    else:
        for j in range(blocks):
            factor = m[b + j]
            least = min(least, factor)
            for _ in range(groups):
                prefetch(origin, at + ahead)
                odd = np.uint32(odd | encode_lanes(x, at, factor, k, codes))
                at += LANES
    if (odd != ZERO) | (least == np.float32(0)):
        for j in range(blocks):
            at = first + j * groups * LANES
            _one_by_one(x, at, at + groups * LANES, m[b + j : b + j + 1], k, packed, codes, counts)
    elif counting:
        both, at = ZERO, first
        for j in range(blocks):
            for _ in range(groups):
                both = np.uint32(both + count_lanes(x, at, m[b + j], k))
                at += LANES
        _add_counts(both, counts)


@helper
def _encode_block(
    x: Any, origin: Any, ahead: Any, first: Any, last: Any, m: Any, b: Any, k: Any, packed: Any, counting: Any,
    codes: Any, counts: Any,
) -> None:  # fmt: skip
    """Codes of x[first:last], block b or a part of it."""
    for start in range(first, last, PART):
        stop = min(start + PART, last)
        groups = (stop - start) // LANES
        _encode_run(x, origin, ahead, start, 1, groups, m, b, k, packed, counting, codes, counts)
        _one_by_one(x, start + groups * LANES, stop, m[b : b + 1], k, packed, codes, counts)


@helper
def _encode_columns(
    x: Any, origin: Any, ahead: Any, first: Any, last: Any, m: Any, k: Any, packed: Any, counting: Any, codes: Any,
    counts: Any,
) -> None:  # fmt: skip
    """Codes of x[first:last] where every column has a multiplier of its own."""
    odd, least, at = ZERO, np.float32(1), first
    for _ in range((last - first) // LANES):
        prefetch(origin, at + ahead)
        found = encode_packed_lanes(x, at, m, k, codes) if packed else encode_lanes(x, at, m, k, codes)
        odd = np.uint32(odd | found)
        at += LANES
    for i in range(first, last):
        least = min(least, m[i])
    if (odd != ZERO) | (least == np.float32(0)):
        _one_by_one(x, first, last, m, k, packed, codes, counts)
        return
    if counting:
        both = ZERO
        for group in range((last - first) // LANES):
            both = np.uint32(both + count_lanes(x, first + group * LANES, m, k))
        _add_counts(both, counts)
    _one_by_one(x, at, last, m, k, packed, codes, counts)


@helper
def _encode_exact(
    x: Any, first: Any, last: Any, divisor: Any, full_range: Any, k: Any, packed: Any, codes: Any, counts: Any
) -> None:
    """E2M1 codes of the exact quotient x[first:last] * full_range / divisor, of one block."""
    at, both = first, ZERO
    if divisor > 0.0:
        for _ in range((last - first) // LANES):
            if packed:
                both = encode_exact_packed_lanes(x, at, divisor, full_range, codes)
            else:
                both = encode_exact_lanes(x, at, divisor, full_range, codes)
            _add_counts(both, counts)
            at += LANES
    for i in range(at, last):
        _put(_one_exact(x[i], divisor, full_range, k, counts), codes, i, packed)


@helper
def _encode_row(
    x: Any, origin: Any, ahead: Any, bk: Any, m: Any, d: Any, full_range: Any, k: Any, packed: Any, counting: Any,
    codes: Any, counts: Any,
) -> None:  # fmt: skip
    """Codes of one row; block b has the multiplier m[b], or the divisor d[b] where d is not empty."""
    if bk == 1 and d.size == 0:
        for start in range(0, x.size, PART):
            _encode_columns(x, origin, ahead, start, min(start + PART, x.size), m, k, packed, counting, codes, counts)
        return
    if d.size:
        for b in range(d.size):
            _encode_exact(x, b * bk, min((b + 1) * bk, x.size), d[b], full_range, k, packed, codes, counts)
        return
    first, per = 0, PART // bk
    if (bk % LANES == 0) & (per > 0):
        whole = x.size // bk
        for b in range(0, whole, per):
            blocks = min(per, whole - b)
            _encode_run(x, origin, ahead, first, blocks, bk // LANES, m, b, k, packed, counting, codes, counts)
            first += blocks * bk
    for start in range(first, x.size, bk):
        _encode_block(
            x, origin, ahead, start, min(start + bk, x.size), m, start // bk, k, packed, counting, codes, counts
        )


@kernel(
    read(_F4, 2), read(_F4, 2), _I8, _I8, _BOOL, _BOOL, _BOOL, _I8, read(_F4, 1), read(_I8, 1), read(_U4, 2), _BOOL,
    _BOOL, write(_U4, 2), write(_U4, 2), write(_F4, 2), write(_F8, 2), write(_U1, 2), write(_U1, 2), write(_U4, 1),
    write(_I8, 1),
)  # fmt: skip
def cast_blocks(
    x: F32, center: F32, bm: int, bk: int, measuring: bool, scaling: bool, encoding: bool, rule: int, floats: F32,
    steps: I64, constants: U32, packed: bool, counting: bool,
    top: U32, bad: U32, multiplier: F32, divisor: F64, scale_codes: U8, codes: U8, amax: U32,
    counts: I64,
) -> None:  # fmt: skip
    """Every row of blocks: measured, scaled, encoded, or those of the three that are asked for.

    center: as in ``measure``; what follows is of the residual. rule, floats, steps: see ``scale_kernels``.
    constants [2, 10]: of the elements, of E4M3FN. top, bad, multiplier, divisor: grids [gm, gk], or [1, gk] where
    only the next step needs them; divisor [., 0] for a rule without one. scale_codes [gm, gk], or [gm, 0] for rule 0,
    whose stored scale is the multiplier. codes [M, K], or [M, (K + 1) // 2] where packed: those of
    RN(x * multiplier), or of the exact quotient where there is a divisor. amax [1] is raised to the largest
    magnitude measured.
    """
    k, scale_k, full_range = load(constants[0]), load(constants[1]), np.float64(floats[5])
    tally = counts if counting else np.zeros_like(counts)
    centred = center.size > 0
    ahead = x.shape[1] if centred or measuring else AHEAD  # a row was read just before it is encoded: the next one
    r = np.empty((1, x.shape[1] if centred else 0), np.float32)
    row_top, row_bad = np.empty(top.shape[1], np.uint32), np.empty(top.shape[1], np.uint32)
    for band in range(scale_codes.shape[0]):
        tile = x[band * bm : (band + 1) * bm]
        t, w = top[min(band, top.shape[0] - 1)], bad[min(band, bad.shape[0] - 1)]
        m, d = multiplier[min(band, multiplier.shape[0] - 1)], divisor[min(band, divisor.shape[0] - 1)]
        if measuring:
            if centred:
                t[:] = ZERO
                w[:] = ZERO
                raise_band(tile, center, band * bm, r, bk, row_top, row_bad, t, w)
            else:
                measure_band(tile, tile, AHEAD, bk, t, w)
            amax[0] = larger(amax[0], top_of(t))
        if scaling:
            scales_of(rule, t, w, tile, center, band * bm, bk, floats, steps, scale_k, scale_codes[band], m, d, counts)
        if encoding:
            for i in range(tile.shape[0]):
                row = band * bm + i
                if centred:
                    subtract_center(tile[i], center, row, r)
                source = read_only(r)[0] if centred else tile[i]
                _encode_row(source, tile[i], ahead, bk, m, d, full_range, k, packed, counting, codes[row], tally)
