"""The definition of every codec, one value at a time, in exact fractions. Knows no arrays, no speed."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
from typing import SupportsFloat

from qsim.errors import FormatError
from qsim.formats import (
    NAN_REFUSED,
    CastCodes,
    FloatFormat,
    NanPolicy,
    Overflow,
    RoundMode,
    cast_codes,
)


def encode_scalar(
    x: SupportsFloat | Fraction,
    fmt: FloatFormat,
    *,
    rounding: RoundMode = RoundMode.TIES_TO_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanPolicy = NanPolicy.SIGNED,
) -> int:
    """Code of ``x``, rounded once: to the nearest value, a tie to the even code.

    x: a float (any numpy float and int too) or a Fraction, taken exactly. A magnitude that would round beyond
    ``fmt.max`` if the exponent were unbounded overflows. A format without zero gives its least code to 0 and
    to all that is below its least value; a format without sign gives NaN to negative numbers.
    FormatError: IEEE overflow for a format with neither Inf nor NaN; a NaN that the policy refuses.
    Source: OCP OFP8 1.0, OCP MX 1.0; NaN by ``nan``.
    """
    if rounding is not RoundMode.TIES_TO_EVEN:
        raise FormatError(f"rounding {rounding!r} is unknown; known: {[mode.name for mode in RoundMode]}")
    return encode_by_codes(x, fmt, cast_codes(fmt, overflow=overflow, nan=nan))


def encode_by_codes(x: SupportsFloat | Fraction, fmt: FloatFormat, codes: CastCodes) -> int:
    """Code of ``x`` with overflow and NaN already resolved (``CastPolicy.codes``)."""
    if isinstance(x, numbers.Rational):
        exact = Fraction(int(x.numerator), int(x.denominator))  # numpy integers too
        negative, magnitude = exact < 0, abs(exact)
    else:
        value = float(x)
        negative = math.copysign(1.0, value) < 0
        if math.isnan(value):
            return _nan_code(negative, fmt, codes)
        if math.isinf(value):
            return _nan_code(False, fmt, codes) if negative and not fmt.signed else _sign(codes.overflow, negative, fmt)
        magnitude = abs(Fraction(value))
    if negative and not fmt.signed and magnitude:
        return _nan_code(False, fmt, codes)
    code = round_magnitude(magnitude, fmt)
    return _sign(codes.overflow if code > fmt.max_code else code, negative, fmt)


def round_magnitude(magnitude: Fraction, fmt: FloatFormat) -> int:
    """Code of the nearest value, ties to the even code, as if the exponent field were unbounded above."""
    if magnitude == 0:
        return 0
    exponent = max(_floor_log2(magnitude), fmt.min_exponent)
    units = magnitude * Fraction(2) ** (fmt.mantissa_bits - exponent)  # in units of the binade's last place
    low = math.floor(units)
    rest = units - low
    # Codes count values in order: each binade holds 2^mantissa_bits of them, and the lowest binade of a
    # format with zero holds the subnormals before its own, so that its first full mantissa has field 1.
    offset = 0 if fmt.has_zero else 1 << fmt.mantissa_bits
    code = low - offset + ((exponent - fmt.min_exponent) << fmt.mantissa_bits)
    if code < 0:
        return 0  # below the least value of a format without zero
    return code + int(rest > Fraction(1, 2) or (rest == Fraction(1, 2) and code % 2 == 1))


def decode_scalar(code: int, fmt: FloatFormat) -> float:
    """Exact value of ``code`` (float64 holds all of them); -0, Inf and the sign of NaN are kept.

    FormatError for a code outside 0 .. fmt.code_count - 1.
    """
    fmt.check_code(code)
    sign = -1.0 if code & fmt.sign_bit else 1.0
    if code in fmt.nan_codes:
        return math.copysign(math.nan, sign)
    if code in fmt.inf_codes:
        return sign * math.inf
    return sign * fmt.magnitude(code)


def _floor_log2(magnitude: Fraction) -> int:
    """floor(log2 magnitude) of a positive fraction."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if magnitude >= Fraction(2) ** guess else guess - 1


def _sign(code: int, negative: bool, fmt: FloatFormat) -> int:
    """``code`` with the sign of the number; zero keeps it only where -0 exists."""
    keeps = code != 0 or fmt.has_negative_zero
    return code | fmt.sign_bit if negative and keeps else code


def _nan_code(negative: bool, fmt: FloatFormat, codes: CastCodes) -> int:
    code = codes.negative_nan if negative else codes.nan
    if code == NAN_REFUSED and not fmt.has_nan:
        raise FormatError(refused_nan(fmt))
    return code


def refused_nan(fmt: FloatFormat) -> str:
    """Message of a NaN that the policy refuses."""
    return (
        f"NaN has no code in {fmt.name} and the policy says NanPolicy.RAISE; clean the input or choose "
        "NanPolicy.SIGNED, POSITIVE or QUIET"
    )
