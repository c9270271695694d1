"""Runs one cell: replays its plan and those of its twins, measures. Knows no file of a study.

Twins (the correct protocol, high precision) are shared by the cells of one process that have them in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from qsim.arrays import F64, I64
from qsim.backends import get_backend
from qsim.errors import CaseError, StudyError
from qsim.severity import CastSeverity, Severity, measure_severity
from qsim.sim import Case, Env, Trace, Violation, in_order, replay, replay_guarded
from qsim.sweep.cell import Cell, CellRecord
from qsim.sweep.plan import (
    CONTROLS,
    CORRECT,
    HIGH_PRECISION,
    POLICY,
    Host,
    Plan,
    defect_of,
    host_of,
    plan_of,
    workload_of,
)

__all__ = ["CONTROLS", "CORRECT", "HIGH_PRECISION", "Outcome", "check_cells", "replay_cell", "run_cell"]


def _play(host: Host, plan: Plan, *, guarded: bool = False) -> Trace:
    env = Env(
        load=workload_of(host).load,
        backend=get_backend(host.backend),
        recipe=plan.case.recipe,
        policy=POLICY,
        lead=(len(host.seeds),),
        reproducible=host.reproducible,
    )
    return replay_guarded(plan.case, env, plan.records) if guarded else replay(plan.case, env, plan.records)


@lru_cache(maxsize=3)
def _trace(host: Host) -> Trace:
    return _play(host, plan_of(host))


@lru_cache(maxsize=2)
def _high_precision_trace(host: Host) -> Trace:
    return _play(host, plan_of(host))


class Outcome(NamedTuple):
    """All that came out of one cell: the record that is kept, and what it was made from."""

    record: CellRecord
    case: Case
    trace: Trace
    violations: tuple[Violation, ...]
    severity: Severity


def check_cells(cells: Iterable[Cell]) -> None:
    """Raise now what every cell would raise later: a capture that cannot be used, layers that it does not have, a
    backend that this machine cannot run. A cell that cannot host its defect is no mistake: its record says why."""
    for cell in cells:
        get_backend(cell.backend)
        try:
            host = host_of(cell, defect_of(cell))
        except CaseError:
            continue
        workload_of(msgspec.structs.replace(host, seeds=(cell.seed,)))


def run_cell(cell: Cell) -> CellRecord:
    """The outcome of one cell. status "not_applicable" where recipe or preset cannot host the defect."""
    try:
        return replay_cell(cell).record
    except CaseError as error:
        if cell.schedule.text:  # nothing was asked of it but to run
            raise StudyError(f"schedule.text: {error}") from error
        return CellRecord(status="not_applicable", note=str(error))


def replay_cell(cell: Cell, *, fix: str = "", guarded: bool = False) -> Outcome:
    """Replay one cell, with a fix of FIXES on top of its defect if one is named. guarded: fail closed.

    Raises CaseError where preset or recipe cannot host the defect, ProtocolViolation where a guarded replay stops.
    """
    defect = defect_of(cell)
    host = host_of(cell, defect)
    plan = plan_of(host, defect="" if defect is None else defect.id, fix=fix)
    trace = _trace(host) if defect is None and not fix and not guarded else _play(host, plan, guarded=guarded)
    correct = _trace(host.correct())
    severity = measure_severity(trace, correct, _high_precision_trace(host.high_precision()))
    record = _record(
        cell,
        severity,
        trace,
        broken_ids=plan.broken,
        expected=in_order(plan.expected),
        violations=len(plan.violations),
        commits_expected=sum(r.kind in ("commit", "store") for r in correct.records),
        distinct_rows=workload_of(host).distinct_rows,
    )
    return Outcome(record, plan.case, trace, plan.violations, severity)


def _record(
    cell: Cell,
    severity: Severity,
    trace: Trace,
    *,
    broken_ids: tuple[str, ...],
    expected: tuple[str, ...],
    violations: int,
    commits_expected: int,
    distinct_rows: int,
) -> CellRecord:
    skip = cell.skip_steps
    error = severity.worst("rel_error", skip_steps=skip)
    casts = [c for c in severity.casts.values() if c.ops]
    bad = sum((g.nonfinite.sum(axis=0) for g in severity.gemms.values()), np.zeros(cell.replicas, np.int64))

    def median(field: str) -> float:
        return _median(severity.worst(field, skip_steps=skip))

    return CellRecord(
        status="ok",
        broken=broken_ids,
        expected=expected,
        violations=violations,
        commits=sum(severity.commits.values()),
        commits_expected=commits_expected,
        rel_error_median=_median(error),
        rel_error_p99=_quantile(error, 0.99),
        rel_error_max=float(error.max()),
        rel_error_replica=tuple(_median(column) for column in error.T),
        reference_error_median=median("reference_error"),
        reference_error_correct=median("reference_error_correct"),
        replay_mismatch=float(severity.replay_mismatch.mean()) if severity.replay_mismatch.size else 0.0,
        code_match=float(np.mean([c.code_match.mean() for c in casts])) if casts else 1.0,
        gain_median=median("gain_factor"),
        gain_max=severity.farthest_gain(skip_steps=skip),
        center_gap_median=median("center_gap"),
        ulp_median=median("ulp"),
        max_abs_error=max(float(g.max_abs.max()) for g in severity.gemms.values()),
        saturated_share=float(np.mean([c.saturated.mean() for c in casts])) if casts else 0.0,
        flushed_share=float(np.mean([c.flushed.mean() for c in casts])) if casts else 0.0,
        nonfinite_outputs=int(bad.sum()),
        outputs=sum(g.elements for g in severity.gemms.values()) * cell.replicas,
        nonfinite_replicas=int((bad > 0).sum()),
        k=_median(k) if (k := _finite_k(casts)).size else 0.0,
        distinct_rows=distinct_rows,
        output_digest=_digest(trace),
    )


def _finite_k(casts: Iterable[CastSeverity]) -> F64:
    """k of every cast that has one: a tensor with an Inf in it has no mean."""
    k = np.concatenate([np.empty(0), *(cast.k.ravel() for cast in casts)])
    finite: F64 = k[np.isfinite(k)]
    return finite


def _median(values: F64 | I64) -> float:
    return _quantile(values, 0.5)


def _quantile(values: F64 | I64, q: float) -> float:
    """The q-quantile as an order statistic (no interpolation, so Inf stays Inf and never becomes NaN)."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def _digest(trace: Trace) -> str:
    """sha256 over the bits of every GEMM output, in order."""
    digest = hashlib.sha256()
    for seq in sorted(trace.outputs):
        digest.update(np.ascontiguousarray(trace.outputs[seq]).tobytes())
    return digest.hexdigest()[:16]
