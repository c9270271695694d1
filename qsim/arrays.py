"""Array types and the few array helpers that every floor shares. Knows no format and no scale."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

A = TypeVar("A", bound=np.ndarray[Any, Any])

FLT_MAX = np.finfo(np.float32).max


def frozen(array: A) -> A:
    """Return ``array`` itself, made read-only: worlds share arrays, nothing is written in place.

    An array of a device has no such flag, and is left as it is.
    """
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def bits(x: F32) -> U32:
    """The uint32 bit patterns of a float32 array (a view where the layout allows)."""
    return np.ascontiguousarray(x).view(np.uint32)


def same_bits(a: AnyArray, b: AnyArray) -> bool:
    """True where shape, dtype and every bit agree; NaN equals the same NaN, +0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)))


def per_lead(value: AnyArray, like: AnyArray) -> AnyArray:
    """Reshape ``value`` [lead] so that it broadcasts against ``like`` [lead + rest]."""
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))
