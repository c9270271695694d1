"""The figures of a training study: traces of gradient norms, spike ratios, skipped steps. Draws; measures nothing.

What is not finite has a place of its own at an edge of each figure; it is never left out in silence.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qsim.arrays import F64, Bool
from qsim.errors import UsageError
from qsim.report.pictures import blank
from qsim.report.severity_table import NAMES
from qsim.report.training_rows import TrainingRow, blocks
from qsim.severity.seeds import measured, order_statistic
from qsim.severity.training_record import Flags, TrainSeverity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of protocols, in their order: those of M. Okabe and K. Ito, told apart by colour-blind eyes."""
TWIN = "#444444"
"""The colour of the correct twin, and of every run that is the twin to the bit."""
CONTROL = "#bdbdbd"
"""The colour of the run in high precision."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
ROW = 0.13
"""Height of a protocol's row in a strip, in inches."""
TWIN_NAME = "correct twin"


class Style(NamedTuple):
    """How a protocol looks in every figure of a study."""

    colour: str
    dash: Any
    width: float


def styles(rows: Sequence[TrainingRow]) -> Mapping[str, Style]:
    """A colour a protocol, then another dash; later ones are thinner, so that curves which coincide are all seen.

    A protocol that is the twin to the bit in every row has the twin's grey, high precision a lighter one.
    """
    found = {TWIN_NAME: Style(TWIN, "-", 3.6)}
    others = 0
    for name in dict.fromkeys(row.protocol for row in rows):
        if all(is_twin(row.severity) for row in rows if row.protocol == name):
            found[name] = found[TWIN_NAME]
            continue
        if name == NAMES["high_precision"]:
            found[name] = Style(CONTROL, "-", 2.8)
            continue
        colour, dash = PALETTE[others % len(PALETTE)], DASHES[others // len(PALETTE) % len(DASHES)]
        found[name] = Style(colour, dash, max(2.4 - 0.3 * others, 1.2))
        others += 1
    return MappingProxyType(found)


def is_twin(severity: TrainSeverity) -> bool:
    """True where every seed of the run is the twin, to the bit."""
    return all(severity.identical)


class _Trace(NamedTuple):
    """Norms of one run [steps]. median: over seeds, inf where more than half of them are not finite.

    lowest, highest: of the finite seeds, NaN where there is none. nonfinite, skipped: shares of seeds.
    """

    name: str
    median: F64
    lowest: F64
    highest: F64
    nonfinite: F64
    skipped: F64


def _trace(name: str, norms: Sequence[Sequence[float]], nonfinite: Sequence[Flags], skipped: Sequence[Flags]) -> _Trace:
    ranked = [[value if math.isfinite(value) else math.inf for value in step] for step in norms]
    finite = [[value for value in step if math.isfinite(value)] for step in norms]
    return _Trace(
        name=name,
        median=np.array([order_statistic(step, percent=50) for step in ranked]),
        lowest=np.array([min(step, default=math.nan) for step in finite]),
        highest=np.array([max(step, default=math.nan) for step in finite]),
        nonfinite=np.array(nonfinite, bool).mean(axis=1),
        skipped=np.array(skipped, bool).mean(axis=1),
    )


def _traces(group: Sequence[TrainingRow]) -> list[_Trace]:
    """The twin, then every run that is not the twin to the bit."""
    twin = group[0].severity.steps
    first = _trace(
        TWIN_NAME, [s.twin_norm for s in twin], [s.twin_nonfinite for s in twin], [s.twin_skipped for s in twin]
    )
    return [first] + [
        _trace(row.protocol, [s.grad_norm for s in steps], [s.nonfinite for s in steps], [s.skipped for s in steps])
        for row in group
        if not is_twin(row.severity) and (steps := row.severity.steps)
    ]


def traces_figure(rows: Sequence[TrainingRow], *, title: str) -> Figure:
    """Gradient norm against step, a panel a setting: median over seeds, band over the seeds that are finite.

    Above: a strip with a mark where seeds were not finite, a row a protocol; below: a rug of skipped steps. A mark is
    as high as its share of seeds. Where most seeds are not finite the median has left the panel: a gap.
    Needs the extra ``plot``; UsageError without it, or without rows.
    """
    panels = _panels(rows)
    look = styles(rows)
    bad_rows = max(len([t for t in _traces(group) if t.nonfinite.any()]) for _, group in panels)
    rug_rows = max(len([t for t in _traces(group) if t.skipped.any()]) for _, group in panels)
    heights = (ROW * max(bad_rows, 1), 3.4, ROW * max(rug_rows, 1))
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    fig = blank((6.4 * across, 1.6 + down * (sum(heights) + 1.1)), what="the traces", layout="constrained")
    from matplotlib.ticker import MaxNLocator  # there: the figure was made by it

    outer = fig.add_gridspec(down, across)
    for number, (setting, group) in enumerate(panels):
        inner = outer[number // across, number % across].subgridspec(3, 1, height_ratios=heights, hspace=0.02)
        body = fig.add_subplot(inner[1])
        strip, rug = fig.add_subplot(inner[0], sharex=body), fig.add_subplot(inner[2], sharex=body)
        traces = _traces(group)
        steps = np.array([step.step for step in group[0].severity.steps])
        _draw_norms(body, steps, traces, look)
        _draw_marks(strip, steps, [(t.name, t.nonfinite) for t in traces], look, "non-finite")
        _draw_marks(rug, steps, [(t.name, t.skipped) for t in traces], look, "skipped")
        strip.set_title(setting, fontsize=9)
        for ax in (strip, body):
            ax.tick_params(axis="x", labelbottom=False, length=0)
        rug.set_xlabel("step", fontsize=9)
        rug.tick_params(labelsize=8)
        rug.xaxis.set_major_locator(MaxNLocator(integer=True))
        rug.set_xlim(steps[0] - 0.7, steps[-1] + 0.7)
    _finish(
        fig, rows, look, title, "line: median over seeds; band: lowest to highest finite seed; marks: share of seeds"
    )
    return fig


def _panels(rows: Sequence[TrainingRow]) -> list[tuple[str, list[TrainingRow]]]:
    if not rows:
        raise UsageError("no run has an outcome yet; nothing to draw")
    return list(blocks(rows))


def _draw_norms(ax: Any, steps: Any, traces: Sequence[_Trace], look: Mapping[str, Style]) -> None:
    values = np.concatenate([np.concatenate([t.lowest, t.highest]) for t in traces])
    shown = values[np.isfinite(values) & (values > 0)]
    low, high = (shown.min() / 1.5, shown.max() * 1.8) if shown.size else (0.1, 10.0)
    edges = np.concatenate([[steps[0] - 0.5], (steps[:-1] + steps[1:]) / 2, [steps[-1] + 0.5]])
    for t in traces:
        style = look[t.name]
        floor, ceiling = np.clip(t.lowest, low, None), np.clip(t.highest, low, None)  # a zero lies on the lower edge
        ax.stairs(ceiling, edges, baseline=floor, fill=True, color=style.colour, alpha=0.15, linewidth=0, zorder=1)
        ax.stairs(ceiling, edges, baseline=floor, color=style.colour, alpha=0.8, linewidth=0.9, zorder=2)
        median = np.where(np.isfinite(t.median), np.clip(t.median, low, None), np.nan)
        ax.plot(steps, median, color=style.colour, linestyle=style.dash, linewidth=style.width, zorder=3)
        alone = _alone(np.isfinite(median))
        ax.plot(steps[alone], median[alone], color=style.colour, linestyle="", marker="o", markersize=style.width + 1.5)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ax.set_ylabel("gradient norm", fontsize=9)
    ax.tick_params(which="both", labelsize=8)  # a panel of less than a decade names its minor ticks
    ax.grid(True, color="0.92", linewidth=0.7)
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def _alone(there: Bool) -> Bool:
    """Points without a neighbour: no line is drawn to them."""
    padded = np.concatenate([[False], there, [False]])
    alone: Bool = there & ~padded[:-2] & ~padded[2:]
    return alone


def _draw_marks(ax: Any, steps: Any, shares: Sequence[tuple[str, F64]], look: Mapping[str, Style], name: str) -> None:
    """One row a protocol that has any; a mark as high as its share of seeds."""
    found = [(protocol, share) for protocol, share in shares if share.any()]
    for row, (protocol, share) in enumerate(found):
        at = share > 0
        style = look[protocol]
        hatch = "" if style.dash == "-" else "//////"  # where colours begin again, as the dashes of lines
        ax.bar(
            steps[at], 0.9 * share[at], bottom=len(found) - 1 - row, width=0.8,
            color=style.colour, hatch=hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
    ax.set_ylim(0, max(len(found), 1))
    ax.set_yticks([])
    ax.set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
    if not found:
        ax.text(0.5, 0.5, "none", transform=ax.transAxes, ha="center", va="center", fontsize=7.5, color="0.5")
    ax.set_facecolor("0.96")
    ax.spines[:].set_visible(False)


def spikes_figure(rows: Sequence[TrainingRow], *, title: str) -> Figure:
    """Spike ratios as a distribution over seeds, a panel a setting; the share that is not finite steps up at the right.

    A ratio of 0 (the twin alone is not finite) has a place at the left; the twin's own is 1. Needs the extra ``plot``;
    UsageError without it, or without rows.
    """
    panels = _panels(rows)
    look = styles(rows)
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    fig = blank((6.0 * across, 1.6 + 3.6 * down), what="the spike ratios", layout="constrained")
    axes = fig.subplots(down, across, squeeze=False, sharey=True).ravel()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (setting, group) in zip(axes, panels, strict=False):
        _draw_ratios(ax, group, look)
        ax.set_title(setting, fontsize=9)
    axes[0].set_ylabel("share of seeds", fontsize=9)
    _finish(fig, rows, look, title, "largest gradient norm of the run / of its correct twin, a step a seed")
    return fig


def _draw_ratios(ax: Any, group: Sequence[TrainingRow], look: Mapping[str, Style]) -> None:
    ratios = {TWIN_NAME: [1.0]} | {
        row.protocol: sorted(measured(row.severity.spike)) for row in group if not is_twin(row.severity)
    }
    shown = [r for values in ratios.values() for r in values if 0 < r < math.inf]
    low, high = min(shown) / 1.6, max(max(shown) * 1.6, 4.0)
    zero, zeros = low / 1.2, any(r == 0 for values in ratios.values() for r in values)
    edge = high * (high / low) ** 0.12  # the strip for what is not finite: an eighth of the width
    for number, (name, values) in enumerate(ratios.items()):
        beyond = high * (edge / high) ** ((number + 1) / (len(ratios) + 1))  # a place of its own for each protocol
        style = look[name]
        if not values:
            continue
        xs = [zero / 1.2, *(zero if r == 0 else min(r, beyond) for r in values), edge]
        ys = [i / len(values) for i in range(len(values) + 1)]
        ax.step(xs, [*ys, ys[-1]], where="post", color=style.colour, linestyle=style.dash, linewidth=style.width)
    ax.axvline(high, color="0.6", linewidth=0.8, linestyle=(0, (2, 2)))
    ax.axvspan(high, edge, color="0.96", zorder=0)
    ax.text(math.sqrt(high * edge), 1.08, "non-\nfinite", fontsize=7, ha="center", va="center", color="0.35")
    ax.set_xscale("log")
    ax.set_xlim(zero / 1.2 if zeros else low, edge)
    ax.set_ylim(-0.02, 1.15)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    ticks = {zero: "0"} if zeros else {}
    ticks |= {tick: f"{tick:g}" for tick in _ticks(low, high)}
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    ax.set_xlabel("\n".join(["spike ratio", *textwrap.wrap(_unmeasured(group), 90)]), fontsize=8)
    ax.tick_params(labelsize=8)
    ax.grid(True, color="0.92", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)


def _unmeasured(group: Sequence[TrainingRow]) -> str:
    """Seeds without a ratio, a protocol; "" where every seed has one."""
    missing = {row.protocol: len(row.severity.seeds) - len(measured(row.severity.spike)) for row in group}
    words = ", ".join(f"{name} {count}" for name, count in missing.items() if count)
    return words and f"seeds without a ratio, for the twin is not finite either: {words}"


def _ticks(low: float, high: float) -> list[float]:
    """Decades, or 1, 2 and 5 of each where there are few; where there are many, six of them at most."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    apart = max(1, -(-(last - first) // 6))
    first = -(-first // apart) * apart  # so that 1 is among them
    return [tick for e in range(first, last + 1, apart) for d in digits if low <= (tick := d * 10.0**e) <= high]


def skips_figure(rows: Sequence[TrainingRow], *, title: str) -> Figure:
    """Skipped steps, protocol x setting: the colour is the share of all steps, the text the count of each seed.

    Hatched where a step was not finite; grey where there is no run. Needs the extra ``plot``; UsageError without it, or
    without rows.
    """
    panels = _panels(rows)
    protocols = list(dict.fromkeys(row.protocol for row in rows))
    cells = {(row.protocol, at): row.severity for at, (_, group) in enumerate(panels) for row in group}
    lines = max(_skip_text(severity).count("\n") for severity in cells.values()) + 1
    width, height = 4.4 + 1.9 * len(panels), 1.5 + (0.3 + 0.15 * lines) * len(protocols)
    fig = blank((width, height), what="the heatmap", layout="constrained")
    from matplotlib.patches import Rectangle  # there: the figure was made by it

    ax = fig.subplots()
    ax.set_facecolor("0.88")
    values = np.full((len(protocols), len(panels)), np.nan)
    for (protocol, x), severity in cells.items():
        values[protocols.index(protocol), x] = sum(severity.skipped) / (len(severity.steps) * len(severity.seeds))
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values), cmap="YlOrBr", vmin=0.0, vmax=1.0, edgecolors="white", linewidth=1
    )
    for (protocol, x), severity in cells.items():
        y = protocols.index(protocol)
        ink = "black" if values[y, x] < 0.6 else "white"
        if severity.any_nonfinite.hits:
            ax.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="///", edgecolor=ink, alpha=0.25, linewidth=0))
        box = {"facecolor": mesh.to_rgba(values[y, x]), "edgecolor": "none", "pad": 1.5}
        ax.text(x + 0.5, y + 0.5, _skip_text(severity), ha="center", va="center", fontsize=8, color=ink, bbox=box)
    ax.set_ylim(len(protocols), 0)  # first protocol on top
    ax.set_yticks(np.arange(len(protocols)) + 0.5, [textwrap.fill(name, 30) for name in protocols], fontsize=8)
    names = [textwrap.fill(setting, 24) for setting, _ in panels]
    ax.set_xticks(np.arange(len(panels)) + 0.5, names, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = fig.colorbar(mesh, ax=ax, format=lambda share, _: f"{100 * share:.0f}%")
    bar.set_label("share of steps skipped", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    fig.suptitle(title, fontsize=10)
    fig.supxlabel("steps skipped, a number a seed; hatched: a step was not finite; grey: no run", fontsize=7.5)
    return fig


def _skip_text(severity: TrainSeverity) -> str:
    """Skips of every seed, five a line, and of how many steps."""
    counts = [str(count) for count in severity.skipped]
    lines = [" ".join(counts[i : i + 5]) for i in range(0, len(counts), 5)]
    return "\n".join([*lines, f"of {len(severity.steps)}"])


def _finish(fig: Any, rows: Sequence[TrainingRow], look: Mapping[str, Style], title: str, caption: str) -> None:
    """Title, one legend for all panels, and how to read it."""
    from matplotlib.lines import Line2D

    same = [name for name, style in look.items() if style is look[TWIN_NAME] and name != TWIN_NAME]
    names = {name: name for name in look if name not in same}
    names[TWIN_NAME] = ", ".join([TWIN_NAME, *same])
    handles = [
        Line2D([], [], color=look[name].colour, linestyle=look[name].dash, linewidth=look[name].width) for name in names
    ]
    words = [textwrap.fill(text, 44) for text in names.values()]
    columns = 2 if fig.get_figwidth() < 9 else 4
    fig.legend(handles, words, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, title=caption,
               title_fontsize=7.5)  # fmt: skip
    fig.suptitle(title, fontsize=11)


FIGURES: Mapping[str, Any] = MappingProxyType(
    {"traces.png": traces_figure, "spikes.png": spikes_figure, "skips.png": skips_figure}
)
"""File name -> what draws it."""
