"""RMSNorm, forward and backward. Knows no layer.

y = x r g with r = 1 / sqrt(mean(x^2) + eps) per token (Zhang and Sennrich, 2019, with eps under the root). Arrays are
[R, N, d], the gain g is [R, d].
"""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.dims import Dims


@np.errstate(all="ignore")
def rmsnorm(A: Arithmetic, D: Dims, x: F32, g: F32) -> F32:
    """RN(RN(x * r) * g)."""
    fused = A.fused(x, g)
    if fused is not None:
        return fused.rmsnorm(x, g, np.float32(D.eps))
    y = x * _reciprocal_root(A, D, x)
    y *= g[:, None]
    return y


@np.errstate(all="ignore")
def rmsnorm_backward(A: Arithmetic, D: Dims, x: F32, g: F32, dy: F32) -> tuple[F32, F32]:
    """(dx [R, N, d], dg [R, d]).

    With n = x r and w = dy g: dx = (w - n mean(w n)) r, dg = the sum of dy n over tokens.
    """
    fused = A.fused(x, g, dy)
    if fused is not None:
        return fused.rmsnorm_backward(x, g, dy, np.float32(D.eps))
    r = _reciprocal_root(A, D, x)
    n = x * r
    dg = A.total(dy * n, 1)
    dx = dy * g[:, None]
    mean = A.total(dx * n, -1) / x.dtype.type(D.width)
    n *= mean[..., None]
    dx -= n
    dx *= r
    return dx, dg


def _reciprocal_root(A: Arithmetic, D: Dims, x: F32) -> F32:
    """r [R, N, 1], each step rounded."""
    one, width, eps = (x.dtype.type(number) for number in (1, D.width, D.eps))
    r: F32 = one / A.xp.sqrt(A.total(x * x, -1) / width + eps)
    return r[..., None]
