"""Launcher of ``encode.cu``: codes of the nearest values. Knows no format and no policy: both arrive as integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous, replicas
from cuda_kernels._place import Place, check_array

KERNEL = "qsim_encode"
ENCODE = Kernel("encode.cu", KERNEL, prelude=("groups.cuh",))


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


def encode(
    place: Place, x: Any, params: EncodeParams, *, scale: Any = None, center: Any = None, out: Any = None
) -> Any:  # fmt: skip
    """Codes of RN(RN(x - center) * scale): uint8 of x's shape, one code a byte.

    x: float32 [lead + rest], any strides. scale: float32 [lead], zero or one axis; None multiplies by nothing.
    center: float32 that broadcasts to x, never -0; None subtracts nothing. out: uint8 of x's shape, contiguous; it is
    filled and returned. Nearest, ties to even. TypeError or ValueError for other dtypes or shapes.
    """
    xp = place.xp
    _check_params(params)
    check_array(place, "x", x, "float32")
    check_array(place, "scale", scale, "float32", optional=True)
    check_array(place, "center", center, "float32", optional=True)
    check_array(place, "out", out, "uint8", optional=True)
    own = replicas(xp, "x", x, "scale", scale, center)
    if out is None:
        out = place.empty(tuple(x.shape), "uint8")
    elif out.shape != x.shape or not out.flags.c_contiguous:
        raise ValueError(f"out of shape {tuple(out.shape)}: it must be contiguous and of x's, {tuple(x.shape)}")
    if x.size:
        inputs = [None if a is None else contiguous(xp, a) for a in (x, scale, own.center)]
        numbers = (np.int32(value) for value in params)
        place.spread(ENCODE, -(-own.each // 4), own.number, (*inputs, out, *own.sizes, *numbers))
    return out


def _check_params(params: EncodeParams) -> None:
    if not 1 <= params.mantissa_bits <= 22:
        raise ValueError(f"mantissa_bits {params.mantissa_bits} is outside 1..22")
    if not -127 <= params.bias <= 127:
        raise ValueError(f"bias {params.bias} is outside -127..127")
    for name, code in params._asdict().items():
        if name != "bias" and not 0 <= code <= 255:
            raise ValueError(f"{name} {code} is outside 0..255")
