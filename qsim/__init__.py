"""qsim: bit-exact low-precision numerics and the life of stateful quantizers. The doors, opened lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qsim.backends import get_backend
    from qsim.codec import (
        decode,
        encode,
        encode_scalar,
        encode_with_counts,
        hadamard_signs,
        pack,
        swizzle_scales,
        unpack,
        unswizzle_scales,
    )
    from qsim.codec.scaled import SCALE_RECIPES, get_scale_recipe
    from qsim.formats import FORMATS, POLICIES, get_format, get_policy
    from qsim.gemm import Epilogue, matmul
    from qsim.philox import RandomStream
    from qsim.quant import (
        OpId,
        begin_logical_quantization,
        commit_quant_observation,
        make_recipe,
        observe_for_future_state,
        quantize_with_snapshot,
    )
    from qsim.quant.assembled import from_codes
    from qsim.quant.plain import dequantize, quantize
    from qsim.quant.products import GemmResult, scaled_gemm, scaled_gemm_with_report
    from qsim.quant.state import QuantizedTensor

_DOORS = {
    "FORMATS": "qsim.formats",
    "Epilogue": "qsim.gemm",
    "GemmResult": "qsim.quant.products",
    "OpId": "qsim.quant",
    "POLICIES": "qsim.formats",
    "QuantizedTensor": "qsim.quant.state",
    "RandomStream": "qsim.philox",
    "SCALE_RECIPES": "qsim.codec.scaled",
    "begin_logical_quantization": "qsim.quant",
    "commit_quant_observation": "qsim.quant",
    "decode": "qsim.codec",
    "dequantize": "qsim.quant.plain",
    "encode": "qsim.codec",
    "encode_scalar": "qsim.codec",
    "encode_with_counts": "qsim.codec",
    "from_codes": "qsim.quant.assembled",
    "get_backend": "qsim.backends",
    "get_format": "qsim.formats",
    "get_policy": "qsim.formats",
    "get_scale_recipe": "qsim.codec.scaled",
    "hadamard_signs": "qsim.codec",
    "make_recipe": "qsim.quant",
    "matmul": "qsim.gemm",
    "observe_for_future_state": "qsim.quant",
    "pack": "qsim.codec",
    "quantize": "qsim.quant.plain",
    "quantize_with_snapshot": "qsim.quant",
    "scaled_gemm": "qsim.quant.products",
    "scaled_gemm_with_report": "qsim.quant.products",
    "swizzle_scales": "qsim.codec",
    "unpack": "qsim.codec",
    "unswizzle_scales": "qsim.codec",
}

_ROOMS = ("gemm",)
"""Packages that are reached as attributes, imported when they are."""

__all__ = [
    "FORMATS",
    "POLICIES",
    "SCALE_RECIPES",
    "Epilogue",
    "GemmResult",
    "OpId",
    "QuantizedTensor",
    "RandomStream",
    "__version__",
    "begin_logical_quantization",
    "commit_quant_observation",
    "decode",
    "dequantize",
    "encode",
    "encode_scalar",
    "encode_with_counts",
    "from_codes",
    "get_backend",
    "get_format",
    "get_policy",
    "get_scale_recipe",
    "hadamard_signs",
    "make_recipe",
    "matmul",
    "observe_for_future_state",
    "pack",
    "quantize",
    "quantize_with_snapshot",
    "scaled_gemm",
    "scaled_gemm_with_report",
    "swizzle_scales",
    "unpack",
    "unswizzle_scales",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(importlib.import_module(_DOORS[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
