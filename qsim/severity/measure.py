"""What a defect costs: a defective trace against its correct twin and against high precision. Judges nothing.

Both traces must come from the same tensors (common random numbers). All sums are float64, over the axes after
the replica axis, so a replica's figures do not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar, cast

import numpy as np

from qsim.arrays import F32, F64, I64, AnyArray, Bool
from qsim.errors import UsageError
from qsim.quant import OpId, TensorRole
from qsim.sim.step import Trace, Used

FORWARD, RECOMPUTE, BACKWARD = "f", "r", "b"
A = TypeVar("A", bound=AnyArray)


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

    @property
    def gain_factor(self) -> F64:
        """max(gain, 1 / gain): how far a gain is from 1, in either direction; inf for a gain of 0."""
        with np.errstate(divide="ignore"):
            return np.maximum(self.gain, 1.0 / self.gain)


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

    def worst(self, field: str, *, skip_steps: int = 0) -> F64:
        """One field of ``gemms`` [gemms, replicas]: for each GEMM the larger of forward and recompute, where it is
        recomputed; then backward's.

        Forward and recompute visit layers in opposite orders; they are matched by GEMM. Steps below ``skip_steps``
        are left out (a cold start).
        """
        keys = self.gemms[FORWARD].keys
        rows = {key: i for i, key in enumerate(self.gemms[RECOMPUTE].keys)} if RECOMPUTE in self.gemms else {}
        worst = _values(self.gemms[FORWARD], field).copy()
        both = [i for i, key in enumerate(keys) if key in rows]
        if both:
            again = _values(self.gemms[RECOMPUTE], field)[[rows[keys[i]] for i in both]]
            worst[both] = np.maximum(worst[both], again)
        worst = worst[_from(keys, skip_steps)]
        if BACKWARD in self.gemms:
            back = self.gemms[BACKWARD]
            worst = np.concatenate([worst, _values(back, field)[_from(back.keys, skip_steps)]])
        return worst

    def farthest_gain(self, *, skip_steps: int = 0, steps: int | None = None) -> float:
        """The gain farthest from 1 (by its logarithm) in steps skip_steps .. skip_steps + steps - 1; 1.0 for none."""
        end = math.inf if steps is None else skip_steps + steps
        gains = [
            part.gain[[i for i, key in enumerate(part.keys) if skip_steps <= key.op.logical_step < end]].ravel()
            for part in self.gemms.values()
        ]
        gain = np.concatenate([*gains, [1.0]])
        with np.errstate(divide="ignore"):
            return float(gain[np.argmax(np.abs(np.log(gain)))])

    def by_step_and_layer(self, phase: str, field: str) -> F64:
        """[steps, layers, replicas] of one field of ``gemms``: the largest over microbatches and sites; NaN throughout
        for a phase without GEMMs."""
        if phase not in self.gemms:
            return np.full_like(self.by_step_and_layer(FORWARD, field), np.nan)
        part = self.gemms[phase]
        values = _values(part, field)
        steps = 1 + max(key.op.logical_step for key in part.keys)
        layers = 1 + max(key.op.layer_id for key in part.keys)
        out = np.full((steps, layers, values.shape[1]), -np.inf)
        for row, key in zip(values, part.keys, strict=True):
            at = key.op.logical_step, key.op.layer_id
            out[at] = np.maximum(out[at], row)
        return out


def _values(part: GemmSeverity, field: str) -> F64:
    return np.asarray(getattr(part, field), np.float64)


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
    there = {r.phase for r in (*defective.records, *correct.records) if r.kind == "consume"}
    for phase in (phase for phase in (FORWARD, RECOMPUTE, BACKWARD) if phase in there):
        gemms[phase] = _gemms(defective, correct, high_precision, phase)
        casts[phase] = _casts(defective, correct, phase)
    commits: dict[tuple[str, int], int] = {}
    for record in defective.records:
        if record.kind in ("commit", "store") and record.op is not None:
            key = record.owner, record.op[0]
            commits[key] = commits.get(key, 0) + 1
    return Severity(
        gemms=MappingProxyType(gemms),
        casts=MappingProxyType({phase: part for phase, part in casts.items() if part.ops}),
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
    outputs = [defective.outputs[seq] for seq in mine.values()]
    wanted = [correct.outputs[twin[key]] for key in mine]
    truth = [] if reference is None or high is None else [high.outputs[reference[key]] for key in mine]
    for key, got, *others in zip(mine, outputs, wanted, *([truth] if truth else []), strict=True):
        if any(other.shape != got.shape for other in others):
            raise UsageError(f"{key.gemm} of {key.op} has another shape in the twin; replay both with the same seeds")
    n, replicas = len(outputs), outputs[0].shape[0]
    rel, absolute, ref, ref_correct = (np.full((n, replicas), np.nan) for _ in range(4))
    ulp, bad = np.zeros((n, replicas), np.int64), np.zeros((n, replicas), np.int64)
    for rows in _by_shape(outputs):  # one numpy call for all GEMMs of a shape; each row is one GEMM of one replica
        got, want = _flat(outputs, rows), _flat(wanted, rows)
        shape = len(rows), replicas
        finite = np.isfinite(got)
        both = (finite & np.isfinite(want)).all(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(axis=1)
        rel[rows] = relative_error(got, want).reshape(shape)
        absolute[rows] = np.where(both, apart, np.inf).reshape(shape)
        ulp[rows] = ulp_distance(got, want).reshape(shape)
        bad[rows] = (~finite).sum(axis=1).reshape(shape)
        if truth:
            ref[rows] = relative_error(got, _flat(truth, rows)).reshape(shape)
            ref_correct[rows] = relative_error(want, _flat(truth, rows)).reshape(shape)
    sizes: dict[int, F64] = {}
    return GemmSeverity(
        keys=tuple(mine),
        rel_error=rel,
        max_abs=absolute,
        reference_error=ref,
        reference_error_correct=ref_correct,
        ulp=ulp,
        nonfinite=bad,
        elements=sum(int(output[0].size) for output in outputs),
        gain=np.array([_gain(defective, defective.used[seq], replicas) for seq in mine.values()]),
        center_gap=np.array([_center_gap(defective, defective.used[seq], replicas, sizes) for seq in mine.values()]),
    )


def _by_shape(arrays: Sequence[AnyArray]) -> list[list[int]]:
    """Indices of arrays of equal shape, in order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(array.shape, []).append(i)
    return list(groups.values())


