"""Runs one accumulation cell: draws the operands, multiplies them twice, measures. Knows no file of a study.

Operands and exact sums are shared by neighbouring cells of one process that have them in common.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qsim.arrays import F32
from qsim.formats import get_format
from qsim.gemm.products import EXACT, accumulate
from qsim.gemm.scaled import ScaledOperand
from qsim.severity.accumulation import accumulation_error
from qsim.sweep.accumulation.cell import AccumulationCell, AccumulationRecord
from qsim.workloads.drawn import draw_operands

_EXACT = EXACT[0]


class _Drawn(NamedTuple):
    """One seed: the operands [rows, K] and [columns, K], and their exact sums, each rounded once to float32."""

    a: ScaledOperand
    b: ScaledOperand
    exact: F32


@lru_cache(maxsize=1)
def _drawn(
    data: str, fmt: str, depth: int, rows: int, columns: int, seed: int, replicas: int
) -> tuple[_Drawn, ...]:  # fmt: skip
    found, element = [], get_format(fmt)
    for each in range(seed, seed + replicas):
        codes = draw_operands(data, element, depth=depth, rows=rows, columns=columns, seed=each)
        a, b = (ScaledOperand(codes=c, fmt=element, row=np.ones(c.shape[0])) for c in codes)
        found.append(_Drawn(a, b, accumulate(a, b, _EXACT).acc))
    return tuple(found)


def run_cell(cell: AccumulationCell) -> AccumulationRecord:
    """The outcome of one cell; the same bits for any number of threads, workers and neighbours."""
    errors, digest, lowest, highest = [], hashlib.sha256(), [], []
    for one in _drawn(cell.data, cell.fmt, cell.depth, cell.rows, cell.columns, cell.seed, cell.replicas):
        acc = accumulate(one.a, one.b, cell.model, promote_every=cell.promote_every or None).acc
        errors.append(accumulation_error(acc, one.exact))
        digest.update(np.ascontiguousarray(acc).tobytes())
        lowest.append(float(acc.min()))
        highest.append(float(acc.max()))
    return AccumulationRecord(
        rel_error=tuple(e.rel_error for e in errors),
        bias=tuple(e.bias for e in errors),
        worst=tuple(e.worst for e in errors),
        differ=tuple(e.differ for e in errors),
        lowest=min(lowest),
        highest=max(highest),
        nonfinite=sum(e.nonfinite for e in errors),
        outputs=cell.rows * cell.columns * cell.replicas,
        output_digest=digest.hexdigest()[:16],
    )
