"""Looks at a run while it goes by: matched points, casts of a step. Changes nothing of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from qsim.arrays import F32, AnyArray, Bool
from qsim.quant import OpId, QuantizedTensor, QuantSnapshot
from qsim.sim.data import Data
from qsim.sim.env import Env
from qsim.sim.events import Compute, Consume, Event, Phase, Quantize, Slot
from qsim.training.log import MatchedPoint

POINTS = {
    "n": "norm_attn", "x": "qkv", "s": "scores", "a": "proj", "m": "residual", "nn": "norm_ffn", "u": "up",
    "g": "activation", "f": "down",
}  # fmt: skip
"""Value of a layer -> name of its matched point: what forward and recompute make by the same steps."""
_FORWARD, _RECOMPUTE = "v.f.", "v.r."


class Watcher(Protocol):
    """Looks at a run after each of its events; it must change nothing."""

    def look(self, event: Event, data: Data) -> None:
        """After ``event``."""
        ...


class _Seen(NamedTuple):
    value: F32
    scale: AnyArray | None


class Matched:
    """Compares every matched point, forward against recompute; of a step that is run again, its last run."""

    def __init__(self, numbers: Mapping[int, int], env: Env) -> None:
        """numbers: step of the schedule -> what it is called; other steps are not looked at."""
        self._numbers, self._env = numbers, env
        self._seen: dict[Slot, _Seen] = {}
        self._found: dict[tuple[int, str], MatchedPoint] = {}

    @property
    def found(self) -> tuple[MatchedPoint, ...]:
        """All of them, in the order in which recompute made them."""
        return tuple(self._found.values())

    def look(self, event: Event, data: Data) -> None:
        """After ``event``."""
        if not isinstance(event, (Compute, Consume)) or event.phase not in (Phase.FORWARD, Phase.RECOMPUTE):
            return
        op = event.at if isinstance(event, Compute) else event.op
        if op.logical_step not in self._numbers:
            return
        for name in event.outs if isinstance(event, Compute) else (event.out,):
            kind, _, place = name.partition("/")
            value = POINTS.get(kind[len(_FORWARD) :])
            if value is None or not kind.startswith((_FORWARD, _RECOMPUTE)):
                continue
            seen = _Seen(data.slots[name], self._scale(event, data))
            key = f"{value}/{place}"
            if event.phase is Phase.FORWARD:
                self._seen[key] = seen
            elif key in self._seen:
                point = self._compared(op, value, self._seen.pop(key), seen)
                self._found.pop((point.step, point.point), None)
                self._found[point.step, point.point] = point

    def _scale(self, event: Event, data: Data) -> AnyArray | None:
        if not isinstance(event, Consume) or event.operands[0].descale is None:
            return None
        codes = data.slots[event.operands[0].codes]
        held = codes.snapshot if isinstance(codes, QuantizedTensor) else None
        return held.scale if isinstance(held, QuantSnapshot) else None

    def _compared(self, op: OpId, value: str, forward: _Seen, again: _Seen) -> MatchedPoint:
        a, b = (self._env.backend.get(seen.value) for seen in (forward, again))
        replicas = a.shape[0]
        rows_a, rows_b = (np.ascontiguousarray(x).reshape(replicas, -1) for x in (a, b))
        finite_a, amax_a = _largest(rows_a)
        same = (rows_a.view(np.uint32) == rows_b.view(np.uint32)).all(axis=1)
        finite_b, amax_b, gap = finite_a, amax_a, np.zeros_like(amax_a)
        if not same.all():
            finite_b, amax_b = _largest(rows_b)
            with np.errstate(all="ignore"):
                gap = np.where(finite_a & finite_b, np.abs(rows_a - rows_b), np.float32(0)).max(axis=1)
        relative = np.divide(gap, amax_a, out=np.zeros_like(gap), where=amax_a > 0)
        digest = _digest(rows_a)
        visit = f".v{op.visit}" if op.visit else ""
        return MatchedPoint(
            step=self._numbers[op.logical_step],
            point=f"m{op.microbatch}.w{op.worker_id}.L{op.layer_id}{visit}.{value}",
            same=tuple(map(bool, same)),
            digest_forward=digest,
            digest_recompute=digest if same.all() else _digest(rows_b),
            max_abs=_row(gap),
            max_rel=_row(relative),
            finite_same=tuple(map(bool, (finite_a == finite_b).all(axis=1))),
            amax_forward=_row(amax_a),
            amax_recompute=_row(amax_b),
            scale_forward=_scales(forward, replicas),
            scale_recompute=_scales(again, replicas),
        )


def _largest(rows: F32) -> tuple[Bool, F32]:
    """Which elements of [R, n] are finite, and the largest magnitude of those, [R]."""
    finite, magnitude = np.isfinite(rows), np.abs(rows)
    if not finite.all():
        magnitude = np.where(finite, magnitude, np.float32(0))
    return finite, magnitude.max(axis=1)


def _digest(rows: F32) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]


def _row(values: AnyArray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _scales(seen: _Seen, replicas: int) -> tuple[float, ...]:
    return (0.0,) * replicas if seen.scale is None else _row(np.asarray(seen.scale))


class Casts:
    """Counts what the casts of a step saturate and flush."""

    def __init__(self, replicas: int) -> None:
        """Nothing yet."""
        self._replicas = replicas
        self._made: list[QuantizedTensor] = []

    def look(self, event: Event, data: Data) -> None:
        """After ``event``."""
        if isinstance(event, Quantize) and isinstance(made := data.slots[event.out], QuantizedTensor):
            self._made.append(made)

    def take(self) -> tuple[AnyArray, AnyArray]:
        """Shares of elements that were saturated and flushed since the last call, float64 [R] each."""
        saturated, flushed = (self._summed(name) for name in ("saturated", "flushed"))
        elements = max(1, sum(_size(made) for made in self._made))
        self._made.clear()
        return saturated / elements, flushed / elements

    def _summed(self, name: str) -> AnyArray:
        total = np.zeros(self._replicas, np.float64)
        for made in self._made:
            if made.counts is not None:
                total += getattr(made.counts, name)
        return total


def _size(made: QuantizedTensor) -> int:
    return int(np.prod(made.shape[1:]))


def points(log: Sequence[MatchedPoint]) -> Iterator[str]:
    """Names of the points that differ in some seed."""
    return (point.point for point in log if not all(point.same))
