"""Launcher of ``fp8_mma.cu``: sums of FP8 products as mma.sync adds them, on a GPU or emulated. Knows no scale."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cuda_kernels import DeviceUnavailableError
from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import aligned
from cuda_kernels.host import HostKernel, build

THREADS, TILE, MAX_GRID = 128, 64, 65535
ARCHES = ("sm_89", "sm_90a", "sm_100a")
MODELS = {"sm_89": "ada_mma_sync", "sm_90a": "hopper_mma_sync", "sm_100a": "blackwell_mma_sync"}
"""The model in qsim.gemm.MODELS whose bits the kernel has on each target; the middle one was never run."""
FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
FP8_MMA = {
    (a, b): Kernel(
        "fp8_mma.cu", f"qsim_fp8_mma_{FORMATS[a]}_{FORMATS[b]}", prelude=("mma_fp8.cuh", "tile.cuh"), arches=ARCHES
    )
    for a in FORMATS
    for b in FORMATS
}  # fmt: skip


def fp8_mma(a: Any, b: Any, *, formats: tuple[str, str], c: Any = None) -> Any:
    """float32 [M, N]: c plus the sum over k of a[i, k] * b[j, k], a chain of mma.sync; CuPy arrays, stream in force.

    a uint8 [M, K], b uint8 [N, K], codes of ``formats`` (``FORMATS``), any strides; c float32 [M, N], zeros if None.
    DeviceUnavailableError without CuPy or a device of compute capability 8.9; TypeError or ValueError for other dtypes,
    shapes or formats.
    """
    return _fp8_mma(cupy_with_device(), a, b, formats, c, lowered=None)


def fp8_mma_on_host(a: Any, b: Any, *, formats: tuple[str, str], c: Any = None, lowered: bool = False) -> Any:
    """``fp8_mma`` of numpy arrays, by the same text emulated: as ada_mma_sync, or lowered as hopper_mma_sync."""
    import numpy as np

    return _fp8_mma(np, a, b, formats, c, lowered=lowered)


def _fp8_mma(xp: Any, a: Any, b: Any, formats: tuple[str, str], c: Any, *, lowered: bool | None) -> Any:
    if formats not in FP8_MMA:
        raise ValueError(f"formats {formats}; mma.sync takes pairs of {', '.join(FORMATS)}")
    for what, array, dtype in (("a", a, "uint8"), ("b", b, "uint8"), ("c", c, "float32")):
        if array is None and what == "c":
            continue
        if not (isinstance(array, xp.ndarray) and array.dtype == getattr(xp, dtype)):
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
            raise TypeError(f"{what} is {kind}; the kernel takes a {xp.__name__} array of {dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not [M, K] and [N, K]")
    shape = (int(a.shape[0]), int(b.shape[0]))
    if c is not None and tuple(c.shape) != shape:
        raise ValueError(f"c of shape {tuple(c.shape)} is not [M, N] = {shape}")
    out = xp.zeros(shape, xp.float32) if c is None else xp.array(c, order="C", copy=True)
    depth = int(a.shape[1])
    if out.size and depth:
        _launch([aligned(xp, a), aligned(xp, b), out], (*shape, depth), formats, lowered=lowered)
    return out


def _launch(
    arrays: list[Any], sizes: tuple[int, int, int], formats: tuple[str, str], *, lowered: bool | None
) -> None:  # fmt: skip
    if lowered is not None:
        arguments = [*host_pointers(arrays), *(ctypes.c_longlong(size) for size in sizes)]
        _emulated(formats, lowered)((2,), (THREADS,), arguments)  # two blocks: some tiles are a block's second
        return
    import numpy as np

    cupy = cupy_with_device()
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < 89:
        raise DeviceUnavailableError(f"FP8 mma.sync needs compute capability 8.9; this device has {capability}")
    grid = (min(-(-sizes[0] // TILE) * -(-sizes[1] // TILE), MAX_GRID),)
    kernel = FP8_MMA[formats].on_device(cupy)
    kernel(grid, (THREADS,), (*device_pointers(arrays), *(np.int64(size) for size in sizes)))


@cache
def _emulated(formats: tuple[str, str], lowered: bool) -> HostKernel:
    kernel = FP8_MMA[formats]
    return build(kernel.text, kernel.entry, options=(f"-DQSIM_LOWERED={int(lowered)}",))
