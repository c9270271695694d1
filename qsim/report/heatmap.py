"""The severity heatmap: defect x format, log10 of the median error. Draws; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F64
from qsim.errors import OutputError, UsageError
from qsim.report.severity_table import Row, blocks, figure, label, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOOR, CEILING = 1e-3, 10.0
"""The colour scale's ends; what lies below the floor (zero included) or above the ceiling takes the end's colour."""


def severity_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """One panel a setting: rows are defects, columns formats; cell text is median and p99.

    Colour: the median relative error against the correct twin on a log scale. Hatched where any output is not
    finite; grey where the defect cannot be hosted. Needs the extra ``plot``.
    """
    try:
        import seaborn as sns
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise UsageError(f'the heatmap needs {error.name}; install "qsim[plot]"') from error

    panels = [(setting, [row for row in group if row[0].defect != "high_precision"]) for setting, group in blocks(rows)]
    panels = [panel for panel in panels if panel[1]]
    defects = [d for d in dict.fromkeys(c.defect for _, group in panels for c, _ in group) if d != "correct"]
    formats = list(dict.fromkeys(c.fmt for _, group in panels for c, _ in group))
    if not defects or not formats:
        raise UsageError("no defect has an outcome yet; nothing to draw")
    width = 3.4 + len(panels) * (0.5 + 0.95 * len(formats))
    fig = NewFigure(figsize=(width, 1.9 + 0.52 * len(defects)), dpi=110, layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for i, (ax, ((shift, recipe, window), group)) in enumerate(zip(axes, panels, strict=True)):
        values, text, bad = _grid(group, defects, formats)
        sns.heatmap(
            np.clip(values, FLOOR, CEILING), mask=np.isnan(values), ax=ax, annot=text, fmt="", cmap="viridis",
            norm=LogNorm(FLOOR, CEILING), linewidths=1, linecolor="white", annot_kws={"fontsize": 7.5},
            xticklabels=[short(f) for f in formats], yticklabels=[label(d) for d in defects],
            cbar=i == len(panels) - 1, cbar_kws={"label": "median relative error (below 1e-3: darkest)"},
        )  # fmt: skip
        ax.set_facecolor("0.88")
        _hatch(ax, bad)
        ax.set_title(f"{recipe}, window {window}" + (f"\nmean_shift {shift:g}" if shift else ""), fontsize=9)
        ax.tick_params(axis="y", rotation=0, labelsize=8)
        ax.tick_params(axis="x", rotation=0, labelsize=8)
    fig.suptitle(title, fontsize=10)
    caption = "each cell: median / p99 relative L2 error of the GEMM output against the correct twin"
    fig.supxlabel(caption + "; hatched: non-finite outputs; grey: not applicable", fontsize=7.5)
    return fig


def _grid(group: Sequence[Row], defects: Sequence[str], formats: Sequence[str]) -> tuple[F64, Any, Any]:
    values = np.full((len(defects), len(formats)), math.nan)
    text = np.full(values.shape, "", dtype=object)
    bad = np.zeros(values.shape, bool)
    for cell, record in group:
        if cell.defect not in defects or record.status != "ok":
            continue
        at = defects.index(cell.defect), formats.index(cell.fmt)
        values[at] = record.rel_error_median
        text[at] = f"{figure(record.rel_error_median)}\n{figure(record.rel_error_p99)}"
        bad[at] = record.nonfinite_outputs > 0
    return values, text, bad


def _hatch(ax: Any, bad: Any) -> None:
    from matplotlib.patches import Rectangle

    for y, x in np.argwhere(bad):
        ax.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="///", edgecolor="white", linewidth=0))


def write_heatmap(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Draw and write a PNG; the file appears whole or not at all. OutputError where it cannot be written."""
    fig = severity_figure(rows, title=title)
    part = path.with_name(f".{path.name}.part")
    try:
        fig.savefig(part, format="png", metadata={"Software": None})
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
