"""Training studies as sweeps: workers, kills, resuming, files that change, options, folders, what a reader gets.

Every run here is of a fake trainer (fake_training): what is tested is that its numbers arrive, whole and once.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from typer.testing import CliRunner, Result

import qsim.sweep.training.run as sweeping_cells
from qsim.errors import InputError, UsageError
from qsim.report.products import write_products
from qsim.report.training import measured
from qsim.sweep import sweep as sweeping
from qsim.sweep.config import read_study
from qsim.sweep.identity import case_id, encode_record
from qsim.sweep.kinds import KINDS, TRAINING, kind_of
from qsim.sweep.known import registries
from qsim.sweep.sweep import SweepOutcome, SweepView, read_sweep, run_sweep
from qsim.sweep.training.cell import TrainingCell, TrainingRecord
from qsim.sweep.training.run import check_cells, run_cell
from qsim.sweep.training.schema import TrainingConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups of POSIX")
Sweep = Callable[..., SweepOutcome]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The fake trainer, here and in spawned workers; its log is tmp_path/log. ``train`` is put back afterwards."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("QSIM_FAKE_LOG", str(tmp_path / "log"))
    found = importlib.import_module("fake_training")
    monkeypatch.setattr(sweeping_cells, "train", found.fake_train)
    return found


@pytest.fixture
def study(fake: ModuleType, tmp_path: Path) -> Path:
    """The fake's study over a text of its own, from scratch."""
    (tmp_path / "text").write_bytes(b"to train on")
    path = tmp_path / "small.toml"
    path.write_text(fake.STUDY + "[workload]\ntext = 'text'\ncheckpoint = 'scratch'\n")
    return path


@pytest.fixture
def sweep(study: Path, tmp_path: Path) -> Sweep:
    def call(*sets: str, out: str = "out", workers: int = 1, run: str = "run", extend: bool = False) -> SweepOutcome:
        config = read(study, *sets)
        return run_sweep(config, out=tmp_path / out, workers=workers, run=f"fake_training:{run}", extend=extend)

    return call


def read(study: Path, *sets: str) -> TrainingConfig:
    config = read_study(study, registries(), list(sets))
    assert isinstance(config, TrainingConfig)
    return config


def runs(tmp_path: Path) -> list[str]:
    path = tmp_path / "log"
    return path.read_text().splitlines() if path.exists() else []


def ended(view: SweepView) -> list[tuple[TrainingCell, TrainingRecord]]:
    found = [(f.cell, f.record) for f in view.finished]
    return [(c, r) for c, r in found if isinstance(c, TrainingCell) and isinstance(r, TrainingRecord)]


def results(tmp_path: Path, out: str = "out") -> bytes:
    return (tmp_path / out / "results.jsonl").read_bytes()


# running


def test_a_record_is_the_log_that_the_trainer_gave_for_this_run_and_one_seed(fake: ModuleType, study: Path) -> None:
    for cell in read(study).cells():
        record = run_cell(cell)
        assert encode_record(record) == encode_record(fake.run(cell))
        assert (cell.seed,) == record.log.seeds
        assert fake.fake_train(cell.config, (cell.seed,)).digest == record.log.digest
        assert ("exact", True) == (record.accumulation, record.reproducible)


def test_one_and_two_workers_give_the_same_bytes_in_cell_order(sweep: Sweep, study: Path, tmp_path: Path) -> None:
    one, two = sweep(out="one", workers=1), sweep(out="two", workers=2)
    cells = read(study).cells()
    assert results(tmp_path, "one") == results(tmp_path, "two")
    assert one.digest == two.digest
    assert list(cells) == [f.cell for f in one.finished] == [f.cell for f in two.finished]
    lines = [json.loads(line) for line in results(tmp_path, "one").splitlines()]
    assert [case_id(cell) for cell in cells] == [line["case"] for line in lines]
    assert [run_cell(cell).log.digest[0] for cell in cells] == [line["record"]["log"]["digest"][0] for line in lines]
    assert str(tmp_path) not in results(tmp_path, "one").decode()


def test_a_finished_sweep_runs_nothing_again(sweep: Sweep, tmp_path: Path) -> None:
    assert 10 == sweep().done_now
    before, seen = results(tmp_path), runs(tmp_path)
    again = sweep()
    assert (0, 10) == (again.done_now, again.done_before)
    assert (before, seen) == (results(tmp_path), runs(tmp_path))


