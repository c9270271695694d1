"""What a defect costs a training run: its log against its correct twin's, seed by seed. Trains nothing, judges nothing.

Both runs must have drawn the same streams (common random numbers): the same seeds, in the same order, the same steps.
Only order statistics, differences and quotients of logged numbers are taken, all in float64. What is not finite ranks
worst, as inf; NaN means "not measured" and nothing else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from qsim.arrays import F64, I64, Bool
from qsim.errors import UsageError
from qsim.severity.seeds import order_statistic
from qsim.severity.training_record import (
    NEVER,
    SPIKE,
    Count,
    OwnerCommits,
    OwnerDrift,
    PairedStep,
    ReplayStep,
    TrainSeverity,
)
from qsim.training.log import MatchedPoint, Row, StepLog, TrainLog

LATE = 4
"""The last 1/LATE of the steps is what the late training loss is taken over."""
_PER_SEED = ("loss", "grad_norm", "skipped", "finite_loss")


class _Columns(NamedTuple):
    """A log as arrays [steps, seeds]; loss and norm are inf where they are not finite."""

    loss: F64
    norm: F64
    skipped: Bool
    nonfinite: Bool
    tokens: I64


def measure_training(defective: TrainLog, correct: TrainLog) -> TrainSeverity:
    """Severity of ``defective`` against its correct twin; a run against itself gives ratios of 1 and gaps of 0.

    Raises UsageError where seeds or steps of the two differ, or a row does not hold one number a seed.
    """
    _check_pair(defective, correct)
    run, twin = _columns(defective), _columns(correct)
    limit = SPIKE * np.sort(twin.norm, axis=0)[(len(twin.norm) - 1) // 2]
    above, above_twin = (np.isinf(part.norm) | (part.norm > limit) for part in (run, twin))
    both = np.isfinite(run.norm) & np.isfinite(twin.norm)
    ratios = [_ratio(run.norm[rows, i], twin.norm[rows, i]).tolist() for i, rows in enumerate(both.T)]
    late = max(1, len(run.loss) // LATE)
    return TrainSeverity(
        seeds=defective.seeds,
        broken=defective.broken,
        expected=defective.expected,
        violations=defective.violations,
        identical=tuple(a == b for a, b in zip(defective.digest, correct.digest, strict=True)),
        nonfinite=_counts(run.nonfinite),
        skipped=_counts(run.skipped),
        first_bad=_first([step.step for step in defective.steps], run.skipped | run.nonfinite | above),
        norm_ratio=tuple(order_statistic(seed, percent=50) for seed in ratios),
        norm_ratio_p90=tuple(order_statistic(seed, percent=90) for seed in ratios),
        left_out=tuple(float(n) / len(both) for n in (~both).sum(axis=0)),
        spike=_row(_ratio(run.norm.max(axis=0), twin.norm.max(axis=0))),
        above=_counts(above),
        above_twin=_counts(above_twin),
        final_gap=_final_gap(np.array(defective.final_loss), np.array(correct.final_loss)),
        late_gap=_row(_gap(_means(run.loss[-late:]), _means(twin.loss[-late:]))),
        replay=_replay(defective),
        drift=_drift(defective.scales, correct.scales),
        unmatched=tuple(
            owner
            for owner in _union(correct.scales, defective.scales)
            if not (owner in defective.scales and owner in correct.scales)
        ),
        commits=tuple(
            OwnerCommits(owner=owner, actual=defective.commits.get(owner, 0), expected=correct.commits.get(owner, 0))
            for owner in _union(correct.commits, defective.commits)
        ),
        tokens=int(run.tokens.sum()),
        tokens_applied=tuple(int(n) for n in run.tokens @ ~run.skipped),
        steps=_paired(defective, correct, run, twin),
    )


def _check_pair(defective: TrainLog, correct: TrainLog) -> None:
    if defective.seeds != correct.seeds:
        raise UsageError(
            f"the run has seeds {list(defective.seeds)}, its twin {list(correct.seeds)}; "
            "give both runs the same seeds in the same order"
        )
    steps, twin_steps = ([step.step for step in log.steps] for log in (defective, correct))
    if steps != twin_steps or not steps:
        raise UsageError(
            f"the run logged {len(steps)} steps, its twin {len(twin_steps)}, or other ones; "
            "run both for the same steps, one at least"
        )
    for log, name in ((defective, "run"), (correct, "twin")):
        rows = [
            *((f"{field} of step {s.step}", getattr(s, field)) for s in log.steps for field in _PER_SEED),
            *((f"matched point {p.point} of step {p.step}", p.same) for p in log.matched),
            *((f"the scale of {owner}", row) for owner, row in log.scales.items()),
            ("the final loss", log.final_loss),
            ("the digest", log.digest),
        ]
        for place, row in rows:
            if len(row) != len(log.seeds):
                raise UsageError(
                    f"{place} has {len(row)} values for {len(log.seeds)} seeds in the {name}; log one a seed"
                )


def _columns(log: TrainLog) -> _Columns:
    loss, norm = (np.array([getattr(s, field) for s in log.steps], np.float64) for field in ("loss", "grad_norm"))
    finite_loss = np.array([s.finite_loss for s in log.steps], bool) & np.isfinite(loss)
    return _Columns(
        loss=np.where(finite_loss, loss, np.inf),
        norm=np.where(np.isfinite(norm), norm, np.inf),
        skipped=np.array([s.skipped for s in log.steps], bool),
        nonfinite=~finite_loss | ~np.isfinite(norm),
        tokens=np.array([s.tokens for s in log.steps], np.int64),
    )


def _ratio(value: F64, base: F64) -> F64:
    """value / base of numbers from 0 to inf: 1 where they are equal (0 / 0 too), but NaN for inf / inf."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(value == base, 1.0, value / base)
    return np.where(np.isinf(value) & np.isinf(base), np.nan, quotient)


