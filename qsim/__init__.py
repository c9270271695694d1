"""qsim: bit-exact low-precision numerics and the life of stateful quantizers. The doors, opened lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qsim.backends import get_backend
    from qsim.codec import decode, encode, pack, unpack
    from qsim.formats import FORMATS, POLICIES, get_format, get_policy
    from qsim.gemm import matmul
    from qsim.quant import (
        OpId,
        begin_logical_quantization,
        commit_quant_observation,
        make_recipe,
        observe_for_future_state,
        quantize_with_snapshot,
    )

_DOORS = {
    "FORMATS": "qsim.formats",
    "POLICIES": "qsim.formats",
    "OpId": "qsim.quant",
    "begin_logical_quantization": "qsim.quant",
    "commit_quant_observation": "qsim.quant",
    "decode": "qsim.codec",
    "encode": "qsim.codec",
    "get_backend": "qsim.backends",
    "get_format": "qsim.formats",
    "get_policy": "qsim.formats",
    "make_recipe": "qsim.quant",
    "matmul": "qsim.gemm",
    "observe_for_future_state": "qsim.quant",
    "pack": "qsim.codec",
    "quantize_with_snapshot": "qsim.quant",
    "unpack": "qsim.codec",
}

__all__ = [
    "FORMATS",
    "POLICIES",
    "OpId",
    "__version__",
    "begin_logical_quantization",
    "commit_quant_observation",
    "decode",
    "encode",
    "get_backend",
    "get_format",
    "get_policy",
    "make_recipe",
    "matmul",
    "observe_for_future_state",
    "pack",
    "quantize_with_snapshot",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
