"""The definition of a tensor-core dot product, one step at a time in Python integers. Slow.

A number is (n, e): the integer n times 2^e. Everything here is exact but the two truncations and the roundings that
``models`` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from qsim.arrays import AnyArray
from qsim.gemm.models import TensorCoreModel
from qsim.gemm.operands import FLOAT16, OperandFormat, fields, operand_format

FLOAT32_BITS, FLOAT16_BITS = (23, -126, 127), (10, -14, 15)
"""Fraction bits, lowest and highest exponent of a result."""

NAN = math.nan


@dataclass(frozen=True, slots=True)
class Term:
    """value = significand * 2^(exponent - fraction_bits), or ``special``: NaN, Inf."""

    significand: int
    exponent: int
    fraction_bits: int
    special: float | None = None

    def times(self, other: Term) -> Term:
        """The exact product, not normalised."""
        if self.special is not None or other.special is not None:
            return Term(0, 0, 0, self.as_float() * other.as_float())
        return Term(
            self.significand * other.significand,
            self.exponent + other.exponent,
            self.fraction_bits + other.fraction_bits,
        )

    def as_float(self) -> float:
        """A float of the same class and sign: enough for products with what is not finite."""
        return self.special if self.special is not None else float((self.significand > 0) - (self.significand < 0))

    @property
    def value(self) -> Fraction:
        """The value, where it is finite."""
        return Fraction(self.significand) * Fraction(2) ** (self.exponent - self.fraction_bits)


def dot_oracle(
    a_codes: AnyArray,
    b_codes: AnyArray,
    c: float,
    *,
    fmt_a: str,
    fmt_b: str,
    model: TensorCoreModel,
    half: bool = False,
    scale_a: AnyArray | None = None,
    scale_b: AnyArray | None = None,
) -> np.float32:
    """One chain: codes [K], block scales [K / scale_block], accumulator c; a float16 result where ``half``."""
    lowest = FLOAT16.min_exponent if model.lowered else None
    a, b = _terms(a_codes, operand_format(fmt_a), lowest), _terms(b_codes, operand_format(fmt_b), lowest)
    depth = model.step
    padding = -len(a) % depth
    zero = Term(0, 0, 0)
    a, b = a + [zero] * padding, b + [zero] * padding
    scales = None
    if model.scale_block:
        scales = [x.times(y) for x, y in zip(_scale_terms(scale_a, model), _scale_terms(scale_b, model), strict=True)]
    result = _rounded(c, half)
    for start in range(0, len(a), depth):
        here = range(start, start + depth)
        partial: np.float32 = np.float32(0) if model.late else result
        for step in _steps(here, model):
            partial = _step(_products(step, a, b, scales, model), partial, model, half)
        result = _added(result, partial, half) if model.late else partial
    return result


def _terms(codes: AnyArray, fmt: OperandFormat, lowest: int | None) -> list[Term]:
    sign, significand, exponent, nan, inf = fields(codes, fmt)
    terms = []
    for i in range(codes.size):
        special = NAN if nan[i] else math.copysign(math.inf, sign[i]) if inf[i] else None
        term = Term(int(sign[i] * significand[i]), int(exponent[i]), fmt.mantissa_bits, special)
        terms.append(term if lowest is None else _normalised(term, lowest))
    return terms


def _normalised(term: Term, lowest: int) -> Term:
    """The same value with a leading bit, as far as the exponent goes down."""
    significand, exponent = term.significand, term.exponent
    while significand and abs(significand) < 1 << term.fraction_bits and exponent > lowest:
        significand, exponent = 2 * significand, exponent - 1
    return Term(significand, exponent, term.fraction_bits, term.special)


def _scale_terms(codes: AnyArray | None, model: TensorCoreModel) -> list[Term]:
    """Block scales; the sign of an E4M3 scale is not read."""
    assert codes is not None, "a scaled model has scales"
    if model.scale_format == "float8_e8m0fnu":
        return [Term(1, int(code) - 127, 0, NAN if code == 255 else None) for code in codes]
    return _terms(codes & np.uint8(0x7F), operand_format(str(model.scale_format)), lowest=None)


def _steps(here: range, model: TensorCoreModel) -> Iterator[list[int]]:
    """The k of every step of one instruction."""
    if not model.order:
        for start in range(here.start, here.stop, model.products):
            yield list(range(start, min(start + model.products, here.stop)))
        return
    for residues in model.order:
        yield [k for k in here if k % 4 in residues]


def _products(
    step: list[int], a: Sequence[Term], b: Sequence[Term], scales: Sequence[Term] | None, model: TensorCoreModel
) -> list[Term]:
    products = [a[k].times(b[k]) for k in step]
    if scales is None:
        return products
    own = [scales[k // model.scale_block] if k // model.scale_block < len(scales) else Term(1, 0, 0) for k in step]
    if not model.group:
        return [product.times(scale) for product, scale in zip(products, own, strict=True)]
    groups = []
    for start in range(0, len(products), model.group):
        part, scale = products[start : start + model.group], own[start]
        special = [t.special for t in (*part, scale) if t.special is not None]
        if special:
            groups.append(Term(0, 0, 0, NAN))  # E2M1 has neither NaN nor Inf: it is the scale that is NaN
            continue
        unit = min(t.exponent - t.fraction_bits for t in part)
        total = sum(t.significand << (t.exponent - t.fraction_bits - unit) for t in part)
        # The sum is a fixed-point significand of exponent 0; only the scales have exponents.
        groups.append(Term(total, 0, -unit).times(scale))
    return groups


def _step(products: list[Term], c: np.float32, model: TensorCoreModel, half: bool) -> np.float32:
    own = _accumulator(c, half)
    specials = [t.special for t in (*products, own) if t.special is not None]
    if specials:
        signs = {math.copysign(1, s) for s in specials if math.isinf(s)}
        broken = any(math.isnan(s) for s in specials) or len(signs) == 2
        return np.float32(NAN if broken else math.copysign(math.inf, signs.pop()))
    terms = [t for t in (*products, own) if t.significand]
    if not terms:
        return np.float32(0)
    top = max(t.exponent for t in terms)
    unit = top - model.fraction
    total = sum(_shifted(t.significand, t.exponent - t.fraction_bits - unit) for t in terms)
    if total == 0:
        return np.float32(0)
    if half:
        return _round_half(Fraction(total) * Fraction(2) ** unit)
    return _truncated(total, unit, model.result)


def _accumulator(c: np.float32, half: bool) -> Term:
    fraction_bits, lowest, _ = FLOAT16_BITS if half else FLOAT32_BITS
    value = float(c)
    if not math.isfinite(value):
        return Term(0, 0, 0, value)
    if value == 0:
        return Term(0, 0, 0)
    exponent = max(math.frexp(value)[1] - 1, lowest)
    return Term(int(Fraction(value) / Fraction(2) ** (exponent - fraction_bits)), exponent, fraction_bits)


def _shifted(n: int, shift: int) -> int:
    """n * 2^shift truncated toward zero."""
    if shift >= 0:
        return n << shift
    return -(-n >> -shift) if n < 0 else n >> -shift


def _truncated(n: int, unit: int, fraction_bits: int) -> np.float32:
    """n * 2^unit truncated toward zero to ``fraction_bits`` of its binade, and to the range of float32."""
    exponent = abs(n).bit_length() - 1 + unit
    if exponent > 127:
        return np.float32(math.copysign(math.inf, n))
    last = max(exponent - fraction_bits, -149)
    return np.float32(math.ldexp(_shifted(n, unit - last), last))


def _round_half(value: Fraction) -> np.float32:
    """A float16, to nearest even, as float32."""
    fraction_bits, lowest, highest = FLOAT16_BITS
    magnitude = abs(value)
    if magnitude == 0:
        return np.float32(0)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, lowest) - fraction_bits)
    rounded = round(magnitude / unit) * unit
    if rounded == 0:
        return np.float32(0)
    return np.float32(math.copysign(math.inf if rounded >= 2 ** (highest + 1) else float(rounded), value))


def _rounded(c: float, half: bool) -> np.float32:
    """c as the instruction takes it: float32, or that rounded to float16."""
    number = np.float32(c)
    if half and np.isfinite(number):
        return _round_half(Fraction(float(number)))
    return number


def _added(c: np.float32, s: np.float32, half: bool) -> np.float32:
    """RN(c + s); an exact 0 is +0."""
    if not (np.isfinite(c) and np.isfinite(s)):
        with np.errstate(invalid="ignore"):
            return np.float32(c + s)
    if half:
        return _round_half(Fraction(float(c)) + Fraction(float(s)))
    with np.errstate(over="ignore"):
        return np.float32(np.float32(c + s) + np.float32(0))
