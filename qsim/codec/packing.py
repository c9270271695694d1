"""Two 4-bit codes a byte. Knows no format and no value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.codec import numba_kernels as kernels
from qsim.errors import FormatError

if TYPE_CHECKING:
    from qsim.arrays import U8, AnyArray


def packed_length(length: int) -> int:
    """Bytes that ``length`` 4-bit codes take."""
    return (length + 1) // 2


def pack(codes: U8) -> U8:
    """uint8 [..., L] codes 0..15 -> uint8 [..., (L + 1) // 2].

    Along the last axis the even element is in the low nibble (as in PyTorch, CUDA, ONNX); an odd tail is
    padded with 0. FormatError for another dtype, no axis, or a code above 15.
    """
    codes = _checked(codes, "codes")
    if codes.size and int(codes.max()) > 15:
        raise FormatError(f"code {int(codes.max())} is outside 0..15: only 4-bit codes are packed")
    length = codes.shape[-1]
    packed = np.empty((*codes.shape[:-1], packed_length(length)), np.uint8)
    if codes.size:
        kernels.pack(np.ascontiguousarray(codes).reshape(-1, length), packed.reshape(-1, packed.shape[-1]))
    return packed


def unpack(packed: U8, length: int) -> U8:
    """Inverse of ``pack``: uint8 [..., (length + 1) // 2] -> uint8 [..., length]; the padding is not read.

    FormatError where ``length`` does not fit the last axis.
    """
    packed = _checked(packed, "packed codes")
    width = packed.shape[-1]
    if length < 0 or packed_length(length) != width:
        raise FormatError(
            f"length {length} does not fit a last axis of {width} bytes, which holds "
            f"{max(2 * width - 1, 0)} or {2 * width} codes"
        )
    codes = np.empty((*packed.shape[:-1], length), np.uint8)
    if codes.size:
        kernels.unpack(np.ascontiguousarray(packed).reshape(-1, width), codes.reshape(-1, length))
    return codes


def _checked(array: AnyArray, what: str) -> U8:
    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim == 0:
        raise FormatError(f"{what} are {array.dtype} of shape {array.shape}; packing needs uint8 with an axis")
    return array
