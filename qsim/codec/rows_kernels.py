"""Rows of x beside rows of a centre, a span at a time. Knows no format and no arithmetic.

x is viewed as [R, P, L] (replica, row, element), a centre as [Q, Lc] with Lc either 1 or L, and ``row_of`` [R * P]
names the centre's row of every row of x. A kernel goes over spans of elements in C order: a piece of a long row, or
several short rows at once with their centres laid side by side, so that no loop is shorter than it need be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.codec.jit import helper, prefetch, stretch

if TYPE_CHECKING:
    from qsim.arrays import F32, I64

SPAN = 1024
"""Most elements of one inner loop, 4 KiB of float32: what begins and ends a loop takes less than a tenth of it."""

LINE = 16
"""float32 numbers of a cache line."""


@helper
def rows_together(rows: Any, length: Any) -> Any:
    """How many rows make one span: 1 where a row is longer than half of one."""
    return max(np.int64(1), min(rows, SPAN // max(length, np.int64(1))))


@helper
def spread_centers(center: F32, row_of: I64, row: Any, laid: I64, length: Any, beside: F32) -> None:
    """Lay the centres of the rows from ``row`` on side by side, ``length`` numbers each.

    laid: which row of the centre lies there already (-1: none), renewed.
    """
    for j in range(min(laid.size, row_of.size - row)):
        owner = row_of[row + j]
        if laid[j] != owner:
            laid[j] = owner
            own = centers_of(center, owner, np.int64(0), length)
            if own.size == 1:
                for i in range(length):
                    beside[j * length + i] = own[0]
            else:
                for i in range(length):
                    beside[j * length + i] = own[i]


@helper
def centers_of(center: F32, row: Any, start: Any, size: Any) -> Any:
    """The centres beside ``size`` elements of one row, from element ``start`` on: one for all, or one for each."""
    if center.shape[1] == 1:
        return stretch(center, row, np.int64(1))
    return stretch(center, row * center.shape[1] + start, size)


@helper
def ask_ahead_of_span(x: F32, at: Any) -> None:
    """Prefetch the span of x that comes after the one at element ``at`` in C order."""
    for line in range(0, SPAN, LINE):
        prefetch(x, at + SPAN + line)
