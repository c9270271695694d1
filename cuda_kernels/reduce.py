"""Launcher of ``reduce.cu``: amax, counts and fixed-point sums. Knows no recipe and no mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous, replicas_of
from cuda_kernels._place import Place, check_array

OBSERVE = Kernel("reduce.cu", "qsim_observe")
SUMS_TOP = Kernel("reduce.cu", "qsim_sums_top")
SUMS_TOTAL = Kernel("reduce.cu", "qsim_sums_total")


class Seen(NamedTuple):
    """top: uint32 bits of the largest finite residual; nan_count, inf_count: uint64; all [lead]."""

    top: Any
    nan_count: Any
    inf_count: Any


def observe(place: Place, x: Any, *, lead: int, center: Any = None) -> Seen:
    """``Seen`` of every replica of x: float32 [lead + rest], ``lead`` 0 or 1 axes; center broadcasts to x.

    TypeError or ValueError for other dtypes or shapes.
    """
    xp = place.xp
    check_array(place, "x", x, "float32")
    check_array(place, "center", center, "float32", optional=True)
    if lead not in (0, 1) or x.ndim < lead:
        raise ValueError(f"lead {lead} of x {tuple(x.shape)}: 0 or 1 leading axes are replicas")
    own = replicas_of(xp, x, lead, center)
    seen = Seen(*(xp.zeros(own.lead, kind) for kind in (xp.uint32, xp.uint64, xp.uint64)))
    if x.size:
        place.spread(OBSERVE, own.each, own.number, (contiguous(xp, x), own.center, *seen, *own.sizes))
    return seen


def sums(place: Place, x: Any, slot_of: Any, slots: int, width: int) -> tuple[Any, Any]:
    """(top uint32 bits, count uint64) [slots, width] of x float32 [rows, length], slot_of int64 [rows], below slots."""
    xp = place.xp
    rows, length = _check_rows(place, x, slot_of, slots, width)
    top, count = xp.zeros((slots, width), xp.uint32), xp.zeros((slots, width), xp.uint64)
    if x.size:
        arrays = (contiguous(xp, x), contiguous(xp, slot_of), top, count)
        place.spread(SUMS_TOP, length, rows, (*arrays, np.int64(rows), np.int64(length), np.int64(width)))
    return top, count


def totals(place: Place, x: Any, slot_of: Any, unit: Any) -> Any:
    """int64 totals [slots, width] of rint(x * unit), unit float64 [slots, width]; x and slot_of as in ``sums``."""
    xp = place.xp
    check_array(place, "unit", unit, "float64")
    rows, length = _check_rows(place, x, slot_of, *unit.shape)
    total = xp.zeros(unit.shape, xp.uint64)
    if x.size:
        arrays = (contiguous(xp, x), contiguous(xp, slot_of), contiguous(xp, unit), total)
        place.spread(SUMS_TOTAL, length, rows, (*arrays, np.int64(rows), np.int64(length), np.int64(unit.shape[1])))
    return total.view(xp.int64)


def _check_rows(place: Place, x: Any, slot_of: Any, slots: int, width: int) -> tuple[int, int]:
    check_array(place, "x", x, "float32")
    check_array(place, "slot_of", slot_of, "int64")
    if x.ndim != 2 or slot_of.shape != x.shape[:1] or width not in (1, x.shape[1]):
        raise ValueError(f"x {tuple(x.shape)}, slot_of {tuple(slot_of.shape)}, results [{slots}, {width}] do not fit")
    return int(x.shape[0]), int(x.shape[1])
