"""The severity heatmap: defect x format, log10 of the median error. Draws; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F64
from qsim.errors import UsageError
from qsim.report.pictures import blank
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
    panels = [(setting, [row for row in group if row[0].defect != "high_precision"]) for setting, group in blocks(rows)]
    panels = [panel for panel in panels if panel[1]]
    defects = [d for d in dict.fromkeys(c.defect for _, group in panels for c, _ in group) if d != "correct"]
    formats = list(dict.fromkeys(c.fmt for _, group in panels for c, _ in group))
    if not defects or not formats:
        raise UsageError("no defect has an outcome yet; nothing to draw")
    width = 4.2 + len(panels) * (0.35 + 0.9 * len(formats))
    height = 1.7 + 0.5 * len(defects)
    fig = blank((width, height), what="the heatmap")
    from matplotlib.colors import LogNorm  # there: the figure was made by it

    axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    left, right, top, bottom = 2.9 / width, 1 - 1.0 / width, 1 - 0.75 / height, 0.7 / height
    fig.subplots_adjust(left=left, right=right, top=top, bottom=bottom, wspace=0.06)
    norm = LogNorm(FLOOR, CEILING)
    for ax, ((shift, recipe, window), group) in zip(axes, panels, strict=True):
        ax.set_title(f"{recipe}, window {window}" + (f"\nmean_shift {shift:g}" if shift else ""), fontsize=9)
        mesh = _draw(ax, _grid(group, defects, formats), norm)
        ax.set_xticks(np.arange(len(formats)) + 0.5, [short(f) for f in formats], fontsize=8)
        ax.set_yticks(np.arange(len(defects)) + 0.5, [label(d) for d in defects], fontsize=8)
        ax.tick_params(length=0)
    bar = fig.add_axes((1 - 0.85 / width, bottom, 0.16 / width, top - bottom))
    fig.colorbar(mesh, cax=bar, label="median relative error")
    fig.suptitle(title, fontsize=10, y=1 - 0.12 / height)
    caption = (
        "each cell: median / p99 relative L2 error of the GEMM output against the correct twin (darkest: below 1e-3); "
        "hatched: non-finite outputs; grey: not applicable"
    )
    fig.text(0.5, 0.12 / height, caption, fontsize=7.5, ha="center")
    return fig


def _draw(ax: Any, grid: tuple[F64, Any, Any], norm: Any) -> Any:
    """One panel: coloured cells with their text, hatched where outputs were not finite."""
    from matplotlib.patches import Rectangle

    values, text, bad = grid
    ax.set_facecolor("0.88")
    shown = np.ma.masked_invalid(np.clip(np.where(np.isinf(values), CEILING, values), FLOOR, CEILING))
    mesh = ax.pcolormesh(shown, cmap="viridis", norm=norm, edgecolors="white", linewidth=1)
    ax.set_ylim(len(values), 0)  # first defect on top
    for (y, x), words in np.ndenumerate(text):
        dark = norm(max(values[y, x], FLOOR)) < 0.75 if words else True
        ax.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    for y, x in np.argwhere(bad):
        ax.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="///", edgecolor="white", linewidth=0))
    return mesh


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