def _gap(value: F64, base: F64) -> F64:
    """value - base; inf stands for what is no number, and two of them are a tie."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(value) & np.isinf(base), 0.0, value - base)


def _final_gap(loss: F64, twin: F64) -> Row:
    """Gap of the held-out losses. NaN in both runs: none was taken; NaN in one: that run has no loss any more."""
    gap = _gap(*(np.where(np.isfinite(x), x, np.inf) for x in (loss, twin)))
    return _row(np.where(np.isnan(loss) & np.isnan(twin), np.nan, gap))


def _apart(log2: F64, twin: F64) -> F64:
    """Difference of two logarithms; equal ones are 0 apart, infinite ones too, and inf where there is no number."""
    with np.errstate(invalid="ignore"):
        difference = np.where(log2 == twin, 0.0, log2 - twin)
    return np.where(np.isnan(difference), np.inf, difference)


def _means(loss: F64) -> F64:
    """Mean over steps [steps, seeds] -> [seeds], each sum correctly rounded."""
    return np.array([math.fsum(seed) / len(loss) for seed in loss.T.tolist()])


def _counts(flags: Bool) -> Count:
    return tuple(int(n) for n in flags.sum(axis=0))


def _row(values: F64) -> Row:
    return tuple(float(value) for value in values)


def _first(steps: list[int], bad: Bool) -> Count:
    return tuple(steps[int(np.argmax(seed))] if seed.any() else NEVER for seed in bad.T)


def _drift(scales: dict[str, Row], twin: dict[str, Row]) -> tuple[OwnerDrift, ...]:
    """Of the owners that both have, in the twin's order."""
    return tuple(
        OwnerDrift(owner=owner, log2=_row(_apart(np.array(scales[owner]), np.array(base))))
        for owner, base in twin.items()
        if owner in scales
    )


def _union(*groups: dict[str, Row] | dict[str, int]) -> list[str]:
    """Keys of all groups, in order of first appearance."""
    return list(dict.fromkeys(key for group in groups for key in group))


def _replay(log: TrainLog) -> tuple[ReplayStep, ...]:
    matched: dict[int, list[MatchedPoint]] = {}
    for point in log.matched:
        matched.setdefault(point.step, []).append(point)
    return tuple(
        ReplayStep(step=step, points=len(points), differing=_counts(~np.array([p.same for p in points], bool)))
        for step, points in matched.items()
    )


def _paired(defective: TrainLog, correct: TrainLog, run: _Columns, twin: _Columns) -> tuple[PairedStep, ...]:
    def pair(i: int, mine: StepLog, other: StepLog) -> PairedStep:
        return PairedStep(
            step=mine.step,
            grad_norm=mine.grad_norm,
            twin_norm=other.grad_norm,
            loss=mine.loss,
            twin_loss=other.loss,
            skipped=mine.skipped,
            twin_skipped=other.skipped,
            nonfinite=tuple(run.nonfinite[i].tolist()),
            twin_nonfinite=tuple(twin.nonfinite[i].tolist()),
        )

    steps = zip(defective.steps, correct.steps, strict=True)
    return tuple(pair(i, mine, other) for i, (mine, other) in enumerate(steps))
