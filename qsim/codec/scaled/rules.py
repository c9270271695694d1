"""Scale recipes as the numbers that kernels take. Knows no threads and no layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, FLT_MAX, I64, U32, frozen
from qsim.codec.scaled.recipes import (
    BlockError,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    ScaleRecipe,
    TwoLevelScale,
    exponent_rule,
)
from qsim.codec.scaled.result import ScaledCodes
from qsim.codec.scaled.scale_kernels import EXACT_RULE
from qsim.codec.tables import decode_table, encoder_table
from qsim.errors import FormatError, UsageError
from qsim.formats import E4M3FN, E8M0FNU, POLICIES, CastPolicy, FloatFormat

if TYPE_CHECKING:
    from cuda_kernels.blocks import BlockRecipe

_NUMBERS = {ScaleOrder.EXACT: 2, ScaleOrder.TE: 3, ScaleOrder.TORCHAO: 4, ScaleOrder.FOUR_OVER_SIX: 5}
_ONE, _SIXTH = np.float32(1), np.float32(1) / np.float32(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A scale rule as ``scale_kernels`` takes it."""

    number: int
    floats: F32
    steps: I64

    @property
    def exact(self) -> bool:
        """Whether elements are divided in float64."""
        return self.number == EXACT_RULE

    @property
    def two_level(self) -> bool:
        """Whether an Inf makes its whole block NaN."""
        return self.number in _NUMBERS.values()


def rule_of(recipe: ScaleRecipe, g: np.float32) -> Rule:
    """The rule of a recipe; g: the amax that a two-level scale is relative to."""
    floats, steps = np.zeros(9, np.float32), np.zeros(3, np.int64)
    match recipe.scale:
        case Float32Scale():
            number, floats[0] = 0, recipe.fmt.max
        case PowerOfTwoScale(rule=rule):
            number, steps[:2] = 1, exponent_rule(recipe.fmt, rule)
        case TwoLevelScale(order=order, scale_max=scale_max, error=error) as scale:
            full = np.float32(scale.full_range)
            with np.errstate(divide="ignore", over="ignore", under="ignore"):
                s_enc = np.minimum(full / g, FLT_MAX) if g > 0 else _ONE
                s_enc = s_enc if s_enc > 0 else _ONE
                pt = g / full
                floats[:] = (recipe.fmt.max, s_enc, _ONE / s_enc, s_enc * _SIXTH, pt, full, g, _ONE / pt, scale_max)
            number, steps[2] = _NUMBERS[order], error is BlockError.ABSOLUTE
    return Rule(number=number, floats=floats, steps=steps)


def device_numbers(recipe: ScaleRecipe) -> BlockRecipe:
    """A recipe as the kernels of a device take it: they know the amax of the matrix, and its floats, themselves."""
    from cuda_kernels.blocks import BlockRecipe  # casts on the CPU need none of it

    rule = rule_of(recipe, np.float32(0))
    carry, offset, absolute = (int(step) for step in rule.steps)
    two = recipe.scale if isinstance(recipe.scale, TwoLevelScale) else None
    return BlockRecipe(
        rows=recipe.block.rows,
        cols=recipe.block.cols,
        rule=rule.number,
        carry=carry,
        offset=offset,
        absolute=absolute,
        fmt_max=recipe.fmt.max,
        scale_max=two.scale_max if two else 0,
        full_range=two.full_range if two else 0,
    )


def check_cast(recipe: ScaleRecipe, *, packed: bool, tensor_amax: np.float32 | None) -> None:
    """FormatError: packed codes of another width than four bits; UsageError: a tensor_amax that is no magnitude."""
    if packed and recipe.fmt.codes_per_byte != 2:
        raise FormatError(f"packed=True needs 4-bit codes; {recipe.name} has {recipe.fmt.bits} bits a code")
    if tensor_amax is not None and not (np.isfinite(tensor_amax) and tensor_amax >= 0):
        raise UsageError(f"tensor_amax {tensor_amax} is no finite magnitude; leave it out, or pass the largest |x|")


@functools.cache
def constants_of(fmt: FloatFormat, policy: CastPolicy) -> U32:
    """Encoder constants of the elements and of the scales of a two-level recipe."""
    return frozen(np.stack([encoder_table(fmt, policy), encoder_table(E4M3FN, POLICIES["ocp"])]))


def decode_operands(scaled: ScaledCodes, recipe: ScaleRecipe) -> tuple[F32, np.float32, np.float32, bool]:
    """a, b, c, exact of ``decode_blocks``."""
    scales = np.ascontiguousarray(scaled.scales)
    match recipe.scale:
        case Float32Scale():
            return np.divide(_ONE, scales, dtype=np.float32), _ONE, _ONE, False
        case PowerOfTwoScale():
            return decode_table(E8M0FNU)[scales], _ONE, _ONE, False
        case TwoLevelScale(order=order) as scale:
            assert scaled.tensor_scale is not None, "a two-level cast keeps its tensor scale"
            g, d8 = np.float32(scaled.tensor_scale), decode_table(E4M3FN)[scales]
            rule = rule_of(recipe, g)
            if order is ScaleOrder.TE:
                return d8, rule.floats[2], _ONE, False
            if order is ScaleOrder.TORCHAO:
                return np.asarray(rule.floats[4] * d8, np.float32), _ONE, _ONE, False
            return d8, g, np.float32(scale.full_range), order is ScaleOrder.EXACT
