"""Quantize a tensor by a scale recipe, and back. Keeps no state: everything follows from the tensor in hand.

The order is fixed: centre, residual RN(x - c), Hadamard rotation, amax, scale, codes; decode goes the same way back.
"""

from __future__ import annotations

import math
import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, U8, AnyArray, frozen
from qsim.backends import get_backend
from qsim.checks import yes_or_no
from qsim.codec.inputs import as_array, holds_real_numbers
from qsim.codec.means import mean_of
from qsim.codec.scaled import Block, BlockCounts, ScaledCodes, ScaleRecipe, TwoLevelScale, get_scale_recipe
from qsim.codec.scaled.refusals import RefusedError, check
from qsim.errors import FormatError, UsageError
from qsim.formats import CastPolicy, MissingNan, NanPolicy, Overflow, RoundMode, get_policy
from qsim.quant import RECIPES
from qsim.quant.state import Layout, QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from qsim.backends import Backend
    from qsim.codec.packing import NibbleOrder
    from qsim.philox import RandomStream

CENTERS = ("tensor", "channel", "token", "block")
"""What one centre serves: all elements; a column (an index along the axis); a row; a block of the recipe."""

_LAYOUTS = {
    "low_first": Layout.PACKED_LOW_FIRST,
    "high_first": Layout.PACKED_HIGH_FIRST,
    "ggml_split": Layout.PACKED_GGML_SPLIT,
}


NIBBLE_ORDERS = tuple(_LAYOUTS)
"""Names of the orders of two codes in a byte (``qsim.codec.packing``)."""


