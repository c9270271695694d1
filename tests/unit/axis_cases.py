"""Streams of amaxes, what observes them, and a recipe in exact fractions: no rule of qsim is called here."""

import math
from fractions import Fraction

import numpy as np

from qsim.arrays import FLT_MAX
from qsim.quant import (
    AmaxChoice,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    OpId,
    QuantObservation,
    ScaleGrid,
    StateKey,
    WindowRule,
    ZeroRule,
    begin_logical_quantization,
    commit_quant_observation,
)

NAN, INF = float("nan"), float("inf")
OWNER = StateKey(0, 0, 0)
TOP = float(FLT_MAX)

STREAM = (4, 0, 0, 2, INF, 8, 64, NAN, 3, 3)
"""Zeros, an Inf, a spike (64) and a NaN; the finite elements of the tensors with Inf or NaN have amax 2."""


def rn(x):
    """A fraction (or a float) as the nearest float32, ties to even, Inf beyond FLT_MAX."""
    if isinstance(x, float) and not math.isfinite(x):
        return x
    x = Fraction(x)
    if x == 0:
        return 0.0
    rounded = round(x / (unit := Fraction(2) ** max(floor_log2(x) - 23, -149))) * unit
    return float(rounded) if rounded <= Fraction(TOP) else INF


def floor_log2(x):
    """The largest k with 2^k <= x."""
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if Fraction(2) ** k <= x else k - 1


def inverse(x):
    """RN(1/x), with 1/0 = Inf, 1/Inf = 0, and NaN."""
    if x == 0 or not math.isfinite(x):
        return {0.0: INF, INF: 0.0}.get(x, NAN)
    return rn(1 / Fraction(x))


def finite_part(amax):
    return amax if math.isfinite(amax) else 2.0


def seen(op, *amaxes):
    """What tensors with these amaxes, one a replica, say: NaN or Inf is one element beside finite ones of amax 2."""
    values = np.array(amaxes, np.float32)
    return QuantObservation(
        op=op,
        amax=np.array([finite_part(float(v)) for v in values], np.float32),
        mean=None,
        count=np.full(len(values), 8),
        nan_count=np.isnan(values).astype(np.int64),
        inf_count=np.isinf(values).astype(np.int64),
    )


def life(recipe, streams):
    """(scale and descale that begin froze, that commit stored) for each step of some streams, one a replica."""
    live, out = recipe.initial(OWNER, (len(streams),)), []
    for step, amaxes in enumerate(zip(*streams, strict=True)):
        op = OpId(step)
        observation = seen(op, *amaxes)
        early = observation if recipe.needs_observation(live) else None
        used = begin_logical_quantization(live, op=op, recipe=recipe, observation=early)
        live = commit_quant_observation(live, recipe.merge([observation]), recipe=recipe)
        out.append(((used.scale, used.descale), (live.scale, live.descale)))
    return out


class Twin:
    """One replica of DelayedScaling, step by step in Python numbers."""

    def __init__(self, recipe):
        self.recipe, self.scale = recipe, rn(recipe.initial_scale)
        self.history, self.epoch = [0.0] * recipe.window, 0

    def scale_of(self, amax, kept):
        r = self.recipe
        if r.zero_rule is ZeroRule.CLAMP and amax < rn(r.eps):
            amax = rn(r.eps)
        if not math.isfinite(amax):
            if r.nonfinite_rule is NonFiniteRule.PROPAGATE:
                return NAN if math.isnan(amax) else 0.0
            return min(inverse(kept), TOP) if r.nonfinite_rule is NonFiniteRule.INVERT else kept
        if amax == 0:
            return kept
        scale = min(rn(Fraction(r.fmt.max) / 2**r.margin / Fraction(amax)), TOP)
        return scale if r.grid is ScaleGrid.FLOAT32 else 2.0 ** floor_log2(Fraction(scale))

    def speaks(self):
        if self.recipe.choice is AmaxChoice.MOST_RECENT:
            return self.history[-1]
        return NAN if any(math.isnan(a) for a in self.history) else max(self.history)

    def step(self, amax):
        """(scale used by begin, scale stored by commit) of the next operation."""
        r, kept = self.recipe, self.scale
        used = kept
        if r.window_rule is WindowRule.EXCLUDED:
            used = self.scale_of(self.speaks(), kept)
        first = {InitialScale.GIVEN: 0, InitialScale.FROM_DATA: 1, InitialScale.WARM_UP: r.window}[r.initial_rule]
        if self.epoch < first:
            used = self.scale_of(finite_part(amax) if r.nonfinite_rule is NonFiniteRule.FINITE else amax, used)
        bad = self.enter(amax)
        if r.window_rule is WindowRule.EXCLUDED or bad is None:
            self.scale = used
        else:
            self.scale = self.scale_of(self.speaks(), used)
            if bad and r.nonfinite_rule is NonFiniteRule.INVERT:
                self.scale = used
        self.epoch += 1
        return used, self.scale

    def enter(self, amax):
        """Roll the window: whether what entered is bad; None where nothing did."""
        r, finite = self.recipe, finite_part(amax)
        if r.merge_rule is MergeRule.CLIP:
            amax, finite = (a if math.isnan(a) else min(a, r.amax_bound) for a in (amax, finite))
        if r.merge_rule is MergeRule.DECAY:
            held = self.history[-1]
            held = rn(Fraction(rn(r.decay)) * Fraction(held)) if math.isfinite(held) else held
            amax, finite = (NAN if math.isnan(a) or math.isnan(held) else max(a, held) for a in (amax, finite))
        bad = not math.isfinite(amax)
        if bad and r.nonfinite_rule is NonFiniteRule.SKIP:
            return None
        if r.nonfinite_rule is NonFiniteRule.FINITE:
            amax = finite
        if amax == 0 and r.zero_rule is ZeroRule.SKIP:
            return None
        self.history = [*self.history[1:], amax]
        return bad
