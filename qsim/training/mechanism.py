"""What makes the gradients spike: recomputed logits meet a log-sum-exp that is not theirs. Judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsim.arrays import F64
from qsim.sim.data import Data
from qsim.sim.events import Compute, Event, Phase
from qsim.training.config import TrainConfig
from qsim.training.log import TrainLog
from qsim.training.run import train_on


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """largest: float64 [steps, layers, R], the largest sum of a row of probabilities that backward used. It is 1 up to
    rounding where they are a softmax, and e^(LSE of the recomputed logits - saved LSE) where the LSE was saved.
    """

    log: TrainLog
    largest: F64


class _Rows:
    """Sums the rows of every matrix of probabilities that recompute makes."""

    def __init__(self, context: int) -> None:
        self._context = context
        self.found: dict[tuple[int, int], F64] = {}

    def look(self, event: Event, data: Data) -> None:
        """After ``event``."""
        again = isinstance(event, Compute) and event.phase is Phase.RECOMPUTE
        if not (again and isinstance(event, Compute) and event.node in ("probabilities", "softmax")):
            return
        p = np.asarray(data.slots[event.outs[0]], np.float64)
        with np.errstate(all="ignore"):
            sums = p.reshape(p.shape[0], -1, self._context).sum(axis=-1).max(axis=-1)
        at = event.at.logical_step, event.at.layer_id
        self.found[at] = np.maximum(self.found.get(at, np.zeros_like(sums)), sums)


def row_sums(config: TrainConfig, seeds: Sequence[int]) -> RowSums:
    """Train, and sum the rows of probabilities on the way. The steps are those that count."""
    rows = _Rows(config.model.context)
    log = train_on(config, seeds, watch=(rows,)).log
    first = config.loop.first + config.loop.warm_steps  # a run from a start: its first step that counts is step 0
    table = [[rows.found[first + step.step, layer] for layer in range(config.model.layers)] for step in log.steps]
    return RowSums(log=log, largest=np.array(table))
