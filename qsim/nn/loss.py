"""Cross-entropy of logits, its gradient, and the loss scale on it. Knows no optimizer."""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32, AnyArray
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.dims import Dims


@np.errstate(all="ignore")
def cross_entropy(A: Arithmetic, D: Dims, logits: F32, targets: AnyArray) -> tuple[F32, F32]:
    """(loss [R], gradient [R, N, V]) of logits [R, N, V] and targets, integers [R, B, T] in 0..V-1.

    loss is the mean over tokens of (max - logit of the target) + ln(total), in nats; the gradient is (p - one-hot) / N,
    not scaled.
    """
    fused = A.fused(logits)
    if fused is not None:
        return fused.cross_entropy(logits, targets)
    replicas, tokens = len(logits), D.tokens
    number = logits.dtype.type
    top = A.largest(logits, -1)
    p = A.exp(logits - top[..., None])
    total = A.total(p, -1)
    own = A.xp.arange(replicas)[:, None], A.xp.arange(tokens), targets.reshape(replicas, tokens)
    nats = top - logits[own]
    nats += A.log(total)
    loss = A.total(nats, 1) / number(tokens)
    p /= total[..., None]
    p[own] -= number(1)  # one place a token: no order
    p /= number(tokens)
    return loss, p


@np.errstate(all="ignore")
def scale_gradient(x: F32, loss_scale: F32) -> F32:
    """RN(x * loss_scale) of a gradient [R, ...] and one scale a replica."""
    return x * loss_scale.reshape(-1, *(1,) * (x.ndim - 1))
