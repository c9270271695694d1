"""One training run of a study and what came out of it: plain values only. Knows neither files nor processes."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from qsim.training.config import TrainConfig
from qsim.training.log import TrainLog

BITS_OF_THIS_MACHINE = "blas"
"""The accumulation whose results are bits of one machine."""


class TrainingCell(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a protocol in one setting of a block, from one seed.

    point: what the block's grid chose, like "quant.window=4". UNSAID: what only names a run for a reader, and is no
    part of a case: another label, or the same value as a point of a grid, is the same case.
    """

    UNSAID: ClassVar[frozenset[str]] = frozenset({"label", "point"})

    block: str
    label: str
    point: tuple[str, ...]
    seed: int
    config: TrainConfig

    @property
    def backend(self) -> str:
        """What computes it."""
        return self.config.backend

    @property
    def setting(self) -> str:
        """The block and its point in one line."""
        return " ".join((self.block, *self.point))

    @property
    def name(self) -> str:
        """The cell in one line, for messages."""
        return f"{self.setting}: {self.label}, seed {self.seed}"


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one cell: the whole log of its one seed; the rows of every step, nothing summarised.

    accumulation: of the matrix products; reproducible: false where they are plain BLAS sums, whose bits belong to the
    machine. Dicts of a log come back from a journal in the order of their keys as text, so "L10" before "L2".
    """

    log: TrainLog
    accumulation: str
    reproducible: bool

    @property
    def as_expected(self) -> bool:
        """True where the invariants broken are exactly those that the catalogue names."""
        return set(self.log.broken) == set(self.log.expected)


def label_of(protocol: str, fix: str = "") -> str:
    """What a protocol is called where the study gives no label: "D04+D02", "D03 fixed by keyed_snapshot"."""
    return f"{protocol} fixed by {fix}" if fix else protocol
