"""Logs of one configuration for several seeds, put side by side into one. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from qsim.errors import UsageError
from qsim.training.log import MatchedPoint, StepLog, TrainLog

_SAME_STEP, _SAME_POINT = ("step", "tokens"), ("step", "point")


def joined(logs: Sequence[TrainLog]) -> TrainLog:
    """One log of all seeds, in the order given. Raises UsageError where they are not of one configuration.

    A digest of a matched point is of the seeds of its own log: several of them are joined with "+".
    """
    if not logs:
        raise UsageError("joined without logs; give at least one")
    first = logs[0]
    for log in logs[1:]:
        for what, a, b in (
            ("steps", [s.step for s in first.steps], [s.step for s in log.steps]),
            ("matched points", _points(first), _points(log)),
            ("owners", sorted(first.scales), sorted(log.scales)),
            ("verdicts", (first.broken, first.commits), (log.broken, log.commits)),
        ):
            if a != b:
                raise UsageError(
                    f"logs of seeds {first.seeds} and {log.seeds} have other {what}; join runs of one case"
                )
    return msgspec.structs.replace(
        first,
        seeds=_chained(logs, lambda log: log.seeds),
        steps=tuple(_step([log.steps[i] for log in logs]) for i in range(len(first.steps))),
        matched=tuple(_point([log.matched[i] for log in logs]) for i in range(len(first.matched))),
        scales={owner: _chained(logs, lambda log, owner=owner: log.scales[owner]) for owner in first.scales},  # type: ignore[misc]
        digest=_chained(logs, lambda log: log.digest),
        final_loss=_chained(logs, lambda log: log.final_loss),
    )


def _points(log: TrainLog) -> list[tuple[int, str]]:
    return [(point.step, point.point) for point in log.matched]


def _chained(logs: Sequence[Any], field: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(value for log in logs for value in field(log))


def _step(steps: Sequence[StepLog]) -> StepLog:
    return _side_by_side(steps, _SAME_STEP)  # type: ignore[no-any-return]


def _point(points: Sequence[MatchedPoint]) -> MatchedPoint:
    return _side_by_side(points, _SAME_POINT)  # type: ignore[no-any-return]


def _side_by_side(parts: Sequence[Any], same: Sequence[str]) -> Any:
    """Structs of one type: rows are chained, dicts of rows by key, texts joined; fields of ``same`` stay."""
    found: dict[str, Any] = {}
    for name in type(parts[0]).__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if name in same:
            found[name] = values[0]
        elif isinstance(values[0], dict):
            found[name] = {key: tuple(v for value in values for v in value[key]) for key in values[0]}
        elif isinstance(values[0], str):
            found[name] = "+".join(values)
        else:
            found[name] = tuple(v for value in values for v in value)
    return type(parts[0])(**found)
