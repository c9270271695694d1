"""The kinds of study: which cells each has, what comes out of them, who runs them. Reads no study.

Journal, executor and sweep serve every kind; a cell says by its type which one it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from qsim.sweep.accumulation.cell import AccumulationCell, AccumulationRecord
from qsim.sweep.cell import Cell, CellRecord

AnyCell = Cell | AccumulationCell
AnyRecord = CellRecord | AccumulationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of study. run: "module:function" that a worker imports to run a cell."""

    name: str
    cell: type[AnyCell]
    record: type[AnyRecord]
    run: str


LIFECYCLE = Kind(name="lifecycle", cell=Cell, record=CellRecord, run="qsim.sweep.run:run_cell")
ACCUMULATION = Kind(
    name="accumulation", cell=AccumulationCell, record=AccumulationRecord, run="qsim.sweep.accumulation.run:run_cell"
)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in (LIFECYCLE, ACCUMULATION)})
"""Kind -> what it is; a study file without a kind is of the first."""


def kind_of(cell: AnyCell) -> Kind:
    """The kind of study that a cell belongs to."""
    return next(kind for kind in KINDS.values() if isinstance(cell, kind.cell))


def kind_of_grid(cells: Sequence[AnyCell]) -> Kind:
    """The kind of all the cells; a grid of none is of the first kind."""
    return kind_of(cells[0]) if cells else LIFECYCLE
