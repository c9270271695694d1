"""The table of an accumulation study: models x K, as text and as CSV. Reads finished cells; runs nothing."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qsim.report.severity_table import figure, short
from qsim.severity.intervals import median_interval
from qsim.sweep.accumulation.cell import AccumulationCell, AccumulationRecord, promotion

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[AccumulationCell, AccumulationRecord]
Curve = tuple[str, int]
"""model, promote_every: what one line of the table and of the figure has in common."""

BOTH_SIGNS = "normal"
"""Data whose sums cancel: their bias is near 0, and the L2 error is what grows."""
_FIXED, _PER_DEPTH = 28, 10
"""Columns of text that a table needs beside its depths, and for each depth."""


def curves(rows: Sequence[Row]) -> list[Curve]:
    """Every (model, promote_every), in order of first appearance."""
    return list(dict.fromkeys((cell.model, cell.promote_every) for cell, _ in rows))


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """data, format and their rows, in order of first appearance."""
    for data, fmt in dict.fromkeys((cell.data, cell.fmt) for cell, _ in rows):
        yield data, fmt, [row for row in rows if (row[0].data, row[0].fmt) == (data, fmt)]


def accumulation_tables(rows: Sequence[Row], *, width: int = 125) -> Iterator[Table]:
    """Tables, one for each data and format: a line a model and promotion, a column a K.

    "normal" shows the relative L2 error, the others the bias; both are medians over seeds. width: columns of text there
    are; depths that do not fit side by side go into a table of their own.
    """
    fit = max(1, (width - _FIXED) // _PER_DEPTH)
    for data, fmt, group in groups(rows):
        depths = sorted({cell.depth for cell, _ in group})
        what = "relative L2 error" if data == BOTH_SIGNS else "bias"
        for start in range(0, len(depths), fit):
            yield _table(f"{data}, {short(fmt)}: {what} against K", group, depths[start : start + fit])


def _table(title: str, group: Sequence[Row], depths: Sequence[int]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, box=None, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("promote", justify="right", no_wrap=True)
    for depth in depths:
        table.add_column(str(depth), justify="right", no_wrap=True, min_width=_PER_DEPTH - 1)
    for curve in curves(group):
        mine = {cell.depth: row for cell, row in group if (cell.model, cell.promote_every) == curve}
        signs = group[0][0].data == BOTH_SIGNS
        texts = [
            figure(mine[d].rel_error_median if signs else mine[d].bias_median) if d in mine else "-" for d in depths
        ]
        table.add_row(curve[0], promotion(curve[1]), *texts)
    return table


def accumulation_notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the figures: definitions, seeds, intervals, stalls, what was left out."""
    if not rows:
        return ["no cell has an outcome"]
    cell = max((c for c, _ in rows), key=lambda c: c.replicas)
    lines = [
        "exact: the exact sum, rounded once to float32. bias: mean (sum - exact) / mean |exact|. promote: k after",
        "which a chain is added to a float32 sum and begins again. ones: products of 1; positive: |x|; normal: x, of",
        f"mean 0 and variance 1. Medians over seeds {cell.seed}..{cell.seed + cell.replicas - 1}, "
        f"{cell.rows} x {cell.columns} outputs each (ones: a single seed); all measures in accumulation.csv.",
        *_largest(rows),
        *_stalls(rows),
        *_left_out(rows),
    ]
    return lines


def _largest(rows: Sequence[Row]) -> Iterator[str]:
    """The largest bias that seeds can move, with its interval."""
    seeded = [row for row in rows if row[0].replicas > 1]
    if seeded:
        cell, record = max(seeded, key=lambda row: abs(row[1].bias_median))
        low, high, coverage = median_interval(record.bias)
        yield (
            f"Largest bias {figure(record.bias_median)} in {figure(low, 4)}..{figure(high, 4)} "
            f"({100 * coverage:.0f}% by order statistics over {cell.replicas} seeds): {cell.name}."
        )


def _stalls(rows: Sequence[Row]) -> Iterator[str]:
    """Chains of ones that end at one number whatever K is: 1 is lost below the last bit that is kept."""
    for model, every in curves(rows):
        short_of = [
            (cell.depth, record.highest)
            for cell, record in rows
            if (cell.model, cell.promote_every, cell.data) == (model, every, "ones") and record.highest < cell.depth
        ]
        if short_of:
            depth, top = min(short_of)
            yield f"{model}, promote {promotion(every)}: ones stall at {top:g} (K = {depth})."


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    """Combinations of the grid that a model cannot do."""
    names, fmts = (list(dict.fromkeys(getattr(c, key) for c, _ in rows)) for key in ("model", "fmt"))
    promotions, promoted = list(dict.fromkeys(c.promote_every for c, _ in rows)), curves(rows)
    there = {(c.model, c.fmt) for c, _ in rows}
    missing = [f"{m} of {short(f)}" for m, f in itertools.product(names, fmts) if (m, f) not in there]
    missing += [f"{m} promoted every {p}" for m, p in itertools.product(names, promotions) if (m, p) not in promoted]
    if missing:
        yield f"Left out, for the model cannot do it: {', '.join(missing)}."


_CSV = (
    "model", "data", "format", "depth", "promote_every", "rows", "columns", "seed", "replicas", "bias", "bias_low",
    "bias_high", "interval_coverage", "rel_error", "rel_error_low", "rel_error_high", "worst", "differ", "lowest",
    "highest", "nonfinite", "outputs", "output_digest",
)  # fmt: skip


def accumulation_csv(rows: Sequence[Row]) -> str:
    """Every figure of every cell: medians with intervals by order statistics, the worst seed's worst output.

    promote_every 0 is never; differ is the mean share over seeds. Floats are written as repr writes them.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for c, r in rows:
        bias, error = median_interval(r.bias), median_interval(r.rel_error)
        writer.writerow((
            c.model, c.data, c.fmt, c.depth, c.promote_every, c.rows, c.columns, c.seed, c.replicas,
            r.bias_median, bias.low, bias.high, bias.coverage, r.rel_error_median, error.low, error.high,
            max(r.worst), sum(r.differ) / len(r.differ), r.lowest, r.highest, r.nonfinite, r.outputs, r.output_digest,
        ))  # fmt: skip
    return out.getvalue()
