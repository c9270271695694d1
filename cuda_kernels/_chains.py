"""How K is cut into chains and parts, and what scales stand at their ends. Knows no kernel, no sum.

A part of K (split_k) has a sum of its own; a chain (promote_every) is what a tensor core adds without leaving its own
format, and its partial joins the part's sum in float32 (``promote.cuh``). ``qsim.gemm.block_dot.cuts`` and
``qsim.gemm.products`` are the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array

Scales = tuple[Any, tuple[int, int] | None, Any, tuple[int, int] | None]
"""(s_a, extent_a, s_b, extent_b): float32 [row blocks, blocks of K] and the (rows, k) of a block, of either operand;
None and None for an operand without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """parts: k ranges, multiples of the step; run: k of a chain, counted from the start of its part."""

    parts: tuple[tuple[int, int], ...]
    run: int


def chains(depth: int, step: int, *, promote_every: int | None, split_k: int, scales: Scales | None) -> Chains:
    """Parts and chains of ``depth`` k on a tensor core that adds ``step`` k at a time.

    ValueError: a chain that would end within a step or outlast its scales, blocks that do not fit each other.
    """
    width = _width(scales)
    if split_k < 1:
        raise ValueError(f"split_k {split_k}: K has one part or more")
    if promote_every is not None and (promote_every < 1 or promote_every % step):
        raise ValueError(f"promote_every {promote_every} cuts an instruction; choose a multiple of {step}")
    if width is not None:
        run = promote_every or width
        if width % step or width % run:
            raise ValueError(
                f"blocks of {width} along K: a chain of {run} must end where its scales do, and the tensor core adds "
                f"{step} k at a time; promote_every must divide {width} and be a multiple of {step}"
            )
    whole, unit = -(-depth // step) * step, width or step
    units = -(-whole // unit)
    each = -(-units // split_k) * unit
    parts = tuple((start, min(start + each, whole)) for start in range(0, whole, max(each, 1)))
    return Chains(parts=parts, run=min(promote_every or width or each, max(whole, step)))


def scale_arguments(place: Place, scales: Scales | None, shape: tuple[int, int], depth: int) -> tuple[Any, ...]:
    """Kernel arguments, four an operand: scales or None, then rows, k and blocks of K as int32.

    TypeError or ValueError for scales of another dtype, place or shape.
    """
    if max(*shape, depth) >= 1 << 31:
        raise ValueError(f"[M, N] = {shape}, K = {depth}: the kernels count rows and k in 31 bits")
    arguments: list[Any] = []
    for name, rows, (scale, extent) in zip("ab", shape, _pairs(scales), strict=True):
        if scale is None or extent is None:
            arguments += [None, np.int32(1), np.int32(1), np.int32(0)]
            continue
        check_array(place, f"the scales of {name}", scale, "float32")
        needed = tuple(-(-size // own) for size, own in zip((rows, depth), extent, strict=True))
        if tuple(scale.shape) != needed or scale.size >= 1 << 31:
            raise ValueError(
                f"scales of {name} of shape {tuple(scale.shape)}: blocks of {extent} of [{rows}, {depth}] are {needed}"
            )
        own = (min(extent[0], rows), min(extent[1], depth))
        arguments += [contiguous(place.xp, scale), *(np.int32(value) for value in (*own, needed[1]))]
    return tuple(arguments)


def _pairs(scales: Scales | None) -> tuple[tuple[Any, tuple[int, int] | None], ...]:
    """(scales, extent) of either operand; ValueError where one of the two is missing, or an extent is empty."""
    if scales is None:
        return (None, None), (None, None)
    pairs = (scales[0], scales[1]), (scales[2], scales[3])
    for name, (scale, extent) in zip("ab", pairs, strict=True):
        if (scale is None) != (extent is None) or (extent is not None and min(extent) < 1):
            raise ValueError(f"scales of {name}: pass an array and the (rows, k) of its blocks, or None and None")
    return pairs


def _width(scales: Scales | None) -> int | None:
    """k of the narrower blocks, which the wider must be a multiple of; None without scales."""
    widths = sorted(extent[1] for _, extent in _pairs(scales) if extent is not None)
    if len(widths) == 2 and widths[1] % widths[0]:
        raise ValueError(f"blocks of {widths[0]} and of {widths[1]} along K do not fit each other")
    return widths[0] if widths else None
