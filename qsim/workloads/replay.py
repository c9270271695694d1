"""The replay workload: real activations through the schedule, resampled per replica. Keeps no random state.

A replica is a seed. It draws, as pure functions of that seed, the order of the capture's steps, the token rows
of each microbatch (with replacement; the same rows in every layer, role and rank, so a pass stays one pass; a second
visit of a module sees the rows drawn after them), and the weights where the capture has none. Everything it reports
is conditional on the capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from qsim.arrays import F32, FLT_MAX, I64, frozen
from qsim.errors import StudyError
from qsim.philox import Purpose, random_bell, random_order, random_words
from qsim.quant import OpId, Site, TensorRole
from qsim.sim.schedule import Body, Linear, Scores
from qsim.workloads.capture import NAMES, Capture, read_capture
from qsim.workloads.model import Shaping

MAX_LOADED = 4096
"""Tensors kept for reuse between the runs of one study: twins load the same ones."""


class Replay:
    """Tensors by operation, for R seeds at once: ``load(op)`` is float32 [R, tokens, channels]."""

    def __init__(self, capture: Capture, *, shaping: Shaping, seeds: Sequence[int], layers: int, microbatches: int):
        if layers > len(capture.layers):
            raise StudyError(
                f"schedule.layers {layers} is more than the {len(capture.layers)} layers of {capture.source}"
            )
        if shaping.layer_spread and len(shaping.layer_spread) < layers:
            raise StudyError(
                f"workload.layer_spread has {len(shaping.layer_spread)} exponents for {layers} layers; give one each"
            )
        _check_shaping(capture, shaping, layers)
        self._capture, self._shaping, self._seeds = capture, shaping, tuple(seeds)
        self._microbatches = microbatches
        self._orders = [random_order(seed, Purpose.ORDER, len(capture.steps)) for seed in self._seeds]
        self._names = {pair: name for name, pair in NAMES.items() if name in capture.names}
        self._layers = layers
        self._loaded = lru_cache(maxsize=MAX_LOADED)(self._load)
        self._weights = lru_cache(maxsize=MAX_LOADED)(self._draw_weights)

    def load(self, op: OpId) -> F32:
        """The tensor of ``op``, float32 [R, tokens, channels] (a weight: [R, channels, outputs]), read-only."""
        return self._loaded(op)

    @property
    def body(self) -> Body:
        """What a layer does: a linear for every captured input, attention scores where q and k were captured."""
        nodes: list[Linear | Scores] = []
        for (site, role), name in self._names.items():
            if role is TensorRole.INPUT:
                nodes.append(Linear(site, any(key[2] == name for key in self._capture.grads)))
            elif role is TensorRole.ATTN_Q:
                nodes.append(Scores(site))
        return tuple(nodes)

    @property
    def distinct_rows(self) -> int:
        """The smallest number of different token rows that any replayed layer and name offers."""
        return min(
            self._capture.distinct_rows(layer, name)
            for layer in self._capture.layers[: self._layers]
            for name in self._capture.names
        )

    def _rows(self, replica: int, op: OpId) -> I64:
        tokens = self._shaping.tokens
        words = random_words(
            self._seeds[replica], Purpose.ROWS,
            count=tokens * (op.visit + 1), step=op.logical_step, microbatch=op.microbatch,
        )[tokens * op.visit :]  # fmt: skip
        return (words.astype(np.uint64) * np.uint64(self._capture.tokens) >> np.uint64(32)).astype(np.int64)

    def _step(self, replica: int, op: OpId) -> int:
        visit = op.logical_step * self._microbatches + op.microbatch
        order = self._orders[replica]
        return self._capture.steps[int(order[visit % len(order)])]

    def _load(self, op: OpId) -> F32:
        layer, role = self._capture.layers[op.layer_id], TensorRole(op.role_id)
        if role is TensorRole.WEIGHT:
            return self._weights(op.layer_id, op.site)
        if role is TensorRole.GRAD_OUTPUT:
            name = self._names[Site(op.site), TensorRole.INPUT]
            source = self._capture.grads
        else:
            name = self._names[Site(op.site), role]
            source = self._capture.activations
        picked = []
        for replica in range(len(self._seeds)):
            whole = source[self._step(replica, op), layer, name]
            shaped = whole if role is TensorRole.GRAD_OUTPUT else self._shaped(whole, op)
            picked.append(shaped[self._rows(replica, op)])
        return frozen(np.stack(picked))

    def _shaped(self, x: F32, op: OpId) -> F32:
        shaping = self._shaping
        if shaping.mean_shift:
            x = x + np.float32(shaping.mean_shift * np.std(x, dtype=np.float64))
        if shaping.layer_spread:
            x = np.ldexp(x, shaping.layer_spread[op.layer_id])
        if op.logical_step in shaping.outlier_steps:
            x = x * np.float32(shaping.outlier_factor)
        return x

    def _draw_weights(self, layer: int, site: int) -> F32:
        name = self._names[Site(site), TensorRole.INPUT]
        real = self._capture.weights.get((self._capture.layers[layer], name))
        if real is not None:
            return frozen(np.repeat(real[None], len(self._seeds), axis=0))
        inner = self._capture.activations[self._capture.steps[0], self._capture.layers[layer], name].shape[1]
        outer = self._shaping.outputs
        grad = self._capture.grads.get((self._capture.steps[0], self._capture.layers[layer], name))
        shape = (inner, outer if grad is None else grad.shape[1])
        fan_in = np.float32(1.0 / np.sqrt(np.float64(inner)))
        drawn = [random_bell(s, Purpose.WEIGHTS, shape, layer=layer, site=site) * fan_in for s in self._seeds]
        return frozen(np.stack(drawn))


def _check_shaping(capture: Capture, shaping: Shaping, layers: int) -> None:
    """StudyError where a shaped activation could pass float32's largest number."""
    factor = max(shaping.outlier_factor, 1.0) if shaping.outlier_steps else 1.0
    for (step, layer, name), x in capture.activations.items():
        at = capture.layers.index(layer)
        if at >= layers:
            continue
        wide = x.astype(np.float64)
        spread = 2.0 ** shaping.layer_spread[at] if shaping.layer_spread else 1.0
        with np.errstate(over="ignore"):
            peak = (np.abs(wide).max() + abs(shaping.mean_shift) * wide.std()) * spread * factor
        if not peak <= FLT_MAX:
            raise StudyError(
                f"shaping ({shaping.describe()}) makes step{step}.L{layer}.{name} overflow float32; shape it less"
            )


@lru_cache(maxsize=4)
def load_capture(path: Path) -> Capture:
    """``read_capture``, once per process."""
    return read_capture(path)


def open_replay(path: Path, *, shaping: Shaping, seeds: Sequence[int], layers: int, microbatches: int) -> Replay:
    """A replay of the capture in ``path``."""
    return Replay(load_capture(path), shaping=shaping, seeds=seeds, layers=layers, microbatches=microbatches)
