"""Bits of a format: encode, decode, pack, means by exact sums. Knows no scale that outlives a tensor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsim.codec.means import Sums, mean_of, merge_sums
from qsim.codec.oracle import decode_scalar, encode_scalar

if TYPE_CHECKING:
    from qsim.codec.api import DEFAULT_POLICY, decode, encode
    from qsim.codec.packing import pack, unpack

__all__ = [
    "DEFAULT_POLICY",
    "Sums",
    "decode",
    "decode_scalar",
    "encode",
    "encode_scalar",
    "mean_of",
    "merge_sums",
    "pack",
    "unpack",
]

_LAZY = {  # these import Numba, which takes 0.4 s
    "DEFAULT_POLICY": "qsim.codec.api",
    "decode": "qsim.codec.api",
    "encode": "qsim.codec.api",
    "pack": "qsim.codec.packing",
    "unpack": "qsim.codec.packing",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
