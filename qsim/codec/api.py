"""Encode and decode numpy arrays of any layout. Knows no scale and no centre."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsim.checks import yes_or_no
from qsim.codec import decode_kernels
from qsim.codec import numba_kernels as kernels
from qsim.codec.counts import CastCounts
from qsim.codec.general import COUNTS, encode_flat, first_refused
from qsim.codec.inputs import as_array, check_stream, no_quantized_tensor
from qsim.codec.oracle import place, refusal
from qsim.codec.packing import pack, packed_length, unpack
from qsim.codec.tables import decode_table, encoder_table, has_fast_kernel
from qsim.codec.threads import in_chunks
from qsim.errors import FormatError
from qsim.formats import (
    ALIASES,
    FORMATS,
    CastPolicy,
    FloatFormat,
    MissingNan,
    NanPolicy,
    Overflow,
    RoundMode,
    get_format,
    get_policy,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from qsim.arrays import F32, F64, I64, U8, U32, AnyArray
    from qsim.philox import RandomStream

DEFAULT_POLICY = "ocp"
"""Ties to even, saturating, sign of NaN kept: the OCP reading, and what FP8 training kernels do."""

WIDENED = frozenset({"float16", "bfloat16", *FORMATS})
"""Names of the dtypes that float32 holds exactly."""


def encode(
    x: npt.ArrayLike,
    fmt: str | FloatFormat,
    *,
    policy: str | CastPolicy = DEFAULT_POLICY,
    rounding: str | RoundMode | None = None,
    overflow: str | Overflow | None = None,
    nan: str | NanPolicy | None = None,
    missing_nan: str | MissingNan | None = None,
    stream: RandomStream | None = None,
    out: U8 | None = None,
    packed: bool = False,
) -> U8:
    """Codes of ``x``: uint8 of the same shape, one code a byte, or two with ``packed`` (4-bit formats).

    x: any shape and strides; float32, float16, bfloat16 and the 8-bit and smaller floats are taken exactly,
    float64 and integers are rounded once, in every mode. ``policy`` says how to round and what overflow and NaN
    become (default "ocp": nearest, ties to the even code, saturating); ``rounding``, ``overflow``, ``nan`` and
    ``missing_nan`` override it, by enum or by name. ``stream``: the random words of stochastic rounding, and of no
    other; element i in C order takes word i, whatever the layout. ``out``: uint8 of the result's shape, any
    strides; it is filled and returned, and an error leaves it as it was. Packed, an axis of L becomes
    (L + 1) // 2 bytes, even element in the low nibble, odd tail padded with 0.
    FormatError: unknown format, policy, rounding or dtype; IEEE overflow for a format with neither Inf nor NaN;
    ``packed`` for a format that is not 4 bits wide; a wrong ``out``; an overflow or a NaN that the policy refuses,
    with the first value and its index. UsageError: stochastic rounding without a stream, a stream without it.
    Source: OCP OFP8 1.0, OCP MX 1.0, IEEE 754-2019; equals ``encode_scalar`` code by code.
    """
    cast = _Cast.of(fmt, policy, rounding=rounding, overflow=overflow, nan=nan, missing_nan=missing_nan)
    return _encode(x, cast, stream, out=out, packed=packed, counted=False)[0]


def encode_with_counts(
    x: npt.ArrayLike,
    fmt: str | FloatFormat,
    *,
    policy: str | CastPolicy = DEFAULT_POLICY,
    rounding: str | RoundMode | None = None,
    overflow: str | Overflow | None = None,
    nan: str | NanPolicy | None = None,
    missing_nan: str | MissingNan | None = None,
    stream: RandomStream | None = None,
    out: U8 | None = None,
    packed: bool = False,
) -> tuple[U8, CastCounts]:
    """(codes, counts): the codes of ``encode``, and what the cast did, counted in the same pass.

    Arguments as for ``encode``. codes: uint8, as there (``out`` itself where it was given). counts: CastCounts of four
    int64 arrays of shape (), whatever the shape of ``x``:
    saturated: finite elements that round beyond ``fmt.max``, as if the exponent were unbounded, whatever mode and
        policy made of them: the largest value, Inf or NaN.
    flushed: elements that are not zero and round to zero; a format without zero (E8M0) flushes nothing.
    nan, inf: elements of x that are NaN, infinite; an Inf is not counted as saturated.
    FormatError, UsageError: as ``encode``; what the policy refuses is raised, not counted.
    """
    cast = _Cast.of(fmt, policy, rounding=rounding, overflow=overflow, nan=nan, missing_nan=missing_nan)
    codes, counts = _encode(x, cast, stream, out=out, packed=packed, counted=True)
    saturated, flushed, nans, infs = (np.asarray(n) for n in counts[:4])
    return codes, CastCounts(saturated=saturated, flushed=flushed, nan=nans, inf=infs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """A format and a policy that fit each other."""

    fmt: FloatFormat
    policy: CastPolicy

    @classmethod
    def of(
        cls,
        fmt: str | FloatFormat,
        policy: str | CastPolicy,
        *,
        rounding: str | RoundMode | None,
        overflow: str | Overflow | None,
        nan: str | NanPolicy | None,
        missing_nan: str | MissingNan | None,
    ) -> _Cast:
        fmt, chosen = _format(fmt), get_policy(policy)
        choices = chosen.for_format(fmt, rounding=rounding, overflow=overflow, nan=nan, missing_nan=missing_nan)
        return cls(fmt=fmt, policy=choices)

    @property
    def refuses(self) -> bool:
        codes = self.policy.codes(self.fmt)
        return codes.refuses_nan or codes.refuses_overflow


def _encode(
    x: npt.ArrayLike, cast: _Cast, stream: RandomStream | None, *, out: U8 | None, packed: bool, counted: bool
) -> tuple[U8, I64]:
    """Codes, and counts where they were asked for."""
    fmt, policy = cast.fmt, cast.policy
    array = as_array(x, "x")
    shape = array.shape
    if yes_or_no("packed", packed):
        _check_packed(fmt, array.ndim)
        shape = (*shape[:-1], packed_length(shape[-1]))
    if out is not None:
        _check_out(out, shape, np.dtype(np.uint8))
    check_stream(policy, stream, array.size)
    numbers = _exact(array)
    # The kernel writes into ``out`` itself only where nothing else reads, reorders or refuses what is there.
    direct = None if packed or cast.refuses else out
    if direct is not None and (np.may_share_memory(array, direct) or not direct.flags.c_contiguous):
        direct = None
    codes = np.empty(array.shape, np.uint8) if direct is None else direct
    flat = codes.reshape(-1)
    counts = np.zeros(COUNTS, np.int64)
    if has_fast_kernel(fmt, policy) and not counted:
        bits, constants = _float32_bits(numbers), encoder_table(fmt, policy)
        in_chunks(lambda start, stop: kernels.encode(bits[start:stop], constants, flat[start:stop]), flat.size)
    else:
        counts = encode_flat(numbers, flat, fmt=fmt, policy=policy, stream=stream)
    if counts[-1]:
        first = first_refused(numbers, fmt=fmt, policy=policy, stream=stream)
        raise FormatError(refusal(array.flat[first], fmt, where=place("x", first, array.shape)))
    return _deliver(pack(codes) if packed else codes, out), counts


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
    UsageError: a QuantizedTensor, which ``qsim.dequantize`` decodes.
    """
    no_quantized_tensor(codes, "qsim.dequantize decodes it, with its scales")
    fmt = _format(fmt)
    array = as_array(codes, "codes")
    if array.dtype.name == fmt.name:
        array = array.view(np.uint8)
    if not (array.dtype.kind in "iu" or (array.size == 0 and array.dtype == np.float64)):
        raise FormatError(f"codes of dtype {array.dtype}: pass integers, best uint8, or {fmt.name} itself")
    if yes_or_no("packed", packed):
        _check_packed(fmt, array.ndim)
        array = unpack(array, 2 * array.shape[-1] if length is None else length)
    elif length is not None:
        raise FormatError(f"length {length} has a meaning only with packed=True")
    if array.size and (fmt.bits < 8 or array.dtype != np.uint8):
        _check_codes(array, fmt)
    if out is not None:
        _check_out(out, array.shape, np.dtype(np.float32))
    direct = out is not None and out.flags.c_contiguous and not np.may_share_memory(array, out)
    values = out if direct and out is not None else np.empty(array.shape, np.float32)
    flat = np.ascontiguousarray(array, np.uint8).reshape(-1)
    table, into = decode_table(fmt), values.reshape(-1)
    in_chunks(lambda start, stop: decode_kernels.look_up(flat[start:stop], table, into[start:stop]), flat.size)
    return _deliver(values, out)


