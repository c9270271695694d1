"""The kinds of study: which cells each has, what comes out of them, who runs them. Reads no study.

Journal, executor and sweep serve every kind; a cell says by its type which one it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from qsim.sweep.accumulation.cell import AccumulationCell, AccumulationRecord
from qsim.sweep.cell import Cell, CellRecord
from qsim.sweep.training.cell import TrainingCell, TrainingRecord

AnyCell = Cell | AccumulationCell | TrainingCell
AnyRecord = CellRecord | AccumulationRecord | TrainingRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of study. run: "module:function" that a worker imports to run a cell.

    fast: what stands for float32 BLAS products in its files, as KEY=VALUE; backend: the key of the backend. "" where
    a study of this kind has no such choice.
    """

    name: str
    cell: type[AnyCell]
    record: type[AnyRecord]
    run: str
    fast: str = ""
    backend: str = ""


LIFECYCLE = Kind(
    name="lifecycle",
    cell=Cell,
    record=CellRecord,
    run="qsim.sweep.run:run_cell",
    fast="run.reproducible=false",
    backend="run.backend",
)
ACCUMULATION = Kind(
    name="accumulation", cell=AccumulationCell, record=AccumulationRecord, run="qsim.sweep.accumulation.run:run_cell"
)
TRAINING = Kind(
    name="training",
    cell=TrainingCell,
    record=TrainingRecord,
    run="qsim.sweep.training.run:run_cell",
    fast="run.accumulation=blas",
    backend="run.backend",
)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in (LIFECYCLE, ACCUMULATION, TRAINING)})
"""Kind -> what it is; a study file without a kind is of the first."""


def kind_of(cell: AnyCell) -> Kind:
    """The kind of study that a cell belongs to."""
    return next(kind for kind in KINDS.values() if isinstance(cell, kind.cell))


def kind_of_grid(cells: Sequence[AnyCell]) -> Kind:
    """The kind of all the cells; a grid of none is of the first kind."""
    return kind_of(cells[0]) if cells else LIFECYCLE
