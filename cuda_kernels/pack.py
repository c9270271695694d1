"""Launcher of ``pack.cu``: two 4-bit codes a byte and back. Knows no format and no value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array

PACK = Kernel("pack.cu", "qsim_pack")
UNPACK = Kernel("pack.cu", "qsim_unpack")


def pack(place: Place, codes: Any) -> Any:
    """uint8 [..., L] codes 0..15, any strides -> uint8 [..., ceil(L / 2)], the even element low, an odd tail 0.

    A code above 15 loses its high bits: it is the caller's to refuse. TypeError for another dtype, ValueError without
    an axis.
    """
    length = _length(place, codes)
    packed = place.empty((*codes.shape[:-1], -(-length // 2)), "uint8")
    if packed.size:
        _launch(place, PACK, (contiguous(place.xp, codes), packed), packed.size, length)
    return packed


def unpack(place: Place, packed: Any, length: int) -> Any:
    """Inverse of ``pack``: uint8 [..., ceil(length / 2)] -> uint8 [..., length]; ValueError where it does not fit."""
    if _length(place, packed) != -(-length // 2) or length < 0:
        raise ValueError(f"length {length} does not fit packed codes of shape {tuple(packed.shape)}")
    codes = place.empty((*packed.shape[:-1], length), "uint8")
    if codes.size:
        _launch(place, UNPACK, (contiguous(place.xp, packed), codes), codes.size, length)
    return codes


def _length(place: Place, array: Any) -> int:
    check_array(place, "codes", array, "uint8")
    if array.ndim == 0:
        raise ValueError("codes of no axis; packing pairs the codes of the last one")
    return int(array.shape[-1])


def _launch(place: Place, kernel: Kernel, arrays: tuple[Any, Any], items: int, length: int) -> None:
    rows = math.prod(arrays[0].shape[:-1])
    place.spread(kernel, items, 1, (*arrays, np.int64(rows), np.int64(length)))
