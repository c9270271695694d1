"""An encoder made of nothing but a format's list of values: thresholds by exact arithmetic. Knows no bit trick.

Independent of the kernels on purpose: an encoder to nearest even is a step function of the magnitude's float32 bits,
and where it steps follows from the values alone. Good for whole ranges of bit patterns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from qsim.arrays import I64, U8
from qsim.formats import CastPolicy, FloatFormat, RoundMode

INF_BITS = 0x7F800000
SIGN_BIT = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Where the code of a float32 bit pattern changes: ``codes[i]`` holds from ``starts[i]`` up to the next start.

    starts int64, ascending from 0; codes uint8; together they cover all 2^32 patterns.
    """

    starts: I64
    codes: U8

    def codes_of(self, start: int, stop: int) -> U8:
        """Codes of the patterns start .. stop - 1."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        edges = np.concatenate([[start], self.starts[first + 1 : last], [stop]])
        return np.repeat(self.codes[first:last], np.diff(edges))


def steps_of(fmt: FloatFormat, policy: CastPolicy) -> Steps:
    """The steps of ``fmt`` under a policy that rounds to nearest even and refuses nothing.

    A value halfway between two neighbours goes to the even code; from halfway beyond the largest value (its even
    neighbour being the one of an unbounded exponent) a magnitude overflows; a format without zero gives its least
    code to all below its least value, and one without sign NaN to negative numbers.
    """
    assert policy.rounding is RoundMode.TIES_TO_EVEN, "steps are made for nearest even"
    resolved = policy.codes(fmt)
    values = [Fraction(fmt.magnitude(code)) for code in range(fmt.max_code + 1)]
    beyond = _value_after(values, fmt)
    starts, codes = [0], [0]
    for code, (low, high) in enumerate(zip(values, [*values[1:], beyond], strict=True), start=1):
        tie_goes_up = code % 2 == 0
        starts.append(_first_pattern((low + high) / 2, inclusive=tie_goes_up))
        codes.append(code if code <= fmt.max_code else resolved.overflow)
    positive = [*starts, INF_BITS, INF_BITS + 1], [*codes, resolved.overflow, resolved.nan]
    negative_codes = [_negative(code, fmt, resolved.nan, zero=i == 0) for i, code in enumerate(positive[1])]
    negative_starts = [SIGN_BIT + start for start in positive[0]]
    negative_codes[-1] = resolved.negative_nan
    if not fmt.signed:  # -0 is zero; every other negative number, Inf too, is NaN
        negative_starts[1:-1] = [SIGN_BIT + 1]
        negative_codes[1:-1] = [resolved.nan]
    return Steps(
        starts=np.array([*positive[0], *negative_starts], np.int64),
        codes=np.array([*positive[1], *negative_codes], np.uint8),
    )


def _value_after(values: list[Fraction], fmt: FloatFormat) -> Fraction:
    """What the code after the largest would stand for if the exponent were unbounded."""
    if fmt.mantissa_bits == 0:
        return 2 * values[-1]
    full = (fmt.max_code + 1) % (1 << fmt.mantissa_bits) == 0  # the largest value ends its binade
    return values[-1] + (values[-1] - values[-2]) if not full else 2 * values[-(1 << fmt.mantissa_bits)]


def _first_pattern(threshold: Fraction, *, inclusive: bool) -> int:
    """Bits of the least float32 above ``threshold``, or equal to it where ``inclusive``; the threshold is a float32."""
    number = np.float32(float(threshold))
    if Fraction(float(number)) == threshold:
        return int(number.view(np.uint32)) + (0 if inclusive else 1)
    assert threshold > Fraction(float(np.finfo(np.float32).max)), "ties of small formats are float32 numbers"
    return INF_BITS  # beyond float32: only Inf overflows


def _negative(code: int, fmt: FloatFormat, nan: int, *, zero: bool) -> int:
    if not fmt.signed:
        return code if zero else nan
    return code | fmt.sign_bit if code or fmt.has_negative_zero else code
