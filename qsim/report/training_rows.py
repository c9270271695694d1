"""The figures of a training study as flat rows: one a protocol, setting and seed. Measures nothing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qsim.severity.training_record import NEVER, TrainSeverity

Plain = str | int | float | bool | None


class TrainingRow(NamedTuple):
    """One protocol in one setting. Both are words for a reader; rows of one setting share a table and a panel."""

    protocol: str
    setting: str
    severity: TrainSeverity


def blocks(rows: Sequence[TrainingRow]) -> Iterator[tuple[str, list[TrainingRow]]]:
    """Rows by setting, in order of first appearance; runs of other seeds or steps are no row of the same block."""
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[TrainingRow]] = {}
    for row in rows:
        steps = tuple(step.step for step in row.severity.steps)
        groups.setdefault((row.setting, row.severity.seeds, steps), []).append(row)
    for (setting, _, _), group in groups.items():
        yield setting, group


def value_class(value: float) -> str:
    """ "finite", "+inf", "-inf", or "not_measured" for NaN: beside a value in tables that have no word for it."""
    if math.isnan(value):
        return "not_measured"
    return "finite" if math.isfinite(value) else f"{value:+}"


def training_rows(rows: Sequence[TrainingRow]) -> list[dict[str, Plain]]:
    """A flat dict for each (protocol, setting, seed), all with the same keys.

    None: never (first_bad_step) or no such thing (drift_owner). nan: not measured; *_class says so in words. Ratios are
    ratios, not logarithms; drift is in log2. replay_points_most: of the matched step in which most points differ.
    """
    return [_flat(row, i) for row in rows for i in range(len(row.severity.seeds))]


def _flat(row: TrainingRow, i: int) -> dict[str, Plain]:
    s = row.severity
    drift = max(((abs(o.log2[i]), o.owner) for o in s.drift), key=lambda found: found[0], default=(math.nan, None))
    replay = max(((step.differing[i], step.points) for step in s.replay), default=(0, 0))
    return {
        "protocol": row.protocol,
        "setting": row.setting,
        "seed": s.seeds[i],
        "steps": len(s.steps),
        "broken": " ".join(s.broken),
        "expected": " ".join(s.expected),
        "as_expected": s.as_expected,
        "violations": s.violations,
        "identical": s.identical[i],
        "nonfinite_steps": s.nonfinite[i],
        "skipped_steps": s.skipped[i],
        "skipped_share": s.skipped[i] / len(s.steps),
        "first_bad_step": None if s.first_bad[i] == NEVER else s.first_bad[i],
        "norm_ratio_median": s.norm_ratio[i],
        "norm_ratio_p90": s.norm_ratio_p90[i],
        "norm_ratio_left_out": s.left_out[i],
        "spike_ratio": s.spike[i],
        "spike_ratio_class": value_class(s.spike[i]),
        "steps_above": s.above[i],
        "twin_steps_above": s.above_twin[i],
        "final_gap": s.final_gap[i],
        "final_gap_class": value_class(s.final_gap[i]),
        "late_gap": s.late_gap[i],
        "late_gap_class": value_class(s.late_gap[i]),
        "matched_steps": len(s.replay),
        "replay_share": s.replay_share[i],
        "replay_points": replay[1],
        "replay_points_most": replay[0],
        "drift_log2_largest": drift[0],
        "drift_owner": drift[1],
        "owners_unmatched": len(s.unmatched),
        "commits": s.commits_actual,
        "commits_expected": s.commits_expected,
        "commit_owners_off": owners_off(s),
        "tokens": s.tokens,
        "tokens_applied": s.tokens_applied[i],
    }


def owners_off(severity: TrainSeverity) -> int:
    """Owners that committed more or less often than in the twin."""
    return sum(owner.actual != owner.expected for owner in severity.commits)


def training_csv(rows: Sequence[TrainingRow]) -> str:
    """``training_rows`` as CSV. Floats are written as repr writes them; inf and nan stand as such, None is empty."""
    flat = training_rows(rows)
    out = io.StringIO()
    if flat:
        writer = csv.DictWriter(out, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return out.getvalue()
