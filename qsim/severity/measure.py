"""What a defect costs: a defective trace against its correct twin and against high precision. Judges nothing.

Both traces must come from the same tensors (common random numbers). All sums are float64, over the axes after
the replica axis, so a replica's figures do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from qsim.arrays import F32, F64, I64, AnyArray, Bool
from qsim.errors import UsageError
from qsim.quant import OpId, TensorRole
from qsim.sim.step import Trace, Used

FORWARD, RECOMPUTE, BACKWARD = "f", "r", "b"


class GemmKey(NamedTuple):
    """One GEMM, whatever the phase it runs in."""

    op: OpId
    gemm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSeverity:
    """What one phase's GEMMs cost: arrays [gemms, replicas], in the order of ``keys``.

    rel_error, max_abs: L2 norm of the difference over that of the correct output, and the largest absolute
    difference; inf where either output is not finite. reference_error: the same against high precision, and
    reference_error_correct that of the correct twin (both NaN without a reference). ulp: largest distance in
    float32 steps over outputs finite in both. nonfinite: number of non-finite outputs. gain: product over the
    two operands of descale used / descale paired. center_gap: rms of centre used - centre paired, over the rms
    of the operand; the larger of the two operands.
    """

    keys: tuple[GemmKey, ...]
    rel_error: F64
    max_abs: F64
    reference_error: F64
    reference_error_correct: F64
    ulp: I64
    nonfinite: I64
    elements: int
    gain: F64
    center_gap: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSeverity:
    """What one phase's activation casts did (weights left out): arrays [casts, replicas].

    code_match: share of codes equal to the correct twin's. saturated, flushed: shares of elements.
    k: |mean| / sigma of the tensor that was encoded.
    """

    ops: tuple[OpId, ...]
    code_match: F64
    saturated: F64
    flushed: F64
    k: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Severity:
    """All of it, by phase ("f", "r", "b"); replay_mismatch [gemms of r, replicas]: any bit differs from forward.

    commits: number of commits by (owner, step), as the trace has them.
    """

    gemms: Mapping[str, GemmSeverity]
    casts: Mapping[str, CastSeverity]
    replay_mismatch: Bool
    commits: Mapping[tuple[str, int], int]

    def worst_error(self, *, skip_steps: int = 0) -> F64:
        """rel_error [gemms, replicas], for each GEMM the worse of forward and recompute; then backward's.

        Steps below ``skip_steps`` are left out (a cold start).
        """
        keys = self.gemms[FORWARD].keys
        rows = {key: i for i, key in enumerate(self.gemms[RECOMPUTE].keys)}
        again = self.gemms[RECOMPUTE].rel_error[[rows[key] for key in keys]]
        worst = np.maximum(self.gemms[FORWARD].rel_error, again)[_from(keys, skip_steps)]
        if BACKWARD in self.gemms:
            back = self.gemms[BACKWARD]
            worst = np.concatenate([worst, back.rel_error[_from(back.keys, skip_steps)]])
        return worst

    def by_step_and_layer(self, phase: str, field: str) -> F64:
        """[steps, layers, replicas] of one field of ``gemms``: the largest over microbatches and sites."""
        part = self.gemms[phase]
        values = np.asarray(getattr(part, field), np.float64)
        steps = 1 + max(key.op.logical_step for key in part.keys)
        layers = 1 + max(key.op.layer_id for key in part.keys)
        out = np.full((steps, layers, values.shape[1]), -np.inf)
        for row, key in zip(values, part.keys, strict=True):
            at = key.op.logical_step, key.op.layer_id
            out[at] = np.maximum(out[at], row)
        return out


def _from(keys: Sequence[GemmKey], skip_steps: int) -> list[int]:
    return [i for i, key in enumerate(keys) if key.op.logical_step >= skip_steps]


def relative_error(got: F32, want: F32) -> F64:
    """||got - want|| / ||want|| per replica [R]; inf where either is not finite, 0 for 0 / 0."""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    axes = tuple(range(1, got.ndim))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.sqrt(np.sum((got64 - want64) ** 2, axis=axes))
        size = np.sqrt(np.sum(want64**2, axis=axes))
        ratio = np.where(difference == 0, 0.0, difference / size)
    finite = np.isfinite(got).all(axis=axes) & np.isfinite(want).all(axis=axes)
    return np.where(finite, ratio, np.inf)  # never NaN: one NaN would be the median of a whole cell


def ulp_distance(a: F32, b: F32) -> I64:
    """Largest number of float32 steps between a and b, per replica [R]; pairs with a non-finite are left out."""
    both = np.isfinite(a) & np.isfinite(b)
    steps = np.where(both, np.abs(_ordered(a) - _ordered(b)), 0)
    most: I64 = steps.max(axis=tuple(range(1, a.ndim)), initial=0)
    return most


def _ordered(x: F32) -> I64:
    """float32 as integers in the order of the reals: neighbours differ by 1, -0 and +0 coincide."""
    i = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(i < 0, np.int64(-(2**31)) - i, i)


def measure_severity(defective: Trace, correct: Trace, high_precision: Trace | None = None) -> Severity:
    """Severity of ``defective`` against its correct twin. Raises UsageError where the two do not match."""
    gemms, casts = {}, {}
    phases = dict.fromkeys(r.phase for r in (*defective.records, *correct.records) if r.kind == "consume")
    for phase in phases:
        gemms[phase] = _gemms(defective, correct, high_precision, phase)
        casts[phase] = _casts(defective, correct, phase)
    commits: dict[tuple[str, int], int] = {}
    for record in defective.records:
        if record.kind in ("commit", "store") and record.op is not None:
            key = record.owner, record.op[0]
            commits[key] = commits.get(key, 0) + 1
    return Severity(
        gemms=MappingProxyType(gemms),
        casts=MappingProxyType({phase: cast for phase, cast in casts.items() if cast.ops}),
        replay_mismatch=replay_mismatch(defective),
        commits=MappingProxyType(commits),
    )


def _consumes(trace: Trace, phase: str) -> dict[GemmKey, int]:
    return {
        GemmKey(OpId(*r.op), r.gemm): r.seq
        for r in trace.records
        if r.kind == "consume" and r.phase == phase and r.op is not None
    }


def replay_mismatch(trace: Trace) -> Bool:
    """[recomputed GEMMs, R]: True where the recomputed output differs from the forward's in any bit."""
    forward = _consumes(trace, FORWARD)
    rows = []
    for key, seq in _consumes(trace, RECOMPUTE).items():
        a, b = trace.outputs[forward[key]].view(np.uint32), trace.outputs[seq].view(np.uint32)
        rows.append((a != b).any(axis=tuple(range(1, a.ndim))))
    return np.array(rows)


