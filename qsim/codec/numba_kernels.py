"""Numba kernels of the codecs: bits in, bits out. Knows no policy, no shape rule, no error message.

Contract: arrays are C-contiguous (inputs may be read-only), shapes are what the callers say; x is viewed as
[R, P, L] (replica, row, element), a centre as [Q, Lc] with Lc either 1 or L, and ``row_of`` [R * P] names the
centre's row of every row of x. Kernels, helpers and constants share this file because Numba's cache key sees
no other. Every constant and every step is wrapped: float32 with a Python number would become float64, uint32
with uint32 becomes uint64. fastmath is off, so nothing is contracted; sums of floats do not occur.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from qsim._paths import prepare_numba_cache

prepare_numba_cache()

import numba  # noqa: E402  (after its cache folder is set: it raises where that is read-only)

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I32, I64, U8, U32
    from qsim.formats import CastCodes, FormatParams

F = TypeVar("F", bound=Callable[..., Any])

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INF = np.uint32(0x7F800000)
QUIET_NAN = np.uint32(0x7FC00000)
ZERO = np.uint32(0)
ONE = np.uint32(1)
RINT64 = np.float64(6755399441055744.0)  # 1.5 * 2^52: adding it leaves rint(v) in the low bits, |v| < 2^51
RINT64_BITS = np.int64(0x4338000000000000)


def _kernel(*arguments: Any) -> Callable[[F], F]:
    """Compile at the first call, for one signature: inputs read-only, so that writable ones fit too."""
    signature = numba.void(*arguments)

    def wrap(function: F) -> F:
        jit = numba.njit(cache=True, error_model="numpy", fastmath=False, nogil=True)(function)
        ready = False

        @functools.wraps(function)
        def call(*values: Any) -> None:
            nonlocal ready
            if not ready:
                jit.compile(signature)
                jit.disable_compile()  # other arguments are converted or refused, never compiled anew
                ready = True
            jit(*values)

        return cast("F", call)

    return wrap


def _helper(function: F) -> F:
    """A function that only kernels call."""
    return cast("F", numba.njit(error_model="numpy", fastmath=False, nogil=True)(function))


def _in(dtype: Any, ndim: int) -> Any:
    return numba.types.Array(dtype, ndim, "C", readonly=True)


def _out(dtype: Any, ndim: int) -> Any:
    return numba.types.Array(dtype, ndim, "C")


_F4, _F8, _U1, _U4 = numba.float32, numba.float64, numba.uint8, numba.uint32
_I4, _I8 = numba.int32, numba.int64


def encoder_constants(params: FormatParams, codes: CastCodes) -> U32:
    """A format and a resolved policy as the uint32 words that ``_code_of`` reads."""
    shift = 23 - params.mantissa_bits
    subnormal_ulp = 1 - params.bias - params.mantissa_bits
    return np.array(
        [
            shift,
            (1 << (shift - 1)) - 1,  # half of the dropped part, less one
            (127 - params.bias) << params.mantissa_bits,  # what the float32 bias adds to the code
            (128 - params.bias) << 23,  # bits of the smallest normal, 2^(1 - bias)
            (127 + 23 + subnormal_ulp) << 23,  # bits of 2^23 subnormal units
            params.max_code,
            params.sign_bit.bit_length() - 1,
            codes.overflow,
            codes.nan,
            codes.negative_nan,
            params.negative_zero,
        ],
        np.uint32,
    )


@_helper
def _load(k: U32) -> Any:
    """The constants as a tuple of scalars, so that loops keep them in registers."""
    return k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9], k[10]


@_helper
def _magnitude_code(mag: Any, k: Any) -> Any:
    """Code of a magnitude by its float32 bits, nearest with ties to even, not yet limited to max_code.

    Normal: dropping 23 - m bits rounds to nearest even when half of them less one, plus the last kept bit, is
    added first; a carry out of the mantissa moves to the next binade, which is the rounding we want. The
    exponent field then differs by a constant. NaN and Inf come out above every finite code.
    Subnormal: 2^23 units of the least value are added in float32; its addition rounds to nearest even at just
    that unit and leaves the count of units in the low bits (2^m of them is the smallest normal, as it must).
    """
    shift = np.uint32(k[0] & np.uint32(31))  # it is below 32: said so that LLVM keeps 32-bit lanes
    odd = np.uint32(np.uint32(mag >> shift) & ONE)
    normal = np.uint32(np.uint32(np.uint32(np.uint32(mag + k[1]) + odd) >> shift) - k[2])
    anchor = np.uint32(k[4]).view(np.float32)
    shifted = np.float32(np.uint32(mag).view(np.float32) + anchor)
    subnormal = np.uint32(np.float32(shifted).view(np.uint32) - k[4])
    return normal if mag >= k[3] else subnormal


@_helper
def _whole_code(code: Any, u: Any, nan_sign: Any, k: Any) -> Any:
    """Limit a magnitude code, put the sign of the bits ``u``, and replace NaN; nan_sign 1 means -NaN."""
    limited = k[7] if code > k[5] else code
    keeps = ONE if (limited | k[10]) != ZERO else ZERO
    sign = np.uint32(np.uint32(np.uint32(u >> np.uint32(31)) & keeps) << np.uint32(k[6] & np.uint32(31)))
    nan = k[9] if nan_sign != ZERO else k[8]
    return nan if np.uint32(u & MAGNITUDE) > INF else np.uint32(limited | sign)


@_kernel(_in(_U4, 1), _in(_U4, 1), _out(_U1, 1))
def encode(x_bits: U32, constants: U32, codes: U8) -> None:
    """codes[i] = code of the float32 with the bits x_bits[i]; NaN keeps the sign that the policy reads."""
    k = _load(constants)
    for i in range(x_bits.size):
        u = x_bits[i]
        code = _magnitude_code(np.uint32(u & MAGNITUDE), k)
        codes[i] = np.uint8(_whole_code(code, u, np.uint32(u >> np.uint32(31)), k))


@_helper
def _quantize_one(x: Any, c: Any, s: Any, k: Any) -> Any:
    """Code, magnitude bits of the residual, and four flags of one element."""
    r = np.float32(x - c)
    y = np.float32(r * s)
    x_bits = np.float32(x).view(np.uint32)
    r_mag = np.uint32(np.float32(r).view(np.uint32) & MAGNITUDE)
    y_bits = np.float32(y).view(np.uint32)
    y_mag = np.uint32(y_bits & MAGNITUDE)
    x_mag = np.uint32(x_bits & MAGNITUDE)
    code = _magnitude_code(y_mag, k)
    x_nan = ONE if x_mag > INF else ZERO
    x_inf = ONE if x_mag == INF else ZERO
    y_number = ZERO if y_mag > INF else ONE
    saturated = y_number if (code > k[5]) & (x_mag < INF) else ZERO
    flushed = ONE if (code == ZERO) & (r_mag != ZERO) else ZERO  # the magnitude code of NaN is not 0
    # The sign of a NaN made by arithmetic differs between processors, so only x's own NaN has one.
    nan_sign = np.uint32(x_nan & np.uint32(x_bits >> np.uint32(31)))
    whole = _whole_code(code, y_bits, nan_sign, k)
    return whole, r_mag if r_mag < INF else ZERO, saturated, flushed, x_nan, x_inf


@_kernel(_in(_F4, 3), _in(_F4, 2), _in(_I8, 1), _in(_F4, 1), _in(_U4, 1), _out(_U1, 3), _out(_F4, 1), _out(_I8, 2))
def quantize(x: F32, center: F32, row_of: I64, scale: F32, constants: U32, codes: U8, amax: F32, counts: I64) -> None:
    """One pass: codes of RN(RN(x - center) * scale), amax of the residual, counts.

    x, codes [R, P, L]; scale, amax [R]; counts [R, 4]: saturated, flushed, nan, inf. L < 2^32.
    No centre is a centre of +0: x - (+0) is x in every bit, -0 included.
    """
    k = _load(constants)
    replicas, rows, length = x.shape
    for replica in range(replicas):
        s = scale[replica]
        top = ZERO
        for row in range(rows):
            source, target = x[replica, row], codes[replica, row]
            c_row = center[row_of[replica * rows + row]]
            saturated, flushed, nan, inf = ZERO, ZERO, ZERO, ZERO
            if c_row.size == 1:
                c = c_row[0]
                for i in range(length):
                    code, mag, is_sat, is_flush, is_nan, is_inf = _quantize_one(source[i], c, s, k)
                    target[i] = np.uint8(code)
                    top = max(top, mag)
                    saturated = np.uint32(saturated + is_sat)
                    flushed = np.uint32(flushed + is_flush)
                    nan = np.uint32(nan + is_nan)
                    inf = np.uint32(inf + is_inf)
            else:
                for i in range(length):
                    code, mag, is_sat, is_flush, is_nan, is_inf = _quantize_one(source[i], c_row[i], s, k)
                    target[i] = np.uint8(code)
                    top = max(top, mag)
                    saturated = np.uint32(saturated + is_sat)
                    flushed = np.uint32(flushed + is_flush)
                    nan = np.uint32(nan + is_nan)
                    inf = np.uint32(inf + is_inf)
            counts[replica, 0] += np.int64(saturated)
            counts[replica, 1] += np.int64(flushed)
            counts[replica, 2] += np.int64(nan)
            counts[replica, 3] += np.int64(inf)
        amax[replica] = np.uint32(top).view(np.float32)


@_kernel(_in(_U1, 1), _in(_F4, 1), _out(_F4, 1))
def look_up(codes: U8, table: F32, out: F32) -> None:
    """out[i] = table[codes[i]], table [256]."""
    for i in range(codes.size):
        out[i] = table[codes[i]]


@_kernel(_in(_U1, 3), _in(_F4, 1), _in(_F4, 1), _in(_F4, 2), _in(_I8, 1), _out(_F4, 3))
def decode(codes: U8, table: F32, descale: F32, center: F32, row_of: I64, out: F32) -> None:
    """out = RN(RN(table[code] * descale) + center), NaN always as 0x7FC00000.

    codes, out [R, P, L]; table [number of codes]; descale [R]. No centre is a centre of -0: v + (-0) is
    v in every bit, for v = +0 and v = -0 too. The product depends on the code alone: computed once a code.
    """
    nan = np.uint32(QUIET_NAN).view(np.float32)
    product = np.empty(table.size, np.float32)
    replicas, rows, length = codes.shape
    for replica in range(replicas):
        for code in range(table.size):
            product[code] = np.float32(table[code] * descale[replica])
        for row in range(rows):
            source, target = codes[replica, row], out[replica, row]
            c_row = center[row_of[replica * rows + row]]
            if c_row.size == 1:
                c = c_row[0]
                for i in range(length):
                    v = np.float32(product[source[i]] + c)
                    target[i] = v if v == v else nan
            else:
                for i in range(length):
                    v = np.float32(product[source[i]] + c_row[i])
                    target[i] = v if v == v else nan


@_helper
def _observe_one(x: Any, c: Any) -> Any:
    """Magnitude bits of the finite residual, and whether x is NaN or infinite."""
    r_mag = np.uint32(np.float32(np.float32(x - c)).view(np.uint32) & MAGNITUDE)
    x_mag = np.uint32(np.float32(x).view(np.uint32) & MAGNITUDE)
    return r_mag if r_mag < INF else ZERO, ONE if x_mag > INF else ZERO, ONE if x_mag == INF else ZERO


@_kernel(_in(_F4, 3), _in(_F4, 2), _in(_I8, 1), _out(_F4, 1), _out(_I8, 2))
def observe(x: F32, center: F32, row_of: I64, amax: F32, counts: I64) -> None:
    """amax [R] of RN(x - center), and counts [R, 2] of NaN and Inf in x."""
    replicas, rows, length = x.shape
    for replica in range(replicas):
        top = ZERO
        for row in range(rows):
            source = x[replica, row]
            c_row = center[row_of[replica * rows + row]]
            nan, inf = ZERO, ZERO
            if c_row.size == 1:
                c = c_row[0]
                for i in range(length):
                    mag, is_nan, is_inf = _observe_one(source[i], c)
                    top = max(top, mag)
                    nan = np.uint32(nan + is_nan)
                    inf = np.uint32(inf + is_inf)
            else:
                for i in range(length):
                    mag, is_nan, is_inf = _observe_one(source[i], c_row[i])
                    top = max(top, mag)
                    nan = np.uint32(nan + is_nan)
                    inf = np.uint32(inf + is_inf)
            counts[replica, 0] += np.int64(nan)
            counts[replica, 1] += np.int64(inf)
        amax[replica] = np.uint32(top).view(np.float32)


@_kernel(_in(_U4, 2), _in(_I8, 1), _out(_U4, 2), _out(_I8, 2))
def sums_amax(x_bits: U32, slot_of: I64, top: U32, count: I64) -> None:
    """Largest finite magnitude (as bits) and number of finite elements of every slot.

    x_bits [rows, L]; row p adds to slot row slot_of[p] of top, count [slots, Ls], Ls 1 or L.
    """
    rows, length = x_bits.shape
    for row in range(rows):
        source = x_bits[row]
        slot_top, slot_count = top[slot_of[row]], count[slot_of[row]]
        if slot_top.size == 1:
            best, finite = slot_top[0], ZERO
            for i in range(length):
                mag = np.uint32(source[i] & MAGNITUDE)
                best = max(best, mag if mag < INF else ZERO)
                finite = np.uint32(finite + (ONE if mag < INF else ZERO))
            slot_top[0] = best
            slot_count[0] += np.int64(finite)
        else:
            for i in range(length):
                mag = np.uint32(source[i] & MAGNITUDE)
                slot_top[i] = max(slot_top[i], mag if mag < INF else ZERO)
                slot_count[i] += np.int64(1) if mag < INF else np.int64(0)


@_kernel(_in(_U4, 2), _out(_I4, 2), _out(_F8, 2))
def sums_scale(top: U32, exponent: I32, unit: F64) -> None:
    """exponent = floor(log2 amax) from bits, -149 for amax 0; unit = 2^(40 - exponent), exact."""
    for row in range(top.shape[0]):
        for i in range(top.shape[1]):
            amax = np.float64(np.uint32(top[row, i]).view(np.float32))  # a float32 subnormal becomes normal
            field = np.int64(np.float64(amax).view(np.int64) >> np.int64(52)) - np.int64(1023)
            k = max(field, np.int64(-149))  # the field of 0.0 gives -1023
            exponent[row, i] = np.int32(k)
            unit[row, i] = np.int64(np.int64(np.int64(1063) - k) << np.int64(52)).view(np.float64)


@_helper
def _units(x: Any, unit: Any) -> Any:
    """rint(x * unit) as int64, ties to even; 0 for NaN and Inf. unit is a power of two, |x * unit| < 2^41.

    The product is exact in float64. Adding 1.5 * 2^52 rounds it to an integer (nearest even) in the low bits.
    """
    finite = np.uint32(np.float32(x).view(np.uint32) & MAGNITUDE) < INF
    v = np.float64(np.float64(x) * unit)
    n = np.int64(np.float64(np.float64(v + RINT64)).view(np.int64) - RINT64_BITS)
    return n if finite else np.int64(0)


@_kernel(_in(_F4, 2), _in(_I8, 1), _in(_F8, 2), _out(_I8, 2))
def sums_total(x: F32, slot_of: I64, unit: F64, total: I64) -> None:
    """Add rint(x * unit) to the slots; shapes as in ``sums_amax``, unit [slots, Ls] = 2^(40 - exponent)."""
    rows, length = x.shape
    for row in range(rows):
        source = x[row]
        slot_unit, slot_total = unit[slot_of[row]], total[slot_of[row]]
        if slot_total.size == 1:
            u, acc = slot_unit[0], np.int64(0)
            for i in range(length):
                acc += _units(source[i], u)
            slot_total[0] += acc
        else:
            for i in range(length):
                slot_total[i] += _units(source[i], slot_unit[i])


@_kernel(_in(_F8, 1), _out(_U4, 1))
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


@_kernel(_in(_U1, 2), _out(_U1, 2))
def pack(codes: U8, packed: U8) -> None:
    """packed [rows, (L + 1) // 2] = two 4-bit codes a byte, even element low, an odd tail padded with 0."""
    rows, length = codes.shape
    for row in range(rows):
        source, target = codes[row], packed[row]
        for j in range(length // 2):
            target[j] = np.uint8((source[2 * j] & np.uint8(15)) | np.uint8(source[2 * j + 1] << np.uint8(4)))
        if length % 2:
            target[length // 2] = np.uint8(source[length - 1] & np.uint8(15))


@_kernel(_in(_U1, 2), _out(_U1, 2))
def unpack(packed: U8, codes: U8) -> None:
    """Inverse of ``pack``; the length is that of ``codes``."""
    rows, length = codes.shape
    for row in range(rows):
        source, target = packed[row], codes[row]
        for j in range(length // 2):
            target[2 * j] = np.uint8(source[j] & np.uint8(15))
            target[2 * j + 1] = np.uint8(source[j] >> np.uint8(4))
        if length % 2:
            target[length - 1] = np.uint8(source[length // 2] & np.uint8(15))
