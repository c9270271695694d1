"""The exact product of two scaled operands: the real sum, factors included, rounded once to float32.

``exact_oracle`` is the definition, in rationals. ``exact_product`` has its bits, from one BLAS product of decoded
values that is proven exact, or whose outputs are proven one by one; what was used is reported (``ProductReport``).

A sum of integers in units of u is exact in a p-bit significand, in any order, with and without FMA, while the sum of
the magnitudes is at most 2^p u. From the formats alone: E2M1 x E2M1 in float32 for K <= 116,508; E4M3 x E4M3 in float64
for K <= 171,196. From formats and block scales, or from the operands themselves: K max|a| max|b| <= 2^53 u_a u_b, u
the lowest bit. Else an output has the bound of ``exact`` with one more rounding a product (K + 3 for K + 2), or the
lowest bits of its own row and column. What is still open is summed in integers; many such outputs of E5M2 by splitting:
an E5M2 value lies wholly in |x| >= 2 or below, so four products of the halves are exact (K <= 684,784; two, K <=
342,392, where one side is E4M3), and four numbers are added in integers.

Rules as in ``exact``: nearest, ties to even; an exact 0 is +0; NaN is 7fc00000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, F64, AnyArray, Bool
from qsim.codec.threads import in_chunks
from qsim.gemm import scaled_kernels as kernels
from qsim.gemm.exact import _round_oracle
from qsim.gemm.int8 import int8_product, serves
from qsim.gemm.numba_kernels import exact_dots, exact_quads, row_grids
from qsim.gemm.scaled import ScaledOperand, check_depths, element_values

if TYPE_CHECKING:
    from collections.abc import Callable

_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)
_SLACK = 1.0 + 2.0**-20
SPLIT_AT = 2.0
"""An E5M2 value is at least this or below it; either half has exponents that span at most 17."""
MANY = 16
"""One output in so many still open: splitting is worth its four products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductReport:
    """How an exact product was made.

    path: the arithmetic, and why it is exact. outputs: how many there are; on_grid: of those that the path left open,
    proven by the lowest bits of their row and column; split: by splitting; in_integers: summed in integers; rational:
    of these, rounded as rationals in the end. The path itself decided the rest.
    """

    path: str
    outputs: int
    on_grid: int = 0
    split: int = 0
    in_integers: int = 0
    rational: int = 0


def exact_oracle(a: ScaledOperand, b: ScaledOperand) -> F32:
    """The definition: every output a sum of rational numbers, rounded once. Slow."""
    check_depths(a, b)
    left, right = a.values(), b.values()
    out = np.empty((left.shape[0], right.shape[0]), np.float32)
    for i, j in np.ndindex(out.shape):
        out[i, j] = _oracle_output(left[i], right[j], _factor(a, b, i, j))
    return out


def _factor(a: ScaledOperand, b: ScaledOperand, i: int, j: int) -> Fraction:
    return a.tensor * b.tensor * Fraction(float(a.row[i])) * Fraction(float(b.row[j]))


def _oracle_output(row: F64, column: F64, factor: Fraction) -> np.float32:
    with np.errstate(invalid="ignore"):
        products = row * column
        special = products[~np.isfinite(products)].sum() if not np.isfinite(products).all() else 0.0
    if special != 0.0:
        return _QUIET_NAN if math.isnan(special) or factor == 0 else np.float32(special)
    total = sum((Fraction(x) * Fraction(y) for x, y in zip(row.tolist(), column.tolist(), strict=True)), Fraction(0))
    return _round_oracle(total * factor)


def exact_product(a: ScaledOperand, b: ScaledOperand, *, factors: bool = True) -> tuple[F32, ProductReport]:
    """D float32 [M, N], and how it was made. Without ``factors`` rows and tensor count as 1: the sum of the block."""
    depth = check_depths(a, b)
    job = _Job(a=a, b=b, depth=depth, factors=factors)
    if a.block is None and b.block is None and depth <= narrow_depth(a, b):
        out, report = job.narrow()
    else:
        out, report = job.wide()
    nan = np.isnan(out)
    if nan.any():
        out[nan] = _QUIET_NAN
    return out, report


