"""Launcher of ``fp8_mma.cu``: sums of FP8 products as mma.sync adds them. Knows no scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import aligned, tile_count
from cuda_kernels._place import Place, check_array

THREADS = 128
ARCHES = ("sm_89", "sm_90a", "sm_100a")
MODELS = {"sm_89": "ada_mma_sync", "sm_90a": "hopper_mma_sync", "sm_100a": "blackwell_mma_sync"}
"""The model in qsim.gemm.MODELS whose bits the kernel has on each target; the middle one was never run."""
FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
FP8_MMA = {
    (a, b): Kernel(
        "fp8_mma.cu", f"qsim_fp8_mma_{FORMATS[a]}_{FORMATS[b]}", prelude=("block_fma.cuh", "mma_fp8.cuh", "tile.cuh"), arches=ARCHES
    )
    for a in FORMATS
    for b in FORMATS
}  # fmt: skip


def fp8_mma(place: Place, a: Any, b: Any, *, formats: tuple[str, str], c: Any = None) -> Any:
    """float32 [M, N]: c plus the sum over k of a[i, k] * b[j, k], a chain of mma.sync, as ``MODELS`` adds on the place.

    a uint8 [M, K], b uint8 [N, K], codes of ``formats`` (``FORMATS``), any strides; c float32 [M, N], zeros if None.
    DeviceUnavailableError for a device of less than compute capability 8.9; TypeError or ValueError for other dtypes,
    shapes or formats.
    """
    xp = place.xp
    if formats not in FP8_MMA:
        raise ValueError(f"formats {formats}; mma.sync takes pairs of {', '.join(FORMATS)}")
    check_array(place, "a", a, "uint8")
    check_array(place, "b", b, "uint8")
    check_array(place, "c", c, "float32", optional=True)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not [M, K] and [N, K]")
    shape, depth = (int(a.shape[0]), int(b.shape[0])), int(a.shape[1])
    if c is not None and tuple(c.shape) != shape:
        raise ValueError(f"c of shape {tuple(c.shape)} is not [M, N] = {shape}")
    out = xp.zeros(shape, xp.float32) if c is None else xp.array(c, order="C", copy=True)
    if out.size and depth:
        arrays = (aligned(xp, a), aligned(xp, b), out)
        sizes = (np.int64(size) for size in (*shape, depth))
        place.tiles(FP8_MMA[formats], tile_count(*shape), THREADS, (*arrays, *sizes))
    return out
