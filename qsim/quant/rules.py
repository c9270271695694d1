"""The axes on which recipes with memory differ, and the arithmetic of a scale. Knows no state, no window, no merge.

Each axis is an enum; a recipe names one member of each. Sources are named by project and function.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import lru_cache

import numpy as np

from qsim.arrays import F32, FLT_MAX
from qsim.formats import FloatFormat

TORCHAO_EPS = 1e-12
"""torchao's EPS: what its ``amax_to_scale`` takes for a smaller amax."""


class Timing(Enum):
    """Which tensor a scale is derived from."""

    CURRENT = "the tensor in hand"
    DELAYED = "tensors of earlier commits"


class AmaxChoice(Enum):
    """Which entry of the window speaks."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class WindowRule(Enum):
    """Which window the scale that a commit stores follows from.

    Let s(a) be the scale of an amax a, s0 the initial scale, and a0, a1, a2, a3 the amaxes of four commits:

    ===========  ===  =========================================  ==================================================
    rule         H    the scale that begins 0, 1, 2, 3 use       the scale that commits 0, 1, 2, 3 store
    ===========  ===  =========================================  ==================================================
    INCLUDED     1    s0, s(a0), s(a1), s(a2)                    s(a0), s(a1), s(a2), s(a3)
    INCLUDED     2    s0, s(a0), s(a0 a1), s(a1 a2)              s(a0), s(a0 a1), s(a1 a2), s(a2 a3)
    INCLUDED     3    s0, s(a0), s(a0 a1), s(a0 a1 a2)           s(a0), s(a0 a1), s(a0 a1 a2), s(a1 a2 a3)
    EXCLUDED     1    s0, s(a0), s(a1), s(a2)                    s0, s(a0), s(a1), s(a2)
    EXCLUDED     2    s0, s(a0), s(a0 a1), s(a1 a2)              s0, s(a0), s(a0 a1), s(a1 a2)
    EXCLUDED     3    s0, s(a0), s(a0 a1), s(a0 a1 a2)           s0, s(a0), s(a0 a1), s(a0 a1 a2)
    ===========  ===  =========================================  ==================================================

    s(a b) is of the larger one. So the two encode alike; they differ for whoever reads a live state between a commit
    and the next begin: under EXCLUDED it still holds the scale of the codes just made.
    """

    INCLUDED = "the newest amax has entered it"  # TE; TE's JAX DelayedScaleQuantizer.update; torchao's sync of amaxes
    EXCLUDED = "the newest amax has not; begin computes the scale again"  # flax qdq_and_return


class ZeroRule(Enum):
    """What a commit does with an amax of 0. While the window speaks for 0, SKIP and ROLL keep the scale."""

    SKIP = "the window does not move"  # TE's fused kernel_bulk
    ROLL = "a 0 enters the window"  # TE's unfused path, TE's JAX, flax
    CLAMP = "a 0 enters the window; an amax below eps that speaks is taken as eps"  # torchao amax_to_scale


class NonFiniteRule(Enum):
    """What a commit does when NaN or Inf was observed.

    PROPAGATE: fmt.max / Inf is a scale of 0 (descale Inf), and of NaN it is NaN: every decode is NaN until the entry
    leaves the window.

    INVERT: MS-AMP's ``compute_scaling_factor`` keeps the scale for an amax of Inf, but the exponent of fmt.max / Inf
    is -Inf, and for a negative exponent its last line takes 1/scale. So an Inf in the tensor in hand inverts the kept
    scale; one in a window inverts it at each commit that it speaks for, save the one that brought it, which MS-AMP's
    optimizer masks. NaN does what Inf does, as in its casts with ``sync``; without, MS-AMP keeps the scale on a NaN.
    """

    LATCH = "Inf or NaN enters the window; the scale is kept while it is there"  # TE, TE's JAX, flax
    SKIP = "the commit changes nothing"
    FINITE = "the largest finite magnitude counts"
    PROPAGATE = "Inf or NaN enters the window; the scale is 0 or NaN while it is there"  # torchao amax_to_scale
    INVERT = "Inf or NaN enters the window; the scale becomes its reciprocal"  # MS-AMP compute_scaling_factor


class MergeRule(Enum):
    """What several observations of one unit, and the state, make of the amax that enters the window.

    MAX is correct: the others are rules that real systems have, or had by accident. SUM and MEAN add in float32, in the
    order given; LAST is the last one given. CLIP and DECAY merge by max, and the commit then applies the recipe's
    ``amax_bound`` or ``decay``: the entry is min(a, bound), or max(a, RN(decay * newest entry of the window)). An Inf
    is clipped like any number; a NaN stays.
    """

    MAX = "max"  # TE, flax (its fp32_max_grad type)
    LAST = "last"  # torchao's amax buffers, TE's JAX (set slot 0), MS-AMP (set amax[0])
    SUM = "sum"  # gradients' accumulation reaching quantizer state: flax 3623, praxis 40, keras 19534
    MEAN = "mean"  # an average over ranks or microbatches
    CLIP = "clip"  # gradient clipping reaching quantizer state: MaxText 672
    DECAY = "decay"  # a decaying maximum


class InitialScale(Enum):
    """Where the scale of an owner's first operations comes from.

    A begin writes no state, so each operation of the first unit takes the scale of its own tensor, as in torchao where
    the sync of amaxes is what ends the initialisation. WARM_UP counts commits; MS-AMP counts anew after NaN or Inf.
    """

    GIVEN = "the recipe's initial_scale"
    FROM_DATA = "the tensor in hand, at epoch 0"  # torchao _maybe_initialize_amaxes_scales_for_float8_cast
    WARM_UP = "the tensor in hand, until the window is full"  # MS-AMP is_in_time_scaling


class ScaleGrid(Enum):
    """Which numbers a scale may be."""

    FLOAT32 = "every float32 number"
    POWER_OF_TWO = "powers of two, rounded down"  # MS-AMP compute_scaling_factor


class Fallback(Enum):
    """The scale of a tensor in hand that says nothing: its amax is 0, or NaN or Inf was in it."""

    ONE = "1"
    LIVE = "the scale of the last commit"  # MS-AMP


@lru_cache(maxsize=256)
def numerator_of(fmt: FloatFormat, margin: int) -> np.float32:
    """fmt.max * 2^-margin, exact: what a scale is a quotient of."""
    return np.float32(math.ldexp(fmt.max, -margin))


def scale_from_amax(
    amax: F32,
    *,
    otherwise: F32,
    fmt: FloatFormat,
    margin: int,
    grid: ScaleGrid = ScaleGrid.FLOAT32,
    nonfinite_rule: NonFiniteRule = NonFiniteRule.LATCH,
    at_least: float = 0.0,
) -> F32:
    """RN(fmt.max * 2^-margin / amax), at most FLT_MAX; ``otherwise`` where amax is 0, Inf or NaN.

    float32 [lead]. Source: Transformer Engine's delayed-scaling update. (flax, TE's JAX, torchao and MS-AMP have no
    FLT_MAX: there an amax below fmt.max / FLT_MAX gives Inf.) at_least: a smaller amax is taken as this.
    """
    numerator = numerator_of(fmt, margin)
    if at_least:
        amax = np.maximum(amax, np.float32(at_least))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        scale = np.minimum(numerator / amax, FLT_MAX)
        usable = (amax > 0) & np.isfinite(amax)
        if grid is ScaleGrid.POWER_OF_TWO:
            scale = floor_power_of_two(scale)
        if nonfinite_rule is NonFiniteRule.PROPAGATE:
            otherwise = np.where(np.isnan(amax), np.float32(np.nan), np.where(np.isinf(amax), np.float32(0), otherwise))
        elif nonfinite_rule is NonFiniteRule.INVERT:
            otherwise = np.where(np.isfinite(amax), otherwise, np.minimum(np.float32(1) / otherwise, FLT_MAX))
    return np.where(usable, scale, otherwise).astype(np.float32)


def floor_power_of_two(x: F32) -> F32:
    """2^floor(log2(x)) of finite x > 0, by exponent bits: exact, for subnormal numbers too. 0 stays 0.

    The floor of a rounded quotient RN(m / a) is that of the exact one. m / a is below 2^k only if a is at least one
    float32 step above m / 2^k (a number, for m has few bits), a step that is 2^-24 of a or more; then m / a falls
    short of 2^k by about as much, which is more than the half step of 2^-25 below 2^k that would round up to it.
    (A log2 in float32, as in MS-AMP, may round up to k there: one power of two more, at the edge.)
    """
    _, exponent = np.frexp(x)  # x = f * 2^exponent, 1/2 <= f < 1
    return np.where(x > 0, np.ldexp(np.float32(1), exponent - 1), x).astype(np.float32)


def descale_of(scale: F32) -> F32:
    """RN(1 / scale): the one place where a descale is computed. Inf for a scale of 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.float32(1) / scale, np.float32)
