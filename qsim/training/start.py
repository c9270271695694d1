"""The parameters that a run starts from: drawn, shipped or read from a file. Trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qsim._paths import sample_checkpoint
from qsim.arrays import F32, frozen
from qsim.errors import InputError, StudyError
from qsim.training.config import BUILTIN, SCRATCH, TRAINED, ModelParams, TrainConfig
from qsim.training.model import drawn, shapes, spread
from qsim.training.pretrain import Train, pretrained
from qsim.training.weights import load_weights, require


def parameters_of(config: TrainConfig, seeds: Sequence[int], train_on: Train | None = None) -> Mapping[str, F32]:
    """Name -> float32 [R, ...]. A checkpoint is the same for all seeds, "scratch" is drawn from each.

    train_on: what makes "trained:N" where it was not made before.

    Raises InputError for a file that cannot be read or does not fit the model, StudyError for a spread that does not.
    """
    model, data = config.model, config.data
    if data.spread and len(data.spread) != model.layers:
        raise StudyError(f"workload.spread has {len(data.spread)} exponents for {model.layers} layers; give one each")
    found: list[Mapping[str, F32]]
    if data.checkpoint == SCRATCH:
        found = [drawn(model, seed) for seed in seeds]
    else:
        one = _read(data.checkpoint, config, train_on)
        found = [one] * len(seeds)
    if data.spread:
        found = [spread(one, data.spread, model) for one in found]
    return {name: frozen(np.stack([one[name] for one in found])) for name in shapes(model)}


def _read(source: str, config: TrainConfig, train_on: Train | None) -> Mapping[str, F32]:
    if source.startswith(TRAINED):
        assert train_on is not None, "the caller can train"
        return pretrained(config, train_on)
    path = sample_checkpoint() if source == BUILTIN else Path(source).expanduser()
    weights, _ = load_weights(path)
    try:
        require(weights, shapes(config.model), source=str(path))
    except InputError as error:
        raise InputError(
            f"{error}; take the sizes that it was trained with, workload.checkpoint = {SCRATCH!r}, or a checkpoint of "
            "this model"
        ) from None
    if source == BUILTIN and config.model.heads != ModelParams().heads:
        raise InputError(
            f"{path} was trained with {ModelParams().heads} heads, model.heads is {config.model.heads}: its weights "
            f"mean nothing to other heads; take workload.checkpoint = {SCRATCH!r}"
        )
    return weights
