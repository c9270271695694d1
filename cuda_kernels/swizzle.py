"""Launcher of ``swizzle.cu``: block scales into 128 x 4 tiles and back. Knows no format."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array

SWIZZLE = Kernel("swizzle.cu", "qsim_swizzle")
UNSWIZZLE = Kernel("swizzle.cu", "qsim_unswizzle")
TILE_ROWS, TILE_COLUMNS, TILE_WORDS = 128, 4, 128


def swizzle(place: Place, scales: Any) -> Any:
    """uint8 [R, C], any strides -> uint8 of whole tiles, padding 0. TypeError or ValueError otherwise."""
    scales = _checked(place, scales, 2)
    tiles = place.empty(swizzled_size(*scales.shape), "uint8")
    _launch(place, SWIZZLE, scales, tiles, scales.shape)
    return tiles


def unswizzle(place: Place, tiles: Any, rows: int, columns: int) -> Any:
    """Inverse of ``swizzle``: the padding is not read."""
    tiles = _checked(place, tiles, 1)
    if tiles.size != swizzled_size(rows, columns):
        raise ValueError(f"{tiles.size} bytes; {rows} x {columns} scales take {swizzled_size(rows, columns)}")
    scales = place.empty((rows, columns), "uint8")
    _launch(place, UNSWIZZLE, tiles, scales, (rows, columns))
    return scales


def swizzled_size(rows: int, columns: int) -> int:
    """Bytes of whole tiles."""
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * TILE_ROWS * TILE_COLUMNS


def _checked(place: Place, array: Any, ndim: int) -> Any:
    check_array(place, "scales", array, "uint8")
    if array.ndim != ndim:
        raise ValueError(
            f"scales of shape {tuple(array.shape)}; the kernel takes {ndim} {'axis' if ndim == 1 else 'axes'}"
        )
    return contiguous(place.xp, array)


def _launch(place: Place, kernel: Kernel, source: Any, target: Any, shape: tuple[int, ...]) -> None:
    rows, columns = shape
    words = swizzled_size(rows, columns) // 4
    if words:
        sizes = (rows, columns, max(-(-columns // TILE_COLUMNS), 1), words)
        place.spread(kernel, words, 1, (source, target, *(np.int64(size) for size in sizes)))
