"""Operands of a tensor core: from codes to exact values and alignment exponents. Knows no step and no sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from qsim.arrays import F64, I64, AnyArray, frozen
from qsim.codec.inputs import as_array
from qsim.errors import FormatError
from qsim.formats import ALIASES, FORMATS, FloatFormat, NanEncoding

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandFormat:
    """A signed binary format as a multiplier reads it.

    Fields as in ``FloatFormat``; ``dropped`` low bits of a code are not read (TF32 is the top of a float32). codes:
    the dtype of codes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: NanEncoding
    codes: type[np.unsignedinteger]
    dropped: int = 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the lowest normal binade, which the subnormals share."""
        return 1 - self.bias

    @property
    def width(self) -> int:
        """Bits of a code that are read."""
        return 1 + self.exponent_bits + self.mantissa_bits


def _wide(
    name: str, exponent_bits: int, mantissa_bits: int, codes: type[np.unsignedinteger], dropped: int = 0
) -> OperandFormat:
    return OperandFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=(1 << (exponent_bits - 1)) - 1,
        nan=NanEncoding.IEEE,
        codes=codes,
        dropped=dropped,
    )


FLOAT16: Final = _wide("float16", 5, 10, np.uint16)
BFLOAT16: Final = _wide("bfloat16", 8, 7, np.uint16)
TF32: Final = _wide("tf32", 8, 10, np.uint32, dropped=13)

_WIDE: Final[Mapping[str, OperandFormat]] = MappingProxyType({f.name: f for f in (FLOAT16, BFLOAT16, TF32)})


def operand_format(fmt: str | FloatFormat) -> OperandFormat:
    """The operand format of a name ("float8_e4m3fn", "e2m1", "float16", "bfloat16", "tf32") or a FloatFormat."""
    if not isinstance(fmt, (str, FloatFormat)):
        raise FormatError(f"operand format {fmt!r}: pass a name, like 'float8_e4m3fn' or 'bfloat16', or a FloatFormat")
    if isinstance(fmt, str):
        key = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}.get(fmt.lower(), fmt.lower())
        if key in _WIDE:
            return _WIDE[key]
        key = ALIASES.get(key, key)
        if key not in FORMATS:
            raise FormatError(f"unknown operand format {fmt!r}: known: {', '.join((*FORMATS, *_WIDE))}")
        fmt = FORMATS[key]
    if not (fmt.signed and fmt.has_zero):
        raise FormatError(f"{fmt.name} holds scales; a tensor core multiplies numbers with a sign and a zero")
    return OperandFormat(
        name=fmt.name,
        exponent_bits=fmt.exponent_bits,
        mantissa_bits=fmt.mantissa_bits,
        bias=fmt.bias,
        nan=fmt.nan,
        codes=np.uint8,
    )


def checked_codes(codes: AnyArray, fmt: OperandFormat, what: str) -> AnyArray:
    """Codes as unsigned integers of the format's width; float16, bfloat16 and float32 arrays by their bits."""
    codes = as_array(codes, what)
    if not codes.dtype.isnative:
        codes = codes.astype(codes.dtype.newbyteorder("="))
    same_name = codes.dtype.name in (fmt.name, "float32" if fmt is TF32 else fmt.name)
    if same_name and codes.dtype.itemsize == np.dtype(fmt.codes).itemsize:
        codes = np.ascontiguousarray(codes).view(fmt.codes)
    if codes.dtype != fmt.codes:
        raise FormatError(f"{what} of dtype {codes.dtype}: codes of {fmt.name} are {np.dtype(fmt.codes).name}")
    if fmt.width < 8 and codes.size and int(codes.max()) >> fmt.width:
        raise FormatError(f"{what} holds code {int(codes.max())}, outside 0..{(1 << fmt.width) - 1} of {fmt.name}")
    return codes


def fields(codes: AnyArray, fmt: OperandFormat) -> tuple[I64, I64, I64, AnyArray, AnyArray]:
    """Sign (+-1), significand, exponent; and where the code is NaN, where Inf.

    The value is sign * significand * 2^(exponent - mantissa_bits); the exponent of zeros and subnormals is that of the
    lowest normal binade, their significand is not normalised.
    """
    word = codes.astype(np.int64) >> fmt.dropped
    mantissa = word & ((1 << fmt.mantissa_bits) - 1)
    field = (word >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    negative = (word >> (fmt.width - 1)) & 1
    top = field == (1 << fmt.exponent_bits) - 1
    nan, inf = np.zeros(codes.shape, np.bool_), np.zeros(codes.shape, np.bool_)
    if fmt.nan is NanEncoding.IEEE:
        # A dropped bit still tells a NaN from an Inf.
        rest = (codes.astype(np.int64) & ((1 << fmt.dropped) - 1)) | mantissa
        nan, inf = top & (rest != 0), top & (rest == 0)
    elif fmt.nan is NanEncoding.ALL_ONES:
        nan = top & (mantissa == (1 << fmt.mantissa_bits) - 1)
    elif fmt.nan is NanEncoding.NEGATIVE_ZERO:
        nan = word == 1 << (fmt.width - 1)
    significand = np.where(field > 0, mantissa | (1 << fmt.mantissa_bits), mantissa)
    exponent = np.maximum(field, 1) - fmt.bias
    return 1 - 2 * negative, significand, exponent, nan, inf


def values_and_powers(codes: AnyArray, fmt: OperandFormat, lowest: int | None = None) -> tuple[F64, F64]:
    """float64 values of codes, exact, and 2^exponent beside each: 0 for a zero and for what is not finite.

    lowest: the exponent of the lowest binade where it is not the format's own, as for an operand that was converted to
    a wider format before the multiplication.
    """
    if np.dtype(fmt.codes).itemsize > 2:
        return _values_and_powers(codes, fmt, lowest)
    values, powers = _tables(fmt, lowest)
    return values[codes], powers[codes]


@lru_cache(maxsize=64)
def _tables(fmt: OperandFormat, lowest: int | None) -> tuple[F64, F64]:
    every = np.arange(1 << max(fmt.width, 8), dtype=np.int64).astype(fmt.codes)
    values, powers = _values_and_powers(every, fmt, lowest)
    return frozen(values), frozen(powers)


def _values_and_powers(codes: AnyArray, fmt: OperandFormat, lowest: int | None) -> tuple[F64, F64]:
    sign, significand, exponent, nan, inf = fields(codes, fmt)
    values = np.ldexp((sign * significand).astype(np.float64), exponent - fmt.mantissa_bits)
    values[(significand == 0) & (sign < 0)] = -0.0
    if lowest is not None:
        exponent = np.maximum(np.frexp(np.where(values == 0, 1.0, values))[1] - 1, lowest)
    powers = np.where(significand == 0, 0.0, np.ldexp(1.0, exponent))
    values[nan], powers[nan] = np.nan, 0.0
    values[inf], powers[inf] = sign[inf] * np.inf, 0.0
    return values, powers
