"""SwiGLU and GELU, forward and backward. Knows no weight.

Both are built on the logistic function s(a) = 1 / (1 + e^-a), which is 0 and 1 far out and never NaN for a number.
"""

from __future__ import annotations

import math

import numpy as np

from qsim.arrays import F32
from qsim.nn.arithmetic import Arithmetic

CUBIC = 0.044715
"""Weight of u^3 in the tanh form of GELU."""

FLAT = 32.0
"""Beyond it s is 0 or 1 in float32 and float64, so powers of u need not grow further, nor overflow."""


@np.errstate(all="ignore")
def swiglu(A: Arithmetic, u: F32) -> F32:
    """silu(a) b of u = [a, b]: [R, N, 2h] -> [R, N, h]; silu(a) = a s(a) (Shazeer, 2020)."""
    fused = A.fused(u)
    if fused is not None:
        return fused.swiglu(u)
    a, b = _halves(u)
    g = _logistic(A, a)
    g *= a
    g *= b
    return g


@np.errstate(all="ignore")
def swiglu_backward(A: Arithmetic, u: F32, dg: F32) -> F32:
    """du [R, N, 2h] of dg [R, N, h]: da = dg b (s + silu (1 - s)), db = dg silu."""
    fused = A.fused(u, dg)
    if fused is not None:
        return fused.swiglu_backward(u, dg)
    a, b = _halves(u)
    s = _logistic(A, a)
    silu = a * s
    slope = s.dtype.type(1) - s
    slope *= silu
    slope += s
    slope *= b
    du: F32 = A.xp.empty(u.shape, u.dtype)
    da, db = _halves(du)
    A.xp.multiply(slope, dg, out=da)
    A.xp.multiply(silu, dg, out=db)
    return du


@np.errstate(all="ignore")
def gelu(A: Arithmetic, u: F32) -> F32:
    """u s(2 z) with z = sqrt(2/pi) (u + 0.044715 u^3), of any shape [R, ...].

    It is the tanh form, u (1 + tanh z) / 2 (Hendrycks and Gimpel, 2016), as 1 + tanh z = 2 s(2 z): nothing cancels
    where tanh z is close to -1.
    """
    y = _logistic(A, _argument(_limited(A, u)))
    y *= u
    return y


@np.errstate(all="ignore")
def gelu_backward(A: Arithmetic, u: F32, dy: F32) -> F32:
    """dy (s + u s (1 - s) t), with s of 2 z and t = d(2 z)/du = sqrt(8/pi) (1 + 3 * 0.044715 u^2)."""
    number = u.dtype.type
    limited = _limited(A, u)
    s = _logistic(A, _argument(limited))
    du: F32 = limited * limited
    du *= number(3 * CUBIC * math.sqrt(8 / math.pi))
    du += number(math.sqrt(8 / math.pi))
    du *= u
    du *= s
    A.xp.subtract(number(1), s, out=limited)  # its memory is free now
    du *= limited
    du += s
    du *= dy
    return du


def _halves(u: F32) -> tuple[F32, F32]:
    h = u.shape[-1] // 2
    return u[..., :h], u[..., h:]


def _logistic(A: Arithmetic, a: F32) -> F32:
    """s(a), an array of its own."""
    one = a.dtype.type(1)
    s = A.exp(-a)
    s += one
    A.xp.divide(one, s, out=s)
    return s


def _limited(A: Arithmetic, u: F32) -> F32:
    """u within -FLAT..FLAT; NaN stays."""
    limited: F32 = A.xp.clip(u, u.dtype.type(-FLAT), u.dtype.type(FLAT))
    return limited


def _argument(limited: F32) -> F32:
    """2 z of GELU."""
    number = limited.dtype.type
    z = limited * limited
    z *= number(CUBIC * math.sqrt(8 / math.pi))
    z += number(math.sqrt(8 / math.pi))
    z *= limited
    return z
