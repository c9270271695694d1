"""The number that a cast encodes, and sums over replicas, in plain numpy. Knows no format and no kernel."""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32, I64, Bool, per_lead
from qsim.backends.checks import as_float32
from qsim.codec.residual import with_signs_of
from qsim.errors import UsageError


def check_broadcast(shape: tuple[int, ...], center: tuple[int, ...]) -> None:
    """UsageError unless ``center`` broadcasts to ``shape``."""
    full = (1,) * (len(shape) - len(center)) + center
    if len(full) != len(shape) or any(c not in (1, n) for c, n in zip(full, shape, strict=True)):
        raise UsageError(f"center of shape {center} does not broadcast to x of shape {shape}")


def residual(x: F32, center: F32 | None) -> F32:
    """RN(x - center); x itself without a centre."""
    if center is None:
        return x
    center = as_float32(center, "center")
    check_broadcast(x.shape, center.shape)
    with np.errstate(all="ignore"):
        return np.asarray(x - center, np.float32)


def scaled(x: F32, r: F32, scale: F32) -> F32:
    """RN(r * scale), r being the residual of x and scale [lead]. NaN is quiet and has the sign of x, or of none.

    The sign of a NaN made by arithmetic differs between processors: only x's own NaN has one.
    """
    with np.errstate(all="ignore"):
        y = np.asarray(r * per_lead(scale, x), np.float32)
    return with_signs_of(y, x)


def finite_amax(r: F32, lead: tuple[int, ...]) -> F32:
    """Largest finite |r| of every replica, float32 [lead]; 0 where there is none."""
    finite = np.where(np.isfinite(r), np.abs(r), np.float32(0))
    return np.asarray(finite.max(axis=tuple(range(len(lead), r.ndim)), initial=np.float32(0)), np.float32)


def count(mask: Bool, lead: tuple[int, ...]) -> I64:
    """Number of True of every replica, int64 [lead]."""
    return np.asarray(mask.sum(axis=tuple(range(len(lead), mask.ndim)), dtype=np.int64))
