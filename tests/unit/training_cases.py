"""Small training runs that tests share."""

from __future__ import annotations

from typing import Any

import msgspec

from qsim.training.config import DataParams, LoopParams, ModelParams, OptimizerParams, QuantParams, TrainConfig

SMALL = TrainConfig(
    model=ModelParams(layers=2, width=16, heads=2, hidden=24, context=8),
    data=DataParams(batch=2, checkpoint="scratch"),
    loop=LoopParams(steps=3, warm_steps=1),
    optimizer=OptimizerParams(lr=1e-2),
)
"""Two layers of width 16: a step takes milliseconds."""
ALL = QuantParams(linear=("input", "weight", "grad_output"), attention=("q", "k", "v", "p"))
"""Everything that can be cast is."""


def small(**tables: Any) -> TrainConfig:
    """SMALL with other values: small(loop={"steps": 5}, defect="D03")."""
    changed = {
        name: msgspec.structs.replace(getattr(SMALL, name), **value) if isinstance(value, dict) else value
        for name, value in tables.items()
    }
    return msgspec.structs.replace(SMALL, **changed)