def _format(name: str | FloatFormat) -> FloatFormat:
    """``get_format``, which knows no scale recipe and would suggest the format that is spelled nearest."""
    if isinstance(name, str) and name.lower() not in (*FORMATS, *ALIASES):
        from qsim.codec.scaled.recipes import SCALE_RECIPE_ALIASES, SCALE_RECIPES

        key, recipes = name.lower(), (*SCALE_RECIPES, *SCALE_RECIPE_ALIASES)
        begun = [key] if key in recipes else [recipe for recipe in recipes if key and recipe.startswith(key)]
        if begun and not any(fmt.startswith(key) for fmt in (*FORMATS, *ALIASES)):
            what, others = "a scale recipe", ""
            if len(begun) > 1:
                what = f"{len(begun)} scale recipes"
                others = " or another of them; `python -m qsim formats` lists them"
            raise FormatError(f"{name!r} names {what}, not a format: qsim.quantize(x, {begun[0]!r}){others}")
    return get_format(name)


def _deliver(result: AnyArray, out: AnyArray | None) -> AnyArray:
    if out is None:
        return result
    if out is not result:
        out[...] = result
    return out


def _check_codes(array: AnyArray, fmt: FloatFormat) -> None:
    try:
        fmt.check_code(int(array.min()))
        fmt.check_code(int(array.max()))
    except FormatError as error:
        hint = "; two codes in a byte need packed=True" if array.dtype == np.uint8 and fmt.codes_per_byte == 2 else ""
        raise FormatError(f"{error}{hint}") from None


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


