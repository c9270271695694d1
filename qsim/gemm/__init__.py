"""Matrix products with defined bits. Knows no state, no time and no device."""

from __future__ import annotations

from qsim.gemm.exact import MatmulReport, matmul, matmul_oracle, matmul_with_report

__all__ = ["MatmulReport", "matmul", "matmul_oracle", "matmul_with_report"]
