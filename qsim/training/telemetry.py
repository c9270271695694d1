"""What an update did, as one line of a log. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from qsim.arrays import F64, AnyArray
from qsim.sim.data import Data
from qsim.training.config import TrainConfig
from qsim.training.log import Row, StepLog
from qsim.training.model import block_of, kind_of
from qsim.training.nodes import Report


def log_step(config: TrainConfig, report: Report, *, number: int, saturated: F64, flushed: F64) -> StepLog:
    """One line, for all seeds. Norms of groups are roots of sums of squares, in float64, in the order of names."""
    done = report.done
    loss = np.zeros(len(saturated), np.float64)
    for one in report.losses:
        loss += _host(one)
    loss /= len(report.losses)
    norms = {name: _host(norm) for name, norm in done.norms.items()}
    skipped, finite = _host(done.skipped), np.isfinite(loss)
    return StepLog(
        step=number,
        loss=_row(loss),
        grad_norm=_row(_host(done.norm)),
        norm_by_layer=_grouped(norms, block_of),
        norm_by_kind=_grouped(norms, kind_of),
        dominant=_dominant(norms),
        lr=_row(_host(done.lr)),
        loss_scale=_row(_host(done.loss_scale)),
        clipped=_flags(_host(done.clipped)),
        skipped=_flags(skipped),
        reason=tuple(_reason(float(norm), bool(gone)) for norm, gone in zip(_host(done.norm), skipped, strict=True)),
        finite_loss=_flags(finite),
        saturated=_row(saturated),
        flushed=_row(flushed),
        tokens=config.data.batch * config.model.context * config.loop.microbatches,
    )


def _reason(norm: float, skipped: bool) -> str:
    if not skipped:
        return ""
    return "gradient is nan" if np.isnan(norm) else "gradient is inf"


def _grouped(norms: Mapping[str, F64], group_of: Callable[[str], str]) -> dict[str, Row]:
    squares: dict[str, F64] = {}
    with np.errstate(all="ignore"):
        for name, norm in norms.items():
            group = group_of(name)
            squares[group] = squares.get(group, np.zeros_like(norm)) + norm * norm
        return {group: _row(np.sqrt(total)) for group, total in squares.items()}


def _dominant(norms: Mapping[str, F64]) -> tuple[str, ...]:
    names = list(norms)
    table = np.stack([norms[name] for name in names])
    ranked = np.where(np.isfinite(table), table, np.inf)
    return tuple(names[at] for at in ranked.argmax(axis=0))


def scales_of(data: Data) -> dict[str, Row]:
    """Owner -> log2 of its live scale, a seed."""
    return {str(cell): _row(np.log2(state.scale.astype(np.float64))) for cell, state in sorted(data.states.items())}


def _host(x: AnyArray) -> AnyArray:
    return np.asarray(x.get() if hasattr(x, "get") else x)


def _row(values: AnyArray) -> Row:
    return tuple(float(value) for value in values)


def _flags(values: AnyArray) -> tuple[bool, ...]:
    return tuple(bool(value) for value in values)
