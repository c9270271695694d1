"""What a cast does where the format leaves a choice: rounding, overflow, NaN. Knows no arrays.

Libraries differ exactly here, so each choice has a name and each library a preset in ``POLICIES``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from qsim.checks import whole_number
from qsim.errors import FormatError
from qsim.formats.model import FloatFormat, NanEncoding
from qsim.formats.names import member, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RANDOM_BITS = 32
"""A random word has 32 bits."""

DEFAULT_RANDOM_BITS = 24
"""Bits that decide a stochastic rounding unless the policy says otherwise."""


class RoundMode(enum.Enum):
    """How a value between two neighbours is rounded; what is representable never moves.

    The value is rounded as if the exponent were unbounded, and only then does overflow apply. A finite
    magnitude beyond ``fmt.max`` that its mode rounds towards zero (TOWARD_ZERO; UP for a negative, DOWN for a
    positive one) becomes ``fmt.max`` whatever the overflow policy gives for a value: IEEE 754-2019, 7.4. It
    still is an overflow: it is counted as saturated, and Overflow.RAISE refuses it.
    Even and odd are said of the code, which for a format without mantissa (E8M0) is its exponent.
    """

    TIES_TO_EVEN = "nearest_even"  # to the nearest; a tie goes to the even code
    TIES_TO_AWAY = "nearest_away"  # to the nearest; a tie goes to the larger magnitude
    TOWARD_ZERO = "toward_zero"
    UP = "up"  # towards +Inf
    DOWN = "down"  # towards -Inf
    TO_ODD = "odd"  # to the neighbour with the odd code: safe to round once more
    STOCHASTIC = "stochastic"  # to the larger magnitude with the probability of the fraction, cut to n bits


class Overflow(enum.Enum):
    """What becomes of a magnitude that rounds beyond ``fmt.max``, Inf included."""

    SATURATE = "saturate"  # the largest finite value
    IEEE = "ieee"  # Inf, or NaN where the format has no Inf
    RAISE = "raise"  # FormatError naming the first such element; possible in every format


class NanPolicy(enum.Enum):
    """Which code a NaN gets in a format that has NaN."""

    SIGNED = "signed"  # the all-ones NaN, sign kept
    POSITIVE = "positive"  # the all-ones NaN, sign dropped
    QUIET = "quiet"  # the NaN with only the top mantissa bit, sign kept
    RAISE = "raise"  # FormatError naming the first NaN, in every format (a negative number without sign too)


class MissingNan(enum.Enum):
    """Which code a NaN gets in a format without NaN (E2M1, E2M3, E3M2)."""

    MAX = "max"  # +max for both signs, as CUDA
    ZERO = "zero"  # -0 for NaN and +0 for -NaN, as ml_dtypes
    RAISE = "raise"  # FormatError naming the first NaN


_ROUND_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{mode.name.lower(): mode.value for mode in RoundMode},  # ties_to_even, to_odd ...
        "nearest": "nearest_even",
        "rne": "nearest_even",
        "rna": "nearest_away",
        "rz": "toward_zero",
        "rtz": "toward_zero",
        "ru": "up",
        "toward_positive": "up",
        "rd": "down",
        "toward_negative": "down",
        "sr": "stochastic",
    }
)
_NAN_ALIASES: Mapping[str, str] = MappingProxyType({"keep_sign": "signed", "canonical": "positive"})


def get_round_mode(name: str | RoundMode) -> RoundMode:
    """The rounding of this name ("nearest_even" ... "stochastic", or a usual abbreviation). Else FormatError."""
    return member(RoundMode, name, what="rounding", aliases=_ROUND_ALIASES)


def get_overflow(name: str | Overflow) -> Overflow:
    """The overflow rule of this name. Else FormatError."""
    return member(Overflow, name, what="overflow")


def get_nan_policy(name: str | NanPolicy) -> NanPolicy:
    """The NaN rule of this name. Else FormatError."""
    return member(NanPolicy, name, what="NaN policy", aliases=_NAN_ALIASES)


def get_missing_nan(name: str | MissingNan) -> MissingNan:
    """The rule for a NaN in a format without NaN. Else FormatError."""
    return member(MissingNan, name, what="rule for a missing NaN")


class CastCodes(NamedTuple):
    """Overflow and NaN of a policy resolved for one format, as a kernel takes them.

    ``overflow`` is the code of a positive overflow (a negative one adds the sign bit); ``nan`` and
    ``negative_nan`` are whole codes. Where a cast is refused the code is what stands there until the error.
    """

    overflow: int
    nan: int
    negative_nan: int
    refuses_overflow: bool = False
    refuses_nan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPolicy:
    """One way to cast, usable for every format.

    Overflow is chosen by what a format can express: ``overflow_with_inf`` for formats with Inf,
    ``overflow_nan_only`` for those with NaN but no Inf, ``overflow_fnuz`` for those whose one NaN is the code of -0
    (torch tells the two apart), ``overflow_finite`` for those with neither, which saturate or raise (an IEEE
    overflow of such a format is an error: see ``cast_codes``). ``missing_nan`` serves formats without NaN, ``nan``
    the others. ``random_bits`` is read by stochastic rounding only.
    """

    name: str
    rounding: RoundMode
    overflow_with_inf: Overflow
    overflow_nan_only: Overflow
    overflow_fnuz: Overflow
    overflow_finite: Overflow = Overflow.SATURATE
    nan: NanPolicy
    missing_nan: MissingNan = MissingNan.MAX
    random_bits: int = DEFAULT_RANDOM_BITS

    def __post_init__(self) -> None:
        """Refuse what no cast can do."""
        if not 1 <= whole_number("random_bits", self.random_bits) <= MAX_RANDOM_BITS:
            raise FormatError(
                f"policy {self.name}: random_bits {self.random_bits} is outside 1..{MAX_RANDOM_BITS}, "
                "the bits of one random word"
            )
        if self.overflow_finite is Overflow.IEEE:
            raise FormatError(
                f"policy {self.name}: overflow_finite 'ieee' does not exist, there is neither Inf nor NaN; "
                "choose 'saturate' or 'raise'"
            )

    def __hash__(self) -> int:
        """By name alone: tables are looked up by policy for every cast."""
        return hash(self.name)

    def overflow(self, fmt: FloatFormat) -> Overflow:
        """The overflow mode in force for ``fmt``."""
        if fmt.has_inf:
            return self.overflow_with_inf
        if fmt.nan is NanEncoding.NEGATIVE_ZERO:
            return self.overflow_fnuz
        return self.overflow_nan_only if fmt.has_nan else self.overflow_finite

    def with_choices(
        self,
        *,
        rounding: str | RoundMode | None = None,
        overflow: str | Overflow | None = None,
        nan: str | NanPolicy | None = None,
        missing_nan: str | MissingNan | None = None,
        random_bits: int | None = None,
    ) -> CastPolicy:
        """This policy with what is given; its name says what was changed. ``overflow``: as ``with_overflow``."""
        policy = self if overflow is None else self.with_overflow(get_overflow(overflow))
        if rounding is not None:
            mode = get_round_mode(rounding)
            policy = replace(policy, name=f"{policy.name}+rounding={mode.value}", rounding=mode)
        if nan is not None:
            rule = get_nan_policy(nan)
            policy = replace(policy, name=f"{policy.name}+nan={rule.value}", nan=rule)
        if missing_nan is not None:
            missing = get_missing_nan(missing_nan)
            policy = replace(policy, name=f"{policy.name}+missing_nan={missing.value}", missing_nan=missing)
        if random_bits is not None:
            policy = replace(policy, name=f"{policy.name}+random_bits={random_bits}", random_bits=random_bits)
        return policy

    def with_overflow(self, overflow: Overflow) -> CastPolicy:
        """This policy with ``overflow`` for every format that can express it; IEEE leaves the others saturating."""
        return replace(
            self,
            name=f"{self.name}+overflow={overflow.value}",
            overflow_with_inf=overflow,
            overflow_nan_only=overflow,
            overflow_fnuz=overflow,
            overflow_finite=Overflow.SATURATE if overflow is Overflow.IEEE else overflow,
        )

    def for_format(
        self,
        fmt: FloatFormat,
        *,
        rounding: str | RoundMode | None = None,
        overflow: str | Overflow | None = None,
        nan: str | NanPolicy | None = None,
        missing_nan: str | MissingNan | None = None,
    ) -> CastPolicy:
        """``with_choices``, for one format: FormatError for a choice that it cannot express."""
        if overflow is not None:
            cast_codes(fmt, overflow=get_overflow(overflow), nan=self.nan)
        return self.with_choices(rounding=rounding, overflow=overflow, nan=nan, missing_nan=missing_nan)

    def codes(self, fmt: FloatFormat) -> CastCodes:
        """This policy resolved for ``fmt``; all but the rounding."""
        return cast_codes(fmt, overflow=self.overflow(fmt), nan=self.nan, missing_nan=self.missing_nan)


@lru_cache(maxsize=512)
def cast_codes(
    fmt: FloatFormat, *, overflow: Overflow, nan: NanPolicy, missing_nan: MissingNan = MissingNan.MAX
) -> CastCodes:
    """Codes of overflow and NaN; FormatError for IEEE overflow in a format with neither Inf nor NaN."""
    positive, negative = _nan_codes(fmt, nan, missing_nan)
    code = fmt.max_code
    if overflow is Overflow.IEEE:
        if not (fmt.has_inf or fmt.has_nan):
            raise FormatError(
                f"overflow {overflow.value!r} does not exist for {fmt.name}: it has neither Inf nor NaN and "
                "always saturates; ask for overflow='saturate', or leave overflow out"
            )
        code = fmt.exponent_mask if fmt.has_inf else positive
    return CastCodes(
        code,
        positive,
        negative,
        refuses_overflow=overflow is Overflow.RAISE,
        refuses_nan=nan is NanPolicy.RAISE or (not fmt.has_nan and missing_nan is MissingNan.RAISE),
    )


def _nan_codes(fmt: FloatFormat, policy: NanPolicy, missing: MissingNan) -> tuple[int, int]:
    """Codes of NaN and of -NaN."""
    if fmt.nan is NanEncoding.NONE:
        return (fmt.sign_bit, 0) if missing is MissingNan.ZERO else (fmt.max_code, fmt.max_code)
    if fmt.nan is NanEncoding.NEGATIVE_ZERO:
        return fmt.sign_bit, fmt.sign_bit
    code = fmt.magnitude_mask
    if policy is NanPolicy.QUIET and fmt.nan is NanEncoding.IEEE:
        code = fmt.exponent_mask | 1 << (fmt.mantissa_bits - 1)
    return code, code if policy is NanPolicy.POSITIVE else code | fmt.sign_bit


def _preset(
    name: str,
    with_inf: Overflow,
    nan_only: Overflow,
    nan: NanPolicy,
    missing_nan: MissingNan = MissingNan.MAX,
    fnuz: Overflow | None = None,
) -> CastPolicy:
    return CastPolicy(
        name=name,
        rounding=RoundMode.TIES_TO_EVEN,
        overflow_with_inf=with_inf,
        overflow_nan_only=nan_only,
        overflow_fnuz=nan_only if fnuz is None else fnuz,
        nan=nan,
        missing_nan=missing_nan,
    )


OCP = _preset("ocp", Overflow.SATURATE, Overflow.SATURATE, NanPolicy.SIGNED)
CUDA = _preset("cuda", Overflow.SATURATE, Overflow.SATURATE, NanPolicy.POSITIVE)
CUDA_NOSAT = _preset("cuda_nosat", Overflow.IEEE, Overflow.IEEE, NanPolicy.POSITIVE)
ML_DTYPES = _preset("ml_dtypes", Overflow.IEEE, Overflow.IEEE, NanPolicy.QUIET, MissingNan.ZERO)
TORCH = _preset("torch", Overflow.IEEE, Overflow.SATURATE, NanPolicy.SIGNED, fnuz=Overflow.IEEE)

POLICIES: Mapping[str, CastPolicy] = MappingProxyType(
    {policy.name: policy for policy in (OCP, CUDA, CUDA_NOSAT, ML_DTYPES, TORCH)}
)
"""Presets: ocp (the default), cuda (saturating), cuda_nosat, ml_dtypes, torch (2.13 and newer)."""


def get_policy(name: str | CastPolicy) -> CastPolicy:
    """The preset of this name; a CastPolicy is returned as it is. Else FormatError."""
    if isinstance(name, CastPolicy):
        return name
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    raise FormatError(unknown("policy", name, POLICIES, POLICIES))