def _flat(arrays: Sequence[A], rows: Sequence[int]) -> A:
    """[len(rows) * R, elements]: contiguous rows, so that a sum over one of them has one order."""
    stacked = np.stack([arrays[i] for i in rows])
    return cast("A", stacked.reshape(stacked.shape[0] * stacked.shape[1], -1))


def _gain(trace: Trace, used: tuple[Used, ...], replicas: int) -> F64:
    """descale used / descale paired, multiplied over the operands [R]."""
    gain = np.ones(replicas)
    for operand in used:
        paired = trace.casts[operand.cast].snapshot
        assert paired is not None, "the simulator casts through snapshots only"
        if operand.descale is paired:
            continue
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            gain = gain * (operand.descale.descale.astype(np.float64) / paired.descale.astype(np.float64))
    return gain


def _center_gap(trace: Trace, used: tuple[Used, ...], replicas: int, sizes: dict[int, F64]) -> F64:
    """rms(centre used - centre paired) / rms(operand) [R], the larger of the operands; 0 without a centre.

    sizes: rms by the identity of an input, filled as needed; a trace keeps its inputs alive.
    """
    gap = np.zeros(replicas)
    for operand in used:
        paired = trace.casts[operand.cast].snapshot
        assert paired is not None, "the simulator casts through snapshots only"
        if operand.center is paired:
            continue
        if paired.center is None or operand.center is None or operand.center.center is None:
            continue
        x = trace.inputs[operand.cast]
        if id(x) not in sizes:
            sizes[id(x)] = _rms(x.astype(np.float64))
        apart = _rms(operand.center.center.astype(np.float64) - paired.center.astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.maximum(gap, np.where(apart == 0, 0.0, apart / sizes[id(x)]))
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
            if r.seq in trace.casts  # none is there where low precision was off
        }

    mine, twin = quantizes(defective), quantizes(correct)
    inputs = [defective.inputs[seq] for seq in mine.values()]
    codes = [defective.casts[seq].codes for seq in mine.values()]
    twins = [correct.casts[twin[op]].codes if op in twin else codes[i] for i, op in enumerate(mine)]
    counts = [c for seq in mine.values() if (c := defective.casts[seq].counts) is not None]
    n, replicas = len(inputs), inputs[0].shape[0] if inputs else 0
    match, k = np.zeros((n, replicas)), np.zeros((n, replicas))
    for rows in _by_shape(inputs):
        shape = len(rows), replicas
        match[rows] = (_flat(codes, rows) == _flat(twins, rows)).mean(axis=1).reshape(shape)
        x = _flat(inputs, rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.abs(x.mean(axis=1, dtype=np.float64))
            ratio = np.where(mean == 0, 0.0, mean / x.std(axis=1, dtype=np.float64))  # an all-zero tensor has k = 0
        k[rows] = ratio.reshape(shape)
    elements = np.array([x[0].size for x in inputs], np.float64).reshape(n, 1)
    return CastSeverity(
        ops=tuple(mine),
        code_match=match,
        saturated=np.array([c.saturated for c in counts]).reshape(n, replicas) / elements,
        flushed=np.array([c.flushed for c in counts]).reshape(n, replicas) / elements,
        k=k,
    )
