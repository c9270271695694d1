"""Plays a scenario: correct, broken, repaired, on the same tensors. Knows no report by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsim.arrays import F64
from qsim.formats import get_format
from qsim.quant import OpId, TensorRole, make_recipe
from qsim.scenarios.model import Scenario, View
from qsim.severity import Severity, measure_severity
from qsim.sim import (
    FIXES,
    PRESETS,
    Case,
    Trace,
    Violation,
    broken,
    build_case,
    get_defect,
    judge,
)
from qsim.workloads.seeded import play_seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The figures at one place of the view's axis. error: median relative error of GEMM outputs against the correct
    twin (inf where one is not finite in most); worst: the largest; truth, truth_correct: median error against high
    precision, of the broken run and of the correct one; scales: median of log2(scale of the broken run / correct).
    """

    at: int
    error: float
    worst: float
    truth: float
    truth_correct: float
    scales: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out: verdicts before and after the repair, figures by line. expected: what the catalogue names.

    over_window: share of forward's activation casts after the first window whose amax passes what their scale was made
    for, broken and correct; NaN where there is none.
    mended_error: the largest error against the correct twin after the repair. mends: the catalogue calls it right.
    """

    scenario: Scenario
    violations: tuple[Violation, ...]
    expected: frozenset[str]
    after_repair: frozenset[str]
    lines: tuple[Line, ...]
    replay: float
    over_window: tuple[float, float]
    mended_error: float
    mends: bool

    @property
    def broken(self) -> frozenset[str]:
        """The invariants that the scenario breaks."""
        return broken(self.violations)

    @property
    def as_expected(self) -> bool:
        """True where it breaks what the catalogue names, and a right fix, and no other, leaves nothing broken."""
        return self.broken == self.expected and self.mends == (not self.after_repair)


def play_scenario(scenario: Scenario) -> Outcome:
    """Play the correct case, the broken one, the repaired one. CaseError where the schedule cannot host the defect."""
    defect = get_defect(scenario.defect)
    recipe = make_recipe(
        scenario.recipe,
        fmt=get_format(scenario.fmt),
        window=scenario.window,
        grad_fmt=get_format("e5m2") if scenario.fmt == "e4m3" else None,
    )

    def built(preset: str) -> Case:
        return build_case(
            scenario.spec,
            body=scenario.body,
            preset=PRESETS[preset],
            recipe=recipe,
            cadence=scenario.cadence if preset != "none" else None,
        )

    host = built(scenario.preset)
    bad = defect.apply(host, scenario.variant)
    mended = FIXES[scenario.repair].rewrite(bad)
    correct, wrong, repaired, truth = (_play(case, scenario) for case in (host, bad, mended, built("none")))
    severity = measure_severity(wrong, correct, truth)
    due = next((v.breaks for v in defect.variants if v.name == scenario.variant), defect.breaks)
    return Outcome(
        scenario=scenario,
        violations=judge(bad, wrong.records),
        expected=due | PRESETS[scenario.preset].breaks_on(host.context.traits),
        after_repair=broken(judge(mended, repaired.records)),
        lines=_lines(severity, _drift(wrong, correct, scenario.view), scenario),
        replay=float(severity.replay_mismatch.mean()) if severity.replay_mismatch.size else 0.0,
        over_window=(_over(wrong, scenario.window), _over(correct, scenario.window)),
        mends=scenario.repair in defect.shaped(scenario.variant).fixes,
        mended_error=float(measure_severity(repaired, correct).worst("rel_error").max()),
    )


def _play(case: Case, scenario: Scenario) -> Trace:
    return play_seeded(case, scenario.spec, seeds=range(scenario.seeds), shaping=scenario.shaping)


def _place(op: OpId, view: View) -> int:
    match view:
        case View.STEP:
            return op.logical_step
        case View.MICROBATCH:
            return op.microbatch
        case View.LAYER:
            return op.layer_id
        case View.RANK:
            return op.worker_id


def _lines(severity: Severity, drift: dict[int, list[F64]], scenario: Scenario) -> tuple[Line, ...]:
    rows: dict[int, dict[str, list[F64]]] = {}
    for phase, part in severity.gemms.items():
        if phase not in scenario.phases:
            continue
        for i, key in enumerate(part.keys):
            at = rows.setdefault(_place(key.op, scenario.view), {"e": [], "t": [], "c": []})
            at["e"].append(part.rel_error[i])
            at["t"].append(part.reference_error[i])
            at["c"].append(part.reference_error_correct[i])
    return tuple(
        Line(
            at=at,
            error=_median(found["e"]),
            worst=float(np.max(found["e"])),
            truth=_median(found["t"]),
            truth_correct=_median(found["c"]),
            scales=_median(drift.get(at, [np.zeros(1)])),
        )
        for at, found in sorted(rows.items())
    )


def _median(values: Sequence[F64]) -> float:
    return float(np.quantile(np.concatenate([np.ravel(v) for v in values]), 0.5, method="inverted_cdf"))


def _scales(trace: Trace) -> dict[OpId, F64]:
    found = {}
    for record in trace.records:
        if record.kind == "quantize" and record.phase in ("f", "b") and record.seq in trace.casts:
            snapshot = trace.casts[record.seq].snapshot
            assert snapshot is not None, "the simulator casts through snapshots only"
            assert record.op is not None, "a cast is of an operation"
            found[OpId(*record.op)] = snapshot.scale.astype(np.float64)
    return found


def _drift(wrong: Trace, correct: Trace, view: View) -> dict[int, list[F64]]:
    mine, twin = _scales(wrong), _scales(correct)
    found: dict[int, list[F64]] = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for op in mine.keys() & twin.keys():
            found.setdefault(_place(op, view), []).append(np.log2(mine[op] / twin[op]))
    return found


def _over(trace: Trace, window: int) -> float:
    """Share of forward's casts, weights and the first ``window`` steps left out, whose amax passes what their scale was
    made for: amax times scale is above the format's largest number.
    """
    over = []
    for record in trace.records:
        if record.kind != "quantize" or record.phase != "f" or record.op is None or record.seq not in trace.casts:
            continue
        if record.op[4] != TensorRole.WEIGHT and record.op[0] >= window:
            cast = trace.casts[record.seq]
            assert cast.snapshot is not None, "the simulator casts through snapshots only"
            over.append(cast.amax.astype(np.float64) * cast.snapshot.scale > cast.snapshot.fmt.max)
    return float(np.mean(over)) if over else float("nan")
