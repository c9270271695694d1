"""Launcher of ``cast.cu``: any cast with scale, centre, amax and counts, on a GPU or emulated. Names no format."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import center_layout

CAST = Kernel("cast.cu", "qsim_cast", prelude=("codec.cuh",))
RULES = 21
"""Unsigned integers of a format and a policy: the fields of ``QsimRules``, in its order."""
BLOCK, MAX_GRID_X, MAX_GRID_Y = 256, 4096, 65535


class Casted(NamedTuple):
    """codes uint8 of x's shape; top uint32 bits of the amax, counts uint64 [lead, 5]: as ``cast.cu`` says."""

    codes: Any
    top: Any
    counts: Any


def cast(x: Any, rules: Any, *, scale: Any = None, center: Any = None, streams: Any = None) -> Casted:
    """Codes of RN(RN(x - center) * scale), amax of the residual, counts; CuPy arrays, on the stream in force.

    x float32 [lead + rest], any strides; scale float32 [lead] (zero or one axis) or None; center float32 that
    broadcasts to x, or None; rules uint32 [21]; streams uint32 [replicas, 5] for a stochastic rounding, else None.
    DeviceUnavailableError without CuPy or a device; TypeError or ValueError for other dtypes or shapes.
    """
    return _cast(cupy_with_device(), x, rules, scale, center, streams, on_host=False)


def cast_on_host(x: Any, rules: Any, *, scale: Any = None, center: Any = None, streams: Any = None) -> Casted:
    """``cast`` of numpy arrays, by the same text emulated."""
    import numpy as np

    return _cast(np, x, rules, scale, center, streams, on_host=True)


def _cast(xp: Any, x: Any, rules: Any, scale: Any, center: Any, streams: Any, *, on_host: bool) -> Casted:
    for what, array, dtype in (
        ("x", x, "float32"), ("rules", rules, "uint32"), ("scale", scale, "float32"), ("center", center, "float32"),
        ("streams", streams, "uint32"),
    ):  # fmt: skip
        if array is None and what not in ("x", "rules"):
            continue
        if not (isinstance(array, xp.ndarray) and array.dtype == getattr(xp, dtype)):
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
            raise TypeError(f"{what} is {kind}; the kernel takes a {xp.__name__} array of {dtype}")
    lead = () if scale is None else tuple(scale.shape)
    if len(lead) > 1 or tuple(x.shape[: len(lead)]) != lead:
        raise ValueError(f"scale of shape {lead} is not the leading axis of x {tuple(x.shape)}")
    replicas, each = math.prod(lead), math.prod(x.shape[len(lead) :])
    if rules.shape != (RULES,) or (streams is not None and streams.shape != (replicas, 5)):
        raise ValueError(f"rules take {RULES} numbers, and streams 5 for each of {replicas} replicas")
    period = stride = 1
    if center is not None:
        center, period, stride = center_layout(xp, tuple(x.shape), center, len(lead))
    codes, top = xp.empty(x.shape, xp.uint8), xp.zeros(lead, xp.uint32)
    counts = xp.zeros((*lead, 5), xp.uint64)
    if x.size:
        inputs = [None if a is None else xp.ascontiguousarray(a) for a in (x, scale, center, streams, rules)]
        _launch([*inputs, codes, top, counts], (replicas, each, period, stride), on_host=on_host)
    return Casted(codes, top, counts)


def _launch(arrays: list[Any], sizes: tuple[int, int, int, int], *, on_host: bool) -> None:
    if on_host:
        arguments = [*host_pointers(arrays), *(ctypes.c_longlong(size) for size in sizes)]
        CAST.on_host()((3, min(sizes[0], 2)), (64,), arguments)  # few threads: strides and tails everywhere
        return
    import numpy as np

    cupy = cupy_with_device()
    grid = (min(-(-sizes[1] // (4 * BLOCK)), MAX_GRID_X), min(sizes[0], MAX_GRID_Y))
    CAST.on_device(cupy)(grid, (BLOCK,), (*device_pointers(arrays), *(np.int64(size) for size in sizes)))
