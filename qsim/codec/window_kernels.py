"""Numba kernel of one commit to an amax window: entry, window, scale and descale of every replica. Knows no owner.

The rules that it has are words; ``qsim.quant.rolling`` says which. Every float32 operation is rounded on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.codec.numba_kernels import INF, QUIET_NAN, is_finite

if TYPE_CHECKING:
    from qsim.arrays import F32, I64

ZERO_SKIPS = 1
"""An entry of 0 moves neither window nor scale."""

NONFINITE_SKIPS = 2
"""Nor does an entry that is NaN or Inf."""

FINITE_COUNTS = 4
"""The entry is the largest finite magnitude, whatever was beside it."""

SPEAKS_AS_ITSELF = 8
"""An Inf that speaks for the window makes a scale of 0, and a NaN one of NaN; else both keep the scale."""

NEWEST_SPEAKS = 16
"""The newest entry speaks for the window; else the largest, and NaN before it."""

_F4, _I8 = numba.float32, numba.int64
_LARGEST = np.finfo(np.float32).max
_NOTHING, _ONE = np.float32(0), np.float32(1)


@helper
def _spoken(window: Any, rules: Any) -> Any:
    """The amax that speaks for a window."""
    top = window[window.size - 1]
    if rules & NEWEST_SPEAKS == 0:
        for i in range(window.size):
            if not window[i] <= top:  # larger, or NaN; once top is NaN it stays
                top = window[i] if top == top else top
    return top


@helper
def _scale_of(amax: Any, kept: Any, numerator: Any, least: Any, rules: Any) -> Any:
    """min(RN(numerator / amax), FLT_MAX) of a positive finite amax, ``kept`` or as the rule says of any other."""
    if amax < least:
        amax = least
    if is_finite(amax):
        return min(np.float32(numerator / amax), _LARGEST) if amax > _NOTHING else kept
    if rules & SPEAKS_AS_ITSELF == 0:
        return kept
    return _NOTHING if amax == amax else np.uint32(QUIET_NAN).view(np.float32)


@helper
def _entry(amax: Any, nan_count: Any, inf_count: Any, rules: Any) -> Any:
    """An observed amax with the NaN or Inf that was beside it, unless the rule leaves them out."""
    if rules & FINITE_COUNTS == 0:
        if nan_count > 0:
            return np.uint32(QUIET_NAN).view(np.float32)
        if inf_count > 0:
            return np.uint32(INF).view(np.float32)
    return amax


@kernel(
    read(_F4, 1), read(_F4, 1), read(_I8, 1), read(_I8, 1), _F4, _F4, _I8, write(_F4, 1), write(_F4, 1),
)  # fmt: skip
def scale_in_hand(
    kept: F32, amax: F32, nan_count: I64, inf_count: I64, numerator: Any, least: Any, rules: Any,
    scales: F32, descales: F32,
) -> None:  # fmt: skip
    """Scale and descale [R] of an observed tensor itself; ``kept`` [R] where it says nothing. Else as ``roll``."""
    for r in range(kept.size):
        entry = _entry(amax[r], nan_count[r], inf_count[r], rules)
        scales[r] = _scale_of(entry, kept[r], numerator, least, rules)
        descales[r] = np.float32(_ONE / scales[r])


@kernel(
    read(_F4, 2), read(_F4, 1), read(_F4, 1), read(_I8, 1), read(_I8, 1), _F4, _F4, _I8,
    write(_F4, 2), write(_F4, 1), write(_F4, 1),
)  # fmt: skip
def roll(
    history: F32, scale: F32, amax: F32, nan_count: I64, inf_count: I64, numerator: Any, least: Any, rules: Any,
    rolled: F32, scales: F32, descales: F32,
) -> None:  # fmt: skip
    """The window, scale and descale after a commit.

    history, rolled [R, window], newest last; the others [R]. amax is finite, and the counts say what was beside it.
    numerator: of the scale of an amax; least: a smaller amax that speaks is taken as this.
    """
    replicas, last = history.shape[0], history.shape[1] - 1
    for r in range(replicas):
        entry = _entry(amax[r], nan_count[r], inf_count[r], rules)
        still = (rules & ZERO_SKIPS != 0 and entry == _NOTHING) or (
            rules & NONFINITE_SKIPS != 0 and not is_finite(entry)
        )
        if still:
            rolled[r, :] = history[r, :]
            scales[r] = scale[r]
        else:
            rolled[r, :last] = history[r, 1:]
            rolled[r, last] = entry
            scales[r] = _scale_of(_spoken(rolled[r], rules), scale[r], numerator, least, rules)
        descales[r] = np.float32(_ONE / scales[r])
