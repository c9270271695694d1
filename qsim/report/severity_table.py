"""The severity table: defects x formats, as text and as CSV. Reads finished cells; runs nothing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from qsim.severity.intervals import median_interval, proportion_interval
from qsim.sweep.cell import Cell, CellRecord

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[Cell, CellRecord]
Setting = tuple[float, str, int]
"""mean_shift, recipe, window: what one block of the table has in common."""

NAMES = {"correct": "correct protocol", "high_precision": "high precision", "written": "written by hand"}
_FIXED, _PER_FORMAT = 53, 24
"""Columns of text that a table needs beside its formats, and for each format."""


def short(fmt: str) -> str:
    """float8_e4m3fn -> e4m3fn: the part of a format's name that tells formats apart."""
    return fmt.split("_", 1)[-1]


def label(defect: str) -> str:
    """D01 -> "D01 consume_after_advance"; controls by their plain name."""
    from qsim.sim import CONTRASTS, DEFECTS

    known = {**DEFECTS, **CONTRASTS}
    if defect in known:
        return known[defect].name if defect == known[defect].name else f"{defect} {known[defect].name}"
    whole, _, variant = defect.partition("/")
    if variant and whole in known:
        return f"{whole} {known[whole].name}/{variant}"
    return NAMES.get(defect, defect)


def figure(value: float, digits: int = 3) -> str:
    """So many significant digits; "0" for exactly zero; inf and - (not measured) in words."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    if math.isinf(value):
        return "inf"
    if 0.001 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".")
    return f"{value:.0e}" if digits < 3 else f"{value:.1e}"


def setting_of(cell: Cell) -> Setting:
    """The block that a cell belongs to."""
    return cell.workload.mean_shift, cell.recipe, cell.window


def blocks(rows: Sequence[Row]) -> Iterator[tuple[Setting, list[Row]]]:
    """Rows by setting, in order of first appearance; the high-precision control joins every block of its data."""
    control = {c.workload.mean_shift: (c, r) for c, r in rows if c.defect == "high_precision"}
    rest = [row for row in rows if row[0].defect != "high_precision"]
    order = list(dict.fromkeys(setting_of(cell) for cell, _ in rest))
    rest.sort(key=lambda row: order.index(setting_of(row[0])))
    for setting, group in groupby(rest, key=lambda row: setting_of(row[0])):
        yield setting, ([control[setting[0]]] if setting[0] in control else []) + list(group)
    if not rest:
        for cell, record in control.values():
            yield setting_of(cell), [(cell, record)]


def broken_text(records: Iterable[CellRecord]) -> str:
    """The invariants broken; an outcome that the catalogue does not name is marked and shows what was due."""
    texts = []
    for record in records:
        text = " ".join(record.broken) or "none"
        if not record.as_expected:
            text += f" (!) expected {' '.join(record.expected) or 'none'}"
        texts.append(text)
    return "; ".join(dict.fromkeys(texts))


def severity_tables(rows: Sequence[Row], *, width: int = 125) -> Iterator[Table]:
    """Tables, one a setting: a row a defect, for each format median, p99, non-finite share, replay mismatch.

    width: columns of text there are; formats that do not fit side by side go into a table of their own.
    """
    for (shift, recipe, window), group in blocks(rows):
        formats = list(dict.fromkeys(c.fmt for c, _ in group if c.defect != "high_precision"))
        title = f"recipe {recipe}, window {window}" + (f", mean_shift {shift:g}" if shift else "")
        fit = max(1, (width - _FIXED) // _PER_FORMAT)
        for start in range(0, max(len(formats), 1), fit):
            yield _table(title, group, formats[start : start + fit])


def _table(title: str, group: Sequence[Row], formats: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, box=None, padding=(0, 1, 0, 0))
    table.add_column("\ndefect", no_wrap=True)
    table.add_column("\nbreaks", no_wrap=True)
    table.add_column("\nk", justify="right", no_wrap=True)
    for fmt in formats:
        for name in ("median", "p99", "nonf", "replay"):
            heading = f"{short(fmt) if name == 'median' else ''}\n{name}"
            table.add_column(heading, justify="right", no_wrap=True, min_width=4)
    for defect in dict.fromkeys(c.defect for c, _ in group):
        mine = {c.fmt: r for c, r in group if c.defect == defect}
        if all(r.status != "ok" for r in mine.values()):
            continue
        if defect == "high_precision":  # casts nothing: the same for every format
            mine = dict.fromkeys(formats, next(iter(mine.values())))
        k = max((r.k for f, r in mine.items() if f in formats), default=math.nan)
        k_text = "-" if defect == "high_precision" else figure(k, 2)
        table.add_row(
            label(defect), broken_text(mine.values()), k_text, *_columns(mine, formats, defect == "high_precision")
        )
    return table


def _columns(mine: dict[str, CellRecord], formats: Sequence[str], control: bool) -> Iterator[str]:
    for fmt in formats:
        record = mine.get(fmt)
        if record is None or record.status != "ok":
            yield from ("-", "-", "-", "-")
        elif control:  # it is its own twin: an error against itself says nothing
            yield from ("-", "-", figure(record.nonfinite_outputs / record.outputs, 2))
            yield f"{100 * record.replay_mismatch:.0f}%"
        else:
            yield figure(record.rel_error_median, 2)
            yield figure(record.rel_error_p99, 2)
            yield figure(record.nonfinite_outputs / record.outputs, 2)
            yield f"{100 * record.replay_mismatch:.0f}%"


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the figures: conditions, intervals, shaping, what could not be hosted."""
    done = [(c, r) for c, r in rows if r.status == "ok"]
    if not done:
        return ["no cell has an outcome"]
    cell, record = done[0]
    lines = [
        "median, p99: relative L2 error of a GEMM output against the correct twin, the worse of forward and recompute",
        f"over {cell.replicas} replicas, steps >= {cell.skip_steps} of {cell.schedule.steps}, all layers and GEMMs. "
        "nonf: share of outputs that are not finite.",
        "replay: GEMMs whose recomputed output differs from forward in any bit. k: |mean| / sigma of activations.",
        f"Conditional on the capture ({record.distinct_rows} distinct token rows in its poorest layer); "
        f"seeds {cell.seed}..{cell.seed + cell.replicas - 1}.",
        f"95% intervals over replicas: {_intervals(done)}; all of them in severity.csv.",
    ]
    lines += _hosts(rows)
    if shaping := _shaping(cell, rows):
        lines.append(f"Shaped data, not the capture alone: {shaping}.")
    if not cell.reproducible:
        lines.append("Fast mode: float32 BLAS products; the last digits depend on this machine.")
    skipped = dict.fromkeys(r.note for _, r in rows if r.status == "not_applicable")
    lines += [f"Not applicable: {note}." for note in skipped]
    return lines