def _gemms(defective: Trace, correct: Trace, high: Trace | None, phase: str) -> GemmSeverity:
    mine, twin = _consumes(defective, phase), _consumes(correct, phase)
    reference = None if high is None else _consumes(high, phase)
    if mine.keys() != twin.keys() or (reference is not None and mine.keys() != reference.keys()):
        raise UsageError(f"the traces compute different GEMMs in phase {phase}; compare a trace with its own twin")
    columns: list[tuple[AnyArray, ...]] = []
    for key, seq in mine.items():
        got, want = defective.outputs[seq], correct.outputs[twin[key]]
        truth = None if reference is None or high is None else high.outputs[reference[key]]
        if any(other.shape != got.shape for other in (want, truth) if other is not None):
            raise UsageError(f"{key.gemm} of {key.op} has another shape in the twin; replay both with the same seeds")
        axes = tuple(range(1, got.ndim))
        finite = np.isfinite(got)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(axis=axes)
        unknown = np.full(got.shape[0], np.nan)
        columns.append(
            (
                relative_error(got, want),
                np.where((finite & np.isfinite(want)).all(axis=axes), apart, np.inf),
                unknown if truth is None else relative_error(got, truth),
                unknown if truth is None else relative_error(want, truth),
                ulp_distance(got, want),
                (~finite).sum(axis=axes),
                _gain(defective, defective.used[seq], got.shape[0]),
                _center_gap(defective, defective.used[seq], got.shape[0]),
            )
        )
    rel, absolute, ref, ref_correct, ulp, bad, gain, gap = (np.array(c) for c in zip(*columns, strict=True))
    return GemmSeverity(
        keys=tuple(mine),
        rel_error=rel,
        max_abs=absolute,
        reference_error=ref,
        reference_error_correct=ref_correct,
        ulp=ulp,
        nonfinite=bad,
        elements=sum(int(defective.outputs[seq][0].size) for seq in mine.values()),
        gain=gain,
        center_gap=gap,
    )


def _gain(trace: Trace, used: tuple[Used, ...], replicas: int) -> F64:
    """descale used / descale paired, multiplied over the operands [R]."""
    gain = np.ones(replicas)
    for operand in used:
        paired = trace.casts[operand.cast].snapshot
        assert paired is not None, "the simulator casts through snapshots only"
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            gain = gain * (operand.descale.descale.astype(np.float64) / paired.descale.astype(np.float64))
    return gain


def _center_gap(trace: Trace, used: tuple[Used, ...], replicas: int) -> F64:
    """rms(centre used - centre paired) / rms(operand) [R], the larger of the operands; 0 without a centre."""
    gap = np.zeros(replicas)
    for operand in used:
        paired = trace.casts[operand.cast].snapshot
        assert paired is not None, "the simulator casts through snapshots only"
        if paired.center is None or operand.center is None or operand.center.center is None:
            continue
        apart = _rms(operand.center.center.astype(np.float64) - paired.center.astype(np.float64))
        size = _rms(trace.inputs[operand.cast].astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.maximum(gap, np.where(apart == 0, 0.0, apart / size))
    return gap


def _rms(x: F64) -> F64:
    rms: F64 = np.sqrt(np.mean(x**2, axis=tuple(range(1, x.ndim))))
    return rms


def _casts(defective: Trace, correct: Trace, phase: str) -> CastSeverity:
    def quantizes(trace: Trace) -> dict[OpId, int]:
        return {
            OpId(*r.op): r.seq
            for r in trace.records
            if r.kind == "quantize" and r.phase == phase and r.op is not None and r.op[4] != TensorRole.WEIGHT
        }

    mine, twin = quantizes(defective), quantizes(correct)
    match, saturated, flushed, k = [], [], [], []
    for op, seq in mine.items():
        cast, x = defective.casts[seq], defective.inputs[seq]
        axes = tuple(range(1, x.ndim))
        size = x[0].size
        other = correct.casts[twin[op]].codes if op in twin else None
        match.append(np.ones(len(x)) if other is None else (cast.codes == other).mean(axis=axes))
        saturated.append(cast.counts.saturated / size)
        flushed.append(cast.counts.flushed / size)
        sigma = x.std(axis=axes, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            k.append(np.abs(x.mean(axis=axes, dtype=np.float64)) / sigma)
    return CastSeverity(
        ops=tuple(mine),
        code_match=np.array(match),
        saturated=np.array(saturated),
        flushed=np.array(flushed),
        k=np.array(k),
    )
