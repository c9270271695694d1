"""One point of an accumulation grid and what came out of it: plain values only. Knows neither files nor processes."""

from __future__ import annotations

import math

import msgspec

NEVER = 0
"""promote_every of a chain that is never cut."""


class AccumulationCell(msgspec.Struct, frozen=True, kw_only=True):
    """rows x columns outputs of K = depth products each, for the seeds ``seed`` .. ``seed + replicas - 1``.

    model: a tensor-core model; data: what the operands are drawn from; fmt: the format of both operands;
    promote_every: k after which a chain is added to a float32 sum and begins again, 0 for never.
    """

    model: str
    data: str
    fmt: str
    depth: int
    promote_every: int
    rows: int
    columns: int
    seed: int
    replicas: int

    @property
    def name(self) -> str:
        """The cell in one line, for messages."""
        return f"{self.model} {self.data} {self.fmt} K {self.depth} promote_every {promotion(self.promote_every)}"


class AccumulationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one cell: a number for each seed, over its outputs; docs/accumulation.md has the formulas.

    rel_error: relative L2 error against the exact sum; bias: mean signed error over mean |exact|; worst: largest
    relative error of one output; differ: share of outputs that are not the correctly rounded sum.
    lowest, highest: accumulator values over all seeds; nonfinite: outputs that are not finite.
    """

    rel_error: tuple[float, ...]
    bias: tuple[float, ...]
    worst: tuple[float, ...]
    differ: tuple[float, ...]
    lowest: float
    highest: float
    nonfinite: int
    outputs: int
    output_digest: str

    @property
    def as_expected(self) -> bool:
        """True: a measurement; the study foretells no outcome."""
        return True

    @property
    def bias_median(self) -> float:
        """Median over seeds, an order statistic."""
        return _median(self.bias)

    @property
    def rel_error_median(self) -> float:
        """Median over seeds, an order statistic."""
        return _median(self.rel_error)


def promotion(promote_every: int) -> str:
    """The word for a table: "never", or the number of k."""
    return "never" if promote_every == NEVER else str(promote_every)


def _median(values: tuple[float, ...]) -> float:
    return sorted(values, key=lambda value: (math.isnan(value), value))[(len(values) - 1) // 2]
