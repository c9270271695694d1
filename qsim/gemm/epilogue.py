"""From the accumulator to D: scales, alpha, beta, bias, output format, in a stated order. Knows no operand's codes.

RN is float32, nearest even. acc is what the product left, s_a and s_b the factors of rows (or tensors) that it did not
hold:

    product             f = RN(s_a s_b); m = f, or RN(f alpha) where alpha is not 1;  y = RN(acc m + z), one rounding
    rows_first          y = RN(RN(acc s_a) s_b), columns_first y = RN(RN(acc s_b) s_a), then as below with m = alpha
    exact               the product holds the factors; m = alpha

z = RN(beta C), 0 without beta; in the last three y = RN(y m + z), and nothing is done where m is 1 and beta 0. Then
y = RN(y + RN(alpha correction)) of centres, y = RN(y + bias); amax is the largest finite |y| of D before its output
format; FP8: RN(y scale_d), saturating; float16 and bfloat16 from that float32 (two roundings, as the hardware has).
Source: cuBLASLt's documentation of its epilogues and scaling modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from qsim.arrays import F32, F64, AnyArray
from qsim.codec.api import encode
from qsim.codec.inputs import as_array
from qsim.errors import FormatError, UsageError
from qsim.formats import ALIASES, FORMATS, get_overflow

if TYPE_CHECKING:
    import numpy.typing as npt

ORDERS: Final = ("exact", "product", "rows_first", "columns_first")
"""When row and tensor factors are applied."""

WIDE_OUTPUTS: Final = ("float32", "float16", "bfloat16")
SHORT_NAMES: Final = MappingProxyType({"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"})


def number(value: object, what: str) -> np.float32:
    """One float32; UsageError for anything but a single real number that float32 holds."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        shape = f" of shape {np.shape(value)}" if isinstance(value, (np.ndarray, list, tuple)) else ""
        raise UsageError(f"{what} {value!r}{shape} is no single number; a scale for each column goes into the operand")
    try:
        with np.errstate(over="ignore"):
            result = np.float32(value)
    except OverflowError:
        result = np.float32(np.inf)
    if np.isinf(result) and not (isinstance(value, (float, np.floating)) and np.isinf(value)):
        raise UsageError(f"{what} {value!r} leaves float32")
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epilogue:
    """What is done to an accumulator; see the module for the order.

    alpha, beta: float32 numbers. c: float32 that broadcasts to D, read where beta is not 0. bias: float32 that
    broadcasts to D ([N]: one a column); it comes after alpha and is not scaled by it. scale_d: a float32 number that
    multiplies an FP8 output before it is encoded (so decode gives D times scale_d); refused with any other output.
    order: when row and tensor scales are applied: "product", y = fma(acc, RN(RN(s_a s_b) alpha), RN(beta c)), one
    rounding; "rows_first" and "columns_first", y = RN(RN(acc s_a) s_b) or RN(RN(acc s_b) s_a), then alpha and beta;
    "exact", they are in the sum. None: "exact" where the accumulator is exact, else "product". overflow: "saturate",
    "ieee" or "raise" of an FP8 output. Every step is float32, to nearest even.
    """

    alpha: float = 1.0
    beta: float = 0.0
    c: npt.ArrayLike | None = None
    bias: npt.ArrayLike | None = None
    scale_d: float = 1.0
    order: str | None = None
    overflow: str = "saturate"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not (self.order is None or (isinstance(self.order, str) and self.order in ORDERS)):
            raise UsageError(f"order {self.order!r} of an epilogue is unknown; known: {', '.join(ORDERS)}")
        for name in ("alpha", "beta", "scale_d"):
            number(getattr(self, name), name)
        get_overflow(self.overflow)
        if number(self.beta, "beta") != 0 and self.c is None:
            raise UsageError(f"beta {self.beta} has nothing to scale; pass c")


DEFAULT: Final = Epilogue()


def finished(
    acc: F32, row: F64, column: F64, epilogue: Epilogue, *, order: str, shape: tuple[int, ...],
    correction: F32 | None = None,
) -> F32:  # fmt: skip
    """y float32 of ``shape`` [..., N] before its output format, of acc [M, N]: row [M], column [N] the factors."""
    full, shape = shape, acc.shape
    z = _addend(epilogue, full, shape)
    alpha = number(epilogue.alpha, "alpha")
    with np.errstate(all="ignore"):
        if order == "product":
            m = (row[:, None] * column).astype(np.float32)
            m = m if alpha == 1 else m * alpha
            y = fma32(acc, np.broadcast_to(m, shape), z)
        else:
            factors = {"exact": (), "rows_first": (row[:, None], column), "columns_first": (column, row[:, None])}
            y = acc
            for factor in factors[order]:
                y = (y * factor.astype(np.float32)).astype(np.float32)
            if alpha != 1 or z is not None:
                y = fma32(y, np.broadcast_to(alpha, shape), z)
        if correction is not None:
            y = (y + (correction if alpha == 1 else correction * alpha)).astype(np.float32)
        if epilogue.bias is not None:
            y = (y + fitted(epilogue.bias, full, "bias").reshape(shape)).astype(np.float32)
    return y.reshape(full)