def quantize(
    x: npt.ArrayLike,
    recipe: str | ScaleRecipe,
    *,
    axis: int = -1,
    center: str | npt.ArrayLike | None = None,
    hadamard: F32 | None = None,
    policy: str | CastPolicy = "ocp",
    rounding: str | RoundMode | None = None,
    overflow: str | Overflow | None = None,
    nan: str | NanPolicy | None = None,
    missing_nan: str | MissingNan | None = None,
    stream: RandomStream | None = None,
    packed: bool = False,
    order: str | NibbleOrder | None = None,
    tensor_amax: float | None = None,
    counts: bool = False,
    backend: str | Backend = "auto",
) -> QuantizedTensor:
    """Codes and scales of ``x`` by a recipe of ``python -m qsim formats``: "e4m3", "mxfp4_rceil", "nvfp4_te", ...

    x: any shape with an ``axis`` (0-d is one element), any strides; float32, float16, bfloat16 exactly, float64 and
    integers rounded to float32 first. Blocks run along ``axis``; a block of several rows counts the other axes,
    flattened, as rows. A tail block is smaller.
    center: "tensor", "channel" (a mean per index of the axis), "token" (a mean along the axis), "block" (a mean per
    block of a recipe whose blocks have one row): the fixed-point mean of the finite elements of x (``means``); or
    float32 numbers of your own that broadcast to x with its axis last: last step's, or a running mean. Zeros of it
    are taken as +0. r = RN(x - c) is what is scaled and encoded.
    hadamard: signs from ``hadamard_signs``: r is rotated in blocks of 16 or 32 along the axis, a multiple of that.
    policy, rounding, overflow, nan, missing_nan, stream: as for ``encode`` (element i of x with its axis last, in C
    order, takes word i); they are of the elements, never of the scales.
    packed, order: two 4-bit codes a byte along the axis, as ``qsim.pack`` does (by default the even element low).
    tensor_amax: what a two-level recipe takes for the largest magnitude; by default that of r.
    counts: also count saturated, flushed, NaN and Inf elements and zero-scale blocks. backend: by name or itself.
    Returns a QuantizedTensor, its arrays read-only: codes (uint8, of the shape of x, or with its axis packed), scales
    (float32, or uint8 codes of E8M0 or E4M3FN; axis last), tensor_scale (the amax of a two-level recipe), amax, center,
    counts and what else ``dequantize`` needs.
    FormatError: unknown recipe or policy, a dtype that is no number, ``packed`` for another width, what the policy
    refuses: the first element of x that is itself NaN, Inf (an Inf of x overflows in every recipe) or, once scaled,
    too large. UsageError: axis, centre, signs or stream that do not fit.
    """
    recipe = _stateless(recipe)
    chosen = get_policy(policy).for_format(
        recipe.fmt, rounding=rounding, overflow=overflow, nan=nan, missing_nan=missing_nan
    )
    device, packed = backend_of(backend), yes_or_no("packed", packed)
    if order is not None and not packed:
        raise UsageError(f"order {str(order)!r} has a meaning only with packed=True")
    order = "low_first" if order is None else order
    if packed and recipe.fmt.codes_per_byte != 2:
        raise FormatError(f"packed=True needs 4-bit codes; {recipe.name} has {recipe.fmt.bits} bits a code")
    counts = yes_or_no("counts", counts)
    source = as_array(x, "x")
    array = _float32(source)
    if tensor_amax is not None and not isinstance(recipe.scale, TwoLevelScale):
        raise UsageError(f"tensor_amax {tensor_amax} has a meaning only for a two-level recipe, not for {recipe.name}")
    shape, lined, axis = _with_axis_last(array, axis)
    matrix = lined.reshape(-1, lined.shape[-1]) if lined.size else lined.reshape(_matrix_shape(lined.shape))
    c, spread = _center(matrix, lined.shape, center, recipe, device, axis=axis)
    steps = " as float32" if c is None else " less its centre"
    if hadamard is not None:
        hadamard = frozen(np.array(as_array(hadamard, "hadamard")))  # the caller's array may change
        with _places_in(source, axis, steps):
            matrix, spread = _rotated(_residual(matrix, spread), hadamard, recipe, chosen, shape, axis, device), None
    low_first = packed and str(getattr(order, "value", order)).lower() == "low_first"
    amax = None if tensor_amax is None else _one_float32(tensor_amax, "tensor_amax")
    if amax == 0 and np.count_nonzero(_residual(matrix, spread)):
        raise UsageError("tensor_amax 0 for a tensor that is not zero; pass the largest |x|, or leave it out")
    with _places_in(source, axis, steps if hadamard is None else " after the rotation"):
        scaled = device.quantize_blocks(
            matrix, recipe, chosen, stream=stream, packed=low_first, counting=counts, tensor_amax=amax,
            center=spread,
        )  # fmt: skip
    codes, layout = scaled.codes, Layout.ONE_PER_BYTE
    if packed:
        from qsim.codec.packing import nibble_order, pack

        codes = codes if low_first else pack(codes, order=order)
        layout = _LAYOUTS[nibble_order(order).value]
    return QuantizedTensor(
        codes=frozen(_axis_back(codes.reshape(*lined.shape[:-1], codes.shape[-1]), axis, shape)),
        scales=frozen(_scales_shaped(scaled.scales, recipe.block, lined.shape)),
        layout=layout,
        shape=shape,
        snapshot=None,
        amax=frozen(scaled.amax),
        counts=scaled.counts if counts else None,
        recipe=recipe,
        axis=axis,
        tensor_scale=None if scaled.tensor_scale is None else frozen(scaled.tensor_scale),
        center=c,
        center_per_block=isinstance(center, str) and center == "block",
        signs=hadamard,
    )


