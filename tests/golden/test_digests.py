"""Digests of GEMM outputs that every machine must reproduce: studies are reproducible to the bit.

Each is sha256 over all outputs of a cell on the capture that ships, 2 seeds, 4 steps. A change of any bit in the
codec, the recipes, the random streams, the exact product or the capture shows here; one that is meant is written
into the CHANGELOG with the new digests.
"""

from __future__ import annotations

import pytest

from qsim.sweep.cell import Cell, ScheduleParams, WorkloadParams
from qsim.sweep.run import run_cell

GOLDEN = {
    ("high_precision", "float32", "none", 1): "74857e50a9e02aee",
    ("correct", "float8_e4m3fn", "delayed", 1): "c49e1d9991ba69cf",
    ("correct", "float8_e5m2", "centred", 16): "65b124843d3e1e80",
    ("correct", "float4_e2m1fn", "current", 1): "61e9cf8db79c7890",
    ("D01", "float8_e4m3fn", "delayed", 1): "2768c12454b4b0f1",
    ("D03", "float4_e2m1fn", "delayed", 16): "ab43c652f69bcaf6",
    ("D05", "float8_e5m2", "delayed", 1): "c9db35f5032235ea",
    ("D07", "float4_e2m1fn", "centred", 1): "77dd7b2cfafbf0a8",
    ("D10", "float8_e4m3fn", "centred", 1): "2cabace914083095",
}


@pytest.mark.parametrize("key", GOLDEN, ids=lambda k: "-".join(map(str, k)))
def test_outputs_have_their_golden_digest(key: tuple[str, str, str, int]) -> None:
    defect, fmt, recipe, window = key
    cell = Cell(
        defect=defect, fmt=fmt, recipe=recipe, window=window, preset="seed_correct", seed=0, replicas=2,
        skip_steps=1, backend="numba", reproducible=True, schedule=ScheduleParams(steps=4),
        workload=WorkloadParams(tokens=4, outputs=8),
    )  # fmt: skip
    assert GOLDEN[key] == run_cell(cell).output_digest
