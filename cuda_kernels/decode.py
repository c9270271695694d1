"""Launcher of ``decode.cu``: codes back to float32, on a GPU or emulated. Knows no format: its values are a table."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import center_layout

DECODE = Kernel("decode.cu", "qsim_decode")
BLOCK, MAX_GRID_X, MAX_GRID_Y = 256, 4096, 65535


def decode(codes: Any, table: Any, *, descale: Any = None, center: Any = None) -> Any:
    """float32 of the codes' shape: RN(RN(table[code] * descale) + center); CuPy arrays, on the stream in force.

    codes uint8 [lead + rest], any strides; table float32 [codes of the format]; descale float32 [lead] (zero or one
    axis) or None; center float32 that broadcasts to codes, or None. DeviceUnavailableError without CuPy or a device;
    TypeError or ValueError for other dtypes or shapes, or a code outside the table.
    """
    return _decode(cupy_with_device(), codes, table, descale, center, on_host=False)


def decode_on_host(codes: Any, table: Any, *, descale: Any = None, center: Any = None) -> Any:
    """``decode`` of numpy arrays, by the same text emulated."""
    import numpy as np

    return _decode(np, codes, table, descale, center, on_host=True)


def _decode(xp: Any, codes: Any, table: Any, descale: Any, center: Any, *, on_host: bool) -> Any:
    for what, array, dtype in (
        ("codes", codes, "uint8"), ("table", table, "float32"), ("descale", descale, "float32"),
        ("center", center, "float32"),
    ):  # fmt: skip
        if array is None and what in ("descale", "center"):
            continue
        if not (isinstance(array, xp.ndarray) and array.dtype == getattr(xp, dtype)):
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
            raise TypeError(f"{what} is {kind}; the kernel takes a {xp.__name__} array of {dtype}")
    lead = () if descale is None else tuple(descale.shape)
    if len(lead) > 1 or tuple(codes.shape[: len(lead)]) != lead:
        raise ValueError(f"descale of shape {lead} is not the leading axis of codes {tuple(codes.shape)}")
    if table.ndim != 1 or not 1 <= table.size <= 256:
        raise ValueError(f"table of shape {tuple(table.shape)}; it has one value a code, at most 256")
    if codes.size and int(codes.max()) >= table.size:
        raise ValueError(f"code {int(codes.max())} is outside the table of {table.size} values")
    replicas, each = math.prod(lead), math.prod(codes.shape[len(lead) :])
    period = stride = 1
    if center is not None:
        center, period, stride = center_layout(xp, tuple(codes.shape), center, len(lead))
    out = xp.empty(codes.shape, xp.float32)
    if codes.size:
        inputs = [None if a is None else xp.ascontiguousarray(a) for a in (codes, table, descale, center)]
        _launch([*inputs, out], (replicas, each, period, stride, table.size), on_host=on_host)
    return out


def _launch(arrays: list[Any], sizes: tuple[int, ...], *, on_host: bool) -> None:
    if on_host:
        arguments = [*host_pointers(arrays), *(ctypes.c_longlong(size) for size in sizes)]
        DECODE.on_host()((3, min(sizes[0], 2)), (64,), arguments)  # few threads: strides and tails everywhere
        return
    import numpy as np

    cupy = cupy_with_device()
    grid = (min(-(-sizes[1] // BLOCK), MAX_GRID_X), min(sizes[0], MAX_GRID_Y))
    DECODE.on_device(cupy)(grid, (BLOCK,), (*device_pointers(arrays), *(np.int64(size) for size in sizes)))