def dequantize(tensor: QuantizedTensor, *, backend: str | Backend = "auto") -> F32:
    """The float32 tensor that ``quantize`` encoded: decode, rotate back, add the centre; NaN is 0x7FC00000.

    UsageError for a tensor with a snapshot: ``decode_for_consumer`` decodes that, and proves whose it is.
    """
    if not isinstance(tensor, QuantizedTensor):
        raise UsageError(f"dequantize of {type(tensor).__name__}; it takes what quantize returned (codes: qsim.decode)")
    recipe = tensor.recipe
    if recipe is None or tensor.snapshot is not None:
        raise UsageError("a tensor with a snapshot is decoded by decode_for_consumer, which names its consumer")
    assert tensor.scales is not None, "a recipe makes scales"
    device = backend_of(backend, "dequantize_blocks")
    lined = lined_shape(tensor.shape, tensor.axis)
    codes = unpacked_codes(tensor, lined)
    grid = recipe.block.grid((codes.shape[0], codes.shape[1]))
    scaled = ScaledCodes(
        codes=codes,
        scales=tensor.scales.reshape(grid),
        tensor_scale=tensor.tensor_scale,
        amax=tensor.amax,
        counts=BlockCounts(0, 0, 0, 0, 0),
    )
    values = device.dequantize_blocks(scaled, recipe)
    if tensor.signs is not None:
        values = device.rotate(values, tensor.signs, back=True)
    if tensor.center is not None:
        with np.errstate(all="ignore"):
            values = values + _center_spread(tensor.center, tensor.center_per_block, recipe, lined)
        values[np.isnan(values)] = np.uint32(0x7FC00000).view(np.float32)
    return _axis_back(values.reshape(lined), tensor.axis, tensor.shape)


def _stateless(recipe: str | ScaleRecipe) -> ScaleRecipe:
    """``get_scale_recipe``, which knows no recipe with memory."""
    if isinstance(recipe, str) and recipe.lower() in RECIPES:
        raise FormatError(
            f"{recipe!r} is a stateful recipe, and quantize keeps no state: qsim.make_recipe({recipe.lower()!r}, "
            "fmt=...) makes it, quantize_with_snapshot encodes with it"
        )
    return get_scale_recipe(recipe)


def _rotated(
    r: F32, signs: F32, recipe: ScaleRecipe, policy: CastPolicy, shape: tuple[int, ...], axis: int, device: Backend
) -> F32:
    """The matrix r rotated; what the policy refuses of r is refused here, as a rotation spreads it."""
    from qsim.codec.hadamard import FACTORS

    if signs.size in FACTORS and r.shape[1] % signs.size:
        raise UsageError(
            f"x of shape {shape} cannot be rotated in blocks of {signs.size} along axis {axis}, which has {r.shape[1]} "
            f"elements: it must have a multiple of {signs.size}; pad it with zeros, or choose another axis"
        )
    check(r, fmt=recipe.fmt, codes=policy.codes(recipe.fmt), two_level=isinstance(recipe.scale, TwoLevelScale))
    return device.rotate(r, signs)


@contextmanager
def _places_in(x: AnyArray, axis: int, steps: str) -> Iterator[None]:
    """What is refused inside is named by its place in x; ``steps``: what became of x before."""
    try:
        yield
    except RefusedError as error:
        numbers = _with_axis_last(np.arange(x.size).reshape(x.shape), axis)[1]
        raise FormatError(error.refused.named(x, numbers.reshape(error.refused.x.shape), steps=steps)) from None


# ---- the tensor as a matrix -------------------------------------------------------------------------------------


