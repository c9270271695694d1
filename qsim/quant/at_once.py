"""Steps of a commit by one kernel each, in place of a dozen of NumPy's. Knows no owner, no epoch and no snapshot.

``Recipe._roll_by_masks``, ``Recipe._in_hand``, ``mean_of`` and ``merge_sums`` are the definitions. These are their fast
twins, equal bit for bit.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F32
from qsim.codec.means import Sums, check_count, merge_sums
from qsim.quant.rules import (
    AmaxChoice,
    InitialScale,
    NonFiniteRule,
    ScaleGrid,
    WindowRule,
    ZeroRule,
    numerator_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsim.quant.recipes import Recipe
    from qsim.quant.state import QuantObservation, QuantState

_NO_LEAST = np.float32(0)


@cache
def _window_kernels() -> Any:
    """The module of the kernel; imported late, as Numba takes 0.4 s."""
    from qsim.codec import window_kernels

    return window_kernels


@cache
def _sums_kernels() -> Any:
    from qsim.codec import sums_kernels

    return sums_kernels


def mean_at_once(sums: Sums) -> F32:
    """``mean_of(sums)``."""
    mean = np.empty(sums.total.shape, np.float32)
    total, exponent, count = sums.total.ravel(), sums.exponent.ravel(), sums.count.ravel()
    _sums_kernels().sums_mean(total, exponent, count, mean.reshape(-1))
    return mean


def merge_at_once(parts: Sequence[Sums]) -> Sums:
    """``merge_sums(parts)``, of one part or more."""
    if len({part.total.shape for part in parts}) != 1:
        return merge_sums(parts)  # which says what is wrong
    count, exponent = reduce(np.add, (part.count for part in parts)), reduce(np.maximum, (p.exponent for p in parts))
    check_count(int(count.max(initial=0)))
    total, common = np.zeros(count.shape, np.int64), exponent.ravel()
    for part in parts:
        _sums_kernels().sums_merge(part.total.ravel(), part.exponent.ravel(), common, total.reshape(-1))
    return Sums(total=total, exponent=np.asarray(exponent), count=np.asarray(count))


def scale_at_once(
    recipe: Recipe, seen: QuantObservation, *, otherwise: F32, finite_counts: bool
) -> tuple[F32, F32] | None:
    """Scale and descale of the observed tensor itself, as ``Recipe._in_hand`` has them; None where no kernel serves.

    finite_counts: the largest finite magnitude counts, whatever was beside it.
    """
    amax = seen.amax
    if not (
        recipe.grid is ScaleGrid.FLOAT32
        and recipe.nonfinite_rule is not NonFiniteRule.INVERT
        and seen.written is None
        and otherwise.shape == amax.shape == seen.nan_count.shape == seen.inf_count.shape
    ):
        return None
    scales, descales = np.empty(amax.shape, np.float32), np.empty(amax.shape, np.float32)
    words, rules = _window_kernels(), _words(recipe)
    words.scale_in_hand(
        otherwise.ravel(),
        amax.ravel(),
        seen.nan_count.ravel(),
        seen.inf_count.ravel(),
        numerator_of(recipe.fmt_of(seen.op), recipe.margin),
        np.float32(recipe.eps) if recipe.zero_rule is ZeroRule.CLAMP else _NO_LEAST,
        rules | words.FINITE_COUNTS if finite_counts else rules & ~words.FINITE_COUNTS,
        scales.reshape(-1),
        descales.reshape(-1),
    )
    return scales, descales


def roll_at_once(recipe: Recipe, live: QuantState, seen: QuantObservation) -> tuple[F32, F32, F32] | None:
    """Window, scale and descale after a commit, as ``_roll_by_masks`` has them; None where no kernel has the rules."""
    history, scale, amax = live.amax_history, live.scale, seen.amax
    fits = history.shape[:-1] == scale.shape == amax.shape == seen.nan_count.shape == seen.inf_count.shape
    if not (fits and _serves(recipe) and seen.written is None):
        return None
    rolled = np.empty(history.shape, np.float32)
    scales, descales = np.empty(scale.shape, np.float32), np.empty(scale.shape, np.float32)
    windows = -1, history.shape[-1]
    _window_kernels().roll(
        np.ascontiguousarray(history).reshape(windows),
        scale.ravel(),
        amax.ravel(),
        seen.nan_count.ravel(),
        seen.inf_count.ravel(),
        numerator_of(recipe.fmt_of(seen.op), recipe.margin),
        np.float32(recipe.eps) if recipe.zero_rule is ZeroRule.CLAMP else _NO_LEAST,
        _words(recipe),
        rolled.reshape(windows),
        scales.reshape(-1),
        descales.reshape(-1),
    )
    return rolled, scales, descales


def _serves(recipe: Recipe) -> bool:
    """True where the kernel has the rules."""
    return (
        recipe.window_rule is WindowRule.INCLUDED
        and recipe.initial_rule is InitialScale.GIVEN
        and recipe.grid is ScaleGrid.FLOAT32
        and recipe.nonfinite_rule is not NonFiniteRule.INVERT
        and recipe.amax_bound is None
        and recipe.decay is None
    )


def _words(recipe: Recipe) -> int:
    """The rules as the kernel reads them."""
    words = _window_kernels()
    rules: int = words.ZERO_SKIPS if recipe.zero_rule is ZeroRule.SKIP else 0
    if recipe.choice is AmaxChoice.MOST_RECENT:
        rules |= words.NEWEST_SPEAKS
    match recipe.nonfinite_rule:
        case NonFiniteRule.LATCH:
            pass
        case NonFiniteRule.SKIP:
            rules |= words.NONFINITE_SKIPS
        case NonFiniteRule.FINITE:
            rules |= words.FINITE_COUNTS
        case NonFiniteRule.PROPAGATE:
            rules |= words.SPEAKS_AS_ITSELF
        case NonFiniteRule.INVERT:
            raise AssertionError("INVERT is a rule that the kernel does not have")
    return rules
