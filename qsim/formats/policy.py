"""What a cast does where the format leaves a choice: rounding, overflow, NaN. Knows no arrays.

Libraries differ exactly here, so each choice has a name and each library a preset in ``POLICIES``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from qsim.errors import FormatError
from qsim.formats.model import FloatFormat, NanEncoding

if TYPE_CHECKING:
    from collections.abc import Mapping

NAN_REFUSED = 255
"""Mark that a kernel writes for a NaN that the policy refuses; never a code of a format without NaN."""


class RoundMode(enum.Enum):
    """How a value between two neighbours is rounded."""

    TIES_TO_EVEN = "ties_to_even"  # to the nearest; a tie goes to the even code


class Overflow(enum.Enum):
    """What becomes of a magnitude that rounds beyond ``fmt.max``, Inf included."""

    SATURATE = "saturate"  # the largest finite value
    IEEE = "ieee"  # Inf, or NaN where the format has no Inf


class NanPolicy(enum.Enum):
    """Which code a NaN gets. The second half says what happens in a format without NaN (E2M1, E2M3, E3M2)."""

    SIGNED = "signed"  # all-ones NaN, sign kept; without NaN: +max for both signs
    POSITIVE = "positive"  # all-ones NaN, sign dropped; without NaN: +max for both signs
    QUIET = "quiet"  # the NaN with only the top mantissa bit, sign kept; without NaN: -0 for NaN, +0 for -NaN
    RAISE = "raise"  # as SIGNED; without NaN: FormatError


class CastCodes(NamedTuple):
    """A policy resolved for one format, as a kernel takes it.

    ``overflow`` is the code of a positive overflow (a negative one adds the sign bit); ``nan`` and
    ``negative_nan`` are whole codes.
    """

    overflow: int
    nan: int
    negative_nan: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPolicy:
    """One way to cast, usable for every format.

    Overflow is chosen by what a format can express: ``overflow_with_inf`` for formats with Inf,
    ``overflow_nan_only`` for those with NaN but no Inf. A format with neither always saturates, under any
    policy; only an explicit ``Overflow.IEEE`` for such a format is an error (see ``cast_codes``).
    """

    name: str
    rounding: RoundMode
    overflow_with_inf: Overflow
    overflow_nan_only: Overflow
    nan: NanPolicy

    def __hash__(self) -> int:
        """By name alone: tables are looked up by policy for every cast."""
        return hash(self.name)

    def overflow(self, fmt: FloatFormat) -> Overflow:
        """The overflow mode in force for ``fmt``."""
        if fmt.has_inf:
            return self.overflow_with_inf
        return self.overflow_nan_only if fmt.has_nan else Overflow.SATURATE

    def with_overflow(self, overflow: Overflow) -> CastPolicy:
        """This policy with ``overflow`` for every format that can express it."""
        name = f"{self.name}+{overflow.value}"
        return replace(self, name=name, overflow_with_inf=overflow, overflow_nan_only=overflow)

    def codes(self, fmt: FloatFormat) -> CastCodes:
        """This policy resolved for ``fmt``."""
        return cast_codes(fmt, overflow=self.overflow(fmt), nan=self.nan)


def cast_codes(fmt: FloatFormat, *, overflow: Overflow, nan: NanPolicy) -> CastCodes:
    """Codes of overflow and NaN; FormatError for IEEE overflow in a format with neither Inf nor NaN."""
    positive, negative = _nan_codes(fmt, nan)
    if overflow is Overflow.SATURATE:
        return CastCodes(fmt.max_code, positive, negative)
    if fmt.has_inf:
        return CastCodes(fmt.exponent_mask, positive, negative)
    if not fmt.has_nan:
        raise FormatError(
            f"overflow {overflow.value!r} does not exist for {fmt.name}: it has neither Inf nor NaN and "
            "always saturates; ask for Overflow.SATURATE or leave overflow out"
        )
    return CastCodes(positive, positive, negative)


def _nan_codes(fmt: FloatFormat, policy: NanPolicy) -> tuple[int, int]:
    """Codes of NaN and of -NaN."""
    if fmt.nan is NanEncoding.NONE:
        if policy is NanPolicy.QUIET:
            return fmt.sign_bit, 0
        if policy is NanPolicy.RAISE:
            return NAN_REFUSED, NAN_REFUSED
        return fmt.max_code, fmt.max_code
    if fmt.nan is NanEncoding.NEGATIVE_ZERO:
        return fmt.sign_bit, fmt.sign_bit
    code = fmt.magnitude_mask
    if policy is NanPolicy.QUIET and fmt.nan is NanEncoding.IEEE:
        code = fmt.exponent_mask | 1 << (fmt.mantissa_bits - 1)
    return code, code if policy is NanPolicy.POSITIVE else code | fmt.sign_bit


def _policy(name: str, with_inf: Overflow, nan_only: Overflow, nan: NanPolicy) -> CastPolicy:
    return CastPolicy(
        name=name,
        rounding=RoundMode.TIES_TO_EVEN,
        overflow_with_inf=with_inf,
        overflow_nan_only=nan_only,
        nan=nan,
    )


OCP = _policy("ocp", Overflow.SATURATE, Overflow.SATURATE, NanPolicy.SIGNED)
CUDA = _policy("cuda", Overflow.SATURATE, Overflow.SATURATE, NanPolicy.POSITIVE)
CUDA_NOSAT = _policy("cuda_nosat", Overflow.IEEE, Overflow.IEEE, NanPolicy.POSITIVE)
ML_DTYPES = _policy("ml_dtypes", Overflow.IEEE, Overflow.IEEE, NanPolicy.QUIET)
TORCH = _policy("torch", Overflow.IEEE, Overflow.SATURATE, NanPolicy.SIGNED)

POLICIES: Mapping[str, CastPolicy] = MappingProxyType(
    {policy.name: policy for policy in (OCP, CUDA, CUDA_NOSAT, ML_DTYPES, TORCH)}
)
"""Presets: ocp (the default), cuda (saturating), cuda_nosat, ml_dtypes, torch (2.13 and newer)."""
