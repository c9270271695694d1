"""Products of formats of few values through int8: FP4 doubled to small integers. Knows no scale.

Exact for K <= 7,456,540: a product of two doubled E2M1 values is at most 144, 288 with one side shifted, and an int32
holds 2^31 - 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qsim.arrays import I8, I32, U8, frozen
from qsim.codec.tables import decode_table
from qsim.codec.threads import in_chunks
from qsim.formats import FloatFormat
from qsim.gemm import int8_kernels as kernels

WORTH = 1 << 18
"""Products below which the padding to whole tiles costs more than it saves."""


@lru_cache(maxsize=64)
def small_integers(fmt: FloatFormat) -> I8 | None:
    """Every value of a format in units of its least, int8 [256]; None where one is no integer up to SHIFT."""
    units = decode_table(fmt)[: fmt.code_count] / np.float32(fmt.smallest_subnormal)
    if not (np.abs(units) <= kernels.SHIFT).all():
        return None
    table = np.zeros(256, np.int8)
    table[: fmt.code_count] = units
    return frozen(table)


def max_depth() -> int:
    """The largest K whose sums an int32 holds, the shift of the unsigned side included at each step."""
    return (2**31 - 1) // (2 * int(kernels.SHIFT) ** 2)


def serves(a: FloatFormat, b: FloatFormat, products: int, depth: int) -> bool:
    """Whether the instruction is there, fits the formats and pays."""
    if small_integers(a) is None or small_integers(b) is None:
        return False
    return products >= WORTH and depth <= max_depth() and kernels.has_instruction()


def int8_product(a: U8, b: U8, fmt_a: FloatFormat, fmt_b: FloatFormat) -> I32:
    """Exact sums of codes a [M, K] and b [N, K], int32 [M, N], in units of both formats' least values."""
    left, right = small_integers(fmt_a), small_integers(fmt_b)
    assert left is not None, "serves() said so"
    assert right is not None, "serves() said so"
    rows, columns, depth = a.shape[0], b.shape[0], a.shape[1]
    steps = -(-depth // kernels.DEPTH)
    tiles, blocks = -(-rows // kernels.ROWS), -(-columns // kernels.COLUMNS)
    spread = np.zeros((tiles * kernels.ROWS, steps * kernels.DEPTH), np.int8)
    panels = np.full(blocks * kernels.COLUMNS * steps * kernels.DEPTH, kernels.SHIFT, np.uint8)
    out = np.empty((tiles * kernels.ROWS, blocks * kernels.COLUMNS), np.int32)
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    in_chunks(lambda start, stop: kernels.spread_rows(a[start:stop], left, spread[start:stop]), rows, cost=depth)
    in_chunks(lambda start, stop: kernels.panels(b, right, start, stop, panels), blocks, cost=kernels.COLUMNS * depth)

    def work(start: int, stop: int) -> None:
        cut = slice(start * kernels.ROWS, stop * kernels.ROWS)
        kernels.product(spread[cut], panels, steps, out[cut])

    in_chunks(work, tiles, cost=kernels.ROWS * columns * max(depth // 64, 1))
    return out[:rows, :columns]
