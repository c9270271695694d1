"""The value types of a stateful quantizer: live state, frozen snapshot, observation, encoded tensor.

All are frozen and hold read-only arrays with ``lead`` leading replica axes. Nothing here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeAlias, TypeVar

import numpy as np

from qsim.arrays import F32, I64, U8, AnyArray, Bool, same_bits
from qsim.backends.protocol import CastCounts, Sums
from qsim.codec.scaled.recipes import ScaleRecipe
from qsim.codec.scaled.result import BlockCounts
from qsim.errors import UsageError
from qsim.formats import FloatFormat
from qsim.quant.identity import OpId, StateKey

Arrays = TypeVar("Arrays", Sums, CastCounts)


_ARRAYS = {kind: tuple(field.name for field in fields(kind)) for kind in (Sums, CastCounts)}


def frozen_arrays(value: Arrays) -> Arrays:
    """``value`` itself, its arrays made read-only: numpy arrays, on every backend."""
    for name in _ARRAYS[type(value)]:
        getattr(value, name).setflags(write=False)
    return value


class Layout(Enum):
    """How codes lie in bytes."""

    ONE_PER_BYTE = "one code a byte"
    PACKED_LOW_FIRST = "two 4-bit codes a byte, even element in the low nibble"
    PACKED_HIGH_FIRST = "two 4-bit codes a byte, even element in the high nibble"
    PACKED_GGML_SPLIT = "two 4-bit codes a byte, elements j and j + 16 of a block of 32"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantState:
    """The live state of one owner between two logical operations.

    epoch: commits so far. scale multiplies before encode, descale = RN(1/scale) after decode: float32 [lead].
    center: float32 [lead + trailing], or None without a centre. amax_history: float32 [lead + (window,)],
    newest last, 0 where nothing was observed yet. last_commit: the op of the newest observation folded in.
    center_seen: where a running mean has begun, bool of the centre's shape; None where the centre is no running mean.
    center_block: columns that one value of a block centre serves; 0: the centre broadcasts as it is.
    """

    owner: StateKey
    epoch: int
    scale: F32
    descale: F32
    center: F32 | None
    amax_history: F32
    last_commit: OpId | None
    center_seen: Bool | None = None
    center_block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSnapshot:
    """The metadata of one logical operation, frozen before anything may advance the state.

    center, center_seen and center_block as in the state. elements: the block recipe that encodes the residual, with
    scales of its own; then scale and descale touch no code.
    """

    owner: StateKey
    op: OpId
    epoch: int
    scale: F32
    descale: F32
    center: F32 | None
    fmt: FloatFormat
    center_seen: Bool | None = None
    center_block: int = 0
    elements: ScaleRecipe | None = None


Metadata: TypeAlias = QuantSnapshot | QuantState
"""What a centre can be read from."""


def spread(center: F32, block: int, width: int) -> F32:
    """A centre under each of ``width`` columns: of blocks, every value repeated; one column serves them all."""
    if block == 0 or center.shape[-1] == 1:
        return center
    return np.repeat(center, block, axis=-1)[..., :width]


def center_over(held: Metadata, width: int) -> F32 | None:
    """The centre held, under each of ``width`` columns. UsageError for blocks that do not tile them."""
    center, block = held.center, held.center_block
    if center is None:
        return None
    if block and center.ndim and center.shape[-1] not in (1, -(-width // block)):
        raise UsageError(
            f"centre {list(center.shape)} of owner {held.owner} has {center.shape[-1]} blocks of {block} columns and "
            f"the tensor {width} columns; keep its columns, or begin with a state of its own"
        )
    return spread(center, block, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantObservation:
    """What one tensor says about scales to come.

    amax: largest finite residual magnitude, float32 [lead]. mean: order-independent sums of the tensor itself,
    or None. count, nan_count, inf_count: elements per replica, int64 [lead]. about: the epoch of the state whose
    centre was subtracted; None for no centre, for one that follows from the tensor itself, and for a mixed merge.
    written: the amax with NaN and Inf in it, float32 [lead], where a merge that is no maximum made it; None: the amax,
    and the counts say where NaN or Inf was.
    """

    op: OpId
    amax: F32
    mean: Sums | None
    count: I64
    nan_count: I64
    inf_count: I64
    about: int | None = None
    written: F32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """Codes paired for good with all that decodes them. Equal to itself alone; ``same_bits`` compares two.

    codes: uint8, of the tensor's shape, or with its ``axis`` packed. layout: how they lie in bytes. shape: of the
    decoded tensor. amax, counts: what the cast saw (amax of the residual that was encoded); counts None where
    nobody asked for them.

    Encoded with a snapshot (stateful): ``snapshot`` holds scale, descale and centre, and ``recipe`` is None, or the
    block recipe of the residual.
    Encoded by a scale recipe: ``recipe``, and beside the codes its ``scales`` (``ScaledCodes.scales``; one row of
    blocks per row of the tensor: [other axes..., blocks along the axis]; blocks of several rows: the grid of the
    tensor as a matrix, its axis last and the others flattened; one scale for all: shape ()), ``tensor_scale`` of a
    two-level recipe, ``center`` that decode adds (float32, broadcastable to the tensor with its axis last; per
    block of the recipe where ``center_per_block``) and ``signs`` of the Hadamard rotation.
    """

    codes: U8
    scales: U8 | F32 | None
    layout: Layout
    shape: tuple[int, ...]
    snapshot: QuantSnapshot | None
    amax: F32
    counts: CastCounts | BlockCounts | None
    recipe: ScaleRecipe | None = None
    axis: int = -1
    tensor_scale: F32 | None = None
    center: F32 | None = None
    center_per_block: bool = False
    signs: F32 | None = None

    def same_bits(self, other: QuantizedTensor) -> bool:
        """True where both hold the same codes, bit for bit, and decode alike; who owns them, amax and counts aside.

        Compared are codes, scales, tensor_scale, center and signs (dtype, shape, bits), layout, shape, recipe, axis and
        center_per_block, and of a snapshot scale, descale, centre, its block and format. UsageError for another type.
        """
        if not isinstance(other, QuantizedTensor):
            raise UsageError(f"same_bits with {type(other).__name__}; it compares two tensors that quantize returned")
        return (
            (self.layout, self.shape, self.recipe, self.axis, self.center_per_block)
            == (other.layout, other.shape, other.recipe, other.axis, other.center_per_block)
            and all(
                _same(getattr(self, name), getattr(other, name))
                for name in ("codes", "scales", "tensor_scale", "center", "signs")
            )
            and _decodes_alike(self.snapshot, other.snapshot)
        )


def _same(a: AnyArray | None, b: AnyArray | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)


def _decodes_alike(a: QuantSnapshot | None, b: QuantSnapshot | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.fmt, a.center_block) == (b.fmt, b.center_block) and all(
        _same(getattr(a, name), getattr(b, name)) for name in ("scale", "descale", "center")
    )
