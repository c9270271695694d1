"""A quantized tensor from codes that are there already: a checkpoint, the FP8 output of a product. Knows no cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, U8, frozen
from qsim.checks import whole_number
from qsim.codec.inputs import as_array
from qsim.codec.scaled import Float32Scale, ScaleRecipe, TwoLevelScale, get_scale_recipe
from qsim.errors import FormatError, UsageError
from qsim.quant.plain import lined_shape
from qsim.quant.state import Layout, QuantizedTensor

if TYPE_CHECKING:
    import numpy.typing as npt


def from_codes(
    codes: npt.ArrayLike,
    recipe: str | ScaleRecipe,
    *,
    scales: npt.ArrayLike = 1.0,
    axis: int = -1,
    tensor_scale: float | None = None,
) -> QuantizedTensor:
    """The tensor that codes and their scales stand for: what ``quantize`` would have returned, without the cast.

    codes: uint8, one a byte (``qsim.unpack`` first). recipe: as for ``quantize``; a format's name for one scale.
    scales: float32 that multiplied before encode (a static or delayed scale, the ``scale_d`` of a product), or for MX
    and NVFP4 the uint8 codes of block scales; one number where the recipe has one, else one a block, in any shape with
    that many elements, blocks along the axis last. tensor_scale: the amax that a two-level recipe is relative to.
    FormatError: codes or scales of another dtype or outside their format; UsageError: another number of scales, a
    tensor_scale that is missing or has no meaning, an axis that does not exist.
    """
    recipe, array = get_scale_recipe(recipe), as_array(codes, "codes")
    if array.dtype != np.uint8 or array.ndim == 0:
        raise FormatError(f"codes are {array.dtype} of shape {array.shape}; pass uint8 with an axis, one code a byte")
    if array.size:
        recipe.fmt.check_code(int(array.max()))
    axis = whole_number("axis", axis)
    if not -array.ndim <= axis < array.ndim:
        raise UsageError(f"axis {axis} does not exist in codes of shape {array.shape}")
    axis %= array.ndim
    two_level = isinstance(recipe.scale, TwoLevelScale)
    if two_level != (tensor_scale is not None):
        raise UsageError(f"{recipe.name} {'needs its' if two_level else 'has no'} tensor_scale")
    lined = lined_shape(array.shape, axis)
    matrix = (int(np.prod(lined[:-1])), lined[-1])
    grid = recipe.block.grid(matrix)
    own = _scales(scales, recipe, grid)
    shaped = own.reshape(*lined[:-1], grid[1]) if recipe.block.rows == 1 else own.reshape(grid)
    return QuantizedTensor(
        codes=frozen(np.array(array)),
        scales=frozen(shaped.reshape(()) if tuple(recipe.block) == (0, 0) and own.size == 1 else shaped),
        layout=Layout.ONE_PER_BYTE,
        shape=array.shape,
        snapshot=None,
        amax=frozen(np.asarray(np.nan, np.float32)),
        counts=None,
        recipe=recipe,
        axis=axis,
        tensor_scale=None if tensor_scale is None else frozen(np.asarray(tensor_scale, np.float32)),
    )


def _scales(scales: npt.ArrayLike, recipe: ScaleRecipe, grid: tuple[int, int]) -> F32 | U8:
    """One scale a block, in C order."""
    array = as_array(scales, "scales")
    if isinstance(recipe.scale, Float32Scale):
        if array.dtype.kind not in "fiu":
            raise FormatError(f"scales of dtype {array.dtype}; {recipe.name} takes float32")
        array = array.astype(np.float32)
        if not (np.isfinite(array) & (array > 0)).all():
            raise FormatError(f"scales of {recipe.name} must be positive and finite; they multiply before encode")
    elif array.dtype != np.uint8:
        raise FormatError(f"scales of dtype {array.dtype}; {recipe.name} takes the uint8 codes of its block scales")
    count = grid[0] * grid[1]
    if array.size not in (1, count) or (array.size == 1 != count and array.ndim):
        raise UsageError(f"{array.size} scales for {grid[0]} x {grid[1]} blocks of {recipe.name}; pass one a block")
    return np.array(np.broadcast_to(array.reshape(-1), (count,)))
