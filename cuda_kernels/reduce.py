"""Launcher of ``reduce.cu``: amax, counts and fixed-point sums, on a GPU or emulated. Knows no recipe and no mean."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import center_layout

OBSERVE = Kernel("reduce.cu", "qsim_observe")
SUMS_TOP = Kernel("reduce.cu", "qsim_sums_top")
SUMS_TOTAL = Kernel("reduce.cu", "qsim_sums_total")
BLOCK, MAX_GRID_X, MAX_GRID_Y = 256, 1024, 65535


class Seen(NamedTuple):
    """top: uint32 bits of the largest finite residual; nan_count, inf_count: uint64; all [lead]."""

    top: Any
    nan_count: Any
    inf_count: Any


def observe(x: Any, *, lead: int, center: Any = None) -> Seen:
    """``Seen`` of every replica of x: CuPy float32 [lead + rest], ``lead`` 0 or 1 axes; center broadcasts to x.

    DeviceUnavailableError without CuPy or a device; TypeError or ValueError for other dtypes or shapes.
    """
    cupy = cupy_with_device()
    return _observe(cupy, x, lead, center, on_host=False)


def observe_on_host(x: Any, *, lead: int, center: Any = None) -> Seen:
    """``observe`` of numpy arrays, by the same text emulated."""
    import numpy as np

    return _observe(np, x, lead, center, on_host=True)


def sums_on_host(x: Any, slot_of: Any, slots: int, width: int) -> tuple[Any, Any]:
    """(top uint32 bits, count uint64) [slots, width] of numpy x float32 [rows, length], by the same text emulated."""
    import numpy as np

    return _sums_top(np, x, slot_of, slots, width, on_host=True)


def sums(x: Any, slot_of: Any, slots: int, width: int) -> tuple[Any, Any]:
    """(top uint32 bits, count uint64) [slots, width] of CuPy x float32 [rows, length], slot_of int64 [rows]."""
    return _sums_top(cupy_with_device(), x, slot_of, slots, width, on_host=False)


def totals_on_host(x: Any, slot_of: Any, unit: Any) -> Any:
    """int64 totals [slots, width] of rint(x * unit), unit float64 [slots, width], by the same text emulated."""
    import numpy as np

    return _sums_total(np, x, slot_of, unit, on_host=True)


def totals(x: Any, slot_of: Any, unit: Any) -> Any:
    """int64 totals [slots, width] of rint(x * unit) of CuPy arrays."""
    return _sums_total(cupy_with_device(), x, slot_of, unit, on_host=False)


def _observe(xp: Any, x: Any, lead: int, center: Any, *, on_host: bool) -> Seen:
    _check(xp, x, "x", "float32")
    if lead not in (0, 1) or x.ndim < lead:
        raise ValueError(f"lead {lead} of x {tuple(x.shape)}: 0 or 1 leading axes are replicas")
    shape = tuple(x.shape[:lead])
    replicas, each = math.prod(shape), math.prod(x.shape[lead:])
    period = stride = 1
    if center is not None:
        _check(xp, center, "center", "float32")
        center, period, stride = center_layout(xp, tuple(x.shape), center, lead)
    seen = Seen(xp.zeros(shape, xp.uint32), xp.zeros(shape, xp.uint64), xp.zeros(shape, xp.uint64))
    if x.size:
        arrays = (xp.ascontiguousarray(x), center, *seen)
        _launch(OBSERVE, arrays, (replicas, each, period, stride), (each, replicas), on_host=on_host)
    return seen


def _sums_top(xp: Any, x: Any, slot_of: Any, slots: int, width: int, *, on_host: bool) -> tuple[Any, Any]:
    rows, length = _check_rows(xp, x, slot_of, slots, width)
    top, count = xp.zeros((slots, width), xp.uint32), xp.zeros((slots, width), xp.uint64)
    if x.size:
        arrays = (xp.ascontiguousarray(x), xp.ascontiguousarray(slot_of), top, count)
        _launch(SUMS_TOP, arrays, (rows, length, width), (length, rows), on_host=on_host)
    return top, count


def _sums_total(xp: Any, x: Any, slot_of: Any, unit: Any, *, on_host: bool) -> Any:
    _check(xp, unit, "unit", "float64")
    rows, length = _check_rows(xp, x, slot_of, *unit.shape)
    total = xp.zeros(unit.shape, xp.uint64)
    if x.size:
        arrays = (xp.ascontiguousarray(x), xp.ascontiguousarray(slot_of), xp.ascontiguousarray(unit), total)
        _launch(SUMS_TOTAL, arrays, (rows, length, unit.shape[1]), (length, rows), on_host=on_host)
    return total.view(xp.int64)


def _check(xp: Any, array: Any, what: str, dtype: str) -> None:
    if not (isinstance(array, xp.ndarray) and array.dtype == getattr(xp, dtype)):
        kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
        raise TypeError(f"{what} is {kind}; the kernel takes a {xp.__name__} array of {dtype}")


def _check_rows(xp: Any, x: Any, slot_of: Any, slots: int, width: int) -> tuple[int, int]:
    _check(xp, x, "x", "float32")
    _check(xp, slot_of, "slot_of", "int64")
    if x.ndim != 2 or slot_of.shape != x.shape[:1] or width not in (1, x.shape[1]):
        raise ValueError(f"x {tuple(x.shape)}, slot_of {tuple(slot_of.shape)}, results [{slots}, {width}] do not fit")
    if slot_of.size and not (int(slot_of.min()) >= 0 and int(slot_of.max()) < slots):
        raise ValueError(f"slot_of names slots outside 0..{slots - 1}")
    return int(x.shape[0]), int(x.shape[1])


def _launch(
    kernel: Kernel, arrays: Sequence[Any], sizes: Sequence[int], extent: tuple[int, int], *, on_host: bool
) -> None:
    if on_host:
        arguments = [*host_pointers(arrays), *(ctypes.c_longlong(size) for size in sizes)]
        kernel.on_host()((2, min(extent[1], 3)), (64,), arguments)  # few threads: strides and tails everywhere
        return
    import numpy as np

    cupy = cupy_with_device()
    grid = (min(-(-extent[0] // BLOCK), MAX_GRID_X), min(extent[1], MAX_GRID_Y))
    kernel.on_device(cupy)(grid, (BLOCK,), (*device_pointers(arrays), *(np.int64(size) for size in sizes)))
