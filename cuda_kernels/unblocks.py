"""Launcher of ``unblocks.cu``: codes and scales of blocks back to float32. Names no format: its values are a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array
from cuda_kernels.blocks import FLOAT32, THREADS, BlockRecipe, chunks, flattened

UNBLOCKS = Kernel("unblocks.cu", "qsim_unblocks", prelude=("scales.cuh", "matrix.cuh"))


def dequantize_blocks(
    place: Place, codes: Any, scales: Any, table: Any, recipe: BlockRecipe, *, tensor: Any = None
) -> Any:  # fmt: skip
    """float32 [M, K] that codes and scales stand for; NaN is always 7fc00000.

    codes uint8 [M, K], one a byte, any strides, below the table's size: a code outside it is the caller's to refuse,
    and decodes to NaN. scales [blocks down, blocks across]: float32 of a float32 rule, else uint8. table float32 [codes
    of the format]. tensor float32 [1]: the amax that a two-level scale is relative to, else None. TypeError or
    ValueError for other dtypes or shapes.
    """
    check_array(place, "codes", codes, "uint8")
    check_array(place, "scales", scales, "float32" if recipe.rule == FLOAT32 else "uint8")
    check_array(place, "table", table, "float32")
    check_array(place, "tensor", tensor, "float32", optional=not recipe.two_level)
    if codes.ndim != 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)}; blocks tile a matrix [M, K]")
    shape = int(codes.shape[0]), int(codes.shape[1])
    block = recipe.within(shape)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    if tuple(scales.shape) != grid:
        raise ValueError(f"scales of shape {tuple(scales.shape)}; codes of shape {shape} have {grid} blocks")
    if table.ndim != 1 or not 1 <= table.size <= 256:
        raise ValueError(f"table of shape {tuple(table.shape)}; it has one value a code, at most 256")
    if tensor is not None and (tensor.shape != (1,) or not recipe.two_level):
        raise ValueError("tensor is one number [1], of a two-level scale")
    out = place.empty(shape, "float32")
    if not codes.size:
        return out
    own = recipe.rule == FLOAT32
    stored = (scales if own else None, None if own else scales)
    inputs = [None if a is None else contiguous(place.xp, a) for a in (codes, *stored, table, tensor)]
    shape, block = flattened(shape, block, packed=False, free=True)
    sizes = (np.int64(size) for size in (*shape, *block))
    last = (np.int32(table.size), np.int32(recipe.rule), np.float32(recipe.full_range))
    place.tiles(UNBLOCKS, chunks(*shape), THREADS, (*inputs, out, *sizes, *last))
    return out
