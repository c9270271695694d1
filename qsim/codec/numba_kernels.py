"""Numba kernels of encode, quantize and observe: bits in, bits out. Knows no policy, no shape rule, no error message.

Contract: arrays are C-contiguous (inputs may be read-only), shapes are what the callers say; rows of x and of a centre
are laid out as in ``rows_kernels``. Every constant and every step is wrapped: float32 with a Python number would become
float64, uint32 with uint32 becomes uint64. fastmath is off, so nothing is contracted; sums of floats do not occur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, prefetch, read, read_only, stretch, write
from qsim.codec.rows_kernels import LINE, SPAN, ask_ahead_of_span, centers_of, rows_together, spread_centers

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, U8, U32
    from qsim.formats import CastCodes, FormatParams

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INF = np.uint32(0x7F800000)
QUIET_NAN = np.uint32(0x7FC00000)
ZERO = np.uint32(0)
ONE = np.uint32(1)
LOW5 = np.uint32(31)  # a shift is below 32: said so that LLVM keeps 32-bit lanes

BLOCK = 256
"""Elements of one inner loop: short enough to be read ahead of, and to be gone over again where it holds a NaN."""

AHEAD = 1024
"""Elements that are asked for ahead of use: 4 KiB, the page that a hardware prefetcher does not cross into."""

_F4, _F8, _U1, _U4 = numba.float32, numba.float64, numba.uint8, numba.uint32
_I8 = numba.int64


def encoder_constants(params: FormatParams, codes: CastCodes) -> U32:
    """A format and a resolved policy as the uint32 words that the encoders read (nearest even)."""
    shift = 23 - params.mantissa_bits
    least = (128 - params.bias) << 23  # float32 bits of the smallest normal, 2^(1 - bias)
    # The float32 bits of the value of a normal code, also of the one that would come after max_code.
    first, limit = (((127 - params.bias) << 23) + (code << shift) for code in (params.max_code, codes.overflow))
    tie = first + (1 << (shift - 1))
    return np.array(
        [
            shift,
            least,
            # The anchor 2^shift units above a number's own binade, and what takes the bias of float32 out of the
            # code: even, as least >> shift is, so that ties still go to the even code.
            (shift << 23) | (-(least >> shift) % 256),
            limit,
            tie + (params.max_code % 2 == 0),  # the first magnitude that rounds beyond max: a tie goes to even
            (126 - params.bias + 1 - params.mantissa_bits) << 23,  # the last one that rounds to 0: half a unit
            32 - params.sign_bit.bit_length(),
            params.negative_zero,
            codes.nan,
            codes.negative_nan,
        ],
        np.uint32,
    )


@helper
def is_finite(x: Any) -> Any:
    """True for a float32 that is neither NaN nor Inf."""
    return np.uint32(np.float32(x).view(np.uint32) & MAGNITUDE) < INF


@helper
def load(k: U32) -> Any:
    """The constants as a tuple of scalars, so that loops keep them in registers."""
    return k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9]


@helper
def magnitude_code(mag: Any, k: Any) -> Any:
    """Code of a magnitude by its float32 bits, nearest with ties to even, in the low 8 bits; the rest is noise.

    Clamped first to the magnitude whose code is that of overflow: fmt.max where the cast saturates, else the next
    one of an unbounded exponent (its code is max_code + 1: Inf, or the NaN that stands for it).
    One float32 addition rounds: the anchor weighs 2^shift units of the number's binade (of the lowest one, that
    of the subnormals, below it), so that the sum counts units in its low bits, hidden bit included, and rounds to
    nearest even at just that unit. The binade adds its field, shifted; a carry out of the mantissa moves to the
    next binade, which is the rounding we want. Fields are multiples of 2^23 and leave the low 8 bits alone.
    """
    m = np.uint32(min(np.int32(mag), np.int32(k[3])))
    field = np.uint32(max(np.int32(m & INF), np.int32(k[1])))
    anchor = np.uint32(field + k[2]).view(np.float32)
    units = np.float32(np.uint32(m).view(np.float32) + anchor).view(np.uint32)
    return np.uint32(np.uint32(units) + np.uint32(field >> np.uint32(k[0] & LOW5)))


@helper
def signed(code: Any, u: Any, k: Any) -> Any:
    """The code with the sign of the bits ``u``, for a format with -0."""
    return np.uint32(code | np.uint32(np.uint32(u & SIGN) >> np.uint32(k[6] & LOW5)))


@helper
def whole_code(u: Any, nan_sign: Any, k: Any) -> Any:
    """Code of any number and any NaN, in any signed format; nan_sign 1 means -NaN."""
    code = np.uint32(magnitude_code(np.uint32(u & MAGNITUDE), k) & np.uint32(255))
    with_sign = signed(code, u, k) if (code | k[7]) != ZERO else code
    nan = k[9] if nan_sign != ZERO else k[8]
    return nan if np.uint32(u & MAGNITUDE) > INF else with_sign


@helper
def ask_ahead(x: Any, start: Any) -> None:
    """Prefetch the block of x that is AHEAD of ``start``."""
    for line in range(0, BLOCK, LINE):
        prefetch(x, start + AHEAD + line)


@kernel(read(_U4, 1), read(_U4, 1), write(_U1, 1))
def encode(x_bits: U32, constants: U32, codes: U8) -> None:
    """codes[i] = code of the float32 with the bits x_bits[i]; NaN keeps the sign that the policy reads."""
    k = load(constants)
    for start in range(0, x_bits.size, BLOCK):
        ask_ahead(x_bits, start)
        source, target = x_bits[start : start + BLOCK], codes[start : start + BLOCK]
        top = MAGNITUDE
        if k[7] != ZERO:
            top = ZERO
            for i in range(source.size):
                mag = np.uint32(source[i] & MAGNITUDE)
                top = np.uint32(max(np.int32(top), np.int32(mag)))
                target[i] = np.uint8(signed(magnitude_code(mag, k), source[i], k))
        if top > INF:  # there is a NaN, or the format has no -0
            for i in range(source.size):
                target[i] = np.uint8(whole_code(source[i], np.uint32(source[i] >> np.uint32(31)), k))


@kernel(read(_U4, 1), write(_U1, 1))
def truncate(x_bits: U32, codes: U8) -> None:
    """The top byte of every float32: no codec, but the least that one could do, for benchmarks to be held against."""
    for start in range(0, x_bits.size, BLOCK):
        ask_ahead(x_bits, start)
        source, target = x_bits[start : start + BLOCK], codes[start : start + BLOCK]
        for i in range(source.size):
            target[i] = np.uint8(np.uint32(source[i] >> np.uint32(24)))


@helper
def _quantize_one(x: Any, c: Any, s: Any, k: Any) -> Any:
    """Code, magnitude bits of the residual, and four flags of one element, special or not."""
    r = np.float32(x - c)
    y = np.float32(np.float32(r * s)).view(np.uint32)
    x_bits = np.float32(x).view(np.uint32)
    r_mag = np.uint32(np.float32(r).view(np.uint32) & MAGNITUDE)
    y_mag, x_mag = np.uint32(y & MAGNITUDE), np.uint32(x_bits & MAGNITUDE)
    x_nan = ONE if x_mag > INF else ZERO
    x_inf = ONE if x_mag == INF else ZERO
    saturated = ONE if (y_mag >= k[4]) & (y_mag <= INF) & (x_mag < INF) else ZERO
    flushed = ONE if (y_mag <= k[5]) & (r_mag != ZERO) else ZERO
    # The sign of a NaN made by arithmetic differs between processors, so only x's own NaN has one.
    code = whole_code(y, np.uint32(x_nan & np.uint32(x_bits >> np.uint32(31))), k)
    return code, r_mag if r_mag < INF else ZERO, saturated, flushed, x_nan, x_inf


@helper
def _quantize_plain(x: Any, c: Any, s: Any, k: Any) -> Any:
    """Code, magnitude bits of the residual and two flags of one ordinary element of a format with -0."""
    r = np.float32(x - c)
    y = np.float32(np.float32(r * s)).view(np.uint32)
    r_mag, y_mag = np.uint32(np.float32(r).view(np.uint32) & MAGNITUDE), np.uint32(y & MAGNITUDE)
    saturated = ONE if np.int32(y_mag) >= np.int32(k[4]) else ZERO
    flushed = ONE if (np.int32(y_mag) <= np.int32(k[5])) & (r_mag != ZERO) else ZERO
    return signed(magnitude_code(y_mag, k), y, k), r_mag, saturated, flushed


@helper
def quantize_block(source: Any, centers: Any, s: Any, k: Any, target: Any) -> Any:
    """Codes of one block into ``target``; the magnitude bits of its largest finite residual, and four counts.

    ``centers`` is one number for all, or one an element. The plain loop is right where every residual is finite;
    where one is not (or the scale is not, or the format has no -0) the block is gone over again with all cases.
    """
    top, saturated, flushed, nan, inf = ZERO, ZERO, ZERO, ZERO, ZERO
    one = centers.size == 1
    plain = is_finite(s) & (k[7] != ZERO)
    if plain and one:
        c = centers[0]
        for i in range(source.size):
            code, mag, is_sat, is_flush = _quantize_plain(source[i], c, s, k)
            target[i] = np.uint8(code)
            top = np.uint32(max(np.int32(top), np.int32(mag)))
            saturated = np.uint32(saturated + is_sat)
            flushed = np.uint32(flushed + is_flush)
    elif plain:
        for i in range(source.size):
            code, mag, is_sat, is_flush = _quantize_plain(source[i], centers[i], s, k)
            target[i] = np.uint8(code)
            top = np.uint32(max(np.int32(top), np.int32(mag)))
            saturated = np.uint32(saturated + is_sat)
            flushed = np.uint32(flushed + is_flush)
    if (top >= INF) or not plain:
        top, saturated, flushed = ZERO, ZERO, ZERO
        for i in range(source.size):
            c = centers[0] if one else centers[i]
            code, mag, is_sat, is_flush, is_nan, is_inf = _quantize_one(source[i], c, s, k)
            target[i] = np.uint8(code)
            top = max(top, mag)
            saturated = np.uint32(saturated + is_sat)
            flushed = np.uint32(flushed + is_flush)
            nan = np.uint32(nan + is_nan)
            inf = np.uint32(inf + is_inf)
    return top, np.int64(saturated), np.int64(flushed), np.int64(nan), np.int64(inf)


@kernel(
    read(_F4, 3), read(_F4, 2), read(_I8, 1), read(_F4, 1), read(_U4, 1), write(_U1, 3), write(_F4, 1), write(_I8, 2)
)
def quantize(x: F32, center: F32, row_of: I64, scale: F32, constants: U32, codes: U8, amax: F32, counts: I64) -> None:
    """One pass: codes of RN(RN(x - center) * scale), amax of the residual, counts.

    x, codes [R, P, L]; scale, amax [R]; counts [4, R]: saturated, flushed, nan, inf.
    No centre is a centre of +0: x - (+0) is x in every bit, -0 included.
    """
    k = load(constants)
    replicas, rows, length = x.shape
    group = rows_together(rows, length)
    beside, owners = np.empty(group * length if group > 1 else 0, np.float32), np.full(group, -1, np.int64)
    for replica in range(replicas):
        top, saturated, flushed, nan, inf = ZERO, np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for row in range(replica * rows, (replica + 1) * rows, group):
            size = min(group, (replica + 1) * rows - row) * length
            if group > 1:
                spread_centers(center, row_of, row, owners, length, beside)
            for start in range(0, size, SPAN):
                at, many = row * length + start, min(SPAN, size - start)
                ask_ahead_of_span(x, at)
                here = read_only(beside[:many]) if group > 1 else centers_of(center, row_of[row], start, many)
                found = quantize_block(stretch(x, at, many), here, scale[replica], k, stretch(codes, at, many))
                top = max(top, found[0])
                saturated, flushed = saturated + found[1], flushed + found[2]
                nan, inf = nan + found[3], inf + found[4]
        amax[replica] = np.uint32(top).view(np.float32)
        counts[0, replica], counts[1, replica] = saturated, flushed
        counts[2, replica], counts[3, replica] = nan, inf


@helper
def _observe_one(x: Any, c: Any) -> Any:
    """Magnitude bits of the finite residual, and whether x is NaN or infinite."""
    r_mag = np.uint32(np.float32(np.float32(x - c)).view(np.uint32) & MAGNITUDE)
    x_mag = np.uint32(np.float32(x).view(np.uint32) & MAGNITUDE)
    return r_mag if r_mag < INF else ZERO, ONE if x_mag > INF else ZERO, ONE if x_mag == INF else ZERO


@helper
def _observe_block(source: Any, centers: Any) -> Any:
    """Magnitude bits of the largest finite residual of one block, and how many x are NaN and infinite."""
    top, nan, inf = ZERO, ZERO, ZERO
    one = centers.size == 1
    if one:
        c = centers[0]
        for i in range(source.size):
            mag = np.uint32(np.float32(np.float32(source[i] - c)).view(np.uint32) & MAGNITUDE)
            top = np.uint32(max(np.int32(top), np.int32(mag)))
    else:
        for i in range(source.size):
            mag = np.uint32(np.float32(np.float32(source[i] - centers[i])).view(np.uint32) & MAGNITUDE)
            top = np.uint32(max(np.int32(top), np.int32(mag)))
    if top >= INF:  # where x is NaN or infinite, so is its residual
        top = ZERO
        for i in range(source.size):
            mag, is_nan, is_inf = _observe_one(source[i], centers[0] if one else centers[i])
            top = max(top, mag)
            nan = np.uint32(nan + is_nan)
            inf = np.uint32(inf + is_inf)
    return top, np.int64(nan), np.int64(inf)


@kernel(read(_F4, 3), read(_F4, 2), read(_I8, 1), write(_F4, 1), write(_I8, 2))
def observe(x: F32, center: F32, row_of: I64, amax: F32, counts: I64) -> None:
    """amax [R] of RN(x - center), and counts [2, R] of NaN and Inf in x."""
    replicas, rows, length = x.shape
    group = rows_together(rows, length)
    beside, owners = np.empty(group * length if group > 1 else 0, np.float32), np.full(group, -1, np.int64)
    for replica in range(replicas):
        top, nan, inf = ZERO, np.int64(0), np.int64(0)
        for row in range(replica * rows, (replica + 1) * rows, group):
            size = min(group, (replica + 1) * rows - row) * length
            if group > 1:
                spread_centers(center, row_of, row, owners, length, beside)
            for start in range(0, size, SPAN):
                at, many = row * length + start, min(SPAN, size - start)
                ask_ahead_of_span(x, at)
                here = read_only(beside[:many]) if group > 1 else centers_of(center, row_of[row], start, many)
                found = _observe_block(stretch(x, at, many), here)
                top, nan, inf = max(top, found[0]), nan + found[1], inf + found[2]
        amax[replica] = np.uint32(top).view(np.float32)
        counts[0, replica], counts[1, replica] = nan, inf


@kernel(read(_F8, 1), write(_U4, 1))
def narrow_to_odd(x: F64, bits: U32) -> None:
    """float32 bits of float64 ``x`` rounded to odd: exact, or the neighbour with an odd last bit.

    Rounding the result once more, to any FloatFormat, gives the single rounding of x: every value and every
    midpoint of such a format is a float32 with an even last bit (it has at most 9 significant bits, and as
    bias <= 127 it is a multiple of 2^-140, where float32 goes on to 2^-149). So the odd neighbour of an x
    that is no float32 lies strictly on the same side of all of them as x does. Beyond FLT_MAX it is FLT_MAX,
    which is odd and beyond every threshold.
    """
    for i in range(x.size):
        v = x[i]
        near = np.float32(v)
        back = np.float64(near)
        u = np.float32(near).view(np.uint32)
        away = ONE if abs(back) > abs(v) else ZERO
        inexact = ONE if back != v else ZERO
        odd = np.uint32(np.uint32(u - away) | inexact)
        sign = np.uint32(np.uint32(np.uint64(np.float64(v).view(np.uint64)) >> np.uint64(32)) & SIGN)
        bits[i] = odd if v == v else np.uint32(sign | QUIET_NAN)
