"""Numba kernels that measure blocks: largest finite magnitude, NaN and Inf beside it. Knows no scale and no code.

x is float32 [M, K]; blocks of bm x bk elements tile it from the top left, tails smaller. Indices are unsigned where a
loop must stay free of the test for negative ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.codec.numba_kernels import INF, MAGNITUDE, ONE, ZERO

if TYPE_CHECKING:
    from qsim.arrays import F32, U32

_F4, _U4, _I8 = numba.float32, numba.uint32, numba.int64

BAD_NAN = np.uint32(2)

GROUP = 16
"""Elements whose maximum is taken in one unrolled loop; the block sizes of the field are multiples of it."""


@helper
def magnitude(v: Any) -> Any:
    """Bits of |v|."""
    return np.uint32(np.float32(v).view(np.uint32) & MAGNITUDE)


@helper
def larger(a: Any, b: Any) -> Any:
    """The larger of two magnitudes; signed, as vector units of old compare no unsigned numbers."""
    return np.uint32(max(np.int32(a), np.int32(b)))


@helper
def _top_of(x: Any, first: Any, last: Any) -> Any:
    top = ZERO
    part = x[first:last]
    for i in range(part.size):
        top = larger(top, magnitude(part[i]))
    return top


@helper
def _measure_row(x: Any, bk: Any, top: Any) -> None:
    """Raise top [gk] to the largest magnitude of every block of one row, NaN and Inf included."""
    if bk == 1:
        for j in range(x.size):
            top[j] = larger(top[j], magnitude(x[j]))
        return
    whole = x.size // GROUP if bk % GROUP == 0 else 0
    each = max(bk // GROUP, 1)
    for group in range(whole):
        at = np.uint64(group * GROUP)
        best = ZERO
        for i in range(GROUP):
            best = larger(best, magnitude(x[at + np.uint64(i)]))
        block = np.uint64(group // each)
        top[block] = larger(top[block], best)
    for start in range(whole * GROUP, x.size, bk):  # a tail of less than a group, or blocks of another size
        last = min(start + bk, x.size)
        top[start // bk] = larger(top[start // bk], _top_of(x, start, last))


@helper
def _finite_top(block: Any) -> Any:
    """(bits of the largest finite magnitude, 0 | 1 there is an Inf | 2 there is a NaN) of a block [rows, cols]."""
    top, bad = ZERO, ZERO
    for i in range(block.shape[0]):
        for j in range(block.shape[1]):
            mag = magnitude(block[i, j])
            top = max(top, mag if mag < INF else ZERO)
            bad = max(bad, BAD_NAN if mag > INF else (ONE if mag == INF else ZERO))
    return top, bad


@helper
def measure_band(x: Any, bk: Any, top: Any, bad: Any) -> Any:
    """top [gk], bad [gk] of one row of blocks, x [rows of the blocks, columns]; the largest of bad."""
    top[:] = ZERO
    bad[:] = ZERO
    for row in range(x.shape[0]):
        _measure_row(x[row], bk, top)
    worst = ZERO
    if top_of(top) >= INF:
        for b in range(top.size):
            if top[b] >= INF:
                top[b], bad[b] = _finite_top(x[:, b * bk : (b + 1) * bk])
                worst = max(worst, bad[b])
    return worst


@helper
def top_of(top: Any) -> Any:
    """The largest of some magnitudes; 0 where there is none."""
    best = ZERO
    for b in range(top.size):
        best = larger(best, top[b])
    return best


@kernel(read(_F4, 2), _I8, _I8, write(_U4, 2), write(_U4, 2))
def measure(x: F32, bm: int, bk: int, top: U32, bad: U32) -> None:
    """Bits of the largest finite magnitude of every block, and 0 | 1 (Inf) | 2 (NaN) beside it."""
    for band in range(top.shape[0]):
        measure_band(x[band * bm : (band + 1) * bm], bk, top[band], bad[band])
