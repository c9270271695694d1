"""Runs one cell: builds the case, rewrites it, replays it and its twins, measures. Knows no file of a study.

Twins (the correct protocol, high precision) are shared by the cells of one process that have them in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from qsim._paths import sample_capture
from qsim.arrays import F64, I64
from qsim.backends import get_backend
from qsim.errors import CaseError, InputError
from qsim.formats import POLICIES, get_format
from qsim.quant import Recipe, make_recipe
from qsim.record import Record
from qsim.severity import Severity, measure_severity
from qsim.sim import (
    FIXES,
    PRESETS,
    Body,
    Cadence,
    Case,
    Defect,
    Env,
    Order,
    ScheduleSpec,
    Trace,
    Violation,
    broken,
    build_case,
    get_defect,
    judge,
    records_of,
    replay,
    ruled,
)
from qsim.sweep.cell import Cell, CellRecord, ScheduleParams, WorkloadParams
from qsim.workloads import WORKLOADS, Shaping, Workload

CORRECT, HIGH_PRECISION = "correct", "high_precision"
CONTROLS = (CORRECT, HIGH_PRECISION)
POLICY = POLICIES["ocp"]


class _Host(msgspec.Struct, frozen=True):
    """What a trace of an unrewritten preset depends on: everything in a cell but the defect."""

    fmt: str
    recipe: str
    window: int
    preset: str
    cadence: Cadence | None
    schedule: ScheduleParams
    workload: WorkloadParams
    seeds: tuple[int, ...]
    backend: str
    reproducible: bool

    def spec(self) -> ScheduleSpec:
        """The schedule's size."""
        p = self.schedule
        return ScheduleSpec(
            steps=p.steps, microbatches=p.microbatches, layers=p.layers, workers=p.workers, order=Order(p.order)
        )

    def correct(self) -> _Host:
        """The host whose trace a defective one is measured against."""
        return self if not PRESETS[self.preset].breaks else msgspec.structs.replace(self, preset="seed_correct")

    def high_precision(self) -> _Host:
        """The control that casts nothing, so format, recipe, window and cadence do not matter."""
        return msgspec.structs.replace(
            self, preset="none", fmt="float8_e4m3fn", recipe="delayed", window=1, cadence=None
        )


def _host(cell: Cell, defect: Defect | None) -> _Host:
    grown = ScheduleSpec(
        steps=cell.schedule.steps,
        microbatches=cell.schedule.microbatches,
        layers=cell.schedule.layers,
        workers=cell.schedule.workers,
        order=Order(cell.schedule.order),
    )
    if defect is not None:
        grown = defect.host(grown)
    host = _Host(
        fmt=cell.fmt,
        recipe=cell.recipe,
        window=cell.window,
        preset=cell.preset,
        cadence=None if defect is None else defect.cadence,
        schedule=ScheduleParams(
            steps=grown.steps,
            microbatches=grown.microbatches,
            layers=grown.layers,
            workers=grown.workers,
            order=grown.order.value,
        ),
        workload=cell.workload,
        seeds=tuple(range(cell.seed, cell.seed + cell.replicas)),
        backend=cell.backend,
        reproducible=cell.reproducible,
    )
    return host.high_precision() if cell.defect == HIGH_PRECISION else host


@lru_cache(maxsize=4)
def _workload(workload: WorkloadParams, seeds: tuple[int, ...], layers: int, microbatches: int) -> Workload:
    path = sample_capture() if workload.tensors == "builtin" else Path(workload.tensors)
    if workload.tensors_digest and path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != workload.tensors_digest:
            raise InputError(f"{path}: changed since the study was read; run the sweep again with another --out")
    shaping = Shaping(
        tokens=workload.tokens,
        outputs=workload.outputs,
        mean_shift=workload.mean_shift,
        layer_spread=workload.layer_spread,
        outlier_steps=workload.outlier_steps,
        outlier_factor=workload.outlier_factor,
    )
    open_workload = WORKLOADS[workload.kind]
    return open_workload(path, shaping=shaping, seeds=seeds, layers=layers, microbatches=microbatches)


def _workload_of(host: _Host) -> Workload:
    return _workload(host.workload, host.seeds, host.schedule.layers, host.schedule.microbatches)


class _Plan(NamedTuple):
    """What no number decides: a schedule, what it does, what it breaks."""

    case: Case
    records: tuple[Record, ...]
    violations: tuple[Violation, ...]


