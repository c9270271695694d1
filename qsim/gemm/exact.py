"""The exact matrix product: the real sum of products, rounded once to float32. Knows no format, no device.

``matmul_oracle`` is the definition, by rational numbers. ``matmul`` gives the same bits from one float64
BLAS product, whatever BLAS does: every output carries a proof, and the few without one are summed exactly.

Rules: round to nearest, ties to even; subnormals kept; at or above 2^128 - 2^103 the infinity. An exactly
zero sum (K = 0 included) is +0, whatever the signs of its products: the IEEE result of a sum that starts
from +0. A non-zero sum that rounds to zero keeps its sign. NaN operands, 0 * Inf and Inf - Inf give NaN
(bits 7fc00000), else an infinite product gives its infinity.

The proof. Let u = 2^-53. A product of two float32 numbers has 48 significant bits and, unless zero, a
magnitude in [2^-298, 2^256): it is exact in float64. All partial sums are multiples of 2^-298 below 2^284
(K <= 2^28), so nothing overflows or is subnormal. BLAS adds K products in an unknown order and grouping,
with or without FMA; a product passes at most K - 1 rounded additions (adding to an initial 0 is exact), so
    |S - exact| <= g * sum |a_k b_k| <= g * |a| * |b|,   g = (K-1) u / (1 - (K-1) u)     (Cauchy-Schwarz).
We take d = (K+2) u (1 + 2^-20) |a| |b|, computed. Its roundings: a norm is the root of at most K additions
of exact squares, so it is too small by a factor of at least (1-u)^(K+1), both norms by (1-u)^(2K+2), the
four multiplications by (1-u)^4, and g exceeds (K-1) u by a factor of at most 1 + 2Ku; together less than
1 + 5(K+2) u <= 1 + 2^-22 for K <= 2^28: the factor 1 + 2^-20 pays for it, with room. S - d and S + d are
rounded too, by at most u (|S| + d) <= u |a| |b| (1 + 2^-20): K + 2 in place of K - 1 pays for that. So
exact lies between the computed ends, and since rounding is monotone, ends that round to the same bits prove
the result.

Low-precision operands often land exactly on a tie of float32 (Gaussian data in E4M3: 1% of the outputs at
K = 128, 13% at K = 1024), which no bound decides. But there S has no error at all: if row and column are
multiples of powers of two p and q, and |a| |b| < 2^53 p q, every partial sum is a multiple of p q below
2^53 p q: a float64. Then RN(S) is the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np

from qsim.arrays import F32, F64, AnyArray, Bool
from qsim.errors import UsageError
from qsim.gemm.numba_kernels import MAX_DEPTH, certify, column_grids, column_norms, exact_sums, row_grids

_Index: TypeAlias = tuple[AnyArray, ...]

_SLACK = 1.0 + 2.0**-20
_GATHER = 1 << 20  # products at a time in the exact sums: 8 MiB each for rows, columns and products


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulReport:
    """How the outputs of one product were decided; what is left of ``outputs`` had a certificate.

    on_grid: the float64 product was exact. recomputed: summed again exactly. non_finite: NaN or Inf because
    an operand is (an overflow of finite operands is not).
    """

    outputs: int
    on_grid: int
    recomputed: int
    non_finite: int


def matmul(a: F32, b: F32) -> F32:
    """a [..., T, K] @ b [..., K, O], leading axes broadcast: exact sums rounded once, ties to even; float32.

    The bits depend on nothing but the operands' values. K = 0 gives +0; K is at most 2^28. NaN is 7fc00000; a sum that
    overflows is Inf. Errors: UsageError for anything but float32 arrays whose shapes fit.
    """
    return matmul_with_report(a, b)[0]


def matmul_with_report(a: F32, b: F32) -> tuple[F32, MatmulReport]:
    """``matmul``, and how its outputs were decided."""
    lead = _check(a, b)
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are results here, not accidents
        rows = a.astype(np.float64, order="C")
        columns = b.astype(np.float64, order="C")
        if b.ndim == 2:  # one large product is faster than many small ones, and has the same bits
            rows = _stack(rows, 1)
        out, report = _product(rows, columns)
    return out.reshape((*lead, a.shape[-2], b.shape[-1])), report


def _check(a: AnyArray, b: AnyArray) -> tuple[int, ...]:
    """The broadcast leading shape."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
            raise UsageError(
                f"matmul: {name} is {type(x).__name__}; pass a float32 array (of a quantized tensor: scaled_gemm)"
            )
        if x.dtype != np.float32:
            raise UsageError(f"matmul: {name} is {x.dtype}; round it to float32 once, before the call")
        if x.ndim < 2:
            raise UsageError(f"matmul: {name} has shape {x.shape}; it needs at least two axes")
    if a.shape[-1] != b.shape[-2]:
        raise UsageError(f"matmul: a {a.shape} and b {b.shape} differ in K, {a.shape[-1]} and {b.shape[-2]}")
    if a.shape[-1] > MAX_DEPTH:
        raise UsageError(f"matmul: K = {a.shape[-1]} is above {MAX_DEPTH}, as far as the proof goes; split K")
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise UsageError(f"matmul: the leading axes of a {a.shape} and b {b.shape} do not broadcast") from None


