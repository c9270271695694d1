"""Launcher of ``fp4_sums.cu``: exact sums of packed E2M1 products. Knows no scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import aligned, tile_count
from cuda_kernels._place import Place, check_array

FP4_SUMS = Kernel("fp4_sums.cu", "qsim_fp4_sums", prelude=("mma.cuh", "tile.cuh", "fp4.cuh"))
THREADS = 128
MAX_DEPTH = (2**31 - 1) // 144
"""The largest K whose sums an int32 holds: each product is at most 12 * 12."""


def fp4_sums(place: Place, a: Any, b: Any, depth: int) -> Any:
    """int32 [M, N] of sum over k of a[i, k] * b[j, k] in units of 1/4, exact.

    a uint8 [M, ceil(depth / 2)], b uint8 [N, ceil(depth / 2)]: packed E2M1 codes, low nibble first, any strides; the
    high nibble behind an odd depth does not count. TypeError or ValueError for other dtypes or shapes, or a depth
    beyond ``MAX_DEPTH``.
    """
    check_array(place, "a", a, "uint8")
    check_array(place, "b", b, "uint8")
    if not 0 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth {depth}; an int32 holds the sums of 0 to {MAX_DEPTH} products")
    for what, array in (("a", a), ("b", b)):
        if array.ndim != 2 or array.shape[1] != -(-depth // 2):
            raise ValueError(f"{what} of shape {tuple(array.shape)}; depth {depth} is [rows, {-(-depth // 2)}] bytes")
    sizes = (int(a.shape[0]), int(b.shape[0]), depth)
    if 0 in sizes:
        return place.xp.zeros(sizes[:2], place.xp.int32)
    out = place.empty(sizes[:2], "int32")
    arrays = (aligned(place.xp, a), aligned(place.xp, b), out)
    place.tiles(FP4_SUMS, tile_count(*sizes[:2]), THREADS, (*arrays, *(np.int64(size) for size in sizes)))
    return out
