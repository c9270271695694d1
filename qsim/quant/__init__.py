"""Stateful quantizers: owners, state, snapshots, recipes with memory, four operations. Knows no schedule."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from qsim.errors import StudyError
from qsim.formats import FloatFormat
from qsim.quant.centred import CenterAxis, CenterSource, CentredDelayedScaling, ObserveMode, ScaleSource
from qsim.quant.identity import ANY, OpId, Site, StateKey, TensorRole
from qsim.quant.merging import merge_observations
from qsim.quant.operations import (
    begin_logical_quantization,
    commit_quant_observation,
    decode_for_consumer,
    observation_of_cast,
    observe_for_future_state,
    quantize_and_decode,
    quantize_with_snapshot,
)
from qsim.quant.recipes import CurrentScaling, DelayedScaling, Recipe
from qsim.quant.rules import (
    AmaxChoice,
    Fallback,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    ScaleGrid,
    Timing,
    WindowRule,
    ZeroRule,
    descale_of,
    scale_from_amax,
)
from qsim.quant.state import Layout, QuantizedTensor, QuantObservation, QuantSnapshot, QuantState

__all__ = [
    "ANY",
    "RECIPES",
    "AmaxChoice",
    "CenterAxis",
    "CenterSource",
    "CentredDelayedScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Fallback",
    "InitialScale",
    "Layout",
    "MergeRule",
    "NonFiniteRule",
    "ObserveMode",
    "OpId",
    "QuantObservation",
    "QuantSnapshot",
    "QuantState",
    "QuantizedTensor",
    "Recipe",
    "ScaleGrid",
    "ScaleSource",
    "Site",
    "StateKey",
    "TensorRole",
    "Timing",
    "WindowRule",
    "ZeroRule",
    "begin_logical_quantization",
    "commit_quant_observation",
    "decode_for_consumer",
    "descale_of",
    "make_recipe",
    "merge_observations",
    "observation_of_cast",
    "observe_for_future_state",
    "quantize_and_decode",
    "quantize_with_snapshot",
    "scale_from_amax",
]

_BY_NAME: dict[str, Callable[..., Recipe]] = {
    cls.name: cls for cls in (DelayedScaling, CentredDelayedScaling, CurrentScaling)
}
RECIPES: Mapping[str, Callable[..., Recipe]] = MappingProxyType(_BY_NAME)
"""Every recipe with memory by its name."""


def make_recipe(name: str, *, fmt: FloatFormat, window: int = 1, **options: object) -> Recipe:
    """A recipe by its registry name; StudyError for an unknown one."""
    if name not in RECIPES:
        raise StudyError(f'recipe "{name}" is unknown; known: {", ".join(RECIPES)}')
    return RECIPES[name](fmt=fmt, window=window, **options)
