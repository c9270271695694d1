"""How operands lie in memory: a centre beside x, codes at aligned addresses, tiles of outputs. Knows no kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

TILE = 64
"""Outputs along a side of a tile of ``tile.cuh``."""


def center_layout(xp: Any, shape: tuple[int, ...], center: Any, lead: int) -> tuple[Any, int, int]:
    """(contiguous centre, period, stride): element r * stride + j % period serves x[r, j]; ``xp`` is numpy or cupy.

    ValueError where the centre does not broadcast to x of ``shape``.
    """
    periodic = _periodic(shape, tuple(center.shape), lead)
    if periodic is None:  # a mean over an axis in the middle: spell it out
        center = xp.broadcast_to(center, shape)
        periodic = _periodic(shape, shape, lead)
        assert periodic is not None
    return contiguous(xp, center), *periodic


class Replicas(NamedTuple):
    """A tensor as replicas: their axes, number and elements; the centre beside it as ``center_layout`` has it."""

    lead: tuple[int, ...]
    number: int
    each: int
    center: Any
    period: int
    stride: int

    @property
    def sizes(self) -> tuple[np.int64, ...]:
        """As kernels take them: replicas, elements of each, period and stride of the centre."""
        return tuple(np.int64(size) for size in (self.number, self.each, self.period, self.stride))


def replicas(xp: Any, what: str, x: Any, by: str, factor: Any, center: Any) -> Replicas:
    """Of x [lead + rest], factor [lead], zero or one axis, or None, and a centre or None. ValueError otherwise."""
    lead = () if factor is None else tuple(factor.shape)
    if len(lead) > 1 or tuple(x.shape[: len(lead)]) != lead:
        raise ValueError(f"{by} of shape {lead} is not the leading axis of {what} {tuple(x.shape)}")
    return replicas_of(xp, x, len(lead), center)


def replicas_of(xp: Any, x: Any, lead: int, center: Any) -> Replicas:
    """Of x with ``lead`` leading replica axes."""
    shape = tuple(x.shape)
    period = stride = 1
    if center is not None:
        center, period, stride = center_layout(xp, shape, center, lead)
    return Replicas(shape[:lead], math.prod(shape[:lead]), math.prod(shape[lead:]), center, period, stride)


def _periodic(x: Sequence[int], center: Sequence[int], lead: int) -> tuple[int, int] | None:
    """(period, stride) of a centre of shape ``center``, or None where one replica's part is not periodic.

    Periodic: ones, then the trailing axes of x in full. ValueError where it does not broadcast to x.
    """
    padded = (1,) * (len(x) - len(center)) + tuple(center)
    if len(padded) > len(x) or any(c not in (1, n) for c, n in zip(padded, x, strict=True)):
        raise ValueError(f"center of shape {tuple(center)} does not broadcast to x {tuple(x)}")
    rest = padded[lead:]
    ones = next((axis for axis, size in enumerate(rest) if size != 1), len(rest))
    if rest[ones:] != tuple(x[lead:])[ones:]:
        return None
    period = math.prod(rest[ones:])
    return period, period if math.prod(padded[:lead]) > 1 else 0


def tile_count(rows: int, columns: int) -> int:
    """Tiles of ``tile.cuh`` that cover an output."""
    return -(-rows // TILE) * -(-columns // TILE)


def contiguous(xp: Any, array: Any) -> Any:
    """``array`` contiguous from an address that its items take; a copy where it is not."""
    array = xp.ascontiguousarray(array)
    return array if address(array) % array.itemsize == 0 else array.copy()


def aligned(xp: Any, array: Any) -> Any:
    """uint8 ``array`` contiguous from an address that 16-byte loads take; a copy where it is not."""
    array = xp.ascontiguousarray(array)
    if address(array) % 16 == 0:
        return array
    room = xp.empty(array.size + 15, xp.uint8)
    own = room[-address(room) % 16 :][: array.size].reshape(array.shape)
    own[...] = array
    return own


def address(array: Any) -> int:
    """Of the first element, numpy's or CuPy's."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)