def _hosts(rows: Sequence[Row]) -> list[str]:
    """Defects that ran on a larger schedule than the study's, and so against another twin."""
    from qsim.sim import DEFECTS

    cell = rows[0][0]
    have = (cell.schedule.layers, cell.schedule.microbatches, cell.schedule.workers)
    grown = []
    for name in dict.fromkeys(c.defect for c, _ in rows if c.defect in DEFECTS):
        need = DEFECTS[name].minimal
        if any(n > h for n, h in zip((need.layers, need.microbatches, need.workers), have, strict=True)):
            grown.append(f"{name} ({need.microbatches} microbatches, {need.workers} workers)")
    return [f"On a larger schedule, with a twin of its own: {', '.join(grown)}; rank them apart."] if grown else []


def _intervals(done: Sequence[Row]) -> str:
    """The largest median with its interval, and the bound on replicas with a non-finite output."""
    cell, record = max(done, key=lambda row: row[1].rel_error_median)
    low, high, coverage = median_interval(record.rel_error_replica)
    bad = max(r.nonfinite_replicas for _, r in done)
    bound = proportion_interval(bad, cell.replicas)
    return (
        f"largest median {figure(record.rel_error_median)} ({cell.defect} {short(cell.fmt)} {cell.recipe}, window "
        f"{cell.window}) in {figure(low)}..{figure(high)} ({100 * coverage:.0f}% by order statistics); "
        f"{bad} of {cell.replicas} replicas non-finite at most, so up to {100 * bound.high:.0f}% of seeds"
    )


def _shaping(cell: Cell, rows: Sequence[Row]) -> str:
    w = cell.workload
    shifts = sorted({c.workload.mean_shift for c, _ in rows})
    parts = [f"mean_shift {', '.join(f'{s:g}' for s in shifts)} sigma"] if any(shifts) else []
    parts += [f"layer_spread 2^{list(w.layer_spread)}"] if any(w.layer_spread) else []
    parts += [f"outlier_steps {list(w.outlier_steps)} x{w.outlier_factor:g}"] if w.outlier_steps else []
    return ", ".join(parts)


_CSV = (
    "defect", "name", "format", "recipe", "window", "mean_shift", "status", "broken", "expected", "as_expected",
    "k", "rel_error_median", "rel_error_median_low", "rel_error_median_high", "interval_coverage", "rel_error_p99",
    "rel_error_max", "reference_error", "reference_error_correct", "nonfinite_share", "nonfinite_replicas",
    "nonfinite_replicas_low", "nonfinite_replicas_high", "replay_mismatch", "code_match", "gain_median", "gain_max",
    "center_gap", "ulp_median", "max_abs_error", "saturated_share", "flushed_share", "commits", "commits_expected",
    "replicas", "distinct_rows", "output_digest", "note",
)  # fmt: skip


def severity_csv(rows: Sequence[Row]) -> str:
    """Every figure of every cell, with intervals: median by order statistics, proportion by Clopper-Pearson.

    Floats are written as repr writes them: they read back to the same bits. inf and nan stand as such.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for cell, record in rows:
        writer.writerow(_csv_row(cell, record))
    return out.getvalue()


def _csv_row(cell: Cell, r: CellRecord) -> list[object]:
    head: list[object] = [cell.defect, label(cell.defect), cell.fmt, cell.recipe, cell.window, cell.workload.mean_shift]
    if r.status != "ok":
        return [*head, r.status, *[""] * (len(_CSV) - len(head) - 2), r.note]
    median = median_interval(r.rel_error_replica)
    bad = proportion_interval(r.nonfinite_replicas, cell.replicas)
    return [
        *head, r.status, " ".join(r.broken), " ".join(r.expected), r.as_expected,
        r.k, r.rel_error_median, median.low, median.high, median.coverage, r.rel_error_p99,
        r.rel_error_max, r.reference_error_median, r.reference_error_correct,
        r.nonfinite_outputs / r.outputs, r.nonfinite_replicas, bad.low, bad.high,
        r.replay_mismatch, r.code_match, r.gain_median, r.gain_max,
        r.center_gap_median, r.ulp_median, r.max_abs_error, r.saturated_share, r.flushed_share,
        r.commits, r.commits_expected, cell.replicas, r.distinct_rows, r.output_digest, r.note,
    ]  # fmt: skip
