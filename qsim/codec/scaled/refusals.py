"""Which element of a scaled cast its policy refuses, and in which words. Knows no kernel, no axis and no block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from qsim.codec.oracle import place, refusal, round_magnitude
from qsim.errors import FormatError

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, AnyArray, Bool
    from qsim.formats import CastCodes, CastPolicy, FloatFormat
    from qsim.philox import RandomStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What the policy of a scaled cast refuses.

    x [M, K]: the matrix that was encoded (the residual, where there is a centre). elements [M, K]: those to blame,
    at least one: NaN or Inf themselves, or finite and beyond ``fmt.max`` once they are scaled. An element whose block
    another one made NaN is none of them. two_level: an Inf makes its whole block NaN. overflow: overflow is refused.
    """

    x: F32
    elements: Bool
    fmt: FloatFormat
    two_level: bool
    overflow: bool

    def named(self, source: AnyArray, numbers: I64, *, steps: str = "") -> str:
        """The message, by the place of the first such element in ``source``, in C order.

        numbers [M, K]: where each element of x stands in ``source``. steps: what became of it on the way into x, as
        in " less its centre"; said only where that changed the number.
        """
        first = int(numbers[self.elements].min())
        value, own = self.x[numbers == first][0], source.flat[first]
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            same = bool(value == own) or bool(np.isnan(value) and np.isnan(own))
        return self._words(value, place("x", first, source.shape) + ("" if same else steps))

    def _words(self, value: np.float32, where: str) -> str:
        if not np.isinf(value) or not self.two_level:
            return refusal(value, self.fmt, where=where, scaled=True)
        if self.overflow:
            return (
                f"{where} is {value}: it is beyond {self.fmt.max:g}, the largest {self.fmt.name}, and the policy "
                "refuses overflow; clean the input, or choose overflow 'saturate', with which its block becomes NaN"
            )
        return (
            f"{where} is {value}, so its whole block is NaN and the policy refuses it in {self.fmt.name}; "
            "clean the input, or choose another NaN rule (nan, missing_nan)"
        )


class RefusedError(FormatError):
    """A scaled cast that its policy refuses, with what names the element in a tensor of another shape."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused)
        self.refused = refused

    def __str__(self) -> str:
        x = self.refused.x
        return self.refused.named(x, np.arange(x.size).reshape(x.shape))


def check(x: F32, *, fmt: FloatFormat, codes: CastCodes, two_level: bool, beyond: Bool | None = None) -> None:
    """RefusedError for what ``codes`` refuse in the matrix x.

    NaN, and Inf beside it where the scale is two-level, by the NaN rule; Inf, and the finite elements ``beyond``, by
    the overflow rule, in a block that is NaN too.
    """
    elements = np.zeros(x.shape, np.bool_)
    if codes.refuses_nan:
        elements |= ~np.isfinite(x) if two_level else np.isnan(x)
    if codes.refuses_overflow:
        elements |= np.isinf(x)
        if beyond is not None:
            elements |= beyond
    if elements.any():
        raise RefusedError(
            Refused(x=x, elements=elements, fmt=fmt, two_level=two_level, overflow=codes.refuses_overflow)
        )


def rounds_beyond(y: F32 | F64, *, fmt: FloatFormat, policy: CastPolicy, stream: RandomStream | None) -> Bool:
    """Where the scaled elements y [n] round beyond ``fmt.max``; element i takes word i of ``stream``.

    From the next value on (were the exponent unbounded) all do, in every mode. The few in the gap before it are
    judged one by one, by the definition: this is the way into an error, where nobody is in a hurry.
    """
    step = math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.mantissa_bits)
    magnitude = np.abs(y.astype(np.float64))
    beyond = np.asarray(magnitude >= fmt.max + step, np.bool_)
    for i in np.flatnonzero((magnitude > fmt.max) & ~beyond):
        code = round_magnitude(
            Fraction(float(magnitude[i])),
            fmt,
            rounding=policy.rounding,
            negative=bool(y[i] < 0),
            word=0 if stream is None else stream.word(int(i)),
            random_bits=policy.random_bits,
        )
        beyond[i] = code > fmt.max_code
    return beyond
