"""Causal softmax of raw scores, forward and backward, and the layouts of heads. Knows no product and no cast.

Scores s = q k^T are [R, B, H, T, T] (query, key) and unscaled; scale = 1 / sqrt(head_width), rounded once, is applied
here. A key behind its query is masked: its probability and its gradient are +0 whatever stands in the inputs, NaN and
Inf included.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from qsim.arrays import F32, AnyArray, frozen
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.dims import Dims


def split3(x: F32) -> tuple[F32, F32, F32]:
    """(q, k, v), views [R, N, d] of x [R, N, 3d]."""
    d = x.shape[-1] // 3
    return x[..., :d], x[..., d : 2 * d], x[..., 2 * d :]


def join3(dq: F32, dk: F32, dv: F32) -> F32:
    """[R, N, 3d] of three [R, N, d]: the way back of ``split3``."""
    return np.concatenate((dq, dk, dv), axis=-1)  # numpy hands arrays of a device to their own module


def split_heads(D: Dims, x: F32) -> F32:
    """A view [R, B, H, T, head_width] of x [R, N, d]."""
    return x.reshape(x.shape[0], D.batch, D.context, D.heads, D.head_width).swapaxes(2, 3)


def merge_heads(D: Dims, x: F32) -> F32:
    """[R, N, d] of x [R, B, H, T, head_width]: the way back of ``split_heads``."""
    return x.swapaxes(2, 3).reshape(x.shape[0], D.tokens, D.width)


@np.errstate(all="ignore")
def softmax(A: Arithmetic, D: Dims, s: F32) -> tuple[F32, F32]:
    """(p [R, B, H, T, T], lse [R, B, H, T]) of raw scores s.

    With t = s scale: p = e^(t - max) / total, lse = max + ln(total), over the keys not behind the query.
    """
    fused = A.fused(s)
    if fused is not None:
        return fused.softmax(s, _scale(D, s))
    keep, minus_inf = _mask(A.xp, D.context, s.dtype)
    t = s * _scale(D, s)
    words = t.view(keep.dtype)
    words &= keep
    words |= minus_inf
    top = A.largest(t, -1)
    t -= top[..., None]
    p = A.exp(t)
    total = A.total(p, -1)
    p /= total[..., None]
    words = p.view(keep.dtype)
    words &= keep  # of a row that is NaN too
    return p, A.log(total) + top


@np.errstate(all="ignore")
def probabilities(A: Arithmetic, D: Dims, s: F32, lse: F32) -> F32:
    """p = e^(s scale - lse) with a saved lse [R, B, H, T], as the backward of flash attention has it (Dao, 2023).

    Where s is not what the lse was made of, a row need not add up to 1, and p may be Inf: that is the result.
    """
    fused = A.fused(s, lse)
    if fused is not None:
        return fused.probabilities(s, lse, _scale(D, s))
    keep, _ = _mask(A.xp, D.context, s.dtype)
    t = s * _scale(D, s)
    t -= lse[..., None]
    p = A.exp(t)
    words = p.view(keep.dtype)
    words &= keep
    return p


@np.errstate(all="ignore")
def softmax_backward(A: Arithmetic, D: Dims, p: F32, dp: F32, do: F32, o: F32) -> F32:
    """ds = p (dp - delta) scale, the gradient of the raw scores, [R, B, H, T, T].

    dp = do v^T is of p's shape; do and o [R, N, d] are the gradient and the output of attention, and delta [R, B, H, T]
    is the sum of do o over a head: where p is what made o it equals the sum of p dp over keys (Dao et al., 2022).
    """
    fused = A.fused(p, dp, do, o)
    if fused is not None:
        return fused.softmax_backward(p, dp, do, o, _scale(D, p))
    keep, _ = _mask(A.xp, D.context, p.dtype)
    by_head = (do * o).reshape(o.shape[0], D.batch, D.context, D.heads, D.head_width)
    delta = A.total(by_head, -1).swapaxes(2, 3)
    ds: F32 = dp - delta[..., None]
    ds *= p
    ds *= _scale(D, p)
    words = ds.view(keep.dtype)
    words &= keep
    return ds


def _scale(D: Dims, like: F32) -> Any:
    return like.dtype.type(1 / math.sqrt(D.head_width))


@functools.lru_cache(maxsize=32)
def _mask(xp: Any, context: int, dtype: np.dtype[Any]) -> tuple[AnyArray, AnyArray]:
    """(keep, minus_inf), words [T, T]: x & keep is +0 at masked places, (x & keep) | minus_inf is -Inf there.

    On bits, so that neither Inf nor NaN gets through, at the price of an addition.
    """
    word = np.dtype(f"u{dtype.itemsize}")
    allowed = np.tri(context, dtype=np.bool_)
    keep = np.where(allowed, word.type(np.iinfo(word).max), word.type(0))
    minus_inf = np.where(allowed, word.type(0), dtype.type(-np.inf).view(word))
    return frozen(xp.asarray(keep)), frozen(xp.asarray(minus_inf))
