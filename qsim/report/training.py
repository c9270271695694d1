"""The report of a training study: cells of one seed each become rows of all seeds, measured against their twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qsim.report.training_figure import skips_figure, spikes_figure, traces_figure
from qsim.report.training_notes import training_notes
from qsim.report.training_rows import TrainingRow, training_csv
from qsim.report.training_table import training_tables
from qsim.severity.training import measure_training
from qsim.sweep.training.cell import TrainingCell, TrainingRecord
from qsim.training.config import CORRECT, HIGH_PRECISION
from qsim.training.join import joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Rows = Sequence[tuple[TrainingCell, TrainingRecord]]
_Seeds = dict[int, tuple[TrainingCell, TrainingRecord]]


def _grouped(rows: Rows) -> dict[str, dict[str, _Seeds]]:
    """Setting -> protocol -> seed."""
    found: dict[str, dict[str, _Seeds]] = {}
    for cell, record in rows:
        found.setdefault(cell.setting, {}).setdefault(cell.label, {})[cell.seed] = cell, record
    return found


def _twin(protocols: dict[str, _Seeds]) -> _Seeds:
    """The correct protocol's runs, by seed; none where the study has it not, or not yet."""
    for runs in protocols.values():
        cell = next(iter(runs.values()))[0]
        if cell.config.defect == CORRECT and not cell.config.fix:
            return runs
    return {}


def measured(rows: Rows) -> list[TrainingRow]:
    """One row a protocol and setting, over the seeds that are done for it and for its correct twin."""
    found = []
    for setting, protocols in _grouped(rows).items():
        twin = _twin(protocols)
        for label, runs in protocols.items():
            seeds = sorted(set(runs) & set(twin))
            if seeds:
                mine, correct = (joined([part[seed][1].log for seed in seeds]) for part in (runs, twin))
                found.append(TrainingRow(label, setting, measure_training(mine, correct)))
    return found


def study_tables(rows: Rows, *, width: int = 126) -> Iterator[Table]:
    """The tables of all settings; every seed has a line of its own where there is one setting."""
    found = measured(rows)
    return training_tables(found, width=width, seeds=len({row.setting for row in found}) == 1)


def study_csv(rows: Rows) -> str:
    """One line a protocol, setting and seed."""
    return training_csv(measured(rows))


def study_notes(rows: Rows) -> list[str]:
    """What the figures are and are not; runs that have no twin yet; whether bits are those of one machine."""
    notes = training_notes(measured(rows))
    notes += [f"Setting {setting}: {_setting(runs)}." for setting, runs in _grouped(rows).items()]
    alone = [
        f"{setting}: {label} ({len(lacking)})"
        for setting, protocols in _grouped(rows).items()
        for label, runs in protocols.items()
        if (lacking := set(runs) - set(_twin(protocols)))
    ]
    if alone:
        notes.append(f"Runs without a correct twin of their seed, left out above: {', '.join(alone)}.")
    if any(not record.reproducible for _, record in rows):
        notes.append("Products are float32 BLAS sums: not reproducible to the bit on another machine (--fast).")
    return notes


def _setting(protocols: dict[str, _Seeds]) -> str:
    """What its runs train from and on, and what they cast."""
    runs = next((runs for runs in protocols.values() if not _uncast(runs)), next(iter(protocols.values())))
    config = next(iter(runs.values()))[0].config
    quant, data, optimizer = config.quant, config.data, config.optimizer
    words = [f"text {data.text}", f"checkpoint {data.checkpoint}", f"batch {data.batch}"]
    words += [f"spread 2^{list(data.spread)}"] if data.spread else []
    if quant.linear:
        words.append(f"{' '.join(quant.linear)} in {quant.fmt}, {quant.recipe}, window {quant.window}")
    if quant.attention:
        words.append(
            f"{' '.join(quant.attention)} in {quant.attention_fmt}, {quant.attention_recipe}, window "
            f"{quant.attention_window}"
        )
    words.append(f"attention statistics {config.model.statistics}, half {config.model.half}")
    words.append(f"loss scale {optimizer.loss_scale:g}{' dynamic' if optimizer.dynamic else ''}")
    return ", ".join(words)


def _uncast(runs: _Seeds) -> bool:
    return next(iter(runs.values()))[0].config.defect == HIGH_PRECISION


def study_traces(rows: Rows, *, title: str) -> Figure:
    """Gradient norms over the steps."""
    return traces_figure(measured(rows), title=title)


def study_spikes(rows: Rows, *, title: str) -> Figure:
    """The distribution of ratios of largest norms."""
    return spikes_figure(measured(rows), title=title)


def study_skips(rows: Rows, *, title: str) -> Figure:
    """Skipped steps by protocol and setting."""
    return skips_figure(measured(rows), title=title)


def study_work(rows: Rows, seconds: float | None) -> str:
    """Training-effective work: steps and tokens that changed parameters. seconds: in which all was done, if it was."""
    steps = [step for _, record in rows for step in record.log.steps]
    applied = [step for step in steps if not step.skipped[0]]
    tokens = sum(step.tokens for step in applied)
    rate = "" if seconds is None else f", {tokens / seconds:,.0f} a second over all processes"
    return (
        f"training-effective work: {len(steps):,} steps attempted, {len(applied):,} applied, "
        f"{len(steps) - len(applied):,} skipped; {tokens:,} tokens applied{rate}"
    )
