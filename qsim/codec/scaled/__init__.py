"""Scales that need only the tensor in hand: per tensor, per block, MX, NVFP4. Knows no state, no time.

Light to import: the oracle and the descriptors use NumPy and exact fractions, never Numba.
"""

from __future__ import annotations

from qsim.codec.scaled.oracle import dequantize_oracle, quantize_oracle
from qsim.codec.scaled.recipes import (
    SCALE_RECIPE_ALIASES,
    SCALE_RECIPES,
    Block,
    BlockError,
    ExponentRule,
    ExponentSteps,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    ScaleRecipe,
    TwoLevelScale,
    exponent_rule,
    get_scale_recipe,
)
from qsim.codec.scaled.result import BlockCounts, ScaledCodes

__all__ = [
    "SCALE_RECIPES",
    "SCALE_RECIPE_ALIASES",
    "Block",
    "BlockCounts",
    "BlockError",
    "ExponentRule",
    "ExponentSteps",
    "Float32Scale",
    "PowerOfTwoScale",
    "ScaleOrder",
    "ScaleRecipe",
    "ScaledCodes",
    "TwoLevelScale",
    "dequantize_oracle",
    "exponent_rule",
    "get_scale_recipe",
    "quantize_oracle",
]
