"""What each kind of study leaves for a reader: a table in the terminal, a CSV, a figure. Measures nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qsim.errors import OutputError, UsageError
from qsim.report.accumulation import accumulation_figure
from qsim.report.accumulation_table import accumulation_csv, accumulation_notes, accumulation_tables
from qsim.report.heatmap import severity_figure
from qsim.report.pictures import is_whole, write_picture
from qsim.report.severity_table import notes, severity_csv, severity_tables
from qsim.report.training import (
    study_csv,
    study_notes,
    study_skips,
    study_spikes,
    study_tables,
    study_traces,
    study_work,
)
from qsim.sweep.kinds import ACCUMULATION, LIFECYCLE, TRAINING, AnyCell, AnyRecord, Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Rows = Sequence[tuple[AnyCell, AnyRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the rows of one kind are shown; table and figure are file names. All rows are of that kind.

    draw: None for a kind without a figure. more: further figures by file name. work: what was done, in so many seconds
    if all of it was done now.
    """

    table: str
    csv: Callable[[Any], str]
    tables: Callable[..., Iterator[Table]]
    notes: Callable[[Any], list[str]]
    figure: str = ""
    draw: Callable[..., Figure] | None = None
    more: tuple[tuple[str, Callable[..., Figure]], ...] = ()
    work: Callable[[Any, float | None], str] | None = None


REPORTS: Mapping[str, Report] = MappingProxyType(
    {
        LIFECYCLE.name: Report(
            table="severity.csv",
            figure="heatmap.png",
            csv=severity_csv,
            draw=severity_figure,
            tables=severity_tables,
            notes=notes,
        ),
        ACCUMULATION.name: Report(
            table="accumulation.csv",
            figure="accumulation.png",
            csv=accumulation_csv,
            draw=accumulation_figure,
            tables=accumulation_tables,
            notes=accumulation_notes,
        ),
        TRAINING.name: Report(
            table="training.csv",
            figure="traces.png",
            csv=study_csv,
            draw=study_traces,
            tables=study_tables,
            notes=study_notes,
            more=(("spikes.png", study_spikes), ("skips.png", study_skips)),
            work=study_work,
        ),
    }
)
"""Kind of study -> its report."""


def write_products(rows: Rows, folder: Path, *, title: str, kind: Kind) -> str:
    """Write what is missing or differs from ``rows``, each file whole or not at all; the line that names them.

    A missing plot extra costs the picture, not the sweep. OutputError where a file cannot be written.
    """
    report = REPORTS[kind.name]
    text = report.csv(rows)
    mark = hashlib.sha256((title + text).encode()).hexdigest()
    table = folder / report.table
    if not (table.is_file() and table.read_bytes() == text.encode()):
        _replace(table, text)
    if report.draw is None:
        return f"table: {table}"
    named = []
    for name, draw in ((report.figure, report.draw), *report.more):
        figure = folder / name
        try:
            if not is_whole(figure, mark):
                write_picture(draw(rows, title=title), figure, mark=mark)
        except UsageError as error:
            return f"table: {table}   no figure: {error}"
        named.append(str(figure))
    return f"table: {table}   figure: {'   '.join(named)}"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; the journal beside it is whole") from error