def fma32(a: F32, b: F32, c: F32 | None) -> F32:
    """RN(a b + c), one rounding; without c RN(a b), and an exact 0 is then +0 (as a b + 0)."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact
    if c is None:
        return np.asarray(product + 0.0, np.float32)
    total = product + c
    # What the float64 sum lost; then the sum rounded to odd, so that one rounding is left.
    other = total - product
    rest = (product - (total - other)) + (np.asarray(c, np.float64) - other)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    away = (rest > 0) == (total > 0)
    odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    return np.asarray(odd.view(np.float64), np.float32)


def amax_of(y: F32) -> np.float32:
    """The largest finite |y|; 0.0 where there is none."""
    magnitude = np.abs(y)
    return np.float32(magnitude.max(initial=np.float32(0), where=np.isfinite(magnitude)))


def output(y: F32, out_dtype: str, epilogue: Epilogue) -> AnyArray:
    """D in its format: float32; float16; bfloat16 as its values in float32; FP8 as uint8 codes of RN(y scale_d)."""
    name = output_name(out_dtype)
    scale = number(epilogue.scale_d, "scale_d")
    if name in WIDE_OUTPUTS and scale != 1:
        raise UsageError(f"scale_d {epilogue.scale_d} belongs to an FP8 output; out_dtype is {out_dtype!r}")
    with np.errstate(all="ignore"):
        if name == "float32":
            return y
        if name == "float16":
            return y.astype(np.float16)
        if name == "bfloat16":
            return _bfloat16(y)
        try:
            return encode(y if scale == 1 else _times(y, scale), name, overflow=epilogue.overflow)
        except FormatError as error:
            raise FormatError(f"D times scale_d: {error}") from None


def _times(y: F32, scale: np.float32) -> F32:
    """RN(y scale); a NaN that the product makes (Inf * 0) is positive, as processors differ there."""
    scaled = np.asarray(y * scale, np.float32)
    made = np.isnan(scaled) & ~np.isnan(y)
    return np.where(made, np.float32(np.nan), scaled) if made.any() else scaled


def output_name(out_dtype: object) -> str:
    """The name of an output format; FormatError for one that no product has."""
    key = out_dtype if isinstance(out_dtype, str) else str(getattr(out_dtype, "__name__", out_dtype))
    key = SHORT_NAMES.get(key.lower(), ALIASES.get(key.lower(), key.lower()))
    if key in WIDE_OUTPUTS or (key in FORMATS and FORMATS[key].bits == 8 and FORMATS[key].signed):
        return key
    known = [name for name, fmt in FORMATS.items() if fmt.bits == 8 and fmt.signed]
    raise FormatError(f"out_dtype {out_dtype!r} is unknown; known: {', '.join((*WIDE_OUTPUTS, *known))}")


def _bfloat16(y: F32) -> F32:
    """Values of bfloat16 nearest y, ties to even, as float32; NaN is 7fc00000."""
    bits = y.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(y), np.uint32(0x7FC00000), rounded).astype(np.uint32).view(np.float32)


def _addend(epilogue: Epilogue, full: tuple[int, ...], shape: tuple[int, ...]) -> F32 | None:
    """z = RN(beta C), C of D's ``full`` shape as [M, N]."""
    beta = number(epilogue.beta, "beta")
    if beta == 0 or epilogue.c is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(fitted(epilogue.c, full, "c").reshape(shape) * beta, np.float32)


def fitted(array: npt.ArrayLike, shape: tuple[int, ...], what: str) -> F32:
    """``array`` as float32, broadcast to ``shape``; FormatError or UsageError where it cannot be."""
    numbers = as_array(array, what)
    if numbers.dtype.kind not in "fiu" and numbers.dtype.name != "bfloat16":
        raise FormatError(f"{what} of dtype {numbers.dtype}; pass float32")
    try:
        return np.broadcast_to(numbers.astype(np.float32), shape)
    except ValueError:
        raise UsageError(f"{what} of shape {numbers.shape} does not broadcast to D of shape {shape}") from None
