"""Launchers of ``exact.cu``: matrix products rounded once, the same bits on any device. Know no format, no recipe."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import address, contiguous
from cuda_kernels._place import Place, Strided, check_array

EXACT = Kernel("exact.cu", "qsim_exact", prelude=("exact.cuh",))
OF_SUMS = Kernel("exact.cu", "qsim_exact_of_sums", prelude=("exact.cuh",))
SETTLE = Kernel("exact.cu", "qsim_exact_settle", prelude=("exact.cuh",))
THREADS = 256
TILE = 64
"""Outputs along a side of a tile."""
MAX_DEPTH = 1 << 28
"""The largest K that the proof and the accumulator are for."""
_FLAT = 1 << 62


class Operand(NamedTuple):
    """What a row of a scaled product is made of: elements values[code] * block, and a factor of the whole row.

    codes uint8 [rows, K], any strides; values float32 [256]; block float32 [ceil(rows / extent[0]), ceil(K /
    extent[1])], the scale of ``extent`` rows and k, or None; row float64 [rows], or None: 1. A finite row factor may be
    any float64, of either sign; the others may be any float32.
    """

    codes: Any
    values: Any
    block: Any = None
    extent: tuple[int, int] = (1, 1)
    row: Any = None


class Summed(NamedTuple):
    """out float32; open uint8 of its shape: 1 where ``qsim_exact`` had no proof and ``qsim_exact_settle`` summed."""

    out: Any
    open: Any


class _Side(NamedTuple):
    """An operand as the kernels take it; strides in elements."""

    data: Any
    strides: tuple[int, int, int]
    operand: Operand | None = None

    def arguments(self, place: Place) -> tuple[Any, ...]:
        """In the order of QSIM_PARAMETERS."""
        x = self.operand or Operand(None, None)
        arrays = (None if each is None else contiguous(place.xp, each) for each in (x.values, x.block, x.row))
        across = 1 if x.block is None else max(int(x.block.shape[1]), 1)
        # A block beyond the matrix is as long as any other that covers it.
        band, width = min(x.extent[0], _FLAT), min(x.extent[1], MAX_DEPTH)
        sizes = (*map(np.int64, (*self.strides, band)), np.int32(width), np.int32(across))
        return (Strided(self.data), *arrays, *sizes)


def matmul(place: Place, a: Any, b: Any) -> Any:
    """a [..., T, K] @ b [..., K, O], leading axes broadcast: exact sums rounded once to float32 [..., T, O].

    a, b: float32, any strides; neither is copied, but for leading axes that no single stride runs through. Rules as in
    ``exact.cu``: ties to even, subnormals kept, an exact 0 (K = 0 included) is +0, NaN is 7fc00000, overflow is Inf.
    TypeError or ValueError for other dtypes or shapes.
    """
    return matmul_summed(place, a, b).out


def matmul_summed(place: Place, a: Any, b: Any) -> Summed:
    """``matmul``, and which outputs it summed again."""
    check_array(place, "a", a, "float32")
    check_array(place, "b", b, "float32")
    shapes = f"a {tuple(a.shape)} and b {tuple(b.shape)}"
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{shapes} are not [..., T, K] and [..., K, O]")
    try:
        lead = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    except ValueError:
        raise ValueError(f"the leading axes of {shapes} do not broadcast") from None
    left, right = (_plain_side(place, x, lead) for x in (a, b.swapaxes(-1, -2)))
    sizes = (math.prod(lead), int(a.shape[-2]), int(b.shape[-1]), int(a.shape[-1]))
    out, open_ = _run(place, left, right, sizes)
    shape = (*lead, *sizes[1:3])
    return Summed(out.reshape(shape), open_.reshape(shape))


def exact_product(place: Place, a: Operand, b: Operand, *, divisor: float = 1.0, per_block: int | None = None) -> Any:
    """float32 [M, N]: RN(sum over k of the elements' products * a.row[i] * b.row[j] / divisor), one rounding of all.

    a.codes [M, K], b.codes [N, K]. divisor: an odd integer below 2^53. per_block: the k of a partial sum that is
    rounded to float32 and added in float32, in ascending k from +0; then there is neither row factor nor divisor.
    Rules as in ``exact.cu``; besides, a non-finite sum times a factor of 0 is NaN, an exact 0 times any factor is +0.
    TypeError or ValueError for other dtypes, shapes or numbers.
    """
    return exact_product_summed(place, a, b, divisor=divisor, per_block=per_block).out


def exact_product_summed(
    place: Place, a: Operand, b: Operand, *, divisor: float = 1.0, per_block: int | None = None
) -> Summed:
    """``exact_product``, and which outputs it summed again."""
    for what, x in (("a", a), ("b", b)):
        _check_operand(place, what, x)
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"codes of a {tuple(a.codes.shape)} and of b {tuple(b.codes.shape)} differ in K")
    if not (1 <= divisor < 2**53 and divisor % 2 == 1):
        raise ValueError(f"divisor {divisor}; an odd integer below 2^53")
    if per_block is not None and (per_block < 1 or divisor != 1 or a.row is not None or b.row is not None):
        raise ValueError(f"per_block {per_block}; at least 1, without row factors and divisor")
    left, right = (_Side(x.codes, (0, *_strides(x.codes)), x) for x in (_steady(place, a), _steady(place, b)))
    sizes = (1, int(a.codes.shape[0]), int(b.codes.shape[0]), int(a.codes.shape[1]))
    out, open_ = _run(place, left, right, sizes, divisor=divisor, width=per_block or 0)
    return Summed(out.reshape(sizes[1:3]), open_.reshape(sizes[1:3]))


def product_of_sums(
    place: Place, sums: Any, a: Operand, b: Operand, *, unit: float, divisor: float = 1.0
) -> Summed:  # fmt: skip
    """``exact_product_summed`` of operands without blocks whose sums of products are known: int32 [M, N] of ``unit``.

    unit: a power of two. Errors as of ``exact_product``.
    """
    check_array(place, "sums", sums, "int32")
    for what, x in (("a", a), ("b", b)):
        _check_operand(place, what, x)
    shape = (int(a.codes.shape[0]), int(b.codes.shape[0]))
    if tuple(sums.shape) != shape or a.block is not None or b.block is not None:
        raise ValueError(f"sums {tuple(sums.shape)} of {shape} products; operands have no blocks here")
    summed = Summed(place.empty(shape, "float32"), place.empty(shape, "uint8"))
    if sums.size:
        left, right = (_Side(x.codes, (0, *_strides(x.codes)), x) for x in (_steady(place, a), _steady(place, b)))
        factors = (None if x.row is None else contiguous(place.xp, x.row) for x in (a, b))
        sizes = (np.int64(shape[0]), np.int64(shape[1]))
        numbers = (np.float64(unit), np.float64(divisor))
        arrays = (contiguous(place.xp, sums), *factors, *summed)
        place.spread(OF_SUMS, int(sums.size), 1, (*arrays, *sizes, *numbers))
        depth = int(a.codes.shape[1])
        if depth:
            args = (*left.arguments(place), *right.arguments(place), *summed)
            place.spread(SETTLE, shape[0] * shape[1], 1, (*args, np.int64(1), *sizes, np.int32(depth), np.int32(0),
                                                          np.float64(divisor)))  # fmt: skip
    return summed


def _run(
    place: Place, a: _Side, b: _Side, sizes: tuple[int, int, int, int], *, divisor: float = 1.0, width: int = 0
) -> Summed:
    """Both kernels on [replicas, rows, columns, depth]."""
    replicas, rows, columns, depth = sizes
    if depth > MAX_DEPTH:
        raise ValueError(f"K = {depth} is above {MAX_DEPTH}, as far as the proof goes; split K")
    if 0 in sizes:
        return Summed(place.xp.zeros(sizes[:3], place.xp.float32), place.xp.zeros(sizes[:3], place.xp.uint8))
    summed = Summed(place.empty(sizes[:3], "float32"), place.empty(sizes[:3], "uint8"))
    numbers = (*map(np.int64, sizes[:3]), np.int32(depth), np.int32(min(width, depth)), np.float64(divisor))
    args = (*a.arguments(place), *b.arguments(place), *summed, *numbers)
    place.tiles(EXACT, replicas * -(-rows // TILE) * -(-columns // TILE), THREADS, args)
    place.spread(SETTLE, rows * columns, replicas, args)
    return summed


def _plain_side(place: Place, x: Any, lead: tuple[int, ...]) -> _Side:
    """x [..., rows, K] float32 with its leading axes broadcast to ``lead``, which become one."""
    if math.prod(x.shape[:-2]) == 1:
        x = x.reshape(x.shape[-2:])
    if x.ndim == 2:
        x = _whole(place, x)
        return _Side(x, (0, *_strides(x)))
    if tuple(x.shape[:-2]) != lead:
        x = place.xp.broadcast_to(x, (*lead, *x.shape[-2:]))
    if x.ndim > 3:
        x = x.reshape(math.prod(lead), *x.shape[-2:])
    x = _whole(place, x)
    return _Side(x, _strides(x))


def _steady(place: Place, x: Operand) -> Operand:
    return x._replace(codes=_whole(place, x.codes))


def _whole(place: Place, x: Any) -> Any:
    """x; a copy where its strides or its address are no multiples of an element."""
    uneven = any(stride % x.itemsize for stride in x.strides) or address(x) % x.itemsize
    return contiguous(place.xp, x) if uneven else x


def _strides(x: Any) -> Any:
    return tuple(int(stride) // int(x.itemsize) for stride in x.strides)


def _check_operand(place: Place, what: str, x: Operand) -> None:
    check_array(place, f"codes of {what}", x.codes, "uint8")
    check_array(place, f"values of {what}", x.values, "float32")
    check_array(place, f"block of {what}", x.block, "float32", optional=True)
    check_array(place, f"row of {what}", x.row, "float64", optional=True)
    if x.codes.ndim != 2 or x.values.shape != (256,):
        raise ValueError(f"codes {tuple(x.codes.shape)}, values {tuple(x.values.shape)} of {what}: [rows, K] and [256]")
    if min(x.extent) < 1:
        raise ValueError(f"extent {x.extent} of {what}: a block has at least one row and one k")
    blocks = tuple(-(-size // own) for size, own in zip(x.codes.shape, x.extent, strict=True))
    if x.block is not None and tuple(x.block.shape) != blocks:
        raise ValueError(f"block {tuple(x.block.shape)} of {what}: {x.extent} of {tuple(x.codes.shape)} are {blocks}")
    if x.row is not None and tuple(x.row.shape) != tuple(x.codes.shape[:1]):
        raise ValueError(f"row {tuple(x.row.shape)} of {what}: one factor for each of {x.codes.shape[0]} rows")
