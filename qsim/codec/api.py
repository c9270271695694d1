"""Encode and decode numpy arrays of any layout. Knows no scale and no centre."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.codec import numba_kernels as kernels
from qsim.codec.oracle import refused_nan
from qsim.codec.packing import pack, packed_length, unpack
from qsim.codec.tables import decode_table, encoder_table
from qsim.errors import FormatError
from qsim.formats import (
    FORMATS,
    NAN_REFUSED,
    CastPolicy,
    FloatFormat,
    NanPolicy,
    Overflow,
    cast_codes,
    get_format,
    get_policy,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from qsim.arrays import F32, F64, U8, U32, AnyArray

DEFAULT_POLICY = "ocp"
"""Ties to even, saturating, sign of NaN kept: the OCP reading, and what FP8 training kernels do."""

WIDENED = frozenset({"float16", "bfloat16", *FORMATS})
"""Names of the dtypes that float32 holds exactly."""


def encode(
    x: npt.ArrayLike,
    fmt: str | FloatFormat,
    *,
    policy: str | CastPolicy = DEFAULT_POLICY,
    overflow: Overflow | None = None,
    out: U8 | None = None,
    packed: bool = False,
) -> U8:
    """Codes of ``x``: uint8 of the same shape, one code a byte, or two with ``packed`` (4-bit formats).

    x: any shape and strides; float32, float16, bfloat16 and the 8-bit and smaller floats are taken exactly,
    float64 and integers are rounded once. Nearest, a tie to the even code. ``policy`` says what overflow and
    NaN become (default "ocp": saturating); ``overflow`` overrides its overflow. ``out``: uint8 of the
    result's shape, any strides; it is filled and returned. Packed, an axis of L becomes (L + 1) // 2 bytes,
    even element in the low nibble, odd tail padded with 0.
    FormatError: unknown format, policy or dtype; IEEE overflow for a format with neither Inf nor NaN;
    ``packed`` for a format that is not 4 bits wide; a wrong ``out``; NaN that the policy refuses.
    Source: OCP OFP8 1.0, OCP MX 1.0; equals ``encode_scalar`` code by code.
    """
    fmt = get_format(fmt)
    chosen = get_policy(policy)
    if overflow is not None:
        cast_codes(fmt, overflow=overflow, nan=chosen.nan)  # refuses what the format cannot express
        chosen = chosen.with_overflow(overflow)
    array = np.asarray(x)
    shape = array.shape
    if packed:
        _check_packed(fmt, array.ndim)
        shape = (*shape[:-1], packed_length(shape[-1]))
    if out is not None:
        _check_out(out, shape, np.dtype(np.uint8))
    bits = _float32_bits(array)
    # The kernel writes into ``out`` itself only where nothing else reads or reorders that memory.
    direct = not packed and out is not None and out.flags.c_contiguous and not np.may_share_memory(array, out)
    codes = out if direct and out is not None else np.empty(array.shape, np.uint8)
    if fmt.signed and fmt.has_zero:
        kernels.encode(bits, encoder_table(fmt, chosen), codes.reshape(-1))
    else:
        codes.reshape(-1)[:] = _encode_unsigned(bits, fmt, chosen)
    if chosen.nan is NanPolicy.RAISE and not fmt.has_nan and bool((codes == NAN_REFUSED).any()):
        raise FormatError(refused_nan(fmt))
    return _deliver(pack(codes) if packed else codes, out)


def decode(
    codes: npt.ArrayLike,
    fmt: str | FloatFormat,
    *,
    packed: bool = False,
    length: int | None = None,
    out: F32 | None = None,
) -> F32:
    """Values of ``codes``: float32 of the same shape, exact (every value is a float32); NaN keeps its sign.

    codes: integers of any shape and strides, or an array of the format's own ml_dtypes dtype. With ``packed``
    uint8 with two codes a byte; ``length`` is then the number of codes along the last axis (default: all,
    2 * bytes). ``out``: float32 of the result's shape, any strides; it is filled and returned.
    FormatError: a code outside the format, another dtype, a ``length`` that does not fit, a wrong ``out``.
    """
    fmt = get_format(fmt)
    array = np.asarray(codes)
    if array.dtype.name == fmt.name:
        array = array.view(np.uint8)
    if not (array.dtype.kind in "iu" or (array.size == 0 and array.dtype == np.float64)):
        raise FormatError(f"codes of dtype {array.dtype}: pass integers, best uint8, or {fmt.name} itself")
    if packed:
        _check_packed(fmt, array.ndim)
        array = unpack(array, 2 * array.shape[-1] if length is None else length)
    elif length is not None:
        raise FormatError(f"length {length} has a meaning only with packed=True")
    if array.size and (fmt.bits < 8 or array.dtype != np.uint8):
        fmt.check_code(int(array.min()))
        fmt.check_code(int(array.max()))
    if out is not None:
        _check_out(out, array.shape, np.dtype(np.float32))
    direct = out is not None and out.flags.c_contiguous and not np.may_share_memory(array, out)
    values = out if direct and out is not None else np.empty(array.shape, np.float32)
    flat = np.ascontiguousarray(array, np.uint8).reshape(-1)
    kernels.look_up(flat, decode_table(fmt), values.reshape(-1))
    return _deliver(values, out)


def _deliver(result: AnyArray, out: AnyArray | None) -> AnyArray:
    if out is None:
        return result
    if out is not result:
        out[...] = result
    return out


def _check_packed(fmt: FloatFormat, ndim: int) -> None:
    if fmt.codes_per_byte != 2:
        raise FormatError(f"packed=True needs a 4-bit format; {fmt.name} has {fmt.bits} bits a code")
    if ndim == 0:
        raise FormatError("packed=True needs an axis to pack along; this array has none")


def _check_out(out: AnyArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype:
        found = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise FormatError(f"out is {found}; it must be {dtype} of shape {shape}")
    if not out.flags.writeable:
        raise FormatError("out is read-only; pass a writable array")


def _float32_bits(array: AnyArray) -> U32:
    """Contiguous float32 bits [size] of ``array``, exact or rounded to odd (so that one rounding is left)."""
    dtype = array.dtype
    if dtype.kind == "f" and dtype.itemsize == 8:
        return narrow_to_odd(array.astype(np.float64, copy=False))
    if dtype.kind in "iub":
        return narrow_to_odd(_integers_as_float64(array))
    if dtype.kind == "f" and dtype.itemsize == 4:
        exact = array.astype(np.float32, copy=False)  # also from the other byte order
    elif dtype.name in WIDENED:
        exact = array.astype(np.float32)
    else:
        raise FormatError(f"x of dtype {dtype} cannot be encoded; pass float32, float16, bfloat16, float64 or integers")
    return np.ascontiguousarray(exact).reshape(-1).view(np.uint32)


def narrow_to_odd(x: F64) -> U32:
    """float32 bits [size] of ``x`` rounded to odd: safe for any format of at most 8 bits (see the kernel)."""
    bits = np.empty(x.size, np.uint32)
    kernels.narrow_to_odd(np.ascontiguousarray(x).reshape(-1), bits)
    return bits


def _integers_as_float64(array: AnyArray) -> F64:
    """Integers as float64: exact up to 2^53, beyond it rounded to odd, so nothing rounds twice."""
    array = array.reshape(-1)
    if array.dtype.itemsize < 8:
        return array.astype(np.float64)
    negative = array < 0
    magnitude = array.astype(np.uint64)  # two's complement: the next line is |array|, -2^63 included
    magnitude = np.where(negative, np.uint64(0) - magnitude, magnitude)
    low = magnitude & np.uint64(0x7FF)
    sticky = (magnitude - low) | np.where(low != 0, np.uint64(0x800), np.uint64(0))
    exact = np.where(magnitude >> np.uint64(53) != 0, sticky, magnitude).astype(np.float64)
    return np.where(negative, -exact, exact)


def _encode_unsigned(bits: U32, fmt: FloatFormat, policy: CastPolicy) -> U8:
    """Codes [size] for a format without sign or zero (scales): few elements, so plain numpy in float64."""
    x = bits.view(np.float32).astype(np.float64)
    fraction, above = np.frexp(np.where(np.isfinite(x), np.abs(x), 1.0))
    exponent = np.where(fraction == 0, fmt.min_exponent, np.maximum(above - 1, fmt.min_exponent))
    units = np.ldexp(fraction, above - exponent + fmt.mantissa_bits)
    # The place of x in the ordered list of codes, exact (8 bits before the point, 24 after); rint goes to the
    # even code at a tie. Below the least value the place is 0.
    first = 0 if fmt.has_zero else 1 << fmt.mantissa_bits
    place = (exponent - fmt.min_exponent) * (1 << fmt.mantissa_bits) + np.maximum(units - first, 0)
    resolved = policy.codes(fmt)
    code = np.rint(place)
    code = np.where((code > fmt.max_code) | np.isinf(x), resolved.overflow, code)
    if not fmt.signed:
        code = np.where(x < 0, resolved.nan, code)
    code = np.where(np.isnan(x), np.where(np.signbit(x), resolved.negative_nan, resolved.nan), code)
    return code.astype(np.uint8)
