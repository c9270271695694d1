"""Runs one cell of a training study: one seed of one protocol. The loop itself is ``qsim.training``'s."""

from __future__ import annotations

from collections.abc import Iterable

from qsim.backends import get_backend
from qsim.sweep.training.cell import BITS_OF_THIS_MACHINE, TrainingCell, TrainingRecord
from qsim.sweep.training.files import require_unchanged
from qsim.training.run import train


def run_cell(cell: TrainingCell) -> TrainingRecord:
    """The outcome of one cell. InputError where text or checkpoint changed since the study was read."""
    require_unchanged(cell.config.data)
    log = train(cell.config, (cell.seed,))
    accumulation = cell.config.accumulation
    return TrainingRecord(log=log, accumulation=accumulation, reproducible=accumulation != BITS_OF_THIS_MACHINE)


def check_cells(cells: Iterable[TrainingCell]) -> None:
    """Raise now what every cell would raise later: a backend that this machine cannot run."""
    for backend in dict.fromkeys(cell.backend for cell in cells):
        get_backend(backend)
