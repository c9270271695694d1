"""The loss of weights on text that training never draws, with nothing cast: a walk over values, no schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qsim.arrays import AnyArray, frozen
from qsim.quant import OpId
from qsim.sim.data import Data
from qsim.sim.schedule import DATA, HELD, Block, Graph, Node, param_slot
from qsim.sim.schedule.walk import STEM, TAIL
from qsim.training.batches import batches
from qsim.training.config import TrainConfig
from qsim.training.model import decoder
from qsim.training.nodes import Nodes
from qsim.training.text import Text

BATCHES = 2
"""Batches of held-out text that are averaged, the same for every run of a seed."""


def held_out_loss(
    config: TrainConfig, nodes: Nodes, data: Data, *, text: Text, seeds: Sequence[int]
) -> tuple[float, ...]:
    """Mean loss [R] over held-out batches: what the weights are worth."""
    total: AnyArray = np.zeros(len(seeds), np.float64)
    for number in range(BATCHES):
        tokens, targets = batches(
            text, seeds, step=number, batch=config.data.batch, context=config.model.context, part="held_out"
        )
        batch = frozen(np.concatenate([tokens, targets[..., -1:]], axis=-1))
        loss = forward_loss(config, decoder(config.model), nodes, data, nodes.arithmetic.backend.put(batch))
        total += nodes.arithmetic.backend.get(loss)
    return tuple(float(value) for value in total / BATCHES)


def forward_loss(config: TrainConfig, graph: Graph, nodes: Nodes, data: Data, batch: AnyArray) -> AnyArray:
    """The loss [R] of one batch [R, B, T + 1], from the parameters that lie in ``data``."""
    table = nodes.table()
    common = {DATA: batch, HELD: data.slots[HELD]}

    def walk(block: Block, layer: int, values: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(values) | {name: data.slots[param_slot(name, layer)] for name in block.params}
        for step in block.steps:
            if isinstance(step, Node):
                found |= zip(step.outs, table[step.kind](OpId(0), *[found[name] for name in step.ins]), strict=True)
            else:
                found[step.out] = nodes.product(step.gemm, found[step.left], found[step.right])
        return found

    hidden = walk(graph.stem, STEM, common)[graph.stem.result]
    for layer in range(config.model.layers):
        hidden = walk(graph.layer, layer, {graph.layer.source: hidden} | common)[graph.layer.result]
    loss: AnyArray = walk(graph.tail, TAIL, {graph.tail.source: hidden} | common)[graph.loss]
    return loss
