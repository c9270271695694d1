"""Launcher of ``fp8_mma.cu``: sums of FP8 products as mma.sync adds them, promoted and scaled by blocks.

Knows no epilogue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._chains import Scales, chains, scale_arguments
from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import aligned, tile_count
from cuda_kernels._place import Place, check_array

THREADS = 128
ARCHES = ("sm_89", "sm_90a", "sm_100a")
MODELS = {"sm_89": "ada_mma_sync", "sm_90a": "hopper_mma_sync", "sm_100a": "blackwell_mma_sync"}
"""The model in qsim.gemm.MODELS whose bits the kernel has on each target; none was run on a device."""
FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
PRELUDE = ("block_fma.cuh", "mma_fp8.cuh", "tile.cuh", "promote.cuh")
PAIRS = tuple((a, b) for a in FORMATS for b in FORMATS)
FP8_MMA = {
    (a, b): Kernel("fp8_mma.cu", f"qsim_fp8_mma_{FORMATS[a]}_{FORMATS[b]}", prelude=PRELUDE, arches=ARCHES)
    for a, b in PAIRS
}
FP8_MMA_PROMOTED = {
    (a, b): Kernel("fp8_mma.cu", f"qsim_fp8_mma_promoted_{FORMATS[a]}_{FORMATS[b]}", prelude=PRELUDE, arches=ARCHES)
    for a, b in PAIRS
}


def fp8_mma(
    place: Place,
    a: Any,
    b: Any,
    *,
    formats: tuple[str, str],
    c: Any = None,
    promote_every: int | None = None,
    split_k: int = 1,
    scales: Scales | None = None,
) -> Any:
    """float32 [M, N] of a [M, K] and b [N, K], uint8 codes of ``formats`` (``FORMATS``), any strides.

    A chain is the sum over its k of a[i, k] * b[j, k] by mma.sync, as ``MODELS`` adds on the place, in ascending k.
    K is one chain that begins with c, float32 [M, N] (zeros if None); or, without c, it is cut, scaled and summed as
    ``fp8_wgmma`` says, promote_every a multiple of the model's step: 16 on sm_89, 32 on later devices.
    DeviceUnavailableError for a device of less than compute capability 8.9; TypeError or ValueError for other dtypes,
    shapes, formats or cuts, and for c with more than one chain or with scales.
    """
    if formats not in FP8_MMA:
        raise ValueError(f"formats {formats}; mma.sync takes pairs of {', '.join(FORMATS)}")
    check_array(place, "a", a, "uint8")
    check_array(place, "b", b, "uint8")
    check_array(place, "c", c, "float32", optional=True)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not [M, K] and [N, K]")
    shape, depth = (int(a.shape[0]), int(b.shape[0])), int(a.shape[1])
    plain = promote_every is None and split_k == 1 and scales is None
    if c is not None and (tuple(c.shape) != shape or not plain):
        raise ValueError(
            f"c of shape {tuple(c.shape)}: it is [M, N] = {shape}, and begins the one chain of a product without "
            "promote_every, split_k and scales"
        )
    if plain:
        return _plain(place, a, b, formats, shape, c)
    step = 16 if place.arch == "sm_89" else 32
    cut = chains(depth, step, promote_every=promote_every, split_k=split_k, scales=scales)
    arguments = scale_arguments(place, scales, shape, depth)
    if 0 in (*shape, depth):
        return place.xp.zeros(shape, place.xp.float32)
    arrays = (aligned(place.xp, a), aligned(place.xp, b), place.empty(shape, "float32"))
    for first, last in cut.parts:
        sizes = (np.int64(value) for value in (*shape, depth, first, min(last, depth), cut.run))
        numbers = (*arrays, *sizes, np.int32(first > 0), *arguments)
        place.tiles(FP8_MMA_PROMOTED[formats], tile_count(*shape), THREADS, numbers)
    return arrays[2]


def _plain(place: Place, a: Any, b: Any, formats: tuple[str, str], shape: tuple[int, int], c: Any) -> Any:
    """One chain that begins with c."""
    xp, depth = place.xp, int(a.shape[1])
    out = xp.zeros(shape, xp.float32) if c is None else xp.array(c, order="C", copy=True)
    if out.size and depth:
        arrays = (aligned(xp, a), aligned(xp, b), out)
        sizes = (np.int64(size) for size in (*shape, depth))
        place.tiles(FP8_MMA[formats], tile_count(*shape), THREADS, (*arrays, *sizes))
    return out
