"""Launcher of ``fp4_sums.cu``: exact sums of packed E2M1 products, on a GPU or emulated. Knows no scale."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import aligned

FP4_SUMS = Kernel("fp4_sums.cu", "qsim_fp4_sums", prelude=("mma.cuh", "tile.cuh"))
THREADS, TILE, MAX_GRID = 128, 64, 65535
MAX_DEPTH = (2**31 - 1) // 144
"""The largest K whose sums an int32 holds: each product is at most 12 * 12."""


def fp4_sums(a: Any, b: Any, depth: int) -> Any:
    """int32 [M, N] of sum over k of a[i, k] * b[j, k] in units of 1/4, exact; CuPy arrays, on the stream in force.

    a uint8 [M, ceil(depth / 2)], b uint8 [N, ceil(depth / 2)]: packed E2M1 codes, low nibble first, any strides; the
    high nibble behind an odd depth does not count. DeviceUnavailableError without CuPy or a device; TypeError or
    ValueError for other dtypes or shapes, or a depth beyond ``MAX_DEPTH``.
    """
    return _fp4_sums(cupy_with_device(), a, b, depth, on_host=False)


def fp4_sums_on_host(a: Any, b: Any, depth: int) -> Any:
    """``fp4_sums`` of numpy arrays, by the same text emulated."""
    import numpy as np

    return _fp4_sums(np, a, b, depth, on_host=True)


def _fp4_sums(xp: Any, a: Any, b: Any, depth: int, *, on_host: bool) -> Any:
    for what, array in (("a", a), ("b", b)):
        if not (isinstance(array, xp.ndarray) and array.dtype == xp.uint8):
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
            raise TypeError(f"{what} is {kind}; the kernel takes a {xp.__name__} array of uint8, two codes a byte")
    if not 0 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth {depth}; an int32 holds the sums of 0 to {MAX_DEPTH} products")
    for what, array in (("a", a), ("b", b)):
        if array.ndim != 2 or array.shape[1] != -(-depth // 2):
            raise ValueError(f"{what} of shape {tuple(array.shape)}; depth {depth} is [rows, {-(-depth // 2)}] bytes")
    sizes = (int(a.shape[0]), int(b.shape[0]), depth)
    out = xp.zeros(sizes[:2], xp.int32)
    if out.size and depth:
        _launch([aligned(xp, a), aligned(xp, b), out], sizes, on_host=on_host)
    return out


def _launch(arrays: list[Any], sizes: tuple[int, int, int], *, on_host: bool) -> None:
    if on_host:
        arguments = [*host_pointers(arrays), *(ctypes.c_longlong(size) for size in sizes)]
        FP4_SUMS.on_host()((2,), (THREADS,), arguments)  # two blocks: some tiles are a block's second
        return
    import numpy as np

    cupy = cupy_with_device()
    grid = (min(-(-sizes[0] // TILE) * -(-sizes[1] // TILE), MAX_GRID),)
    FP4_SUMS.on_device(cupy)(grid, (THREADS,), (*device_pointers(arrays), *(np.int64(size) for size in sizes)))
