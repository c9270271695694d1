"""Logs of training runs made by hand: every number in them is given by the test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qsim.training.log import MatchedPoint, Row, StepLog, TrainLog

TOKENS = 512


def step_log(
    step: int,
    norm: Sequence[float],
    *,
    loss: Sequence[float] | None = None,
    skipped: Sequence[bool] | None = None,
    finite_loss: Sequence[bool] | None = None,
    tokens: int = TOKENS,
) -> StepLog:
    """One step; a loss of 2 and a skip at every non-finite norm, unless said."""
    seeds = len(norm)
    losses = tuple(loss) if loss is not None else (2.0,) * seeds
    skips = tuple(skipped) if skipped is not None else tuple(not math.isfinite(value) for value in norm)
    return StepLog(
        step=step,
        loss=losses,
        grad_norm=tuple(norm),
        norm_by_layer={},
        norm_by_kind={},
        dominant=("L0.qkv",) * seeds,
        lr=(1e-3,) * seeds,
        loss_scale=(1.0,) * seeds,
        clipped=(False,) * seeds,
        skipped=skips,
        reason=tuple("gradient is inf" if skip else "" for skip in skips),
        finite_loss=tuple(finite_loss) if finite_loss is not None else tuple(math.isfinite(x) for x in losses),
        saturated=(0.0,) * seeds,
        flushed=(0.0,) * seeds,
        tokens=tokens,
    )


def point(step: int, name: str, same: Sequence[bool]) -> MatchedPoint:
    zeros: Row = (0.0,) * len(same)
    return MatchedPoint(
        step=step,
        point=name,
        same=tuple(same),
        digest_forward="f",
        digest_recompute="f" if all(same) else "r",
        max_abs=zeros,
        max_rel=zeros,
        finite_same=(True,) * len(same),
        amax_forward=zeros,
        amax_recompute=zeros,
        scale_forward=zeros,
        scale_recompute=zeros,
    )


def log(
    steps: Sequence[StepLog],
    *,
    seeds: Sequence[int] | None = None,
    matched: Sequence[MatchedPoint] = (),
    scales: Mapping[str, Sequence[float]] | None = None,
    commits: Mapping[str, int] | None = None,
    broken: Sequence[str] = (),
    expected: Sequence[str] = (),
    final_loss: Sequence[float] | None = None,
    digest: Sequence[str] | None = None,
) -> TrainLog:
    count = len(steps[0].loss) if steps else 0
    return TrainLog(
        seeds=tuple(seeds) if seeds is not None else tuple(range(count)),
        steps=tuple(steps),
        matched=tuple(matched),
        scales={owner: tuple(row) for owner, row in (scales or {}).items()},
        commits=dict(commits or {}),
        broken=tuple(broken),
        expected=tuple(expected),
        violations=len(broken),
        digest=tuple(digest) if digest is not None else tuple(f"digest {i}" for i in range(count)),
        final_loss=tuple(final_loss) if final_loss is not None else (math.nan,) * count,
    )


def run(norms: Sequence[Sequence[float]], **more: object) -> TrainLog:
    """A log of these gradient norms: a row a seed, a column a step."""
    columns = list(zip(*norms, strict=True))
    return log([step_log(i, column) for i, column in enumerate(columns)], **more)  # type: ignore[arg-type]
