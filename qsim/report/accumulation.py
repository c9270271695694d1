"""The figure of an accumulation study: bias and L2 error against K. Draws; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qsim.errors import UsageError
from qsim.report.accumulation_table import BOTH_SIGNS, Curve, Row, curves
from qsim.report.pictures import blank
from qsim.report.severity_table import short
from qsim.sweep.accumulation.cell import NEVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_SIGN = "positive"
LINEAR = 1e-6
"""Half the height of the linear part of the bias axis: below it, 0 is near enough."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7a3e9d", "#8c6d00", "#444444")  # told apart by colour-blind eyes
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
LINE_POINTS = 11.0
"""Height of a label's line, in points."""


def accumulation_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """Two panels of the study's first format: bias of "positive", relative L2 error of "normal", against K.

    A colour is a model, a dash pattern a promotion; curves that end in one place share a label. An error of 0 is no
    point of the logarithmic panel. Medians over seeds, without bars: the CSV has the intervals. Needs the extra
    ``plot``; UsageError without it, or without rows.
    """
    fmt = rows[0][0].fmt if rows else ""
    panels = [(data, [r for r in rows if (r[0].data, r[0].fmt) == (data, fmt)]) for data in (ONE_SIGN, BOTH_SIGNS)]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise UsageError(f'no cell of "{ONE_SIGN}" or "{BOTH_SIGNS}" data has an outcome; nothing to draw')
    fig = blank((7.2 * len(panels), 5.4), what="the figure", layout="constrained")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    styles = _styles(curves(rows))
    for ax, (data, group) in zip(axes, panels, strict=True):
        _draw(ax, data, group, styles)
    fig.suptitle(f"{title} ({short(fmt)})", fontsize=11)
    first = {model: axes[0].plot([], color=c, linewidth=w)[0] for (model, _), (c, _, w) in styles.items()}
    fig.legend(first.values(), first.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    fig.canvas.draw()  # the layout is settled: labels can be placed by pixels
    for ax, (data, group) in zip(axes, panels, strict=True):
        _label(ax, data, group, styles)
    return fig


def _styles(found: Sequence[Curve]) -> dict[Curve, tuple[str, Any, float]]:
    """Colour, dashes, width; later models are thinner, so that curves which coincide are all seen."""
    models = list(dict.fromkeys(model for model, _ in found))
    promotions = sorted({every for _, every in found})  # never comes first: a full line
    styles = {}
    for model, every in found:
        at = models.index(model)
        dash = DASHES[promotions.index(every) % len(DASHES)]
        styles[model, every] = (COLOURS[at % len(COLOURS)], dash, max(2.8 - 0.7 * at, 1.0))
    return styles


def _points(data: str, group: Sequence[Row], curve: Curve) -> tuple[list[int], list[float]]:
    mine = sorted((c.depth, r) for c, r in group if (c.model, c.promote_every) == curve)
    return [d for d, _ in mine], [r.rel_error_median if data == BOTH_SIGNS else r.bias_median for _, r in mine]


def _draw(ax: Any, data: str, group: Sequence[Row], styles: dict[Curve, tuple[str, Any, float]]) -> None:
    depths = sorted({cell.depth for cell, _ in group})
    for curve in curves(group):
        colour, dash, width = styles[curve]
        at, values = _points(data, group, curve)
        shown = [math.nan if data == BOTH_SIGNS and value == 0 else value for value in values]
        ax.plot(at, shown, color=colour, linestyle=dash, linewidth=width, marker="o", markersize=width + 1.8)
    ax.set_xscale("log", base=2)
    ax.set_xlim(depths[0] / 1.2, depths[-1] * 1.2)
    ax.set_xticks(depths, [str(d) for d in depths], fontsize=8, rotation=35 if len(depths) > 7 else 0)
    ax.minorticks_off()
    ax.set_xlabel("K, products of one sum", fontsize=9)
    if data == BOTH_SIGNS:
        ax.set_yscale("log")
        ax.set_title("x of both signs: relative L2 error", fontsize=10)
    else:
        ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.6)
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        lowest = min(min(_points(data, group, curve)[1]) for curve in curves(group))
        decades = range(-6, math.ceil(math.log10(max(-lowest, 10 * LINEAR))) + 1)
        ax.set_yticks([-(10.0**e) for e in decades] + [0.0, LINEAR])
        ax.set_ylim(min(lowest * 1.6, -10 * LINEAR), 2 * LINEAR)
        ax.set_title("|x|: bias, mean (sum − exact) / mean |exact|", fontsize=10)
    ax.tick_params(axis="y", labelsize=8)
    ax.grid(True, color="0.92", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)


def _label(ax: Any, data: str, group: Sequence[Row], styles: dict[Curve, tuple[str, Any, float]]) -> None:
    """A label at the right end of each curve; those that would overlap share a line or are pushed apart."""
    ends = []
    for curve in curves(group):
        depths, values = _points(data, group, curve)
        if math.isfinite(values[-1]) and (values[-1] > 0 or data != BOTH_SIGNS):
            ends.append((float(ax.transData.transform((depths[-1], values[-1]))[1]), curve))
    pixels = ax.figure.dpi / 72.0
    labels: list[tuple[float, list[Curve]]] = []
    for y, curve in sorted(ends, key=lambda end: end[0]):
        if labels and y - labels[-1][0] < 0.35 * LINE_POINTS * pixels:
            labels[-1][1].append(curve)
        else:
            labels.append((y, [curve]))
    words = [_words(found) for _, found in labels]
    lines = [len(text.splitlines()) for text in words]
    placed = iter(_apart([y for (y, _), n in zip(labels, lines, strict=True) for _ in range(n)], LINE_POINTS * pixels))
    right = max(cell.depth for cell, _ in group)
    for (y, found), text, n in zip(labels, words, lines, strict=True):
        anchor = ax.transData.inverted().transform((0.0, y))[1]
        text_y = sum(next(placed) for _ in range(n)) / n
        ax.annotate(
            text,
            xy=(right, anchor),
            xytext=(14, (text_y - y) / pixels),
            textcoords="offset points",
            fontsize=7.5,
            va="center",
            color=styles[found[0]][0] if len({m for m, _ in found}) == 1 else "0.25",
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
            annotation_clip=False,
        )


def _words(found: Sequence[Curve]) -> str:
    """``hopper_wgmma, ada_mma_sync: never``; promotions that several models share are named once."""
    by_promotions: dict[tuple[int, ...], list[str]] = {}
    for model in sorted({m for m, _ in found}):
        by_promotions.setdefault(tuple(sorted(p for m, p in found if m == model)), []).append(model)
    parts = []
    for promotions, models in by_promotions.items():
        every = "/".join(str(p) for p in promotions if p != NEVER)
        words = ([] if NEVER not in promotions else ["never"]) + ([f"every {every}"] if every else [])
        parts.append(f"{', '.join(models)}: {', '.join(words)}")
    return "\n".join(parts)


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places, moved as little as a run of neighbours needs to be ``gap`` apart."""
    runs: list[list[float]] = []  # middle and number of each run of labels that touch
    for place in places:
        runs.append([place, 1])
        while len(runs) > 1 and runs[-1][0] - runs[-2][0] < gap * (runs[-1][1] + runs[-2][1]) / 2:
            middle, count = runs.pop()
            total = count + runs[-1][1]
            runs[-1] = [(runs[-1][0] * runs[-1][1] + middle * count) / total, total]
    return [middle + gap * (i - (count - 1) / 2) for middle, count in runs for i in range(int(count))]
