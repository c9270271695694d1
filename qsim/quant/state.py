"""The value types of a stateful quantizer: live state, frozen snapshot, observation, encoded tensor.

All are frozen and hold read-only arrays with ``lead`` leading replica axes. Nothing here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from qsim.arrays import F32, I64, U8, frozen
from qsim.backends.protocol import CastCounts, Sums
from qsim.formats import FloatFormat
from qsim.quant.identity import OpId, StateKey

Arrays = TypeVar("Arrays", Sums, CastCounts)


def frozen_arrays(value: Arrays) -> Arrays:
    """``value`` itself, its arrays made read-only."""
    for field in fields(value):
        frozen(getattr(value, field.name))
    return value


class Layout(Enum):
    """How codes lie in bytes."""

    ONE_PER_BYTE = "one code a byte"
    PACKED_LOW_FIRST = "two 4-bit codes a byte, even element in the low nibble"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantState:
    """The live state of one owner between two logical operations.

    epoch: commits so far. scale multiplies before encode, descale = RN(1/scale) after decode: float32 [lead].
    center: float32 [lead + trailing], or None without a centre. amax_history: float32 [lead + (window,)],
    newest last, 0 where nothing was observed yet. last_commit: the op of the newest observation folded in.
    """

    owner: StateKey
    epoch: int
    scale: F32
    descale: F32
    center: F32 | None
    amax_history: F32
    last_commit: OpId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSnapshot:
    """The metadata of one logical operation, frozen before anything may advance the state."""

    owner: StateKey
    op: OpId
    epoch: int
    scale: F32
    descale: F32
    center: F32 | None
    fmt: FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantObservation:
    """What one tensor says about scales to come.

    amax: largest finite residual magnitude, float32 [lead]. mean: order-independent sums of the tensor itself,
    or None. count, nan_count, inf_count: elements per replica, int64 [lead].
    """

    op: OpId
    amax: F32
    mean: Sums | None
    count: I64
    nan_count: I64
    inf_count: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """Codes paired for good with the metadata that made them.

    codes: uint8. scales: block scales beside the codes, None for one scale per tensor. shape: of the decoded
    tensor. snapshot: None for a plain cast. amax and counts: what the cast saw (amax of the residual).
    """

    codes: U8
    scales: U8 | None
    layout: Layout
    shape: tuple[int, ...]
    snapshot: QuantSnapshot | None
    amax: F32
    counts: CastCounts
