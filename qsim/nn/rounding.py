"""Float32 numbers rounded to a shorter type and kept as float32. Knows no scale and no cast state.

FP8 and FP4 are the codec's. Here are the types of autocast, where nothing but the mantissa and the range matters.
"""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32
from qsim.errors import UsageError

DROPPED = {"bfloat16": 16, "tf32": 13}
"""Types with the exponent of float32 -> how many mantissa bits they lack."""

ROUNDED_TO = ("float32", "float16", *DROPPED)

_ONE = np.uint32(1)
_FIELD = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)
_NAN = np.float32(np.nan)
_TO_INF = np.float32(2.0**112)  # takes 2^16 to Inf, and 65504, the largest float16, to a number
_FROM_INF = np.float32(2.0**-112)


def _power(exponent: int) -> np.uint32:
    """The bits of 2^exponent."""
    return np.uint32((127 + exponent) << 23)


@np.errstate(all="ignore")
def round_to(x: F32, name: str) -> F32:
    """x rounded to the type: nearest, ties to even, Inf beyond the range, subnormals kept; NaN is 7fc00000.

    "float32" returns x itself. "tf32" is 10 explicit mantissa bits, ties to even; the instruction cvt.rna.tf32 of
    NVIDIA devices takes ties away from zero. UsageError: an unknown type, an x that is not float32.
    """
    if name == "float32":
        return x
    if name not in ROUNDED_TO or x.dtype != np.float32:
        raise UsageError(f"round_to {name!r} of {x.dtype}; it takes float32 to one of {', '.join(ROUNDED_TO)}")
    rounded = _to_half(x) if name == "float16" else _without(x, DROPPED[name])
    rounded[x != x] = _NAN
    return rounded


def _to_half(x: F32) -> F32:
    """To float16, four times as fast as numpy's conversion there and back.

    Adding 2^13 times a number's own binade, but at least that of 2^-14, where the subnormals begin, leaves float32 no
    bit below the last one of float16: that addition rounds, and the subtraction is exact. Numbers beyond the range get
    the anchor of its top binade; they need only stay beyond it.
    """
    magnitude = abs(x)
    field = magnitude.view(np.uint32) & _FIELD
    np.clip(field, _power(-14), _power(15), out=field)
    field += np.uint32(13 << 23)
    anchor = field.view(np.float32)
    magnitude += anchor
    magnitude -= anchor
    magnitude *= _TO_INF
    magnitude *= _FROM_INF
    words = magnitude.view(np.uint32)
    words |= x.view(np.uint32) & _SIGN
    return magnitude


def _without(x: F32, dropped: int) -> F32:
    """Without the low bits. A carry goes into the exponent, and from the largest number to Inf; NaN is noise."""
    words = x.view(np.uint32)
    kept = words >> np.uint32(dropped)
    kept &= _ONE
    kept += np.uint32((1 << (dropped - 1)) - 1)
    kept += words
    kept &= np.uint32(0xFFFFFFFF >> dropped << dropped)
    return kept.view(np.float32)
