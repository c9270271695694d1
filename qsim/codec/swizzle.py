"""Block scales in the 128x4 tiles that tensor cores read, and back. Knows no format and no block size.

Source: "1D block scaling factors layout" in the cuBLAS documentation, and torchao's ``to_blocked``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.checks import whole_number
from qsim.codec.inputs import as_array, no_quantized_tensor
from qsim.errors import FormatError, UsageError

if TYPE_CHECKING:
    from qsim.arrays import U8, AnyArray

TILE_ROWS = 128
"""Rows of scales (rows of the operand) in a tile."""

TILE_COLUMNS = 4
"""Columns of scales (blocks along K) in a tile: four bytes that stay together, moved as one uint32."""

GROUP = 32
"""Rows r, r + 32, r + 64 and r + 96 of a tile stand side by side: 16 bytes."""


def swizzled_size(rows: int, columns: int) -> int:
    """Bytes of ``rows`` x ``columns`` scales in whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * (-(-columns // TILE_COLUMNS)) * TILE_COLUMNS


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where scale (row, column) of a matrix with ``columns`` columns stands: the definition, in integers.

    Tiles of 128 x 4 are row-major, each of 512 bytes; inside one, (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c.
    """
    tile = row // TILE_ROWS * -(-columns // TILE_COLUMNS) + column // TILE_COLUMNS
    r, c = row % TILE_ROWS, column % TILE_COLUMNS
    inside = r % GROUP * (TILE_ROWS // GROUP * TILE_COLUMNS) + r // GROUP * TILE_COLUMNS + c
    return tile * (TILE_ROWS * TILE_COLUMNS) + inside


def swizzle_scales(scales: U8) -> U8:
    """uint8 [R, C], any strides -> uint8 [swizzled_size(R, C)]: scale (r, c) at ``swizzled_offset(r, c, C)``.

    One row of scales belongs to one row of the operand, one column to one block along K: what ``q.scales`` is, but
    for more axes (take ``.reshape(-1, columns)``) and for blocks of 16 rows (repeat each row of scales 16 times).
    What fills up the last tiles is 0. FormatError for another dtype (take ``.view(np.uint8)`` of a one-byte float),
    UsageError for another number of axes.
    """
    no_quantized_tensor(scales, "swizzle its scales, q.scales")
    scales = _checked(scales, "scales", 2)
    rows, columns = scales.shape
    tile_rows, tile_columns = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    whole = np.zeros((tile_rows * TILE_ROWS, tile_columns * TILE_COLUMNS), np.uint8)
    whole[:rows, :columns] = scales
    fours = whole.view(np.uint32).reshape(tile_rows, TILE_ROWS // GROUP, GROUP, tile_columns)
    return np.ascontiguousarray(fours.transpose(0, 3, 2, 1)).reshape(-1).view(np.uint8)


def unswizzle_scales(swizzled: U8, rows: int, columns: int) -> U8:
    """Inverse of ``swizzle_scales``: uint8 [swizzled_size(rows, columns)] -> uint8 [rows, columns].

    The padding may hold anything. FormatError for another dtype, UsageError for another number of axes
    (take ``.reshape(-1)``) or a size that does not fit rows and columns.
    """
    swizzled = _checked(swizzled, "swizzled scales", 1)
    rows, columns = whole_number("rows", rows), whole_number("columns", columns)
    if rows < 0 or columns < 0 or swizzled.size != swizzled_size(rows, columns):
        raise UsageError(
            f"{swizzled.size} bytes of swizzled scales do not hold {rows} rows of {columns} scales: "
            f"whole tiles of {TILE_ROWS}x{TILE_COLUMNS} take {swizzled_size(max(rows, 0), max(columns, 0))} bytes"
        )
    tile_rows, tile_columns = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    fours = np.ascontiguousarray(swizzled).view(np.uint32)
    tiles = fours.reshape(tile_rows, tile_columns, GROUP, TILE_ROWS // GROUP).transpose(0, 3, 2, 1)
    whole = tiles.reshape(tile_rows * TILE_ROWS, tile_columns).view(np.uint8)  # reshape copies: the axes are swapped
    return whole if whole.shape == (rows, columns) else np.array(whole[:rows, :columns], order="C")


def _checked(array: AnyArray, what: str, ndim: int) -> U8:
    array = as_array(array, what)
    if array.dtype != np.uint8:
        raise FormatError(f"{what} are {array.dtype}; the layout is one of bytes: pass uint8 codes")
    if array.ndim != ndim:
        flat = f".reshape(-1, {array.shape[-1]})" if ndim == 2 and array.ndim else ".reshape(-1)"
        hint = f": take {flat}" if array.ndim > ndim else ""
        raise UsageError(
            f"{what} have shape {array.shape}; pass an array of {ndim} {'axis' if ndim == 1 else 'axes'}{hint}"
        )
    return array
