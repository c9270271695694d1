"""Launchers of ``blocks.cu``: a matrix in blocks to codes and scales. Names no format and no recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array
from cuda_kernels.cast import RULES

_PRELUDE = ("codec.cuh", "scales.cuh", "matrix.cuh", "elements.cuh")
BLOCKS_FUSED = Kernel("blocks.cu", "qsim_blocks_fused", prelude=_PRELUDE)
BLOCKS_MEASURE = Kernel("blocks.cu", "qsim_blocks_measure", prelude=_PRELUDE)
BLOCKS_SCALE = Kernel("blocks.cu", "qsim_blocks_scale", prelude=_PRELUDE)
BLOCKS_ENCODE = Kernel("blocks.cu", "qsim_blocks_encode", prelude=_PRELUDE)

THREADS = 128
MOST = 2048
"""Thread blocks of a launch: enough to fill any device, few enough that what they add to the counts is little."""

FUSED_COLUMNS = (16, 32, 64, 128)
"""Widths of blocks of one row that a part of a warp holds."""
FLOAT32, EXACT = 0, 2
"""Rules with a float32 scale, and with elements that are divided in float64; from EXACT on a scale has two levels."""
COUNTS = 6
"""saturated, flushed, NaN, Inf, blocks of scale zero, elements that the policy refuses."""
_HEIGHT, _CHUNK = 16, 128  # QSIM_HEIGHT, QSIM_CHUNK


class BlockRecipe(NamedTuple):
    """A scale recipe as plain numbers: blocks of rows x cols, 0 the whole extent; the rest as in ``scales.cuh``."""

    rows: int
    cols: int
    rule: int
    carry: int
    offset: int
    absolute: int
    fmt_max: float
    scale_max: float
    full_range: float

    @property
    def two_level(self) -> bool:
        """Whether scales are relative to the amax of the matrix."""
        return self.rule >= EXACT

    def within(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a block of a matrix of this shape, at least 1."""
        rows, cols = (max(size, 1) for size in shape)
        return min(self.rows or rows, rows), min(self.cols or cols, cols)

    def numbers(self) -> tuple[Any, ...]:
        """All but the block, as the kernels take them."""
        steps = np.int32(self.rule), np.uint32(self.carry), np.int32(self.offset), np.int32(self.absolute)
        return *steps, np.float32(self.fmt_max), np.float32(self.scale_max), np.float32(self.full_range)


class Quantized(NamedTuple):
    """What ``quantize_blocks`` fills; nothing of it was on the host.

    codes uint8 [M, K], or [M, (K + 1) // 2] where packed. scales [blocks down, blocks across]: float32, or uint8 codes.
    top uint32 [1]: bits of the largest finite |residual|. tensor float32 [1]: the amax that two-level scales are
    relative to, a view of top where none was given; else None. counts uint64 [6]: as ``COUNTS`` says.
    """

    codes: Any
    scales: Any
    top: Any
    tensor: Any
    counts: Any


