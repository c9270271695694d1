"""Launcher of ``encode.cu``: checks, sizes, launches, on a GPU through CuPy or on the CPU through g++.

Knows no format and no policy: both arrive as the integers of ``EncodeParams``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from cuda_kernels._kernel import Kernel, cupy_with_device, device_pointers, host_pointers
from cuda_kernels._layout import center_layout
from cuda_kernels.host import HostKernel

KERNEL = "qsim_encode"
ENCODE = Kernel("encode.cu", KERNEL)
BLOCK = 256
MAX_GRID_Y = 65535
# Enough threads to fill any device; the kernel strides over the rest.
MAX_GRID_X = 4096


class EncodeParams(NamedTuple):
    """A format and a resolved policy as the kernel takes them; the contract in ``encode.cu`` explains each.

    ``overflow_code`` is of a positive overflow, ``nan_code`` and ``negative_nan_code`` are whole codes.
    """

    mantissa_bits: int
    bias: int
    max_code: int
    sign_bit: int
    negative_zero: int
    overflow_code: int
    nan_code: int
    negative_nan_code: int


class _Layout(NamedTuple):
    """The sizes that the kernel takes, in its order."""

    replicas: int
    per_replica: int
    center_period: int
    center_stride: int


def encode(x: Any, params: EncodeParams, *, scale: Any = None, center: Any = None, out: Any = None) -> Any:
    """Codes of RN(RN(x - center) * scale): uint8 of x's shape, one code a byte, on x's device.

    x: CuPy float32 [lead + rest], any strides. scale: float32 [lead], zero or one axis; None multiplies by
    nothing. center: float32 that broadcasts to x, never -0; None subtracts nothing. out: uint8 of x's shape,
    contiguous; it is filled and returned. Nearest, ties to even. Runs on the stream in force.
    DeviceUnavailableError without CuPy or a device; TypeError or ValueError for other dtypes or shapes.
    """
    cupy = cupy_with_device()
    x, scale, center, out, layout = _prepare(cupy, x, params, scale=scale, center=center, out=out)
    if x.size:
        kernel = ENCODE.on_device(cupy)
        import numpy as np

        pointers = device_pointers((x, scale, center, out))
        sizes = [np.int64(size) for size in layout]
        kernel(_grid(layout), (BLOCK, 1, 1), (*pointers, *sizes, *(np.int32(value) for value in params)))
    return out


def encode_on_host(
    x: Any, params: EncodeParams, *, scale: Any = None, center: Any = None, kernel: HostKernel | None = None
) -> Any:
    """``encode`` of numpy arrays by the same kernel text compiled with g++: for checks without a GPU.

    kernel: what ``host.build`` made of a text of this kernel; None builds ``encode.cu`` once a process.
    """
    import numpy as np

    x, scale, center, out, layout = _prepare(np, x, params, scale=scale, center=center, out=None)
    if x.size:
        pointers = host_pointers((x, scale, center, out))
        sizes = [ctypes.c_longlong(size) for size in layout]
        numbers = [ctypes.c_int(value) for value in params]
        run = kernel or ENCODE.on_host()
        # Few threads: a stride of 192 in 3 blocks leaves tails everywhere, and costs little on a CPU.
        run((3, min(layout.replicas, 2)), (64,), [*pointers, *sizes, *numbers])
    return out


def _prepare(xp: Any, x: Any, params: EncodeParams, *, scale: Any, center: Any, out: Any) -> tuple[Any, ...]:
    """Checked, contiguous operands and their layout; ``xp`` is numpy or cupy."""
    _check_params(params)
    for name, array in (("x", x), ("scale", scale), ("center", center)):
        if array is not None and not (isinstance(array, xp.ndarray) and array.dtype == xp.float32):
            raise TypeError(f"{name} is {_kind(array)}; the kernel takes a {xp.__name__} array of float32")
    lead = () if scale is None else tuple(scale.shape)
    if len(lead) > 1 or tuple(x.shape[: len(lead)]) != lead:
        raise ValueError(f"scale of shape {lead} is not the leading axis of x {tuple(x.shape)}")
    if out is None:
        out = xp.empty(x.shape, xp.uint8)
    elif not isinstance(out, xp.ndarray) or out.dtype != xp.uint8:
        raise TypeError(f"out is {_kind(out)}; the kernel fills a {xp.__name__} array of uint8")
    elif out.shape != x.shape or not out.flags.c_contiguous:
        raise ValueError(f"out of shape {tuple(out.shape)}: it must be contiguous and of x's, {tuple(x.shape)}")
    period = stride = 1
    if center is not None:
        center, period, stride = center_layout(xp, tuple(x.shape), center, len(lead))
    replicas = math.prod(lead)
    layout = _Layout(replicas, math.prod(x.shape[len(lead) :]), period, stride)
    scale = None if scale is None else xp.ascontiguousarray(scale)
    return xp.ascontiguousarray(x), scale, center, out, layout


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"


def _check_params(params: EncodeParams) -> None:
    if not 1 <= params.mantissa_bits <= 22:
        raise ValueError(f"mantissa_bits {params.mantissa_bits} is outside 1..22")
    if not -127 <= params.bias <= 127:
        raise ValueError(f"bias {params.bias} is outside -127..127")
    for name, code in params._asdict().items():
        if name != "bias" and not 0 <= code <= 255:
            raise ValueError(f"{name} {code} is outside 0..255")


def _grid(layout: _Layout) -> tuple[int, int, int]:
    blocks = -(-layout.per_replica // BLOCK)
    return min(blocks, MAX_GRID_X), min(layout.replicas, MAX_GRID_Y), 1
