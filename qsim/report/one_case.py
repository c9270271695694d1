"""One replayed case, for a reader: verdict, commits, error by step, first violations. Runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from qsim.report.severity_table import figure, label, short
from qsim.sim import RULES, Feature, Order
from qsim.sweep.cell import Cell

if TYPE_CHECKING:
    from rich.table import Table

    from qsim.sweep.run import Outcome

SHOWN = 3
"""Violations shown of each invariant; the full count stands beside them."""


def case_report(cell: Cell, outcome: Outcome, *, fix: str) -> Iterator[str | Table]:
    """The parts of the report, in order."""
    record, schedule = outcome.record, cell.schedule
    what = label(cell.defect) + (f" + fix {fix}" if fix else "")
    yield (
        f"{what}: {short(cell.fmt)}, recipe {cell.recipe}, window {cell.window}, preset {cell.preset}, "
        f"{schedule.steps} steps, {cell.replicas} seeds, {len(outcome.case.schedule)} events"
    )
    if grown := _grown(cell, outcome):
        yield f"grown to host it: {grown}"
    verdict = "as expected" if record.as_expected else f"expected {' '.join(record.expected) or 'none'}"
    yield f"invariants broken: {' '.join(record.broken) or 'none'} ({verdict}); {record.violations} violations"
    yield (
        f"commits {record.commits}, correct twin {record.commits_expected}; "
        f"replay mismatch {100 * record.replay_mismatch:.1f}% of GEMMs; code match {100 * record.code_match:.1f}%"
    )
    yield (
        f"error against correct, steps {cell.skip_steps} to {schedule.steps - 1}: median "
        f"{figure(record.rel_error_median)}, p99 {figure(record.rel_error_p99)}, max {figure(record.rel_error_max)}; "
        f"against high precision: {figure(record.reference_error_median)} "
        f"(correct twin {figure(record.reference_error_correct)})"
    )
    yield ""
    yield _by_step(outcome)
    yield from _violations(outcome)


def _grown(cell: Cell, outcome: Outcome) -> str:
    """What the schedule has that nobody asked for, because the defect needs it."""
    traits, asked = outcome.case.context.traits, cell.schedule
    orders = [order.value for order in Order if order.value in traits and order.value != asked.order]
    added = [f"order {order}" for order in orders]
    added += sorted(f"feature {f.value}" for f in Feature if f.value in traits and f.value not in asked.features)
    added += ["more microbatches"] if "accumulation" in traits and asked.microbatches == 1 else []
    added += ["more workers"] if "workers" in traits and asked.workers == 1 else []
    return ", ".join(added)


def _by_step(outcome: Outcome) -> Table:
    from rich.table import Table

    table = Table(title="by step (median over layers and seeds)", title_justify="left", box=None, show_edge=False)
    for column in ("step", "error forward", "error recompute", "farthest gain", "non-finite", "commits"):
        table.add_column(column, justify="right")
    severity = outcome.severity
    forward = severity.by_step_and_layer("f", "rel_error")
    again = severity.by_step_and_layer("r", "rel_error")
    bad = severity.by_step_and_layer("f", "nonfinite")
    bad = bad + np.nan_to_num(severity.by_step_and_layer("r", "nonfinite"))
    commits: Counter[int] = Counter()
    for (_, step), count in severity.commits.items():
        commits[step] += count
    for step in range(forward.shape[0]):
        far = severity.farthest_gain(skip_steps=step, steps=1)
        table.add_row(
            str(step),
            figure(_median(forward[step])),
            figure(_median(again[step])),
            figure(far),
            str(int(bad[step].sum())),
            str(commits[step]),
        )
    return table


def _median(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.quantile(values, 0.5, method="inverted_cdf"))


def _violations(outcome: Outcome) -> Iterator[str]:
    by_rule: dict[str, list[str]] = {}
    for v in outcome.violations:
        by_rule.setdefault(v.invariant, []).append(f"  event {v.event}, owner {v.owner}: {v.because}")
    for rule, lines in sorted(by_rule.items()):
        yield ""
        yield f"{rule} {RULES[rule].name} ({RULES[rule].meaning}): {len(lines)} violations"
        yield "\n".join(lines[:SHOWN] + (["  ..."] if len(lines) > SHOWN else []))
