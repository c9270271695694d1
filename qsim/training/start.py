"""The parameters that a run starts from: drawn, shipped or read from a file. Trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qsim._paths import sample_checkpoint
from qsim.arrays import F32, frozen
from qsim.errors import InputError, StudyError
from qsim.training.config import BUILTIN, SCRATCH, TrainConfig
from qsim.training.model import drawn, shapes, spread
from qsim.training.weights import load_weights, require


def parameters_of(config: TrainConfig, seeds: Sequence[int]) -> Mapping[str, F32]:
    """Name -> float32 [R, ...]. A checkpoint is the same for all seeds, "scratch" is drawn from each.

    Raises InputError for a file that cannot be read or does not fit the model, StudyError for a spread that does not.
    """
    model, data = config.model, config.data
    if data.spread and len(data.spread) != model.layers:
        raise StudyError(f"workload.spread has {len(data.spread)} exponents for {model.layers} layers; give one each")
    if data.checkpoint == SCRATCH:
        found = [drawn(model, seed) for seed in seeds]
    else:
        one = _read(data.checkpoint, config)
        found = [one] * len(seeds)
    if data.spread:
        found = [spread(one, data.spread, model) for one in found]
    return {name: frozen(np.stack([one[name] for one in found])) for name in shapes(model)}


def _read(source: str, config: TrainConfig) -> dict[str, F32]:
    path = sample_checkpoint() if source == BUILTIN else Path(source).expanduser()
    weights, _ = load_weights(path)
    try:
        require(weights, shapes(config.model), source=str(path))
    except InputError as error:
        raise InputError(
            f"{error}; take the sizes that it was trained with, workload.checkpoint = {SCRATCH!r}, or a checkpoint of "
            "this model"
        ) from None
    return weights