def _matrix_shape(lined: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(lined[:-1]), lined[-1]


def lined_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Shape with the axis last; a 0-d tensor is one row of one element."""
    return (*shape[:axis], *shape[axis + 1 :], shape[axis]) if shape else (1,)


def _with_axis_last(array: AnyArray, axis: int) -> tuple[tuple[int, ...], AnyArray, int]:
    shape, ndim = array.shape, max(array.ndim, 1)
    try:
        axis = operator.index(axis)
    except TypeError:
        raise UsageError(f"axis {axis!r} is no integer; choose {-ndim}..{ndim - 1}") from None
    if not -ndim <= axis < ndim:
        raise UsageError(f"axis {axis} does not exist in x of shape {shape}; choose {-ndim}..{ndim - 1}")
    axis %= ndim
    lined = np.moveaxis(array, axis, -1) if array.ndim else array.reshape(1)
    return shape, np.ascontiguousarray(lined), axis


def _axis_back(lined: AnyArray, axis: int, shape: tuple[int, ...]) -> AnyArray:
    if not shape:
        return lined.reshape(lined.shape if lined.size != 1 else ())
    return np.ascontiguousarray(np.moveaxis(lined, -1, axis))


def _scales_shaped(scales: AnyArray, block: Block, lined: tuple[int, ...]) -> AnyArray:
    """[other axes..., blocks] for blocks of one row; () for one scale; else the grid of the matrix."""
    if block.rows == 1:
        return scales.reshape(*lined[:-1], scales.shape[1])
    return scales.reshape(()) if block == Block(0, 0) and scales.size == 1 else scales


def unpacked_codes(tensor: QuantizedTensor, lined: tuple[int, ...]) -> U8:
    """The codes one a byte, a contiguous matrix [other axes flattened, axis]; lined: ``lined_shape`` of the tensor."""
    codes: U8 = np.moveaxis(tensor.codes, tensor.axis, -1) if tensor.shape else tensor.codes.reshape(-1)
    if tensor.layout is not Layout.ONE_PER_BYTE:
        from qsim.codec.packing import unpack

        order = next(name for name, layout in _LAYOUTS.items() if layout is tensor.layout)
        codes = unpack(codes, lined[-1], order=order)
    return np.ascontiguousarray(codes).reshape(_matrix_shape(lined))


def backend_of(backend: str | Backend, does: str = "quantize_blocks") -> Backend:
    """The backend meant by its name or itself; UsageError for anything that does not do ``does``."""
    if isinstance(backend, str):
        return get_backend(backend)
    if isinstance(backend, type) or not callable(getattr(backend, does, None)):
        raise UsageError(f"backend is {type(backend).__name__}; pass its name, or get_backend(name)")
    return backend


def _float32(array: AnyArray) -> F32:
    """``array`` as float32: exact from the narrower floats, else rounded once."""
    if array.dtype == np.float32:
        return array
    if array.dtype.kind in "iufb" or array.dtype.name in ("bfloat16", "float16"):
        with np.errstate(over="ignore", invalid="ignore"):  # the latter is of a signalling NaN
            return array.astype(np.float32)
    raise FormatError(f"x of dtype {array.dtype} cannot be quantized; pass float32, float16, bfloat16 or float64")


def _one_float32(value: float, what: str) -> np.float32:
    """A magnitude, never -0."""
    try:
        with np.errstate(all="ignore"):
            number = np.float32(value) + np.float32(0) if holds_real_numbers(np.asarray(value)) else None
    except (TypeError, ValueError):
        number = None
    except OverflowError:
        raise UsageError(f"{what} leaves float32; leave it out, or pass the largest |x|") from None
    if number is None:
        raise UsageError(f"{what} {value!r} is no number; leave it out, or pass the largest |x|")
    if not isinstance(number, np.float32):
        raise UsageError(f"{what} of shape {np.shape(value)} is no single number; leave it out")
    if not (number >= 0 and np.isfinite(number)):
        raise UsageError(f"{what} {value} is no finite magnitude; leave it out, or pass the largest |x|")
    return number


# ---- centres ----------------------------------------------------------------------------------------------------


def _center(
    matrix: F32,
    lined: tuple[int, ...],
    center: str | npt.ArrayLike | None,
    recipe: ScaleRecipe,
    backend: Backend,
    *,
    axis: int,
) -> tuple[F32 | None, F32 | None]:
    """The centre as it is kept (broadcastable to the tensor with its axis last) and as the matrix needs it."""
    if center is None:
        return None, None
    if isinstance(center, str):
        own = _mean(matrix, center, recipe, backend)
        kept = _kept_shape(center, own, lined)
    else:
        given = as_array(center, "center")
        if not holds_real_numbers(given):
            raise UsageError(f"center of type {type(center).__name__} holds no real numbers; pass float32 numbers")
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                kept = np.asarray(given, np.float32)
        except OverflowError:  # of an integer that float64 cannot hold
            kept = np.full((), np.inf, np.float32)
        except (TypeError, ValueError):
            raise UsageError(f"center of type {type(center).__name__} is no float32 array") from None
        if not np.isfinite(kept).all():
            raise UsageError("center holds NaN or Inf, or leaves float32: every residual would; pass finite numbers")
    kept = frozen(np.asarray(kept + np.float32(0), np.float32))  # a centre is never -0
    try:
        return kept, _center_spread(kept, center_per_block=isinstance(center, str) and center == "block", recipe=recipe,
                                    lined=lined)  # fmt: skip
    except ValueError:
        shape = (*lined[:axis], lined[-1], *lined[axis:-1])
        raise UsageError(
            f"center of shape {kept.shape} does not broadcast to x of shape {shape} with its axis {axis} last: {lined}"
        ) from None


def _residual(matrix: F32, spread: F32 | None) -> F32:
    """RN(x - c)."""
    if spread is None:
        return matrix
    with np.errstate(all="ignore"):
        return np.asarray(matrix - spread, np.float32)


def _mean(matrix: F32, center: str, recipe: ScaleRecipe, backend: Backend) -> F32:
    if center not in CENTERS:
        raise UsageError(f"center {center!r} is unknown; known: {', '.join(CENTERS)}, or float32 numbers")
    if center == "block":
        return _block_mean(matrix, recipe, backend)
    axes = {"tensor": (0, 1), "channel": (0,), "token": (1,)}[center]
    return mean_of(backend.sums(matrix, lead=0, axes=axes))


def _block_mean(matrix: F32, recipe: ScaleRecipe, backend: Backend) -> F32:
    """Means over the blocks of every row [M, blocks]: of the whole blocks, then of the tail."""
    if recipe.block.rows != 1:
        raise UsageError(f"center 'block' needs blocks of one row; those of {recipe.name} are {tuple(recipe.block)}")
    rows, columns = matrix.shape
    width = recipe.block.within((rows, columns))[1]
    whole = columns // width * width
    parts = [(matrix[:, :whole].reshape(rows, whole // width, width), 2), (matrix[:, whole:], 1)]
    means = []
    for part, axis in parts:
        if part.shape[1]:
            sums = backend.sums(np.ascontiguousarray(part), lead=0, axes=(axis,))
            means.append(mean_of(sums).reshape(rows, part.shape[1] if part.ndim == 3 else 1))
    return np.concatenate(means, axis=1) if means else np.zeros((rows, 0), np.float32)


def _kept_shape(center: str, own: F32, lined: tuple[int, ...]) -> F32:
    """The matrix's centre with the axes of the tensor: [1..., K], [other axes..., 1 or blocks]."""
    if center in ("token", "block"):
        return own.reshape(*lined[:-1], own.shape[1])
    return own.reshape(*(1,) * (len(lined) - 1), own.shape[1])


def _center_spread(center: F32, center_per_block: bool, recipe: ScaleRecipe, lined: tuple[int, ...]) -> F32:
    """The centre as something that broadcasts to the matrix; ValueError where it does not."""
    shape = _matrix_shape(lined)
    if center_per_block:
        width = recipe.block.within(shape)[1]
        return np.repeat(center.reshape(shape[0], center.shape[-1]), width, axis=1)[:, : shape[1]]
    if center.size == 1:
        return center.reshape(1, 1)
    if center.shape[-1:] == lined[-1:] and math.prod(center.shape[:-1]) == 1:
        return center.reshape(1, -1)
    return np.broadcast_to(center, lined).reshape(shape)
