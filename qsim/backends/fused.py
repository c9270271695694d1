"""The fused nodes of a decoder: checks, sizes and makes arrays around ``node_kernels``. Computes nothing itself.

Every array is numpy's, float32; one that is not in C order is copied. Results equal the formulas of ``qsim.nn`` with
exact arithmetic in every bit; the formula is the definition. One thread: workers are processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsim.arrays import F32, F64, AnyArray, Bool
from qsim.backends import node_kernels as kernels
from qsim.backends import update_kernels as kernels_of_update
from qsim.errors import UsageError


class FusedNodes:
    """Nodes by name, as ``Backend.fused`` hands them out. UsageError: shapes that do not fit together."""

    __slots__ = ()

    def softmax(self, s: F32, scale: np.float32) -> tuple[F32, F32]:
        """(p, lse) of scores s [..., T, T]; see ``qsim.nn.attention.softmax``."""
        _square(s)
        p, lse = np.empty(s.shape, np.float32), np.empty(s.shape[:-1], np.float32)
        kernels.softmax(_flat(s), scale, p.reshape(-1), lse.reshape(-1))
        return p, lse

    def probabilities(self, s: F32, lse: F32, scale: np.float32) -> F32:
        """p of scores s [..., T, T] and lse [..., T]; see ``qsim.nn.attention.probabilities``."""
        _square(s)
        _fits("lse", lse, s.shape[:-1])
        p = np.empty(s.shape, np.float32)
        kernels.probabilities(_flat(s), _flat(lse), scale, p.reshape(-1))
        return p

    def softmax_backward(self, p: F32, dp: F32, do: F32, o: F32, scale: np.float32) -> F32:
        """ds of p, dp [R, B, H, T, T] and do, o [R, B T, d]; see ``qsim.nn.attention.softmax_backward``."""
        _square(p)
        _fits("dp", dp, p.shape)
        _fits("do", do, o.shape)
        replicas, batch, heads, context, _ = p.shape
        width = o.shape[-1]
        if o.shape[:-1] != (replicas, batch * context) or width % heads:
            raise UsageError(f"o {o.shape} does not fit to p {p.shape}: it should be [R, B T, H head_width]")
        ds = np.empty(p.shape, np.float32)
        kernels.softmax_backward(
            _flat(p), _flat(dp), _flat(do), _flat(o), heads, width // heads, scale, ds.reshape(-1)
        )  # fmt: skip
        return ds

    def cross_entropy(self, logits: F32, targets: AnyArray) -> tuple[F32, F32]:
        """(loss [R], gradient) of logits [R, N, V] and integers [R, ...], N a replica; see ``qsim.nn.loss``.

        UsageError besides: a target outside 0..V-1.
        """
        replicas, tokens, words = logits.shape
        own = np.ascontiguousarray(targets, np.int64).reshape(-1)
        _fits("targets", own, (replicas * tokens,))
        loss, p = np.empty(replicas, np.float32), np.empty(logits.shape, np.float32)
        wrong = np.empty(1, np.int64)
        kernels.cross_entropy(_rows(logits), own, np.float32(tokens), loss, p.reshape(-1, words), wrong)
        if wrong[0]:
            raise UsageError(f"{wrong[0]} of {own.size} targets are not in 0..{words - 1}")
        return loss, p

    def swiglu(self, u: F32) -> F32:
        """g [..., h] of u [..., 2h]; see ``qsim.nn.feed_forward.swiglu``."""
        h = u.shape[-1] // 2
        _fits("u", u, (*u.shape[:-1], 2 * h))
        g = np.empty((*u.shape[:-1], h), np.float32)
        kernels.swiglu(_rows(u), g.reshape(-1, h))
        return g

    def swiglu_backward(self, u: F32, dg: F32) -> F32:
        """du of u [..., 2h] and dg [..., h]; see ``qsim.nn.feed_forward.swiglu_backward``."""
        h = dg.shape[-1]
        _fits("u", u, (*dg.shape[:-1], 2 * h))
        du = np.empty(u.shape, np.float32)
        kernels.swiglu_backward(_rows(u), _rows(dg), du.reshape(-1, 2 * h))
        return du

    def rmsnorm(self, x: F32, g: F32, eps: np.float32) -> F32:
        """y of x [R, N, d] and g [R, d]; see ``qsim.nn.norm.rmsnorm``."""
        _fits("g", g, (x.shape[0], x.shape[2]))
        y = np.empty(x.shape, np.float32)
        width = x.shape[2]
        kernels.rmsnorm(_rows(x), _rows(g), np.float32(width), eps, y.reshape(-1, width))
        return y

    def rmsnorm_backward(self, x: F32, g: F32, dy: F32, eps: np.float32) -> tuple[F32, F32]:
        """(dx, dg) of x, dy [R, N, d] and g [R, d]; see ``qsim.nn.norm.rmsnorm_backward``."""
        _fits("g", g, (x.shape[0], x.shape[2]))
        _fits("dy", dy, x.shape)
        dx, dg = np.empty(x.shape, np.float32), np.empty(g.shape, np.float32)
        width = x.shape[2]
        kernels.rmsnorm_backward(_rows(x), _rows(g), _rows(dy), np.float32(width), eps, dx.reshape(-1, width), dg)
        return dx, dg

    def squares(self, tensors: Sequence[F32], unscale: F32) -> F64:
        """float64 [R, tensors]: the sum of squares of each tensor [R, ...] times unscale [R], in float32, by halves."""
        replicas = len(unscale)
        out = np.empty((replicas, len(tensors)), np.float64)
        for column, x in enumerate(tensors):
            kernels_of_update.squares(np.ascontiguousarray(x).reshape(replicas, -1), unscale, column, out)
        return out

    def adamw(
        self, tensors: Sequence[tuple[int, F32, F32]], m: F32, v: F32, *, factors: F32, kept: F32, betas: F32,
        matrices: int, skipped: Bool,
    ) -> F32:  # fmt: skip
        """[3, R, columns], p', m', v' after a step of AdamW; see ``qsim.nn.optimizer``.

        tensors: the column where each begins, parameter and gradient [R, ...]; m, v [R, columns]. factors [4, R]: of
        the gradient, of its clipping, a, e; kept [R]: of parameters from the column ``matrices`` on. betas: b1, 1 - b1,
        b2, 1 - b2. skipped [R]: who stays. The tensors fill the columns.
        """
        replicas, columns = m.shape
        _fits("v", v, m.shape)
        if sum(p.size for _, p, _ in tensors) != m.size:
            raise UsageError(f"parameters do not fill moments {m.shape}")
        out = np.empty((3, replicas, columns), np.float32)
        vector, matrix = (np.ascontiguousarray([*factors, last]) for last in (np.ones_like(kept), kept))
        m, v, skipped = np.ascontiguousarray(m), np.ascontiguousarray(v), np.ascontiguousarray(skipped)
        for start, p, g in tensors:
            _fits("a gradient", g, p.shape)
            p, g = (np.ascontiguousarray(x).reshape(replicas, -1) for x in (p, g))
            kernels_of_update.adamw(p, g, m, v, matrix if start >= matrices else vector, betas, skipped, start, out)
        return out


def _flat(x: F32) -> F32:
    return np.ascontiguousarray(x).reshape(-1)


def _rows(x: F32) -> F32:
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def _square(s: F32) -> None:
    if s.ndim < 2 or s.shape[-1] != s.shape[-2] or not s.size:
        raise UsageError(f"scores {s.shape} are not [..., T, T]: queries by keys")


def _fits(name: str, x: AnyArray, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise UsageError(f"{name} is {x.shape}; beside the other arrays it should be {shape}")
