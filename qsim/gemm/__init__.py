"""Matrix products with defined bits. Knows no state, no time and no device."""

from __future__ import annotations

from qsim.gemm.block_dot import block_dot
from qsim.gemm.centred import (
    WeightGradientTerms,
    centred_input_gradient,
    centred_matmul,
    centred_matmul_oracle,
    centred_weight_gradient,
    centred_weight_gradient_oracle,
    weight_gradient_terms,
)
from qsim.gemm.epilogue import Epilogue
from qsim.gemm.exact import MatmulReport, matmul, matmul_oracle, matmul_with_report
from qsim.gemm.exact_scaled import ProductReport
from qsim.gemm.models import MODELS, TensorCoreModel, get_model

__all__ = [
    "MODELS",
    "Epilogue",
    "MatmulReport",
    "ProductReport",
    "TensorCoreModel",
    "WeightGradientTerms",
    "block_dot",
    "centred_input_gradient",
    "centred_matmul",
    "centred_matmul_oracle",
    "centred_weight_gradient",
    "centred_weight_gradient_oracle",
    "get_model",
    "matmul",
    "matmul_oracle",
    "matmul_with_report",
    "weight_gradient_terms",
]
