"""Trains a model from scratch with nothing cast, once, and keeps it. Knows no study; how a step goes is handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from qsim.arrays import F32
from qsim.training.config import (
    HIGH_PRECISION,
    SCRATCH,
    DataParams,
    LoopParams,
    OptimizerParams,
    TrainConfig,
    steps_of,
)
from qsim.training.text import open_text
from qsim.training.weights import cached

SEED = 1
BATCH = 8
PART = 100
"""Steps whose schedule is held in memory at once."""
OPTIMIZER = OptimizerParams(lr=2e-3, warmup=50)

Train = Callable[[TrainConfig, tuple[int, ...], Any], Any]
"""``qsim.training.run.train_on``."""


def pretraining(config: TrainConfig, first: int, steps: int) -> TrainConfig:
    """Steps ``first`` ... of the training that makes a checkpoint for the model and text of ``config``.

    The model is trained as it is without half types and shifted keys, which only a run on it has.
    """
    model = msgspec.structs.replace(config.model, half="float32", key_mean=0.0)
    return TrainConfig(
        model=model, optimizer=OPTIMIZER, defect=HIGH_PRECISION, backend=config.backend,
        data=DataParams(text=config.data.text, batch=BATCH, checkpoint=SCRATCH),
        loop=LoopParams(first=first, steps=steps, warm_steps=0),
    )  # fmt: skip


def trained(config: TrainConfig, steps: int, train_on: Train, *, seed: int = SEED) -> Mapping[str, F32]:
    """The parameters [...] after ``steps`` steps: exact products, so the same on every machine."""
    state = None
    for first in range(0, steps, PART):
        state = train_on(pretraining(config, first, min(PART, steps - first)), (seed,), state).state
    assert state is not None, "there is at least one step"
    return {name: np.asarray(value[0]) for name, value in state.params.items()}


def pretrained(config: TrainConfig, train_on: Train) -> Mapping[str, F32]:
    """The checkpoint "trained:N" of ``config``, from the cache if it was made before; a damaged file is made again."""
    steps = steps_of(config.data.checkpoint)
    how = pretraining(config, 0, 1)
    key = {
        "model": msgspec.to_builtins(how.model), "optimizer": msgspec.to_builtins(how.optimizer), "batch": BATCH,
        "seed": SEED, "steps": steps, "text": open_text(config.data.text).sha256,
    }  # fmt: skip
    return cached(key, lambda: trained(config, steps, train_on), label=f"decoder-{steps}").arrays
