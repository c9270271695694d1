"""What every workload offers to a replay, and how its data may be shaped. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qsim.arrays import F32
from qsim.quant import OpId
from qsim.sim.schedule import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What real data alone may not show; printed wherever it is used.

    mean_shift: added to every activation, in units of its standard deviation in that step (so k is about it).
    layer_spread: activations of layer l are multiplied by 2^layer_spread[l]. outlier_steps: logical steps whose
    activations are multiplied by outlier_factor. tokens: rows per microbatch; outputs: columns of seeded weights.
    """

    tokens: int = 4
    outputs: int = 8
    mean_shift: float = 0.0
    layer_spread: tuple[int, ...] = ()
    outlier_steps: tuple[int, ...] = ()
    outlier_factor: float = 8.0

    def describe(self) -> str:
        """The shaping in force, "" for none."""
        parts = []
        if self.mean_shift:
            parts.append(f"mean_shift {self.mean_shift:g} sigma")
        if any(self.layer_spread):
            parts.append(f"layer_spread 2^{list(self.layer_spread)}")
        if self.outlier_steps:
            parts.append(f"outlier_steps {list(self.outlier_steps)} x{self.outlier_factor:g}")
        return ", ".join(parts)


class Workload(Protocol):
    """Tensors by operation for R seeds at once; the same op always gives the same bits."""

    @property
    def body(self) -> Body:
        """What a layer does."""
        ...

    @property
    def distinct_rows(self) -> int:
        """How many different token rows the poorest layer offers."""
        ...

    def load(self, op: OpId) -> F32:
        """float32 [R, tokens, channels], read-only."""
        ...


class OpenWorkload(Protocol):
    """How a workload is opened. Raises InputError or StudyError where the file or the sizes do not fit."""

    def __call__(
        self, path: Path, *, shaping: Shaping, seeds: Sequence[int], layers: int, microbatches: int
    ) -> Workload:
        """A workload over ``path``."""
        ...