def _exact(array: AnyArray) -> F32 | F64:
    """The numbers of ``array`` [size], contiguous, in C order: float32 or float64, exact (or as good as: see below)."""
    dtype = array.dtype
    if dtype.kind == "f" and dtype.itemsize == 8:
        return np.ascontiguousarray(array, np.float64).reshape(-1)  # also from the other byte order
    if dtype.kind in "iub":
        return _integers_as_float64(array)
    if (dtype.kind == "f" and dtype.itemsize == 4) or dtype.name in WIDENED:
        return np.ascontiguousarray(array, np.float32).reshape(-1)
    raise FormatError(f"x of dtype {dtype} cannot be encoded; pass float32, float16, bfloat16, float64 or integers")


def _float32_bits(numbers: F32 | F64) -> U32:
    """float32 bits, exact or rounded to odd (so that one rounding to nearest is left)."""
    return narrow_to_odd(np.asarray(numbers, np.float64)) if numbers.dtype == np.float64 else numbers.view(np.uint32)


def narrow_to_odd(x: F64) -> U32:
    """float32 bits [size] of ``x`` rounded to odd: safe for any format of at most 8 bits (see the kernel)."""
    bits = np.empty(x.size, np.uint32)
    kernels.narrow_to_odd(np.ascontiguousarray(x).reshape(-1), bits)
    return bits


def _integers_as_float64(array: AnyArray) -> F64:
    """Integers as float64: exact up to 2^53, beyond it rounded to odd, so nothing rounds twice.

    Where 53 bits are not exact the last is odd. No value and no midpoint of a format has so many, and stochastic
    rounding reads at most 7 + 32 of them, so the odd neighbour is rounded as the integer is, in every mode.
    """
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