def _product(a: F64, b: F64) -> tuple[F32, MatmulReport]:
    """``matmul_with_report`` on float64 copies: the certificate, and what it leaves to ``_decide``."""
    S: F64 = np.matmul(a, b)
    row_norm = np.sqrt(np.vecdot(a, a))
    column_norm = np.empty((*b.shape[:-2], b.shape[-1]))
    column_norms(_stack(b, 2), _stack(column_norm, 1))
    unit = (a.shape[-1] + 2) * 2.0**-53 * _SLACK
    out: F32 = np.empty(S.shape, np.float32)
    undecided = np.empty(S.shape, np.bool_)
    left = certify(
        _stack(S, 2),
        _stack(_spread(unit * row_norm, S.shape[:-1]), 1),
        _stack(_spread(column_norm, (*S.shape[:-2], S.shape[-1])), 1),
        _stack(out, 2),
        _stack(undecided, 2),
    )
    if left == 0:
        return out, MatmulReport(outputs=S.size, on_grid=0, recomputed=0, non_finite=0)
    at = np.unravel_index(np.flatnonzero(undecided), S.shape)
    return out, _decide(a, b, _Norms(row_norm, column_norm), S=S, out=out, at=at)


def _spread(x: F64, shape: tuple[int, ...]) -> F64:
    """x broadcast to a contiguous array of this shape; x itself where it has it."""
    return x if x.shape == shape else np.broadcast_to(x, shape).copy()


def _stack(x: AnyArray, keep: int) -> AnyArray:
    """A view of a C-contiguous array that flattens all axes but the last ``keep`` into one."""
    return x.reshape(math.prod(x.shape[:-keep]), *x.shape[-keep:])


class _Norms(NamedTuple):
    """Euclidean norms, or grids: of the rows of a [..., T] and of the columns of b [..., O]."""

    row: F64
    column: F64

    def products(self, at: _Index, shape: tuple[int, ...]) -> F64:
        """row * column for each index of an output of ``shape``."""
        row = np.broadcast_to(self.row, shape[:-1])
        column = np.broadcast_to(self.column, (*shape[:-2], shape[-1]))
        product: F64 = row[at[:-1]] * column[(*at[:-2], at[-1])]
        return product


