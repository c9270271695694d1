"""What every host backend checks and how it lays out its arguments. Knows no arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, I64, AnyArray, frozen
from qsim.codec.inputs import check_is_stream
from qsim.errors import FormatError, UsageError
from qsim.formats import RoundMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsim.backends.protocol import CastSpec
    from qsim.philox import RandomStream


_FLOAT32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)


def lead_shape(scale: AnyArray, x: AnyArray) -> tuple[int, ...]:
    """The replica axes: the shape of ``scale``, which must open the shape of ``x``."""
    if scale.ndim > 1 or x.shape[: scale.ndim] != scale.shape:
        raise UsageError(
            f"scale of shape {scale.shape} does not fit x of shape {x.shape}: it is one number, "
            "or one a replica along the first axis"
        )
    return scale.shape


def as_float32(array: AnyArray, what: str) -> F32:
    """``array`` itself if it is float32; anything else must be rounded by whoever has it."""
    array = np.asarray(array)
    if array.dtype != _FLOAT32:
        raise FormatError(f"{what} is {array.dtype}; a backend takes float32 (qsim.codec.encode takes the rest)")
    return array


def as_matrix(array: AnyArray) -> F32:
    """``array`` itself if it is a float32 matrix."""
    array = as_float32(array, "x")
    if array.ndim != 2:
        raise UsageError(f"x of shape {array.shape} is no matrix; blocks tile [rows, columns]")
    return array


def matrix_center(center: AnyArray, x: AnyArray) -> F32:
    """A contiguous float32 centre [1 or M, 1 or K] of the matrix x [M, K]; UsageError for any other shape."""
    center = as_float32(center, "center")
    if center.ndim != 2 or any(c not in (1, n) for c, n in zip(center.shape, x.shape, strict=True)):
        raise UsageError(f"center of shape {center.shape} does not broadcast to x of shape {x.shape}")
    return np.ascontiguousarray(center)


def as_codes(array: AnyArray) -> AnyArray:
    """``array`` itself if it is uint8."""
    array = np.asarray(array)
    if array.dtype != _UINT8:
        raise FormatError(f"codes are {array.dtype}; a backend takes uint8")
    return array


def streams_of(spec: CastSpec, replicas: int) -> Sequence[RandomStream | None]:
    """The stream of every replica, None where the rounding draws nothing; UsageError for another number or type."""
    draws = spec.policy.rounding is RoundMode.STOCHASTIC
    if len(spec.streams) != (replicas if draws else 0):
        raise UsageError(
            f"policy {spec.policy.name} rounds by {spec.policy.rounding.value!r} and the cast has {len(spec.streams)} "
            f"streams for {replicas} replicas; give one a replica to stochastic rounding, and none to any other"
        )
    for stream in spec.streams:
        check_is_stream(stream)
    return spec.streams if draws else (None,) * replicas


@lru_cache(maxsize=64)
def mean_shape(shape: tuple[int, ...], lead: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the mean over ``axes``, reduced axes 1; UsageError for a lead axis or a missing one."""
    ndim = len(shape)
    normal = {axis + ndim if axis < 0 else axis for axis in axes}
    if any(not lead <= axis < ndim for axis in normal):
        raise UsageError(f"mean_axes {axes} of shape {shape}: axes {lead}..{ndim - 1} can be reduced")
    return tuple(1 if axis in normal else size for axis, size in enumerate(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """x laid out as [R, P, L] and a broadcasting partner as [Q, 1 or L] with its row for every row of x."""

    shape: tuple[int, int, int]
    partner: tuple[int, int]
    row_of: I64


@lru_cache(maxsize=64)
def rows_without_partner(shape: tuple[int, ...], lead: int) -> Rows:
    """One long row a replica, and one scalar partner for all of them."""
    replicas = shape[0] if lead else 1
    length = math.prod(shape[lead:])
    return Rows(shape=(replicas, 1, length), partner=(1, 1), row_of=frozen(np.zeros(replicas, np.int64)))


@lru_cache(maxsize=64)
def rows_of(shape: tuple[int, ...], lead: int, partner: tuple[int, ...]) -> Rows:
    """Lay out for a partner whose shape broadcasts to ``shape``; UsageError where it does not."""
    full = (1,) * (len(shape) - len(partner)) + partner
    if len(full) != len(shape) or any(p not in (1, n) for p, n in zip(full, shape, strict=True)):
        raise UsageError(f"center of shape {partner} does not broadcast to x of shape {shape}")
    replicas = shape[0] if lead else 1
    if all(p == 1 for p in full[lead:]):  # one number a replica, or one for all
        length = math.prod(shape[lead:])
        count = full[0] if lead else 1
        row_of = np.arange(replicas, dtype=np.int64) if count > 1 else np.zeros(replicas, np.int64)
        return Rows(shape=(replicas, 1, length), partner=(count, 1), row_of=frozen(row_of))
    rows = math.prod(shape[lead:-1])
    count = math.prod(full[:-1])
    index = np.arange(count, dtype=np.int64).reshape(full[:-1])
    row_of = np.ascontiguousarray(np.broadcast_to(index, shape[:-1])).reshape(-1)
    return Rows(shape=(replicas, rows, shape[-1]), partner=(count, full[-1]), row_of=frozen(row_of))
