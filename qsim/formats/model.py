"""A number format as data: which numbers exist and which code each has. Knows no arrays, no policy.

A format is one literal of ``FloatFormat`` (see ``catalog``); nothing in qsim branches on a format's name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from qsim.errors import FormatError


class NanEncoding(enum.Enum):
    """Which codes are NaN."""

    NONE = "none"  # every code is a number
    IEEE = "ieee"  # exponent field all ones, mantissa not zero; mantissa zero is Inf
    ALL_ONES = "all_ones"  # exponent and mantissa all ones; the rest of the top binade are numbers
    NEGATIVE_ZERO = "negative_zero"  # the code of -0, and no other


class FormatParams(NamedTuple):
    """What a kernel needs of a sign-magnitude format: plain integers.

    ``max_code`` is the code of the largest finite value, ``sign_bit`` the code with only the sign set (0 for
    an unsigned format), ``negative_zero`` 1 where -0 is a value and 0 where it is not.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    sign_bit: int
    negative_zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """One binary floating-point format of at most 8 bits.

    A code is, from the top: sign (if signed), exponent field, mantissa field. A field value f > 0 stands for
    2^(f - bias) * 1.mantissa. Field 0 is the subnormal binade 2^(1 - bias) * 0.mantissa where ``has_zero``,
    and the ordinary binade 2^-bias * 1.mantissa where there is no zero (E8M0).
    ``mantissa_bits`` counts explicit bits only. Source: the value table in docs (OCP OFP8 1.0, OCP MX 1.0).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool
    nan: NanEncoding
    codes_per_byte: int = 1
    signed: bool = True
    has_zero: bool = True

    def __post_init__(self) -> None:
        """Refuse a literal that contradicts itself."""
        if self.exponent_bits < 1 or self.mantissa_bits < 0 or not 2 <= self.bits <= 8:
            raise FormatError(f"{self.name}: {self.bits} bits is outside 2..8")
        if not 0 <= self.bias <= 127 or self.max >= 2.0**128:
            raise FormatError(f"{self.name}: with bias {self.bias} its values leave the range of float32")
        if self.has_inf != (self.nan is NanEncoding.IEEE):
            raise FormatError(f"{self.name}: Inf and the IEEE encoding of NaN come together or not at all")
        if self.nan is NanEncoding.IEEE and self.mantissa_bits == 0:
            raise FormatError(f"{self.name}: the IEEE encoding of NaN needs a mantissa bit")
        if self.nan is NanEncoding.NEGATIVE_ZERO and not (self.signed and self.has_zero):
            raise FormatError(f"{self.name}: a format without -0 cannot put NaN there")
        if self.codes_per_byte * self.bits > 8:
            raise FormatError(f"{self.name}: {self.codes_per_byte} codes of {self.bits} bits exceed a byte")

    def __hash__(self) -> int:
        """By name alone: tables are looked up by format for every cast."""
        return hash(self.name)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def code_count(self) -> int:
        """Number of codes, 2^bits."""
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """The code with only the sign set; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def magnitude_mask(self) -> int:
        """Exponent and mantissa fields all ones."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def exponent_mask(self) -> int:
        """Exponent field all ones, mantissa zero: the code of +Inf where there is one."""
        return self.magnitude_mask ^ ((1 << self.mantissa_bits) - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.nan is NanEncoding.IEEE:
            return self.exponent_mask - 1
        if self.nan is NanEncoding.ALL_ONES:
            return self.magnitude_mask - 1
        return self.magnitude_mask

    @property
    def min_exponent(self) -> int:
        """Exponent of the lowest binade (the one that subnormals share)."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def max(self) -> float:
        """Largest finite value, exact."""
        return self.magnitude(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest value with a full mantissa, exact."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value, exact: a subnormal, or ``min_normal`` where there are none."""
        return self.magnitude(1 if self.has_zero else 0)

    @property
    def has_nan(self) -> bool:
        """True where some code is NaN."""
        return self.nan is not NanEncoding.NONE

    @property
    def has_negative_zero(self) -> bool:
        """True where -0 is a value of its own."""
        return self.signed and self.has_zero and self.nan is not NanEncoding.NEGATIVE_ZERO

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that is NaN, ascending."""
        if self.nan is NanEncoding.NONE:
            return ()
        if self.nan is NanEncoding.NEGATIVE_ZERO:
            return (self.sign_bit,)
        first = self.magnitude_mask if self.nan is NanEncoding.ALL_ONES else self.exponent_mask + 1
        positive = tuple(range(first, self.magnitude_mask + 1))
        return positive + tuple(self.sign_bit | code for code in positive) if self.signed else positive

    @property
    def inf_codes(self) -> tuple[int, ...]:
        """The codes of +Inf and -Inf, or nothing."""
        return (self.exponent_mask, self.sign_bit | self.exponent_mask) if self.has_inf else ()

    def magnitude(self, code: int) -> float:
        """Value of the exponent and mantissa fields of ``code`` read as a finite number, exact in float64."""
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        field = (code & self.magnitude_mask) >> self.mantissa_bits
        subnormal = self.has_zero and field == 0
        significand = mantissa if subnormal else mantissa | 1 << self.mantissa_bits
        exponent = self.min_exponent if subnormal else field - self.bias
        return float(significand) * 2.0 ** (exponent - self.mantissa_bits)

    def check_code(self, code: int) -> None:
        """Raise FormatError unless ``code`` is one of the format's codes."""
        if not 0 <= code < self.code_count:
            raise FormatError(f"code {code} is outside 0..{self.code_count - 1} of {self.name}")

    def params(self) -> FormatParams:
        """The format as a kernel takes it; only a signed format with a zero has a kernel."""
        if not (self.signed and self.has_zero):
            raise FormatError(
                f"{self.name} has no sign or no zero: it holds scales, not elements; "
                "use encode and decode of qsim.codec"
            )
        return FormatParams(
            self.exponent_bits,
            self.mantissa_bits,
            self.bias,
            self.max_code,
            self.sign_bit,
            int(self.has_negative_zero),
        )
