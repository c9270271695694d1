"""Stands in for the report of a training study until there is one: a row a step, a line a run. Explains nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qsim.sweep.training.cell import TrainingCell, TrainingRecord

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[TrainingCell, TrainingRecord]
_COLUMNS = ("block", "point", "label", "defect", "fix", "seed", "step", "loss", "grad_norm", "skipped", "reproducible")


def training_rows(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Flat rows of plain values: one for each step of each run."""
    return [
        {
            "block": cell.block,
            "point": " ".join(cell.point),
            "label": cell.label,
            "defect": cell.config.defect,
            "fix": cell.config.fix,
            "seed": cell.seed,
            "step": step.step,
            "loss": step.loss[0],
            "grad_norm": step.grad_norm[0],
            "skipped": step.skipped[0],
            "reproducible": record.reproducible,
        }
        for cell, record in rows
        for step in record.log.steps
    ]


def training_csv(rows: Sequence[Row]) -> str:
    """The flat rows; floats are written as repr writes them."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(training_rows(rows))
    return out.getvalue()


def tables(rows: Sequence[Row], *, width: int = 125) -> Iterator[Table]:
    """One table: a line a run."""
    from rich.table import Table

    table = Table(box=None)
    for heading in ("setting", "protocol", "seed", "breaks", "skipped"):
        table.add_column(heading, no_wrap=True)
    for cell, record in rows:
        skipped = sum(step.skipped[0] for step in record.log.steps)
        table.add_row(cell.setting, cell.label, str(cell.seed), " ".join(record.log.broken) or "none", str(skipped))
    yield table


def training_notes(rows: Sequence[Row]) -> list[str]:
    """Whether the bits are those of one machine."""
    fast = any(not record.reproducible for _, record in rows)
    return ["products are float32 BLAS sums: not reproducible to the bit"] if fast else []
