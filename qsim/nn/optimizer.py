"""AdamW and SGD with clipping, warm-up and a loss scale, a mask a replica. Knows no layer and no schedule.

State in, state out. Every replica decides for itself: one whose gradient is not finite keeps parameters and moments to
the bit. What is one number a replica is an array [R] of the backend's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F32, F64, I64, Bool, frozen
from qsim.checks import whole_number
from qsim.errors import UsageError
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.flat import Flat, Layout, check_tensors, gathered, layout_of

if TYPE_CHECKING:
    from qsim.backends.fused import FusedNodes

KINDS = ("adamw", "sgd")

CLIP_EPS = 1e-6
"""Added to the norm that clipping divides by, as ``torch.nn.utils.clip_grad_norm_`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """Numbers of an optimizer. Unused ones (beta1, beta2, eps of SGD; momentum of AdamW) are ignored.

    warmup: steps over which lr rises from lr / warmup to lr; 0 for none. clip: largest global norm; 0 for none.
    weight_decay: decoupled, for both kinds, and on matrices alone. dynamic: whether the loss scale moves: times
    backoff, at least min_scale, after a step that was not finite; times growth, at most max_scale, after
    growth_interval finite ones. UsageError for an unknown kind or a number out of range.
    """

    kind: str = "adamw"
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9
    warmup: int = 0
    clip: float = 0.0
    dynamic: bool = False
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    max_scale: float = 2.0**24
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown optimizer {self.kind!r}; known: {', '.join(KINDS)}")
        for name in ("lr", "eps", "weight_decay", "clip"):
            _check(name, getattr(self, name), 0.0, np.inf)
        for name in ("beta1", "beta2", "momentum"):
            _check(name, getattr(self, name), 0.0, 1.0)
        _check("growth", self.growth, 1.0, np.inf)
        _check("backoff", self.backoff, 0.0, 1.0)
        _check("min_scale", self.min_scale, 0.0, self.max_scale)
        whole_number("warmup", self.warmup, least=0)
        whole_number("growth_interval", self.growth_interval, least=1)


def _check(name: str, value: float, least: float, below: float) -> None:
    if not least <= value <= below or value == np.inf or (below == 1.0 and value == 1.0):
        raise UsageError(f"{name} {value} is out of range; it must be from {least} to below {below}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """applied int64 [R]: steps that changed parameters. m, v: moments by name, float32 [R, ...] (SGD: m alone).

    loss_scale float32 [R]; good int64 [R]: finite steps since it last changed, or since it could. power1, power2
    float64 [R]: beta1 and beta2 to the power ``applied``, by repeated multiplication.
    """

    applied: I64
    m: Mapping[str, F32]
    v: Mapping[str, F32]
    loss_scale: F32
    good: I64
    power1: F64
    power2: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one update saw, arrays [R]; of an update that is not enabled, what it would have done.

    norm float64: of the unscaled gradient, before clipping; norms: the same by tensor. lr float32. clipped, skipped,
    finite: bool. loss_scale float32: the one that the gradients carried.
    """

    norm: F64
    lr: F32
    clipped: Bool
    skipped: Bool
    finite: Bool
    loss_scale: F32
    norms: Mapping[str, F64]


def initial_state(A: Arithmetic, hyper: Hyper, params: Mapping[str, F32], loss_scale: float | F32) -> OptimizerState:
    """Before the first step: moments 0, the loss scale given, one for all replicas or float32 [R]."""
    layout, xp = layout_of(params), A.xp
    first = next(iter(params.values()))
    replicas = len(first)

    def zeros() -> Flat:
        return Flat(buffer=frozen(xp.zeros((replicas, layout.columns), first.dtype)), layout=layout)

    return OptimizerState(
        applied=xp.zeros(replicas, np.int64),
        m=zeros(),
        v=zeros() if hyper.kind == "adamw" else {},
        loss_scale=xp.zeros(replicas, np.float32) + xp.asarray(np.asarray(loss_scale, np.float32)),
        good=xp.zeros(replicas, np.int64),
        power1=xp.ones(replicas, np.float64),
        power2=xp.ones(replicas, np.float64),
    )


def grad_norms(A: Arithmetic, grads: Mapping[str, F32]) -> dict[str, F64]:
    """Name -> float64 [R]: the root of the sum of squares, added by halves over the tensor in C order."""
    squares = _squares(A, gathered(A.xp, grads, layout_of(grads)))
    return {name: A.xp.sqrt(squares[name]) for name in grads}


@np.errstate(all="ignore")
def update(
    A: Arithmetic,
    hyper: Hyper,
    params: Mapping[str, F32],
    grads: Mapping[str, F32],
    state: OptimizerState,
    enabled: bool,
) -> tuple[Mapping[str, F32], OptimizerState, StepReport]:
    """(parameters, state, report) after gradients of loss_scale times the mean loss.

    g = RN(grad * RN(1 / loss_scale)), which is exact for a power of two above underflow. The global norm is the root of
    the tensors' sums of squares, added by halves in the order of ``params``. A replica whose norm is not finite keeps
    all but its loss scale. Then g = RN(g * min(1, clip / (norm + 1e-6))). The numbers of a replica (rate, corrections,
    clip) are float64, rounded once. Not enabled: params and state as they came.
    """
    xp, layout = A.xp, layout_of(params)
    unscale = np.float32(1) / state.loss_scale
    fused = A.fused(*params.values(), *grads.values(), unscale) if hyper.kind == "adamw" else None
    if fused is None:
        g = gathered(xp, grads, layout, unscale)
        squares = _squares(A, g)
        table: F64 = xp.stack([squares[name] for name in params], axis=1)
    else:
        check_tensors(grads, layout)
        table = fused.squares([grads[name] for name in params], unscale)
    norm: F64 = xp.sqrt(A.total64(table, 1))
    finite: Bool = xp.isfinite(norm)
    shrink = xp.minimum(1.0, hyper.clip / (norm + CLIP_EPS)) if hyper.clip else xp.ones_like(norm)
    rise = xp.minimum(1.0, (state.applied + 1) / hyper.warmup) if hyper.warmup else xp.ones_like(norm)
    lr: F32 = (hyper.lr * rise).astype(np.float32)
    report = StepReport(
        norm=norm, lr=lr, clipped=finite & (shrink < 1.0), skipped=~finite, finite=finite, loss_scale=state.loss_scale,
        norms=dict(zip(params, xp.sqrt(table).T, strict=True)),
    )  # fmt: skip
    if not enabled:
        return params, state, report
    state = replace(
        _scale_moved(xp, hyper, state, finite),
        applied=state.applied + finite,
        power1=xp.where(finite, state.power1 * hyper.beta1, state.power1),
        power2=xp.where(finite, state.power2 * hyper.beta2, state.power2),
    )
    if fused is not None:
        of_gradient = unscale, shrink.astype(np.float32)
        return *_adamw_fused(fused, hyper, params, grads, layout, state, report, of_gradient), report
    if hyper.clip:
        buffer = g.buffer  # made by ``gathered`` for this call
        buffer *= _column(shrink, buffer)
    old = gathered(xp, params, layout)
    step = _adamw if hyper.kind == "adamw" else _sgd
    moved, state = step(xp, hyper, old, g, state, report)
    return moved, state, report


def _squares(A: Arithmetic, g: Flat) -> dict[str, F64]:
    """Name -> sum of squares, float64 [R]: tensors of one length are summed together."""
    found: dict[str, F64] = {}
    for start, length, names in g.layout.runs:
        run = g.buffer[:, start : start + length * len(names)].astype(np.float64)
        run *= run
        totals = A.total64(run.reshape(-1, len(names), length), 2)
        found |= {name: totals[:, i] for i, name in enumerate(names)}
    return found


def _scale_moved(xp: Any, hyper: Hyper, state: OptimizerState, finite: Bool) -> OptimizerState:
    if not hyper.dynamic:
        return replace(state, good=xp.where(finite, state.good + 1, state.good))
    good = xp.where(finite, state.good + 1, 0)
    grows = good >= hyper.growth_interval
    larger = xp.minimum(state.loss_scale * np.float32(hyper.growth), np.float32(hyper.max_scale))
    smaller = xp.maximum(state.loss_scale * np.float32(hyper.backoff), np.float32(hyper.min_scale))
    scale = xp.where(finite, xp.where(grows, larger, state.loss_scale), smaller)
    return replace(state, loss_scale=scale, good=xp.where(grows, 0, good))


def _adamw_fused(
    fused: FusedNodes, hyper: Hyper, params: Mapping[str, F32], grads: Mapping[str, F32], layout: Layout,
    state: OptimizerState, report: StepReport, of_gradient: tuple[F32, F32],
) -> tuple[Flat, OptimizerState]:  # fmt: skip
    """``_adamw`` in one pass. of_gradient: the two factors of a gradient."""
    m, v = (gathered(np, x, layout) for x in (state.m, state.v))
    a, e = _corrections(np, hyper, state, report)
    out = fused.adamw(
        [(layout.starts[name], p, grads[name]) for name, p in params.items()], m.buffer, v.buffer,
        factors=np.array([*of_gradient, a, e], np.float32), kept=_kept(hyper, report.lr).astype(np.float32),
        betas=np.array([hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, 1.0 - hyper.beta2], np.float32),
        matrices=layout.matrices, skipped=report.skipped,
    )  # fmt: skip
    p1, m1, v1 = (Flat(buffer=frozen(x), layout=layout) for x in out)
    return p1, replace(state, m=m1, v=v1)


def _corrections(xp: Any, hyper: Hyper, state: OptimizerState, report: StepReport) -> tuple[F64, F64]:
    """a and e of ``_adamw``, a replica."""
    root = xp.sqrt(1.0 - state.power2)
    return report.lr * root / (1.0 - state.power1), hyper.eps * root


def _adamw(
    xp: Any, hyper: Hyper, p: Flat, g: Flat, state: OptimizerState, report: StepReport
) -> tuple[Flat, OptimizerState]:
    """Kingma and Ba (2015), in the order of operations of their section 2, with Loshchilov and Hutter's decay (2019).

    m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, p' = (1 - lr decay) p - a m' / (sqrt(v') + e), where
    a = lr sqrt(1 - b2^t) / (1 - b1^t) and e = eps sqrt(1 - b2^t).
    """
    number = p.buffer.dtype.type
    m, v = (gathered(xp, x, p.layout).buffer for x in (state.m, state.v))
    a, e = (_column(x, p.buffer) for x in _corrections(xp, hyper, state, report))
    p1, m1, v1, part = xp.empty((4, *p.buffer.shape), p.buffer.dtype)  # one allocation: its pages come as large ones
    xp.multiply(m, number(hyper.beta1), out=m1)
    xp.multiply(g.buffer, number(1.0 - hyper.beta1), out=part)
    m1 += part
    xp.multiply(v, number(hyper.beta2), out=v1)
    xp.multiply(g.buffer, g.buffer, out=part)
    part *= number(1.0 - hyper.beta2)
    v1 += part
    xp.sqrt(v1, out=part)
    part += e
    xp.divide(m1, part, out=part)
    part *= a
    _decay(xp, hyper, p, report.lr, out=p1)
    p1 -= part
    state = replace(state, m=_settled(m1, m, p, report), v=_settled(v1, v, p, report))
    return _settled(p1, p.buffer, p, report), state


def _sgd(
    xp: Any, hyper: Hyper, p: Flat, g: Flat, state: OptimizerState, report: StepReport
) -> tuple[Flat, OptimizerState]:
    """m' = momentum m + g, p' = (1 - lr decay) p - lr m'."""
    m = gathered(xp, state.m, p.layout).buffer
    p1, m1, part = xp.empty((3, *p.buffer.shape), p.buffer.dtype)
    xp.multiply(m, p.buffer.dtype.type(hyper.momentum), out=m1)
    m1 += g.buffer
    xp.multiply(m1, _column(report.lr, p.buffer), out=part)
    _decay(xp, hyper, p, report.lr, out=p1)
    p1 -= part
    return _settled(p1, p.buffer, p, report), replace(state, m=_settled(m1, m, p, report))


def _decay(xp: Any, hyper: Hyper, p: Flat, lr: F32, *, out: F32) -> None:
    """out = parameters times 1 - lr weight_decay where they are matrices."""
    split = p.layout.matrices
    out[:, :split] = p.buffer[:, :split]
    xp.multiply(p.buffer[:, split:], _column(_kept(hyper, lr), p.buffer), out=out[:, split:])


def _kept(hyper: Hyper, lr: F32) -> F64:
    """What decay leaves of a matrix, a replica."""
    kept: F64 = 1.0 - lr.astype(np.float64) * hyper.weight_decay
    return kept


def _column(x: Any, like: F32) -> F32:
    """One number a replica, [R, 1] in the dtype of ``like``."""
    column: F32 = x.astype(like.dtype)[:, None]
    return column


def _settled(own: F32, before: F32, p: Flat, report: StepReport) -> Flat:
    """``own``, read-only, but the rows of skipped replicas as they were before."""
    own[report.skipped] = before[report.skipped]
    return Flat(buffer=frozen(own), layout=p.layout)
