"""The optimizer's two passes over one tensor: its sum of squares, and AdamW's step. Knows no schedule of rates.

Each step is the one of ``qsim.nn.optimizer``, in the same order, rounded to float32; squares are added in float64, by
halves. A gradient is unscaled in each pass anew: that is cheaper than to write it down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.backends.vector_kernels import LANES, every, load_some, root, store_some
from qsim.codec.jit import inlined, kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, Bool

_F4, _F8, _I8, _FLAG = numba.float32, numba.float64, numba.int64, numba.bool_

ZERO = np.float32(0)


@inlined
def square(x: Any, factor: Any) -> Any:
    """(x factor)^2, the product in float32, its square in float64."""
    wide = np.float64(x * factor)
    return wide * wide


@kernel(read(_F4, 2), read(_F4, 1), _I8, write(_F8, 2))
def squares(x: F32, unscale: F32, column: int, out: F64) -> None:
    """out[r, column] is the sum of squares of x[r] unscale[r], by halves; x [R, n], n > 0."""
    replicas, n = x.shape
    row = np.empty((n >> 1) + 1, np.float64)
    for r in range(replicas):
        half, factor = n >> 1, unscale[r]
        for i in range(half):
            row[i] = square(x[r, i], factor) + square(x[r, half + i], factor)
        if n & 1:
            row[half] = square(x[r, n - 1], factor)
        left = half + (n & 1)
        while left > 1:
            half = left >> 1
            for i in range(half):
                row[i] = row[i] + row[half + i]
            if left & 1:
                row[half] = row[left - 1]
            left = half + (left & 1)
        out[r, column] = row[0]


@kernel(*[read(_F4, 2)] * 5, read(_F4, 1), read(_FLAG, 1), _I8, write(_F4, 3))
def adamw(
    p: F32, g: F32, m: F32, v: F32, factors: F32, betas: F32, skipped: Bool, start: int, out: F32
) -> None:  # fmt: skip
    """AdamW on p, g [R, n], whose moments are m, v [R, columns] from ``start`` on; out [3, R, columns] is p', m', v'.

    factors [5, R]: of the gradient, of its clipping, a, e, and of the parameter. betas: b1, 1 - b1, b2, 1 - b2. A
    replica that is skipped gets copies.
    """
    replicas, n = p.shape
    columns = m.shape[1]
    b1, c1, b2, c2 = every(betas[0]), every(betas[1]), every(betas[2]), every(betas[3])
    for r in range(replicas):
        if skipped[r]:
            for i in range(n):
                out[0, r, start + i] = p[r, i]
                out[1, r, start + i] = m[r, start + i]
                out[2, r, start + i] = v[r, start + i]
            continue
        unscale, shrink, kept = every(factors[0, r]), every(factors[1, r]), every(factors[4, r])
        a, e = every(factors[2, r]), every(factors[3, r])
        for i in range(0, n, LANES):
            count, at = n - i, r * columns + start + i
            grad = load_some(g, r * n + i, count, ZERO) * unscale * shrink
            m1 = load_some(m, at, count, ZERO) * b1 + grad * c1
            v1 = load_some(v, at, count, ZERO) * b2 + grad * grad * c2
            p1 = load_some(p, r * n + i, count, ZERO) * kept - m1 / (root(v1) + e) * a
            store_some(p1, out, at, count)
            store_some(m1, out, replicas * columns + at, count)
            store_some(v1, out, 2 * replicas * columns + at, count)