def lowest_and_largest(x: ScaledOperand) -> tuple[float, float]:
    """From format and block scales alone: a power of two that divides every finite value, and the largest magnitude."""
    low, high = x.fmt.smallest_subnormal, float(x.fmt.max)
    if x.block is None:
        return low, high
    finite = np.abs(x.block[np.isfinite(x.block) & (x.block != 0)])
    if not finite.size:
        return low, high
    bits = np.empty(1)
    row_grids(np.ascontiguousarray(finite.reshape(1, -1)), bits)
    return low * float(bits[0]), high * float(finite.max())


def narrow_depth(a: ScaledOperand, b: ScaledOperand) -> int:
    """The largest K at which float32 holds every sum of products of the two formats exactly; 0 where none is."""
    unit = a.fmt.smallest_subnormal * b.fmt.smallest_subnormal
    return int(2.0**24 * unit // (a.fmt.max * b.fmt.max)) if _finite_format(a) and _finite_format(b) else 0


def wide_depth(a: ScaledOperand, b: ScaledOperand) -> int:
    """The largest K at which float64 does, by formats and block scales."""
    (low_a, high_a), (low_b, high_b) = lowest_and_largest(a), lowest_and_largest(b)
    with np.errstate(all="ignore"):
        bound = 2.0**53 * (low_a * low_b) / (high_a * high_b)
    return int(min(bound, 2.0**62)) if math.isfinite(bound) else 0


def factors_of(a: ScaledOperand, b: ScaledOperand) -> tuple[F64, F64, float]:
    """Factors of rows and of columns, of two float32 numbers at most, and an odd integer that divides their product."""
    row, column, divisor = a.row, b.row, Fraction(1)
    for tensor, side in ((a.tensor, 0), (b.tensor, 1)):
        numerator, denominator = _float32_quotient(tensor)
        if side:
            column = column * numerator
        else:
            row = row * numerator
        divisor *= denominator
    return row, column, float(divisor)


def _finite_format(x: ScaledOperand) -> bool:
    return bool(np.isfinite(element_values(x.fmt)[: x.fmt.code_count]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    a: ScaledOperand
    b: ScaledOperand
    depth: int
    factors: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.codes.shape[0], self.b.codes.shape[0]

    def narrow(self) -> tuple[F32, ProductReport]:
        """Formats of few bits: float32 holds every partial sum."""
        a, b = self.a, self.b
        if serves(a.fmt, b.fmt, self.shape[0] * self.shape[1] * self.depth, self.depth):
            unit = a.fmt.smallest_subnormal * b.fmt.smallest_subnormal
            return self._finished(int8_product(a.codes, b.codes, a.fmt, b.fmt), unit, "int8 dot products")
        S = np.matmul(a.narrow_values(), b.narrow_values().T)
        return self._finished(S, 1.0, "float32 BLAS, exact by the formats")

    def _finished(self, S: AnyArray, unit: float, path: str) -> tuple[F32, ProductReport]:
        """RN32 of exact sums times the factors."""
        report = ProductReport(path=path, outputs=S.size)
        row, column, divisor = self._factors()
        out = np.empty(S.shape, np.float32)
        if divisor == 1.0:
            _over_rows(lambda cut: kernels.finish_exact(S[cut], unit, row[cut], column, out[cut]), S)
            return out, report
        wide = np.asarray(S, np.float64) * unit
        left = self._bounded(wide, np.zeros(S.shape[0]), np.zeros(S.shape[1]), out)
        at = np.nonzero(left)
        for i, j in zip(*at, strict=True):
            out[i, j] = _rounded(Fraction(float(wide[i, j])), _factor(self.a, self.b, i, j))
        return out, ProductReport(path=path, outputs=S.size, rational=at[0].size)

    def _factors(self) -> tuple[F64, F64, float]:
        if self.factors:
            return factors_of(self.a, self.b)
        return np.ones(self.shape[0]), np.ones(self.shape[1]), 1.0

    def _bounded(self, S: F64, row_bound: F64, column_norm: F64, out: F32) -> Bool:
        row, column, divisor = self._factors()
        left = np.empty(S.shape, np.bool_)

        def work(cut: slice) -> None:
            kernels.finish_bounded(S[cut], row_bound[cut], column_norm, row[cut], column, divisor, out[cut], left[cut])

        _over_rows(work, S)
        return left

    def wide(self) -> tuple[F32, ProductReport]:
        """Decoded values in float64."""
        left, right = self.a.values(), self.b.values()
        with np.errstate(all="ignore"):
            S = np.matmul(left, right.T)
        finite = bool(np.isfinite(S).all())  # an operand that is not makes a whole row or column so
        if finite and self.depth <= wide_depth(self.a, self.b):
            return self._finished(S, 1.0, "float64 BLAS, exact by formats and scales")
        if finite and self._certified(left, right):
            return self._finished(S, 1.0, "float64 BLAS, exact by a certificate of the operands")
        return self._one_by_one(S, left, right)

    def _certified(self, left: F64, right: F64) -> bool:
        """K max|a| max|b| <= 2^53 u_a u_b."""
        low_a, low_b = (_grids(x).min(initial=np.inf) for x in (left, right))
        high_a, high_b = (float(np.abs(x).max(initial=0.0)) for x in (left, right))
        return bool(self.depth * high_a * high_b <= 2.0**53 * (low_a * low_b))

    def _one_by_one(self, S: F64, left: F64, right: F64) -> tuple[F32, ProductReport]:
        """A bound for every output; then lowest bits, splitting, integers."""
        out = np.empty(S.shape, np.float32)
        norms = [np.sqrt(np.vecdot(x, x)) for x in (left, right)]
        unit = (self.depth + 3) * 2.0**-53 * _SLACK
        open_ = self._bounded(S, unit * norms[0], norms[1], out)
        at = np.nonzero(open_)
        counts = {"on_grid": 0, "split": 0, "in_integers": 0, "rational": 0}
        if at[0].size:
            with np.errstate(all="ignore"):
                reach = norms[0][at[0]] * norms[1][at[1]] * _SLACK
                on_grid = reach < _grids(left)[at[0]] * _grids(right)[at[1]] * 2.0**53
            self._settle(at, on_grid, S[at], np.ones(at[0].size, np.bool_), left, right, out, counts)
            counts["on_grid"] = int(np.count_nonzero(on_grid))
            at = tuple(axis[~on_grid] for axis in at)
        if at[0].size * MANY > S.size and self._splits(left, right):
            sums, exact = self._by_splitting(left, right, at)
            counts["split"] = at[0].size
            self._settle(at, np.ones(at[0].size, np.bool_), sums, exact, left, right, out, counts)
        elif at[0].size:
            sums, exact = np.empty(at[0].size), np.empty(at[0].size, np.bool_)
            rows, columns = (np.ascontiguousarray(axis, np.int64) for axis in at)

            def work(start: int, stop: int) -> None:
                cut = slice(start, stop)
                exact_dots(left, right, rows[cut], columns[cut], sums[cut], exact[cut])

            in_chunks(work, at[0].size, cost=16 * self.depth)
            counts["in_integers"] = at[0].size
            self._settle(at, np.ones(at[0].size, np.bool_), sums, exact, left, right, out, counts)
        path = "float64 BLAS, outputs proven one by one"
        return out, ProductReport(path=path, outputs=S.size, **counts)

    def _settle(
        self, at: tuple[AnyArray, ...], chosen: Bool, sums: F64, exact: Bool, left: F64, right: F64, out: F32,
        counts: dict[str, int],
    ) -> None:  # fmt: skip
        """Write outputs whose sum is known: exactly, or rounded to odd (``exact`` False)."""
        rows, columns = at[0][chosen], at[1][chosen]
        sums, exact = sums[chosen], exact[chosen]
        row, column, divisor = self._factors()
        factor = row[rows] * column[columns]
        with np.errstate(all="ignore"):
            own = np.empty((1, sums.size), np.float32)
            kernels.finish_exact(sums[None], 1.0, np.ones(1), factor, own)
            certain = exact & (divisor == 1.0) | ~np.isfinite(sums) | (sums == 0)
            # Otherwise the sum, the product and the quotient are off by less than 2^-50 of the result in all.
            t = sums * factor / divisor
            d = np.abs(t) * 2.0**-50
            proven = (t - d).astype(np.float32) == (t + d).astype(np.float32)
        values = np.where(certain, own[0], (t + 0.0).astype(np.float32))
        for n in np.flatnonzero(~certain & ~proven):
            i, j = int(rows[n]), int(columns[n])
            values[n] = _oracle_output(
                left[i], right[j], _factor(self.a, self.b, i, j) if self.factors else Fraction(1)
            )
            counts["rational"] += 1
        out[rows, columns] = values

    def _splits(self, left: F64, right: F64) -> bool:
        """Whether the halves of E5M2 operands have exact products: few enough k, no block scales, all finite."""
        if self.a.block is not None or self.b.block is not None:
            return False
        products = [
            self.depth * high_a * high_b <= 2.0**53 * low_a * low_b
            for low_a, high_a in _halves(self.a)
            for low_b, high_b in _halves(self.b)
        ]
        return all(products) and bool(np.isfinite(left).all() and np.isfinite(right).all())

    def _by_splitting(self, left: F64, right: F64, at: tuple[AnyArray, ...]) -> tuple[F64, Bool]:
        """The sums at some outputs, from the products of the halves."""
        halves = [
            (np.where(np.abs(x) >= SPLIT_AT, x, 0.0), np.where(np.abs(x) >= SPLIT_AT, 0.0, x)) for x in (left, right)
        ]
        parts = np.stack([np.matmul(x, y.T)[at] for x in halves[0] for y in halves[1]], axis=1)
        sums, exact = np.empty(at[0].size), np.empty(at[0].size, np.bool_)
        exact_quads(np.ascontiguousarray(parts), sums, exact)
        return sums, exact


def _halves(x: ScaledOperand) -> list[tuple[float, float]]:
    """Lowest bit and largest value of the two halves of a format."""
    values = np.abs(element_values(x.fmt)[: x.fmt.code_count])
    values = values[np.isfinite(values) & (values > 0)]
    halves = []
    for own in (values[values >= SPLIT_AT], values[values < SPLIT_AT]):
        if own.size:
            low = np.empty(1)
            row_grids(np.ascontiguousarray(own.reshape(1, -1)), low)
            halves.append((float(low[0]), float(own.max())))
    return halves


def _grids(x: F64) -> F64:
    """The lowest bit of every row."""
    grids = np.empty(x.shape[0])
    _over_rows(lambda cut: row_grids(x[cut], grids[cut]), x)
    return grids


def _float32_quotient(value: Fraction) -> tuple[float, int]:
    """A float32 and an integer whose quotient is ``value``: the tensor factor of a recipe is made of such."""
    odd = value.denominator
    while odd % 2 == 0:
        odd //= 2
    return float(value * odd), odd


def _rounded(total: Fraction, factor: Fraction) -> np.float32:
    return _round_oracle(total * factor)


def _over_rows(work: Callable[[slice], object], S: AnyArray) -> None:
    """``work`` on the rows of S, spread over the threads."""
    if S.size:

        def part(start: int, stop: int) -> None:
            work(slice(start, stop))

        in_chunks(part, S.shape[0], cost=S.shape[1])