@lru_cache(maxsize=64)
def _plan(
    spec: ScheduleSpec,
    body: Body,
    preset: str,
    cadence: Cadence | None,
    recipe: Recipe,
    defect: str,
    fix: str,
) -> _Plan:
    case = build_case(spec, body=body, preset=PRESETS[preset], recipe=recipe, cadence=cadence, policy=POLICY)
    if defect:
        found = get_defect(defect)
        found.require(PRESETS[preset], recipe)
        case = found.apply(case)
    if fix:
        case = FIXES[fix].rewrite(case)
    records = records_of(case)
    return _Plan(case, records, judge(case, records))


def _plan_of(host: _Host, *, defect: str = "", fix: str = "") -> _Plan:
    """The plan of a host: shared by all formats and windows, which change no event."""
    stand_in = make_recipe(host.recipe, fmt=get_format("float8_e4m3fn"))
    body = _workload_of(host).body
    plan = _plan(host.spec(), body, host.preset, host.cadence, stand_in, defect, fix)
    return plan._replace(case=replace(plan.case, recipe=_recipe(host)))


def _recipe(host: _Host) -> Recipe:
    return ruled(make_recipe(host.recipe, fmt=get_format(host.fmt), window=host.window), PRESETS[host.preset])


def _play(host: _Host, plan: _Plan) -> Trace:
    env = Env(
        load=_workload_of(host).load,
        backend=get_backend(host.backend),
        recipe=plan.case.recipe,
        policy=POLICY,
        lead=(len(host.seeds),),
        reproducible=host.reproducible,
    )
    return replay(plan.case, env, plan.records)


@lru_cache(maxsize=3)
def _trace(host: _Host) -> Trace:
    return _play(host, _plan_of(host))


@lru_cache(maxsize=2)
def _high_precision_trace(host: _Host) -> Trace:
    return _play(host, _plan_of(host))


class Outcome(NamedTuple):
    """All that came out of one cell: the record that is kept, and what it was made from."""

    record: CellRecord
    case: Case
    trace: Trace
    violations: tuple[Violation, ...]
    severity: Severity


def check_cells(cells: Iterable[Cell]) -> None:
    """Raise now what every cell would raise later: a capture that cannot be used, layers that it does not have, a
    backend that this machine cannot run."""
    for cell in cells:
        get_backend(cell.backend)
        defect = None if cell.defect in CONTROLS else get_defect(cell.defect)
        _workload_of(msgspec.structs.replace(_host(cell, defect), seeds=(cell.seed,)))


def run_cell(cell: Cell) -> CellRecord:
    """The outcome of one cell. status "not_applicable" where recipe or preset cannot host the defect."""
    try:
        return replay_cell(cell).record
    except CaseError as error:
        return CellRecord(status="not_applicable", note=str(error))


def replay_cell(cell: Cell, *, fix: str = "") -> Outcome:
    """Replay one cell, with a fix of FIXES on top of its defect if one is named.

    Raises CaseError where preset or recipe cannot host the defect.
    """
    defect = None if cell.defect in CONTROLS else get_defect(cell.defect)
    host = _host(cell, defect)
    plan = _plan_of(host, defect="" if defect is None else defect.id, fix=fix)
    expected = PRESETS[host.preset].breaks if defect is None else defect.breaks
    if fix and (defect is None or fix in defect.fixes):
        expected = frozenset()
    elif fix and defect is not None and fix in defect.wrong_fixes and plan.violations:
        expected = broken(plan.violations)  # a wrong fix is known to leave something broken; what, it does not say
    trace = _trace(host) if defect is None and not fix else _play(host, plan)
    correct = _trace(host.correct())
    severity = measure_severity(trace, correct, _high_precision_trace(host.high_precision()))
    record = _record(
        cell,
        severity,
        trace,
        broken_ids=tuple(sorted(broken(plan.violations))),
        expected=tuple(sorted(expected)),
        violations=len(plan.violations),
        commits_expected=sum(r.kind in ("commit", "store") for r in correct.records),
        distinct_rows=_workload_of(host).distinct_rows,
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
        replay_mismatch=float(severity.replay_mismatch.mean()),
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
        k=_median(np.concatenate([c.k.ravel() for c in casts])) if casts else 0.0,
        distinct_rows=distinct_rows,
        output_digest=_digest(trace),
    )


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
