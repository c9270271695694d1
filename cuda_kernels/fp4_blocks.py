"""Launcher of ``fp4_blocks.cu``: sums of packed E2M1 products, rounded block by block. Names no recipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import aligned, contiguous, tile_count
from cuda_kernels._place import Place, check_array

THREADS = 128
BLOCKS = {"e8m0": 32, "e4m3": 16}
"""Elements along K that share a scale code of each kind."""
_SHORT = {"e8m0": "mx", "e4m3": "nv"}
FP4_BLOCKS = {
    (a, b): Kernel(
        "fp4_blocks.cu", f"qsim_fp4_blocks_{_SHORT[a]}_{_SHORT[b]}", prelude=("mma.cuh", "tile.cuh", "fp4.cuh")
    )
    for a in BLOCKS
    for b in BLOCKS
}


def fp4_blocks(
    place: Place, a: Any, b: Any, depth: int, a_scales: Any, b_scales: Any, *, kinds: tuple[str, str],
    extents: tuple[int, int] = (1, 1),
) -> Any:  # fmt: skip
    """float32 [M, N]: for each block of k, ascending, acc = RN(acc + RN(exact sum of a[i, k] * b[j, k] * scales)).

    a uint8 [M, ceil(depth / 2)], b uint8 [N, ceil(depth / 2)]: packed E2M1 codes, low nibble first; the high nibble
    behind an odd depth does not count. kinds: what the scale codes of a and of b are, of ``BLOCKS``: "e8m0" of blocks
    of 32 k, "e4m3" (E4M3FN) of 16; the narrower of the two is a partial sum. extents: rows of a and of b that share a
    scale; a_scales uint8 [ceil(M / extents[0]), ceil(depth / block)], b_scales alike. Any strides. acc begins at +0, a
    NaN is 7fc00000. TypeError or ValueError for other dtypes, shapes, kinds or extents.
    """
    if kinds not in FP4_BLOCKS:
        raise ValueError(f"kinds {kinds}; scale codes are pairs of {', '.join(BLOCKS)}")
    if depth < 0 or min(extents) < 1:
        raise ValueError(f"depth {depth} is at least 0, and extents {extents} at least 1")
    sides = (("a", a, a_scales, kinds[0], extents[0]), ("b", b, b_scales, kinds[1], extents[1]))
    for name, codes, scales, kind, extent in sides:
        check_array(place, name, codes, "uint8")
        check_array(place, f"{name}_scales", scales, "uint8")
        if codes.ndim != 2 or codes.shape[1] != -(-depth // 2):
            raise ValueError(f"{name} of shape {tuple(codes.shape)}; depth {depth} is [rows, {-(-depth // 2)}] bytes")
        grid = (-(-codes.shape[0] // extent), -(-depth // BLOCKS[kind]))
        if tuple(scales.shape) != grid:
            raise ValueError(f"{name}_scales of shape {tuple(scales.shape)}; {kind} of these codes is {grid}")
    xp, shape = place.xp, (int(a.shape[0]), int(b.shape[0]))
    if 0 in (*shape, depth):
        return xp.zeros(shape, xp.float32)
    out = place.empty(shape, "float32")
    arrays = (*(aligned(xp, x) for x in (a, b)), *(contiguous(xp, x) for x in (a_scales, b_scales)), out)
    sizes = (np.int64(size) for size in (*shape, depth, *extents))
    place.tiles(FP4_BLOCKS[kinds], tile_count(*shape), THREADS, (*arrays, *sizes))
    return out
