"""The GEMMs of a layer by name: which operand is turned, which one is split into heads. Adds no product itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from qsim.arrays import F32

Matmul = Callable[[F32, F32], F32]


class Form(NamedTuple):
    """left @ right, either of them transposed first.

    heads: in attention, which of (left, right, product) are tokens by channels [..., N, d] of all heads; the others are
    a matrix for each sequence and head [..., T, T].
    """

    turn_left: bool = False
    turn_right: bool = False
    heads: tuple[bool, bool, bool] | None = None


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "linear": Form(),  # X W
        "dgrad": Form(turn_right=True),  # dY W^T
        "wgrad": Form(turn_left=True),  # X^T dY
        "scores": Form(turn_right=True, heads=(True, True, False)),  # Q K^T
        "qgrad": Form(heads=(False, True, True)),  # dS K
        "kgrad": Form(turn_left=True, heads=(False, True, True)),  # dS^T Q
        "values": Form(heads=(False, True, True)),  # P V
        "pgrad": Form(turn_right=True, heads=(True, True, False)),  # dO V^T
        "vgrad": Form(turn_left=True, heads=(False, True, True)),  # P^T dO
    }
)
FORWARD_FORMS = ("linear", "scores", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How tokens by channels [R, batch * context, heads * width] split: to [R, batch, heads, context, width].

    A matrix a head is [R, batch, heads, context, context] inside a product, and [R, batch * heads * context, context]
    outside, so that it can be cast like any other tensor.
    """

    batch: int
    heads: int
    context: int

    def split(self, x: F32) -> F32:
        """[R, N, d] as [R, B, H, T, d / H], a view."""
        replicas, _, width = x.shape
        return x.reshape(replicas, self.batch, self.context, self.heads, width // self.heads).swapaxes(2, 3)

    def merge(self, x: F32) -> F32:
        """The inverse of ``split``."""
        replicas, batch, heads, context, width = x.shape
        return x.swapaxes(2, 3).reshape(replicas, batch * context, heads * width)

    def square(self, x: F32) -> F32:
        """[R, B * H * T, T] as [R, B, H, T, T]."""
        return x.reshape(x.shape[0], self.batch, self.heads, self.context, self.context)

    def flat(self, x: F32) -> F32:
        """The inverse of ``square``."""
        return x.reshape(x.shape[0], self.batch * self.heads * self.context, self.context)


def multiply(name: str, left: F32, right: F32, *, matmul: Matmul, heads: Heads | None = None) -> F32:
    """The product ``name`` of two operands. heads: None where operands are plain matrices, as in a replay."""
    form = FORMS[name]
    if heads is None or form.heads is None:
        return matmul(_turned(left, form.turn_left), _turned(right, form.turn_right))
    whole_left, whole_right, whole_out = form.heads
    left = (heads.split if whole_left else heads.square)(left)
    right = (heads.split if whole_right else heads.square)(right)
    out = matmul(_turned(left, form.turn_left), _turned(right, form.turn_right))
    return (heads.merge if whole_out else heads.flat)(out)


def _turned(x: F32, turn: bool) -> F32:
    return x.swapaxes(-1, -2) if turn else x
