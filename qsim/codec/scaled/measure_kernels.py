"""Numba kernels that measure blocks: largest finite magnitude, NaN and Inf beside it. Knows no scale and no code.

x is float32 [M, K]; blocks of bm x bk elements tile it from the top left, tails smaller. A centre is taken off row
by row: what is measured is the residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, prefetch, read, read_only, write
from qsim.codec.lanes_kernels import LANES, top_of_lanes
from qsim.codec.numba_kernels import AHEAD, BLOCK, INF, MAGNITUDE, ONE, ZERO, ask_ahead

if TYPE_CHECKING:
    from qsim.arrays import F32, U32

_F4, _U4, _I8 = numba.float32, numba.uint32, numba.int64

BAD_NAN = np.uint32(2)


@helper
def magnitude(v: Any) -> Any:
    """Bits of |v|."""
    return np.uint32(np.float32(v).view(np.uint32) & MAGNITUDE)


@helper
def larger(a: Any, b: Any) -> Any:
    """The larger of two magnitudes; signed, as vector units of old compare no unsigned numbers."""
    return np.uint32(max(np.int32(a), np.int32(b)))


@helper
def _top_of(x: Any, origin: Any, ahead: Any, first: Any, last: Any) -> Any:
    """The largest magnitude of x[first:last]; memory is asked for ``ahead`` elements further on in ``origin``."""
    top = ZERO
    for start in range(first, last, BLOCK):
        ask_ahead(origin, start + ahead - AHEAD)
        part = x[start : min(start + BLOCK, last)]
        for i in range(part.size):
            top = larger(top, magnitude(part[i]))
    return top


@helper
def _measure_lanes(x: Any, origin: Any, ahead: Any, groups: Any, top: Any) -> Any:
    """Raise top[b] for every whole block of ``groups`` times LANES elements; the number of elements gone over."""
    at = 0
    for b in range(x.size // (groups * LANES)):
        best = top[b]
        for _ in range(groups):
            prefetch(origin, at + ahead)
            best = larger(best, top_of_lanes(x, at))
            at += LANES
        top[b] = best
    return at


@helper
def _measure_row(x: Any, origin: Any, ahead: Any, bk: Any, top: Any) -> None:
    """Raise top [gk] to the largest magnitude of every block of one row, NaN and Inf included."""
    if bk == 1:
        for j in range(x.size):
            top[j] = larger(top[j], magnitude(x[j]))
        return
    done = _measure_lanes(x, origin, ahead, bk // LANES, top) if (bk % LANES == 0) & (bk <= BLOCK) else 0
    for first in range(done, x.size, bk):
        b = first // bk
        top[b] = larger(top[b], _top_of(x, origin, ahead, first, min(first + bk, x.size)))


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
def measure_band(x: Any, origin: Any, ahead: Any, bk: Any, top: Any, bad: Any) -> Any:
    """top [gk], bad [gk] of one row of blocks, x [rows of the blocks, columns]; the largest of bad.

    origin: x itself, or what x was made from: there memory is asked for, ``ahead`` elements before its use.
    """
    top[:] = ZERO
    bad[:] = ZERO
    for row in range(x.shape[0]):
        _measure_row(x[row], origin[row], ahead, bk, top)
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


@helper
def subtract_center(x: Any, center: Any, row: Any, r: Any) -> None:
    """r[0] = RN(x - c), x a row; center [1 or all rows, 1 or K]."""
    own = center[min(row, center.shape[0] - 1)]
    target = r[0]
    if own.size == 1:
        c = own[0]
        for i in range(x.size):
            target[i] = np.float32(x[i] - c)
    else:
        for i in range(x.size):
            target[i] = np.float32(x[i] - own[i])


@helper
def _residual_top(x: Any, own: Any, first: Any, last: Any) -> Any:
    """The largest magnitude of RN(x - own) in first:last, own one number or one a column; no scratch is written."""
    top = ZERO
    for start in range(first, last, BLOCK):
        ask_ahead(x, start)
        part = x[start : min(start + BLOCK, last)]
        if own.size == 1:
            c = own[0]
            for i in range(part.size):
                top = larger(top, magnitude(np.float32(part[i] - c)))
        else:
            here = own[start : min(start + BLOCK, last)]
            for i in range(part.size):
                top = larger(top, magnitude(np.float32(part[i] - here[i])))
    return top


@helper
def raise_band(x: Any, center: Any, row: Any, r: Any, bk: Any, row_top: Any, row_bad: Any, top: Any, bad: Any) -> Any:
    """``measure_band`` of RN(x - c), x the rows from ``row`` on: row by row, over scratch r [1, K]; top, bad raised."""
    for i in range(x.shape[0]):
        own, plain = center[min(row + i, center.shape[0] - 1)], bk > BLOCK
        if plain:  # long blocks: no scratch, unless there is a number that is not finite
            for b in range(top.size):
                row_top[b] = _residual_top(x[i], own, b * bk, min((b + 1) * bk, x.shape[1]))
                row_bad[b] = ZERO
                plain = plain & (row_top[b] < INF)
        if not plain:
            subtract_center(x[i], center, row + i, r)
            measure_band(read_only(r), x[i : i + 1], r.shape[1], bk, row_top, row_bad)
        for b in range(top.size):
            top[b] = larger(top[b], row_top[b])
            bad[b] = larger(bad[b], row_bad[b])


@kernel(read(_F4, 2), read(_F4, 2), _I8, _I8, write(_U4, 2), write(_U4, 2))
def measure(x: F32, center: F32, bm: int, bk: int, top: U32, bad: U32) -> None:
    """Bits of the largest finite magnitude of every block of RN(x - center), and 0 | 1 (Inf) | 2 (NaN) beside it.

    center [1 or M, 1 or K], or [0, 0] for none.
    """
    gk = top.shape[1]
    r = np.empty((1, x.shape[1] if center.size else 0), np.float32)
    row_top, row_bad = np.empty(gk, np.uint32), np.empty(gk, np.uint32)
    for band in range(top.shape[0]):
        rows = x[band * bm : (band + 1) * bm]
        if center.size:
            top[band] = ZERO
            bad[band] = ZERO
            raise_band(rows, center, band * bm, r, bk, row_top, row_bad, top[band], bad[band])
        else:
            measure_band(rows, rows, AHEAD, bk, top[band], bad[band])
