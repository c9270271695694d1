"""Launcher of ``hadamard.cu``: blocks of 16 or 32 along the last axis. Knows no signs and no way back."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array

HADAMARD = Kernel("hadamard.cu", "qsim_hadamard")
SIZES = (16, 32)
THREADS = 128
MOST = 4096
"""Thread blocks of a launch: enough to fill any device."""


def hadamard(place: Place, x: Any, before: Any, after: Any) -> Any:
    """H(x * before) * after + 0 on every block of n = before.size along the last axis: float32 of x's shape.

    x float32, any strides, last axis a multiple of n; before, after float32 [16] or [32]. A rotation has the signs
    before and 1 / sqrt(n) after; its way back has ones before and sign / sqrt(n) after. TypeError or ValueError for
    other dtypes or shapes.
    """
    xp = place.xp
    check_array(place, "x", x, "float32")
    check_array(place, "before", before, "float32")
    check_array(place, "after", after, "float32")
    size = int(before.size)
    if size not in SIZES or before.shape != (size,) or after.shape != (size,):
        raise ValueError(f"before {tuple(before.shape)} and after {tuple(after.shape)}; both have 16 numbers, or 32")
    if x.ndim == 0 or x.shape[-1] % size:
        raise ValueError(f"x of shape {tuple(x.shape)}; its last axis must be a multiple of {size}")
    out = place.empty(tuple(x.shape), "float32")
    if x.size:
        inputs = [contiguous(xp, a) for a in (x, before, after)]
        sizes = (np.int64(x.size), np.int32(size))
        place.tiles(HADAMARD, min(-(-int(x.size) // (4 * THREADS)), MOST), THREADS, (*inputs, out, *sizes))
    return out