def test_killed_in_the_middle_it_goes_on_and_repeats_only_the_run_that_was_under_way(
    sweep: Sweep, study: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
    args = [sys.executable, str(HERE / "fake_training.py"), str(study), str(tmp_path / "out"), "1", "stuck_on_scope"]
    process = subprocess.Popen(args, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(runs(tmp_path)) < 7 or finished(tmp_path / "out") < 6:
            assert time.monotonic() < deadline, runs(tmp_path)
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    view = read_sweep(tmp_path / "out")
    assert (6, 4) == (len(view.finished), len(view.pending))
    assert view.kind is TRAINING
    outcome = sweep()
    assert (4, 6) == (outcome.done_now, outcome.done_before)
    times = Counter(runs(tmp_path))
    assert {"scope|correct|0": 2} == {name: n for name, n in times.items() if n > 1}
    assert 10 == len(times)
    assert results(tmp_path) == results(tmp_path, sweep(out="whole").out.name)


def finished(out: Path) -> int:
    try:
        return len(read_sweep(out).finished)
    except InputError:
        return 0


def test_more_seeds_and_another_block_extend_a_folder_and_keep_what_is_done(sweep: Sweep) -> None:
    sweep('only=["timing"]')
    with pytest.raises(UsageError, match="holds another sweep"):
        sweep()
    assert (4, 6) == ((more := sweep(extend=True)).done_now, more.done_before)
    assert (5, 10) == ((more := sweep("replicas.count=3", extend=True)).done_now, more.done_before)


def test_another_label_is_taken_over_without_a_run(sweep: Sweep, study: Path, tmp_path: Path) -> None:
    sweep()
    before = results(tmp_path)
    study.write_text(study.read_text().replace("shared, paired", "one state for all"))
    outcome = sweep()
    assert 0 == outcome.done_now
    assert ["one state for all"] * 2 == [c.label for c, _ in ended(outcome) if c.config.defect == "D04+D02"]
    assert before == results(tmp_path)


def test_a_text_that_changed_since_the_study_was_read_fails_its_cells_and_says_so(
    sweep: Sweep, study: Path, tmp_path: Path
) -> None:
    config = read(study)
    for data, what in ((b"another", "changed since the study was read"), (None, "cannot be read any more")):
        text = tmp_path / "text"
        text.write_bytes(data) if data is not None else text.unlink()
        outcome = run_sweep(config, out=tmp_path / "out", workers=1, run="fake_training:run")
        assert (0, 10) == (len(outcome.finished), len(outcome.failed))
        assert {True} == {what in each.error for each in outcome.failed}


def test_a_folder_of_another_kind_is_not_extended(sweep: Sweep, tmp_path: Path) -> None:
    sweep()
    accumulation = read_study(ROOT / "studies" / "accumulation.toml", registries())
    with pytest.raises(UsageError, match="holds a study of kind training, and this one is of kind accumulation"):
        run_sweep(accumulation, out=tmp_path / "out", workers=1, extend=True)


def test_a_backend_that_this_machine_has_not_is_refused_before_a_cell_runs(study: Path) -> None:
    cells = read(study, "run.backend=oracle").cells()
    assert {"oracle"} == {cell.backend for cell in cells}
    check_cells(cells)
    absent = msgspec.structs.replace(cells[0], config=msgspec.structs.replace(cells[0].config, backend="no_such"))
    with pytest.raises(UsageError, match="unknown backend 'no_such'"):
        check_cells([*cells, absent])


# what a reader gets


@pytest.fixture
def qsim(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``qsim("sweep", ...)`` in this process; workers run the fake."""
    from qsim.cli import app

    def call(*args: str, run: str = "run") -> Result:
        monkeypatch.setattr(sweeping, "run_sweep", partial(run_sweep, run=f"fake_training:{run}"))
        return CliRunner().invoke(app, list(args))

    monkeypatch.chdir(tmp_path)
    return call


def test_the_command_leaves_records_study_table_and_figures(
    qsim: Callable[..., Result], study: Path, tmp_path: Path
) -> None:
    done = qsim("sweep", str(study), "--out", "out", "--workers", "1", "--set", "loop.steps=2")
    assert 0 == done.exit_code, done.output
    assert "10 cells done now, 0 before" in done.output
    assert f"table: {Path('out') / 'training.csv'}   figure: " in done.output
    there = {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith((".", "journal"))}
    pictures = {"traces.png", "spikes.png", "skips.png"}
    assert {"training.csv", "results.jsonl", "results.sha256", "study.toml"} | pictures == there
    effective = tomllib.loads((tmp_path / "out" / "study.toml").read_text())
    assert ("training", 2) == (effective["kind"], effective["loop"]["steps"])
    with (tmp_path / "out" / "training.csv").open() as file:
        lines = list(csv.DictReader(file))
    logs = {(c.setting, c.label, str(c.seed)): r.log for c, r in ended(read_sweep(tmp_path / "out"))}
    assert 10 == len(logs)
    assert lines
    for line in lines:
        log = logs[line["setting"], line["protocol"], line["seed"]]
        assert str(sum(step.skipped[0] for step in log.steps)) == line["skipped_steps"]
        assert str(len(log.steps)) == line["steps"]
    status = qsim("status", "out", "--table")
    assert "10 of 10 cells done, 0 pending" in status.output
    assert "shared, paired" in status.output


def test_an_outcome_that_the_catalogue_does_not_foretell_is_named_and_ends_with_1(
    qsim: Callable[..., Result], study: Path
) -> None:
    done = qsim("sweep", str(study), "--out", "out", "--workers", "1", run="unexpected_on_d03")
    assert 1 == done.exit_code
    assert "qsim: unexpected outcome: timing: D03, seed 1" in done.output


def test_fast_takes_blas_products_for_every_block_and_the_record_says_so(
    qsim: Callable[..., Result], study: Path, tmp_path: Path
) -> None:
    sets = ["--set", "blocks.scope.run.accumulation=tf32"]
    for option, accumulation in (([], {"exact", "tf32"}), (["--fast"], {"blas"})):
        out = "-".join(["out", *option])
        done = qsim("sweep", str(study), "--out", out, "--workers", "1", *sets, *option)
        assert 0 == done.exit_code, done.output
        records = [record for _, record in ended(read_sweep(tmp_path / out))]
        assert 10 == len(records)
        assert accumulation == {r.accumulation for r in records}
        assert {not option} == {r.reproducible for r in records}
        assert bool(option) == ("not reproducible to the bit" in done.output)


def test_the_backend_option_is_the_backend_of_every_run(
    qsim: Callable[..., Result], study: Path, tmp_path: Path
) -> None:
    done = qsim("sweep", str(study), "--out", "out", "--workers", "1", "--backend", "oracle")
    assert 0 == done.exit_code, done.output
    assert {"oracle"} == {cell.backend for cell, _ in ended(read_sweep(tmp_path / "out"))}


def test_a_mistake_in_a_study_is_one_message_and_nothing_is_written(
    qsim: Callable[..., Result], study: Path, tmp_path: Path
) -> None:
    done = qsim("sweep", str(study), "--out", "out", "--set", "quant.windo=3", "--set", "model.heads=5")
    assert done.exception is not None
    assert 'did you mean "quant.window"?' in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_products_of_part_of_a_sweep_can_be_written_and_are_replaced_by_those_of_the_whole(
    fake: ModuleType, study: Path, tmp_path: Path
) -> None:
    rows = [(cell, run_cell(cell)) for cell in read(study).cells()]
    write_products(rows[:3], tmp_path, title="t", kind=TRAINING)
    part = (tmp_path / "training.csv").read_text()
    write_products(rows, tmp_path, title="t", kind=TRAINING)
    whole = (tmp_path / "training.csv").read_text()
    assert set(part.splitlines()) < set(whole.splitlines())
    assert 1 + sum(len(row.severity.seeds) for row in measured(rows)) == len(whole.splitlines())


def test_the_kind_of_a_cell_says_how_it_is_run(study: Path) -> None:
    (kind,) = {kind_of(cell) for cell in read(study).cells()}
    assert kind is KINDS["training"] is TRAINING
    module, name = kind.run.split(":")
    assert getattr(importlib.import_module(module), name) is run_cell
