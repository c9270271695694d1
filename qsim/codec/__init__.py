"""Bits of a format: encode, decode, pack, means by exact sums. Knows no scale that outlives a tensor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsim.codec.counts import CastCounts
from qsim.codec.means import Sums, mean_of, merge_sums
from qsim.codec.oracle import decode_scalar, encode_scalar

if TYPE_CHECKING:
    from qsim.codec.api import DEFAULT_POLICY, decode, encode, encode_with_counts
    from qsim.codec.hadamard import hadamard_signs, rotate, rotate_back
    from qsim.codec.packing import NibbleOrder, pack, packed_length, unpack
    from qsim.codec.swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "DEFAULT_POLICY",
    "CastCounts",
    "NibbleOrder",
    "Sums",
    "decode",
    "decode_scalar",
    "encode",
    "encode_scalar",
    "encode_with_counts",
    "hadamard_signs",
    "mean_of",
    "merge_sums",
    "pack",
    "packed_length",
    "rotate",
    "rotate_back",
    "swizzle_scales",
    "unpack",
    "unswizzle_scales",
]

_LAZY = {  # these import Numba, which takes 0.4 s
    "DEFAULT_POLICY": "qsim.codec.api",
    "NibbleOrder": "qsim.codec.packing",
    "decode": "qsim.codec.api",
    "encode": "qsim.codec.api",
    "encode_with_counts": "qsim.codec.api",
    "hadamard_signs": "qsim.codec.hadamard",
    "pack": "qsim.codec.packing",
    "packed_length": "qsim.codec.packing",
    "rotate": "qsim.codec.hadamard",
    "rotate_back": "qsim.codec.hadamard",
    "swizzle_scales": "qsim.codec.swizzle",
    "unpack": "qsim.codec.packing",
    "unswizzle_scales": "qsim.codec.swizzle",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
