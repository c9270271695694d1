"""The nodes of a decoder's graph by name, bound to sizes and an arithmetic. Computes nothing itself; knows no event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsim import nn
from qsim.arrays import F32, AnyArray
from qsim.nn import Arithmetic, Dims, Hyper, OptimizerState, StepReport
from qsim.quant import OpId
from qsim.sim.env import NodeFunction
from qsim.sim.products import Heads, multiply

_BACKWARD_IN_HALF = frozenset({"dgrad", "qgrad", "kgrad", "pgrad", "vgrad"})
"""Products whose outputs are gradients of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one update did. losses: of every microbatch, float32 [R]. step: the schedule's own, warm steps included."""

    step: int
    losses: tuple[F32, ...]
    done: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Everything that a graph's events call. half: type that recomputed probabilities and gradients of activations are
    rounded to. mode: "exact", "blas" or "tf32". warm: the first step whose update changes something. names: of the
    parameters, in the order in which the update gets them. held: what the optimizer goes on from; None: from nothing.
    key_mean: see ``ModelParams``.
    """

    arithmetic: Arithmetic
    dims: Dims
    half: str
    mode: str
    microbatches: int
    warm: int
    hyper: Hyper
    loss_scale: float
    names: tuple[str, ...]
    held: OptimizerState | None = None
    key_mean: float = 0.0

    @property
    def heads(self) -> Heads:
        """How attention splits."""
        return Heads(batch=self.dims.batch, heads=self.dims.heads, context=self.dims.context)

    def product(self, name: str, left: F32, right: F32) -> F32:
        """A product of the graph; gradients of activations are rounded to ``half``."""
        if self.mode == "tf32":
            left, right = (nn.round_to(x, "tf32") for x in (left, right))
        out = multiply(name, left, right, matmul=self.arithmetic.product, heads=self.heads)
        return nn.round_to(out, self.half) if name in _BACKWARD_IN_HALF else out

    def table(self) -> Mapping[str, NodeFunction]:
        """Name -> (at, *values) -> values."""
        a, d = self.arithmetic, self.dims

        def plain(function: Callable[..., Any], *first: Any) -> NodeFunction:
            """A function of arrays as a node."""

            def node(at: OpId, *values: AnyArray) -> tuple[Any, ...]:
                made = function(*first, *values)
                return made if isinstance(made, tuple) else (made,)

            return node

        return {
            "add": plain(_added),
            "pass": lambda at, *values: values,
            "split": self._split,
            "split.backward": self._split_backward,
            "rmsnorm": plain(nn.rmsnorm, a, d),
            "rmsnorm.backward": plain(nn.rmsnorm_backward, a, d),
            "swiglu": plain(nn.swiglu, a),
            "swiglu.backward": plain(nn.swiglu_backward, a),
            "gelu": plain(nn.gelu, a),
            "gelu.backward": plain(nn.gelu_backward, a),
            "embed": self._embed,
            "embed.backward": self._embed_backward,
            "softmax": self._softmax,
            "probabilities": self._probabilities,
            "softmax.backward": self._softmax_backward,
            "loss": self._loss,
            "start": self._start,
            "update": self._update,
        }

    # ---- data and attention ---------------------------------------------------------------------------------

    def _embed(self, at: OpId, data: AnyArray, table: F32, positions: F32) -> tuple[F32, ...]:
        return (nn.embed(self.arithmetic, self.dims, data[..., :-1], table, positions),)

    def _embed_backward(self, at: OpId, data: AnyArray, dh: F32) -> tuple[F32, ...]:
        return nn.embed_backward(self.arithmetic, self.dims, data[..., :-1], dh)

    def _split(self, at: OpId, x: F32) -> tuple[F32, ...]:
        q, k, v = (self.arithmetic.xp.ascontiguousarray(part) for part in nn.split3(x))
        return q, self._with_mean(k), v

    def _split_backward(self, at: OpId, dq: F32, dk: F32, dv: F32) -> tuple[F32, ...]:
        return (nn.join3(dq, self._with_mean(dk), dv),)

    def _with_mean(self, k: F32) -> F32:
        """k and ``key_mean`` times its mean over tokens; a symmetric map, so the gradient takes the same way."""
        if not self.key_mean:
            return k
        with np.errstate(all="ignore"):
            mean = self.arithmetic.total(k, 1) / k.dtype.type(self.dims.tokens)
            return k + mean[:, None] * k.dtype.type(self.key_mean)

    def _softmax(self, at: OpId, s: F32) -> tuple[F32, ...]:
        p, lse = nn.softmax(self.arithmetic, self.dims, self.heads.square(s))
        return self.heads.flat(nn.round_to(p, self.half)), lse

    def _probabilities(self, at: OpId, s: F32, lse: F32) -> tuple[F32, ...]:
        p = nn.probabilities(self.arithmetic, self.dims, self.heads.square(s), lse)
        return (self.heads.flat(nn.round_to(p, self.half)),)

    def _softmax_backward(self, at: OpId, p: F32, do: F32, o: F32, dp: F32) -> tuple[F32, ...]:
        square = self.heads.square
        ds = nn.softmax_backward(self.arithmetic, self.dims, square(p), square(dp), do, o)
        return (nn.round_to(self.heads.flat(ds), self.half),)

    # ---- loss and update --------------------------------------------------------------------------------------

    def _loss(self, at: OpId, logits: F32, data: AnyArray, held: OptimizerState) -> tuple[F32, ...]:
        """The mean loss of a microbatch, and the gradient of loss_scale / microbatches times it."""
        loss, gradient = nn.cross_entropy(self.arithmetic, self.dims, logits, data[..., 1:])
        scale = held.loss_scale / np.float32(self.microbatches)
        return loss, nn.round_to(nn.scale_gradient(gradient, scale), self.half)

    def _start(self, at: OpId, *params: F32) -> tuple[OptimizerState]:
        if self.held is not None:
            return (self.held,)
        return (nn.initial_state(self.arithmetic, self.hyper, self._named(params), self.loss_scale),)

    def _update(self, at: OpId, held: OptimizerState, *values: F32) -> tuple[Any, ...]:
        count = len(self.names)
        losses, params, grads = values[: -2 * count], values[-2 * count : -count], values[-count:]
        moved, state, done = nn.update(
            self.arithmetic, self.hyper, self._named(params), self._named(grads), held,
            enabled=at.logical_step >= self.warm,
        )  # fmt: skip
        report = Report(step=at.logical_step, losses=losses, done=done)
        return (state, report, *(moved[name] for name in self.names))

    def _named(self, values: Sequence[F32]) -> dict[str, F32]:
        return dict(zip(self.names, values, strict=True))


@np.errstate(all="ignore")
def _added(x: F32, y: F32) -> F32:
    """RN(x + y)."""
    return x + y
