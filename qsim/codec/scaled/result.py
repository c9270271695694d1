"""What a scaled cast returns. Knows no rule that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from qsim.arrays import F32, U8


class BlockCounts(NamedTuple):
    """What a scaled cast did, summed over the matrix; plain integers.

    saturated: finite elements of x whose |y| exceeds ``fmt.max`` and did not round to it, an infinite y
        included. y is the scaled element before any clamp of the recipe (of the map that won, for four over six).
    flushed: finite elements, not zero, whose own code is a zero, those of a block with scale 0 too, those of a
        block that is NaN never.
    nan, inf: elements of the matrix that was encoded (of the residual, where there is a centre) that are NaN, infinite.
    zero_scale: blocks whose stored scale decodes to 0, and blocks of nothing but zeros (finite amax 0, no NaN,
        no Inf) whatever their stored scale is.
    """

    saturated: int
    flushed: int
    nan: int
    inf: int
    zero_scale: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCodes:
    """A matrix [M, K] as codes and scales.

    codes: uint8 [M, K], one code a byte.
    scales: one a block, [rows of blocks, columns of blocks] (``Block.grid``), by the recipe's scale rule:
        ``Float32Scale`` float32, the scale that multiplies before encode; ``PowerOfTwoScale`` uint8 codes of
        E8M0; ``TwoLevelScale`` uint8 codes of E4M3FN (both are what multiplies after decode).
    tensor_scale: float32 (), the amax of the whole matrix that a two-level scale is relative to; else None.
    amax: float32 (), the largest finite |x|, 0.0 where there is none.
    """

    codes: U8
    scales: F32 | U8
    tensor_scale: F32 | None
    amax: F32
    counts: BlockCounts
