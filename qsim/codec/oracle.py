"""The definition of every codec, one value at a time, in exact fractions. Knows no arrays, no speed."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
from typing import SupportsFloat

from qsim.errors import FormatError
from qsim.formats import (
    DEFAULT_RANDOM_BITS,
    CastCodes,
    CastPolicy,
    FloatFormat,
    MissingNan,
    NanPolicy,
    Overflow,
    RoundMode,
    cast_codes,
    get_format,
    get_missing_nan,
    get_nan_policy,
    get_overflow,
    get_round_mode,
)

WORD_BITS = 32


def encode_scalar(
    x: SupportsFloat | Fraction,
    fmt: str | FloatFormat,
    *,
    rounding: str | RoundMode = RoundMode.TIES_TO_EVEN,
    overflow: str | Overflow = Overflow.SATURATE,
    nan: str | NanPolicy = NanPolicy.SIGNED,
    missing_nan: str | MissingNan = MissingNan.MAX,
    word: int = 0,
    random_bits: int = DEFAULT_RANDOM_BITS,
) -> int:
    """Code of ``x``, rounded once: by default to the nearest value, a tie to the even code.

    x: a float (any numpy float and int too) or a Fraction, taken exactly. It is rounded as if the exponent were
    unbounded; a magnitude that lands beyond ``fmt.max`` overflows, and so does every Inf, but a finite one that
    the mode rounds towards zero becomes ``fmt.max`` (see ``RoundMode``). A format without zero gives its least
    code to 0 and to all that is below its least value; a format without sign gives NaN to negative numbers.
    Stochastic rounding: f in [0, 1) is the distance to the smaller neighbour in units of the distance of the two,
    and the magnitude goes up iff (word >> (32 - random_bits)) < floor(f * 2^random_bits).
    FormatError: what is no real number; IEEE overflow for a format with neither Inf nor NaN; an overflow or a NaN that
    is refused; a word or a number of bits out of range.
    Source: OCP OFP8 1.0, OCP MX 1.0; IEEE 754-2019, 4.3 and 7.4; NaN by ``nan``, or ``missing_nan`` without one.
    """
    if not (0 <= word < 1 << WORD_BITS and 1 <= random_bits <= WORD_BITS):
        raise FormatError(f"word {word} of {random_bits} bits: a word is in 0..2^32-1 and has 1..32 bits to use")
    _check_number(x)
    fmt = get_format(fmt)
    codes = cast_codes(
        fmt, overflow=get_overflow(overflow), nan=get_nan_policy(nan), missing_nan=get_missing_nan(missing_nan)
    )
    return encode_by_codes(x, fmt, codes, rounding=get_round_mode(rounding), word=word, random_bits=random_bits)


def encode_by_policy(x: SupportsFloat | Fraction, fmt: FloatFormat, policy: CastPolicy, *, word: int = 0) -> int:
    """Code of ``x`` under a policy; ``word`` is read by stochastic rounding only."""
    return encode_by_codes(
        x, fmt, policy.codes(fmt), rounding=policy.rounding, word=word, random_bits=policy.random_bits
    )


def encode_by_codes(
    x: SupportsFloat | Fraction,
    fmt: FloatFormat,
    codes: CastCodes,
    *,
    rounding: RoundMode = RoundMode.TIES_TO_EVEN,
    word: int = 0,
    random_bits: int = DEFAULT_RANDOM_BITS,
) -> int:
    """Code of ``x`` with overflow and NaN already resolved (``CastPolicy.codes``)."""
    negative, magnitude = _sign_and_magnitude(x)
    if magnitude is None or (negative and magnitude != 0 and not fmt.signed):
        if codes.refuses_nan:
            raise FormatError(refusal(x, fmt))
        return codes.negative_nan if negative else codes.nan
    if isinstance(magnitude, Fraction):
        code = round_magnitude(magnitude, fmt, rounding=rounding, negative=negative, word=word, random_bits=random_bits)
        beyond = fmt.max_code if rounds_toward_zero(rounding, negative) else codes.overflow
    else:
        code, beyond = fmt.max_code + 1, codes.overflow
    if code > fmt.max_code:
        if codes.refuses_overflow:
            raise FormatError(refusal(x, fmt))
        code = beyond
    keeps = code != 0 or fmt.has_negative_zero or not fmt.has_zero  # a zero has a sign only where -0 exists
    return code | fmt.sign_bit if negative and keeps else code


def round_magnitude(
    magnitude: Fraction,
    fmt: FloatFormat,
    *,
    rounding: RoundMode = RoundMode.TIES_TO_EVEN,
    negative: bool = False,
    word: int = 0,
    random_bits: int = DEFAULT_RANDOM_BITS,
) -> int:
    """Code of a magnitude, as if the exponent field were unbounded above; ``negative`` is what UP and DOWN ask."""
    if magnitude == 0:
        return 0
    exponent = max(_floor_log2(magnitude), fmt.min_exponent)
    # The magnitude is low + rest / whole units of its binade's last place, in plain integers.
    shift = fmt.mantissa_bits - exponent
    whole = magnitude.denominator << max(-shift, 0)
    low, rest = divmod(magnitude.numerator << max(shift, 0), whole)
    # Codes count values in order: each binade holds 2^mantissa_bits of them, and the lowest binade of a
    # format with zero holds the subnormals before its own, so that its first full mantissa has field 1.
    offset = 0 if fmt.has_zero else 1 << fmt.mantissa_bits
    code = low - offset + ((exponent - fmt.min_exponent) << fmt.mantissa_bits)
    if code < 0 or rest == 0:
        return max(code, 0)  # below the least value of a format without zero, or exact
    match rounding:
        case RoundMode.TIES_TO_EVEN:
            up = 2 * rest > whole or (2 * rest == whole and code % 2 == 1)
        case RoundMode.TIES_TO_AWAY:
            up = 2 * rest >= whole
        case RoundMode.TOWARD_ZERO | RoundMode.UP | RoundMode.DOWN:
            up = not rounds_toward_zero(rounding, negative)
        case RoundMode.TO_ODD:
            up = code % 2 == 0
        case RoundMode.STOCHASTIC:
            up = word >> (WORD_BITS - random_bits) < (rest << random_bits) // whole
    return code + int(up)


def rounds_toward_zero(rounding: RoundMode, negative: bool) -> bool:
    """True where the mode never enlarges a magnitude of this sign."""
    return rounding is RoundMode.TOWARD_ZERO or rounding is (RoundMode.UP if negative else RoundMode.DOWN)


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
    above, below = magnitude.numerator, magnitude.denominator
    guess = above.bit_length() - below.bit_length()
    return guess if above << max(-guess, 0) >= below << max(guess, 0) else guess - 1


def _check_number(x: object) -> None:
    """FormatError for what is no real number; text that spells one is none."""
    real = isinstance(x, numbers.Real)
    try:
        if not real and isinstance(x, (str, bytes, bytearray, numbers.Complex)):
            raise TypeError
        if not real:
            float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise FormatError(f"x {x!r} is no real number; pass a float, an integer or a Fraction") from None


def _sign_and_magnitude(x: SupportsFloat | Fraction) -> tuple[bool, Fraction | float | None]:
    """Sign bit and exact magnitude: the float inf for Inf, None for NaN."""
    if isinstance(x, numbers.Rational):
        exact = Fraction(int(x.numerator), int(x.denominator))  # numpy integers too
        return exact < 0, abs(exact)
    value = float(x)
    negative = math.copysign(1.0, value) < 0
    if math.isnan(value):
        return negative, None
    return negative, math.inf if math.isinf(value) else abs(Fraction(value))


def place(name: str, element: int, shape: tuple[int, ...]) -> str:
    """An element in C order as a reader of arrays writes it: ``x[2, 3]``, or ``x`` alone for a scalar."""
    indices = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        indices.append(str(index))
    return f"{name}[{', '.join(reversed(indices))}]" if indices else name


def refusal(x: SupportsFloat | Fraction, fmt: FloatFormat, *, where: str = "x", scaled: bool = False) -> str:
    """Message of a value that a policy refuses; ``where`` names its place, as in ``x[2, 3]``.

    scaled: a scale of its own recipe stands between ``x`` and what rounds beyond the largest value.
    """
    negative, magnitude = _sign_and_magnitude(x)
    if magnitude is None:
        return (
            f"{where} is NaN and the policy refuses it in {fmt.name}; clean the input, or choose another NaN rule "
            "(nan, or missing_nan for a format without NaN)"
        )
    if negative and not fmt.signed:
        return (
            f"{where} is {x!s}: {fmt.name} has no sign, so it would become NaN, which the policy refuses; "
            "encode magnitudes, or choose another NaN rule"
        )
    finite = isinstance(magnitude, Fraction)
    does = "scaled, it rounds" if finite and scaled else "it rounds"
    mend = "clean the input" if not finite else "take a recipe that leaves room" if scaled else "scale the input"
    rules = "'saturate' or 'ieee'" if fmt.has_inf or fmt.has_nan else "'saturate'"
    return (
        f"{where} is {x!s}: {does} beyond {fmt.max:g}, the largest {fmt.name}, and the policy refuses overflow; "
        f"{mend}, or choose overflow {rules}"
    )
