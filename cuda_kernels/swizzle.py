"""Launcher of ``swizzle.cu``: block scales into 128 x 4 tiles and back, on a GPU or emulated. Knows no format."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda_kernels._kernel import Kernel, cupy_with_device, host_pointers

SWIZZLE = Kernel("swizzle.cu", "qsim_swizzle")
UNSWIZZLE = Kernel("swizzle.cu", "qsim_unswizzle")
TILE_ROWS, TILE_COLUMNS, TILE_WORDS = 128, 4, 128
BLOCK, MAX_GRID = 256, 4096


def swizzle(scales: Any) -> Any:
    """CuPy uint8 [R, C], any strides -> uint8 of whole tiles; on the stream in force.

    DeviceUnavailableError without CuPy or a device; TypeError or ValueError for another dtype or shape.
    """
    cupy = cupy_with_device()
    scales = _checked(cupy, scales, 2)
    tiles = cupy.empty(swizzled_size(*scales.shape), cupy.uint8)
    _on_device(cupy, SWIZZLE, scales, tiles, scales.shape)
    return tiles


def unswizzle(tiles: Any, rows: int, columns: int) -> Any:
    """Inverse of ``swizzle``: the padding is not read."""
    cupy = cupy_with_device()
    tiles = _checked_tiles(cupy, tiles, rows, columns)
    scales = cupy.empty((rows, columns), cupy.uint8)
    _on_device(cupy, UNSWIZZLE, tiles, scales, (rows, columns))
    return scales


def swizzle_on_host(scales: Any) -> Any:
    """``swizzle`` of a numpy array, by the same text emulated."""
    import numpy as np

    scales = _checked(np, scales, 2)
    tiles = np.full(swizzled_size(*scales.shape), 0xEE, np.uint8)  # poisoned: the kernel must write every byte
    _on_host(SWIZZLE, scales, tiles, scales.shape)
    return tiles


def unswizzle_on_host(tiles: Any, rows: int, columns: int) -> Any:
    """``unswizzle`` of a numpy array, by the same text emulated."""
    import numpy as np

    tiles = _checked_tiles(np, tiles, rows, columns)
    scales = np.full((rows, columns), 0xEE, np.uint8)
    _on_host(UNSWIZZLE, tiles, scales, (rows, columns))
    return scales


def swizzled_size(rows: int, columns: int) -> int:
    """Bytes of whole tiles."""
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * TILE_ROWS * TILE_COLUMNS


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    rows, columns = shape
    return rows, columns, max(-(-columns // TILE_COLUMNS), 1), swizzled_size(rows, columns) // 4


def _checked(xp: Any, array: Any, ndim: int) -> Any:
    if not (isinstance(array, xp.ndarray) and array.dtype == xp.uint8):
        kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
        raise TypeError(f"scales are {kind}; the kernel takes a {xp.__name__} array of uint8")
    if array.ndim != ndim:
        raise ValueError(
            f"scales of shape {tuple(array.shape)}; the kernel takes {ndim} {'axis' if ndim == 1 else 'axes'}"
        )
    return xp.ascontiguousarray(array)


def _checked_tiles(xp: Any, tiles: Any, rows: int, columns: int) -> Any:
    tiles = _checked(xp, tiles, 1)
    if tiles.size != swizzled_size(rows, columns):
        raise ValueError(f"{tiles.size} bytes; {rows} x {columns} scales take {swizzled_size(rows, columns)}")
    return tiles


def _on_device(cupy: Any, kernel: Kernel, source: Any, target: Any, shape: tuple[int, ...]) -> None:
    import numpy as np

    sizes = _sizes(shape)
    if sizes[-1]:
        grid = min(-(-sizes[-1] // BLOCK), MAX_GRID)
        kernel.on_device(cupy)((grid,), (BLOCK,), (source, target, *(np.int64(size) for size in sizes)))


def _on_host(kernel: Kernel, source: Any, target: Any, shape: tuple[int, ...]) -> None:
    sizes = _sizes(shape)
    if sizes[-1]:
        arguments = [*host_pointers((source, target)), *(ctypes.c_longlong(size) for size in sizes)]
        kernel.on_host()((3,), (32,), arguments)
