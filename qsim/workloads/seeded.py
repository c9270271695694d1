"""The seeded workload: tensors drawn from seeds, with gradients, for any number of layers. Reads no file.

Every tensor is bell-shaped (Irwin-Hall, |x| < 3.47 sigma) with a magnitude of its own, a power of two from 2^-2 to
2^2 for each step, microbatch, layer, site and role: no two states share an amax, and from one step to the next the
scale moves. Weights drift by 2^-5 of their size a step. A tool of self-tests and scenarios; it models no trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from qsim.arrays import F32, frozen
from qsim.backends import get_backend
from qsim.errors import StudyError
from qsim.formats import POLICIES
from qsim.philox import Purpose, random_bell, random_words
from qsim.quant import OpId, TensorRole
from qsim.sim import Case, Env, ScheduleSpec, Trace, records_of, replay
from qsim.sim.schedule import Body, Linear, Scores
from qsim.workloads.model import Shaping

CHANNELS = 16
BODY: Body = (Linear(0, True), Scores(1), Linear(2, True))
DRIFT = np.float32(2.0**-5)
MAX_LOADED = 4096


class Seeded:
    """Tensors by operation, for R seeds at once: ``load(op)`` is float32 [R, tokens, channels]."""

    body = BODY

    def __init__(self, *, shaping: Shaping, seeds: Sequence[int], layers: int) -> None:
        if shaping.layer_spread and len(shaping.layer_spread) < layers:
            raise StudyError(
                f"workload.layer_spread has {len(shaping.layer_spread)} exponents for {layers} layers; give one each"
            )
        self._shaping, self._seeds = shaping, tuple(seeds)
        self._loaded = lru_cache(maxsize=MAX_LOADED)(self._load)

    @property
    def distinct_rows(self) -> int:
        """Every row is drawn, so none is another's."""
        return self._shaping.tokens

    def load(self, op: OpId) -> F32:
        """The tensor of ``op``, float32 [R, tokens, channels] (a weight: [R, channels, outputs]), read-only.

        Workers of one microbatch see the same tensor; a second visit sees another one.
        """
        return self._loaded(op._replace(worker_id=0))

    def _load(self, op: OpId) -> F32:
        made = self._weight if op.role_id == TensorRole.WEIGHT else self._activation
        return frozen(np.stack([made(seed, op) for seed in self._seeds]))

    def _weight(self, seed: int, op: OpId) -> F32:
        shape = CHANNELS, self._shaping.outputs
        fan_in = np.float32(1.0 / np.sqrt(np.float64(CHANNELS)))
        first = random_bell(seed, Purpose.WEIGHTS, shape, layer=op.layer_id, site=op.site)
        if op.logical_step == 0:
            return first * fan_in
        moved = random_bell(seed, Purpose.WEIGHTS, shape, step=op.logical_step, layer=op.layer_id, site=op.site)
        return (first + moved * (DRIFT * np.float32(op.logical_step))) * fan_in

    def _activation(self, seed: int, op: OpId) -> F32:
        shaping, gradient = self._shaping, op.role_id == TensorRole.GRAD_OUTPUT
        at = {
            "step": op.logical_step,
            "microbatch": op.microbatch,
            "worker": op.visit,
            "layer": op.layer_id,
            "site": op.site,
            "role": op.role_id,
        }
        x = random_bell(seed, Purpose.DATA, (shaping.tokens, shaping.outputs if gradient else CHANNELS), **at)
        exponent = int(random_words(seed, Purpose.MAGNITUDE, count=1, **at)[0] % 5) - 2
        if gradient:
            return np.ldexp(x, exponent - 8)
        x = x + np.float32(shaping.mean_shift)
        exponent += shaping.layer_spread[op.layer_id] if shaping.layer_spread else 0
        x = np.ldexp(x, exponent)
        return x * np.float32(shaping.outlier_factor) if op.logical_step in shaping.outlier_steps else x


def play_seeded(case: Case, spec: ScheduleSpec, *, seeds: Sequence[int], shaping: Shaping) -> Trace:
    """The trace of a case of ``spec`` over seeded tensors, on the backend numba."""
    load = Seeded(shaping=shaping, seeds=seeds, layers=spec.layers).load
    env = Env(load=load, backend=get_backend("numba"), recipe=case.recipe, policy=POLICIES["ocp"], lead=(len(seeds),))
    return replay(case, env, records_of(case))


def open_seeded(path: Path, *, shaping: Shaping, seeds: Sequence[int], layers: int, microbatches: int) -> Seeded:
    """A seeded workload; ``path`` is not read, and any number of microbatches is there."""
    return Seeded(shaping=shaping, seeds=seeds, layers=layers)
