"""The files that a sweep leaves for a reader: severity.csv and heatmap.png. Measures nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from qsim.errors import OutputError, UsageError
from qsim.report.heatmap import is_whole, write_heatmap
from qsim.report.severity_table import Row, severity_csv

TABLE, FIGURE = "severity.csv", "heatmap.png"


def write_products(rows: Sequence[Row], folder: Path, *, title: str) -> str:
    """Write what is missing or differs from ``rows``, each file whole or not at all; the line that names them.

    A missing plot extra costs the picture, not the sweep. OutputError where a file cannot be written.
    """
    text = severity_csv(rows)
    mark = hashlib.sha256((title + text).encode()).hexdigest()
    table, figure = folder / TABLE, folder / FIGURE
    if not (table.is_file() and table.read_bytes() == text.encode()):
        _replace(table, text)
    try:
        if not is_whole(figure, mark):
            write_heatmap(rows, figure, title=title, mark=mark)
    except UsageError as error:
        return f"table: {table}   no figure: {error}"
    return f"table: {table}   figure: {figure}"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; the journal beside it is whole") from error