def _decide(a: F64, b: F64, norms: _Norms, *, S: F64, out: F32, at: _Index) -> MatmulReport:
    """Write the outputs at the indices ``at``: NaN by a norm, exact float64 products, exact sums."""
    left = at[0].size
    reach = norms.products(at, S.shape)
    # A norm is NaN iff an element is, else Inf iff an element is (finite ones stay below 2^128 sqrt(K)), and
    # 0 iff all are. So NaN here is a NaN element, or Inf against a column (row) of zeros: NaN either way.
    nan = np.isnan(reach)
    out[_where(at, nan)] = np.float32(np.nan)
    at, reach = _where(at, ~nan), reach[~nan]
    on_grid = 0
    # Grids read the operands once, an exact sum reads a row and a column: a few outputs go there directly.
    if at[0].size > (norms.row.size + norms.column.size) // 8:
        # Grids are powers of two: products with them are exact. A row of zeros (grid Inf) has no undecided
        # output but against Inf, which is NaN; and a reach of Inf is never below.
        exact = reach * _SLACK < _grids(a, b).products(at, S.shape) * 2.0**53
        hit = _where(at, exact)
        out[hit] = S[hit] + 0.0  # an exact zero is +0
        on_grid = hit[0].size
        at = _where(at, ~exact)
    infinite = _sum_exactly(a, b, at, out)
    return MatmulReport(
        outputs=S.size,
        on_grid=on_grid,
        recomputed=at[0].size - infinite,
        non_finite=left - on_grid - at[0].size + infinite,
    )


def _where(at: _Index, mask: Bool) -> _Index:
    return tuple(axis[mask] for axis in at)


def _grids(a: F64, b: F64) -> _Norms:
    row = np.empty(a.shape[:-1])
    row_grids(_stack(a, 1), row.reshape(-1))
    column = np.empty((*b.shape[:-2], b.shape[-1]))
    column_grids(_stack(b, 2), _stack(column, 1))
    return _Norms(row, column)


def _sum_exactly(a: F64, b: F64, at: _Index, out: F32) -> int:
    """Write the exact sums at the indices ``at``; returns how many are NaN or Inf because an operand is."""
    depth = a.shape[-1]
    rows = np.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))
    columns = np.broadcast_to(np.swapaxes(b, -1, -2), (*out.shape[:-2], b.shape[-1], depth))
    step = max(1, _GATHER // max(1, depth))
    non_finite = 0
    for start in range(0, at[0].size, step):
        here = tuple(axis[start : start + step] for axis in at)
        products = np.ascontiguousarray(rows[here[:-1]] * columns[(*here[:-2], here[-1])])
        words = np.empty(here[0].size, np.int64)
        non_finite += exact_sums(products.view(np.int64), words)
        out[here] = words.astype(np.uint32).view(np.float32)
    return non_finite


def matmul_oracle(a: F32, b: F32) -> F32:
    """The definition of ``matmul``, one output at a time in rational numbers. Slow."""
    lead = _check(a, b)
    rows = np.broadcast_to(a, (*lead, *a.shape[-2:]))
    columns = np.broadcast_to(b, (*lead, *b.shape[-2:]))
    out: F32 = np.empty((*lead, a.shape[-2], b.shape[-1]), np.float32)
    for index in np.ndindex(out.shape):
        row = rows[(*index[:-2], index[-2])].tolist()
        column = columns[(*index[:-2], slice(None), index[-1])].tolist()
        out[index] = _dot_oracle(row, column)
    return out


def _dot_oracle(row: list[float], column: list[float]) -> np.float32:
    special: set[float] = set()
    total = Fraction(0)
    for x, y in zip(row, column, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            total += Fraction(x) * Fraction(y)
        elif math.isnan(x) or math.isnan(y) or x == 0 or y == 0:
            return np.float32(np.nan)
        else:
            special.add(math.copysign(math.inf, x) * math.copysign(1.0, y))
    if len(special) == 2:
        return np.float32(np.nan)
    if special:
        return np.float32(special.pop())
    return _round_oracle(total)


def _round_oracle(total: Fraction) -> np.float32:
    """A rational number rounded to float32, ties to even; 0 is +0, a negative one that rounds to 0 is -0."""
    if total == 0:
        return np.float32(0)
    magnitude = abs(total)
    # log2 of the magnitude lies within 1 of the difference of the bit lengths; settle it by comparing.
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    last = max(exponent - 23, -149)
    steps = round(magnitude / Fraction(2) ** last)  # Python rounds a Fraction to even
    rounded = math.inf if steps * Fraction(2) ** last >= 2**128 else math.ldexp(steps, last)
    return np.float32(math.copysign(rounded, total))