def quantize_blocks(
    place: Place,
    x: Any,
    rules: Any,
    recipe: BlockRecipe,
    *,
    center: Any = None,
    stream: Any = None,
    packed: bool = False,
    tensor_amax: Any = None,
) -> Quantized:
    """Codes and scales of RN(x - center).

    x float32 [M, K], any strides; rules uint32 [21]; center float32 [1 or M, 1 or K] or None; stream uint32 [5] for a
    stochastic rounding, else None: element i in C order takes word i. packed: two codes a byte along K, the even one
    low; the format has four bits then. tensor_amax float32 [1]: what a two-level scale is relative to, by default the
    amax of the residual. TypeError or ValueError for other dtypes or shapes.
    """
    _check(place, x, rules, recipe, center, stream, tensor_amax)
    xp, shape = place.xp, (int(x.shape[0]), int(x.shape[1]))
    block = recipe.within(shape)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    own = recipe.rule == FLOAT32
    codes = place.empty((shape[0], -(-shape[1] // 2) if packed else shape[1]), "uint8")
    scales = place.empty(grid, "float32" if own else "uint8")
    top, counts = xp.zeros(1, xp.uint32), xp.zeros(COUNTS, xp.uint64)
    tensor = None
    if recipe.two_level:
        tensor = top.view(xp.float32) if tensor_amax is None else contiguous(xp, tensor_amax)
    out = Quantized(codes, scales, top, tensor, counts)
    if not x.size:
        return out
    arrays = [None if a is None else contiguous(xp, a) for a in (x, center, rules, stream)]
    fused = block[0] == 1 and (block[1] in FUSED_COLUMNS or recipe.cols in FUSED_COLUMNS)
    if fused and block[1] not in FUSED_COLUMNS:  # cut to a narrow matrix
        block = (1, recipe.cols)
    shape, block = flattened(shape, block, packed=packed, free=center is None or center.size == 1)
    down, across = (0, 0) if center is None else _strides(center.shape)
    sizes = [np.int64(size) for size in (*shape, down, across)]
    if fused:
        _fused(place, arrays, recipe, out, sizes, block[1], packed=packed, given=tensor_amax is not None)
    else:
        _in_steps(place, arrays, recipe, out, sizes, block, packed=packed)
    return out


def flattened(
    shape: tuple[int, int], block: tuple[int, int], *, packed: bool, free: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The matrix as one row, with its block, where that changes no block and no byte: few lanes then lie past an end.

    free: nothing else depends on the row.
    """
    rows, columns = shape
    whole = block[0] >= rows and block[1] >= columns
    along = block[0] == 1 and columns % block[1] == 0
    if rows == 1 or not free or not (whole or along) or (packed and columns % 2):
        return shape, block
    return (1, rows * columns), (1, rows * columns if whole else block[1])


def chunks(rows: int, columns: int) -> int:
    """Thread blocks for a matrix that warps go over by chunks."""
    return min(-(-rows * -(-columns // _CHUNK) // (THREADS // 32)), MOST)


def _fused(
    place: Place,
    arrays: list[Any],
    recipe: BlockRecipe,
    out: Quantized,
    sizes: list[Any],
    width: int,
    *,
    packed: bool,
    given: bool,
) -> None:
    """In one read, blocks of ``width`` columns; two levels need one more before, unless their amax is given."""
    x, center, rules, stream = arrays
    rows, columns = (int(size) for size in sizes[:2])
    measured = recipe.two_level and not given
    if measured:
        _measure(place, x, center, None, out.top, sizes, (rows, columns))
    own = recipe.rule == FLOAT32
    stored = (out.scales if own else None, None if own else out.scales)
    args = (x, center, rules, stream, out.tensor, out.codes, *stored, None if measured else out.top, out.counts, *sizes,
            np.int32(width), np.int32(packed), *recipe.numbers())  # fmt: skip
    place.tiles(BLOCKS_FUSED, chunks(rows, columns), THREADS, args)


def _in_steps(
    place: Place,
    arrays: list[Any],
    recipe: BlockRecipe,
    out: Quantized,
    sizes: list[Any],
    block: tuple[int, int],
    *,
    packed: bool,
) -> None:
    """Measured, scaled, encoded: blocks of any shape."""
    x, center, rules, stream = arrays
    rows, columns = (int(size) for size in sizes[:2])
    extent = [np.int64(side) for side in block]
    seen = place.xp.zeros(out.scales.shape, place.xp.uint32)
    _measure(place, x, center, seen, out.top, sizes, block)
    own = recipe.rule == FLOAT32
    multiplier = out.scales if own else place.empty(out.scales.shape, "float32")
    scale_codes = None if own else out.scales
    args = (x, center, seen, out.tensor, multiplier, scale_codes, out.counts, *sizes, *extent, *recipe.numbers())
    place.tiles(BLOCKS_SCALE, min(-(-int(seen.size) // THREADS), MOST), THREADS, args)
    last = (np.int32(packed), np.int32(recipe.rule), np.float32(recipe.full_range))
    args = (
        x,
        center,
        rules,
        stream,
        out.tensor,
        multiplier,
        scale_codes,
        out.codes,
        out.counts,
        *sizes,
        *extent,
        *last,
    )
    place.tiles(BLOCKS_ENCODE, chunks(rows, columns), THREADS, args)


def _measure(
    place: Place, x: Any, center: Any, seen: Any, top: Any, sizes: list[Any], block: tuple[int, int]
) -> None:  # fmt: skip
    count = chunks(-(-int(sizes[0]) // _HEIGHT), int(sizes[1]))
    place.tiles(BLOCKS_MEASURE, count, THREADS, (x, center, seen, top, *sizes, *(np.int64(side) for side in block)))


def _strides(center: tuple[int, ...]) -> tuple[int, int]:
    """How far apart elements of a contiguous centre lie, down and across; 0 where one serves all."""
    return center[1] if center[0] > 1 else 0, 1 if center[1] > 1 else 0


def _check(
    place: Place, x: Any, rules: Any, recipe: BlockRecipe, center: Any, stream: Any, tensor_amax: Any
) -> None:  # fmt: skip
    check_array(place, "x", x, "float32")
    check_array(place, "rules", rules, "uint32")
    check_array(place, "center", center, "float32", optional=True)
    check_array(place, "stream", stream, "uint32", optional=True)
    check_array(place, "tensor_amax", tensor_amax, "float32", optional=True)
    if x.ndim != 2:
        raise ValueError(f"x of shape {tuple(x.shape)}; blocks tile a matrix [M, K]")
    if rules.shape != (RULES,) or (stream is not None and stream.shape != (5,)):
        raise ValueError(f"rules take {RULES} numbers, and a stream 5")
    if center is not None and (
        center.ndim != 2 or any(c not in (1, n) for c, n in zip(center.shape, x.shape, strict=True))
    ):
        raise ValueError(f"center of shape {tuple(center.shape)} does not broadcast to x {tuple(x.shape)}")
    if tensor_amax is not None and (tensor_amax.shape != (1,) or not recipe.two_level):
        raise ValueError("tensor_amax is one number [1], of a two-level scale")
