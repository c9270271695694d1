"""How a node multiplies, exponentiates and sums: exactly and alike everywhere, or fast. Knows no node.

Every array opens with the replica axis [R, ...]. Nothing here crosses it, so with ``exact`` the bits of a replica
depend on no other one, and neither on memory layout, threads or processor. The exception is a NaN that numpy makes
from others or from Inf: processors differ in its sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F32, F64, AnyArray
from qsim.backends import Backend
from qsim.errors import UsageError

if TYPE_CHECKING:
    from qsim.backends.fused import FusedNodes

_FLOAT32 = np.dtype(np.float32)

_SHORT = 16
"""Length at which an axis that lies close in memory is laid across: shorter inner loops cost more than the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """A backend and a promise. Arrays are float32; without ``exact`` they may be float64, and stay so.

    exact: products are exact sums rounded once, exp and log are ``Backend``'s, sums go by halves. Without it they are
    the array module's own, in the arrays' dtype: faster, and other bits on another machine. The nodes that the backend
    has fused are exact with ``exact`` and without it.
    """

    backend: Backend
    exact: bool = True

    @property
    def xp(self) -> Any:
        """Module of the arrays."""
        return self.backend.xp

    def fused(self, *arrays: AnyArray) -> FusedNodes | None:
        """The backend's fused nodes if it has them and every array is float32; else the array formula is the node."""
        nodes = self.backend.fused
        return nodes if nodes is not None and all(x.dtype == _FLOAT32 for x in arrays) else None

    def product(self, a: F32, b: F32) -> F32:
        """a [..., T, K] @ b [..., K, O]."""
        if self.exact:
            return self.backend.matmul(a, b)
        with np.errstate(all="ignore"):
            product: F32 = self.xp.matmul(a, b)
        return product

    def exp(self, x: F32) -> F32:
        """e^x; NaN is 7fc00000 with ``exact``."""
        if self.exact:
            return self.backend.exp(x)
        with np.errstate(all="ignore"):
            power: F32 = self.xp.exp(x)
        return power

    def log(self, x: F32) -> F32:
        """ln x; -Inf of 0, NaN below it."""
        if self.exact:
            return self.backend.log(x)
        with np.errstate(all="ignore"):
            logarithm: F32 = self.xp.log(x)
        return logarithm

    def total(self, x: F32, axis: int) -> F32:
        """Sum along one axis, which goes; an empty one gives +0.

        With ``exact`` by halves, in x's dtype: while n > 1 elements are left, element i < n//2 becomes the rounded sum
        of elements i and i + n//2, and an odd last one moves up behind them unchanged.
        """
        with np.errstate(all="ignore"):
            if not self.exact:
                summed: F32 = self.xp.sum(x, axis=_checked(x, axis))
                return summed
            total: F32 = _halved(self.xp, self.xp.add, x, axis)
        return total

    def total64(self, x: AnyArray, axis: int) -> F64:
        """``total`` in float64, with ``exact`` or without."""
        with np.errstate(all="ignore"):
            total: F64 = _halved(self.xp, self.xp.add, x.astype(np.float64), axis)
        return total

    def largest(self, x: F32, axis: int) -> F32:
        """The largest element along one axis that is not empty; NaN if any is, +0 for zeros of either sign."""
        with np.errstate(all="ignore"):
            largest: F32 = _halved(self.xp, self.xp.maximum, x, axis) + x.dtype.type(0)
        return largest


def _checked(x: AnyArray, axis: int) -> int:
    found = axis + x.ndim if axis < 0 else axis
    if not 0 < found < x.ndim:
        raise UsageError(
            f"axis {axis} of shape {tuple(x.shape)}: axis 0 is that of replicas; sum over one of the others"
        )
    return found


def _halved(xp: Any, combine: Any, x: AnyArray, axis: int) -> Any:
    """The tree of ``total``; an array of its own."""
    rows = xp.moveaxis(x, _checked(x, axis), 0)
    left = rows.shape[0]
    if left < 2:
        return rows[0].copy() if left else xp.zeros(rows.shape[1:], x.dtype)
    while left > 1:
        if left <= _SHORT:
            rows = xp.ascontiguousarray(rows)
        half, odd = left // 2, left % 2
        if odd:
            # A fresh array, not in place: where halves interleave in memory, numpy would copy them to be safe.
            made = xp.empty_like(rows[: half + 1])
            combine(rows[:half], rows[half : 2 * half], out=made[:half])
            made[half] = rows[2 * half]
            rows = made
        else:
            rows = combine(rows[:half], rows[half:])
        left = half + odd
    return rows[0]
