"""Sweeps as a whole: processes that raise, die, are killed and interrupted."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from qsim.errors import OutputError, UsageError
from qsim.sweep.executor import THREAD_CAPS, Tally, available_cores
from qsim.sweep.identity import case_id, encode_record
from qsim.sweep.progress import SweepProgress
from qsim.sweep.sweep import SweepOutcome, read_sweep, run_sweep

HERE = Path(__file__).parent
CELLS = 12
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups of POSIX")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The helper module, importable here and in spawned workers; its log is tmp_path/log."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("QSIM_FAKE_LOG", str(tmp_path / "log"))
    return importlib.import_module("fake_cells")


@pytest.fixture
def sweep(fakes: ModuleType, tmp_path: Path) -> Callable[..., SweepOutcome]:
    """``sweep("plain", "--set text", out=..., workers=...)`` in this process."""

    def call(name: str, *overrides: str, out: str = "out", workers: int = 2, extend: bool = False) -> SweepOutcome:
        config = fakes.study(tmp_path / "tensors", *overrides)
        return run_sweep(config, out=tmp_path / out, workers=workers, run=f"fake_cells:{name}", extend=extend)

    return call


@contextlib.contextmanager
def _driver(tmp_path: Path, run: str, *, workers: int = 2) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own with a session of its own; nothing of it survives the block."""
    script, out, tensors = HERE / "fake_cells.py", tmp_path / "out", tmp_path / "tensors"
    process = subprocess.Popen(
        [sys.executable, str(script), str(out), str(tensors), str(workers), run],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _log(tmp_path: Path) -> list[tuple[str, int]]:
    path = tmp_path / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def _alive(pid: int) -> bool:
    """Running, and no zombie that only waits for somebody to look."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


def _results(tmp_path: Path, out: str = "out") -> bytes:
    return (tmp_path / out / "results.jsonl").read_bytes()


def _attempts(tmp_path: Path, name: str) -> list[str]:
    with closing(sqlite3.connect(tmp_path / "out" / "journal.sqlite")) as db:
        return [row[0] for row in db.execute("SELECT outcome FROM attempts WHERE case_id = ?", (name,))]


def test_one_and_two_workers_and_any_order_give_the_same_bytes(
    sweep: Callable[..., SweepOutcome], fakes: ModuleType, tmp_path: Path
) -> None:
    one = sweep("plain", out="one", workers=1)
    (tmp_path / "log").unlink()
    two = sweep("together", out="two", workers=2)
    assert len({pid for _, pid in _log(tmp_path)}) == 2
    assert _results(tmp_path, "one") == _results(tmp_path, "two")
    cells = fakes.study(tmp_path / "tensors").cells()
    assert len(cells) == CELLS
    assert [f.cell for f in one.finished] == list(cells) == [f.cell for f in two.finished]
    lines = [json.loads(line) for line in _results(tmp_path, "one").splitlines()]
    assert [line["case"] for line in lines] == [case_id(cell) for cell in cells]
    assert [line["record"] for line in lines] == [json.loads(encode_record(fakes.record_of(c))) for c in cells]
    assert str(tmp_path) not in _results(tmp_path, "one").decode()
    assert (one.done_now, one.done_before, one.total, one.complete) == (CELLS, 0, CELLS, True)


def test_a_finished_sweep_runs_nothing_and_says_so(sweep: Callable[..., SweepOutcome], tmp_path: Path) -> None:
    sweep("plain")
    before = _results(tmp_path)
    (tmp_path / "out" / "results.jsonl").unlink()
    again = sweep("there_is_no_such_function")
    assert (again.done_now, again.done_before) == (0, CELLS)
    assert again.summary.startswith("nothing to run: all 12 cells were done before; results in ")
    assert _results(tmp_path) == before


def _both_stuck(tmp_path: Path) -> bool:
    """Four cells are kept and both workers sit in an endless one."""
    return len(_log(tmp_path)) == 6 and len(read_sweep(tmp_path / "out").finished) == 4


def test_a_sweep_killed_in_the_middle_leaves_no_orphans_and_goes_on_without_repeating_a_cell(
    sweep: Callable[..., SweepOutcome], tmp_path: Path
) -> None:
    with _driver(tmp_path, "endless_on_d02") as process:
        _until(lambda: _both_stuck(tmp_path))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        workers = {pid for _, pid in _log(tmp_path)}
        assert len(workers) == 2
        _until(lambda: not any(_alive(pid) for pid in workers), seconds=5)
    kept = {case for case, _, _ in read_sweep(tmp_path / "out").finished}
    assert len(kept) == 4
    assert not (tmp_path / "out" / "results.jsonl").exists()
    (tmp_path / "log").unlink()
    outcome = sweep("plain")
    assert (outcome.done_before, outcome.done_now, outcome.complete) == (4, CELLS - 4, True)
    runs = Counter(case for case, _ in _log(tmp_path))
    assert set(runs) & kept == set()
    assert set(runs.values()) == {1}
    sweep("plain", out="whole")
    assert _results(tmp_path) == _results(tmp_path, "whole")


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "parent only"])
def test_ctrl_c_stops_quietly_and_the_sweep_goes_on_later(
    sweep: Callable[..., SweepOutcome], tmp_path: Path, group: bool
) -> None:
    with _driver(tmp_path, "endless_on_d02") as process:
        _until(lambda: _both_stuck(tmp_path))
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (130, "")
        assert not any(_alive(pid) for _, pid in _log(tmp_path))
    if group:
        outcome = sweep("plain")
        assert (outcome.done_before, outcome.done_now, outcome.complete) == (4, CELLS - 4, True)


def test_workers_are_deaf_to_ctrl_c_from_their_first_moment(sweep: Callable[..., SweepOutcome]) -> None:
    outcome = sweep("tells_sigint", "grid.windows=[1]")
    assert {f.record.note for f in outcome.finished} == {"blocked True, ignored True"}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_second_sweep_is_refused_while_anybody_may_read(sweep: Callable[..., SweepOutcome], tmp_path: Path) -> None:
    with _driver(tmp_path, "endless_on_d02") as process:
        _until(lambda: _both_stuck(tmp_path))
        with pytest.raises(OutputError, match=rf"another sweep \(process {process.pid}\) is writing to"):
            sweep("plain")
        view = read_sweep(tmp_path / "out")
        assert (len(view.finished), len(view.pending), view.total) == (4, CELLS - 4, CELLS)
        assert {cell.defect for cell in view.pending} >= {"D02"}
    assert len(_log(tmp_path)) == 6


def test_a_cell_that_kills_its_process_is_crashed_and_the_others_are_done(
    sweep: Callable[..., SweepOutcome], fakes: ModuleType, tmp_path: Path
) -> None:
    outcome = sweep("dies_on_d02")
    assert [(c.cell.defect, c.cell.window) for c in outcome.crashed] == [("D02", 4)]
    assert "died twice" in outcome.crashed[0].error
    assert len(outcome.finished) == CELLS - 1
    assert (outcome.complete, outcome.failed, outcome.done_now) == (False, (), CELLS - 1)
    runs = Counter(case for case, _ in _log(tmp_path))
    assert runs[outcome.crashed[0].case_id] == 2
    assert _attempts(tmp_path, outcome.crashed[0].case_id) == ["worker died", "crashed"]
    lines = [json.loads(line) for line in _results(tmp_path).splitlines()]
    assert [line["state"] for line in lines].count("crashed") == 1
    assert len(lines) == CELLS
    mended = sweep("plain")
    assert (mended.done_now, mended.done_before, mended.complete) == (1, CELLS - 1, True)


def test_a_death_that_does_not_repeat_costs_nothing(sweep: Callable[..., SweepOutcome], tmp_path: Path) -> None:
    outcome = sweep("dies_once_on_d02", workers=1)
    assert outcome.complete
    assert "worker died" in _attempts(tmp_path, outcome.finished[2].case_id)
    sweep("plain", out="calm")
    assert _results(tmp_path) == _results(tmp_path, "calm")


@pytest.mark.parametrize(
    ("run", "error"),
    [
        ("raises_on_d02", "ValueError: the second defect"),
        ("exits_on_d02", "SystemExit: leaving"),
        ("returns_a_number", "TypeError: fake_cells:returns_a_number returned int, not a CellRecord"),
    ],
)
def test_a_cell_that_raises_is_failed_with_its_error(sweep: Callable[..., SweepOutcome], run: str, error: str) -> None:
    outcome = sweep(run, "grid.windows=[1]")
    assert outcome.failed[-1].cell.defect == "D02"
    assert outcome.failed[-1].error == error
    assert len(outcome.finished) + len(outcome.failed) == 3
    assert len(outcome.failed) == (3 if run == "returns_a_number" else 1)
    assert f"{len(outcome.failed)} failed" in outcome.summary


def test_extend_runs_only_the_new_cells(sweep: Callable[..., SweepOutcome], tmp_path: Path) -> None:
    sweep("plain", "grid.windows=[4]")
    with pytest.raises(UsageError, match="--extend"):
        sweep("plain", "grid.windows=[1, 4]")
    old = _results(tmp_path)
    with (tmp_path / "out" / "results.jsonl").open("rb") as reader:
        wider = sweep("plain", "grid.windows=[1, 4]", extend=True)
        assert reader.read() == old  # a reader keeps its whole file: the new one took its place
    assert (wider.done_before, wider.done_now) == (3, 3)
    sweep("plain", "grid.windows=[1, 4]", out="anew")
    assert _results(tmp_path) == _results(tmp_path, "anew")


def test_threads_are_capped_in_workers_and_the_callers_environment_comes_back(
    sweep: Callable[..., SweepOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THREAD_CAPS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("qsim.sweep.executor.available_cores", lambda: 9)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # lower than the cap: stays
    monkeypatch.setenv("MKL_NUM_THREADS", "64")
    before = dict(os.environ)
    outcome = sweep("tells_caps", "grid.windows=[1]", workers=2)
    assert {f.record.note for f in outcome.finished} == {"3 4 4 4 4 4"}
    assert dict(os.environ) == before


def test_cores_come_from_the_affinity_of_the_process() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this platform")
    whole = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(whole)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, whole)
    assert available_cores() == len(whole)


def test_a_run_function_that_cannot_be_loaded_stops_the_sweep_before_any_cell(
    sweep: Callable[..., SweepOutcome], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="'fake_cells:plian' cannot be loaded in a worker: AttributeError"):
        sweep("plian")
    with pytest.raises(UsageError, match="--workers 0"):
        sweep("plain", workers=0)
    assert _log(tmp_path) == []
    assert len(read_sweep(tmp_path / "out").pending) == CELLS


def test_a_script_without_a_main_guard_is_told_about_it(tmp_path: Path, fakes: ModuleType) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import fake_cells, sys, pathlib\n"
        "from qsim.sweep.sweep import run_sweep\n"
        "config = fake_cells.study(pathlib.Path(sys.argv[1]) / 'tensors')\n"
        "run_sweep(config, out=sys.argv[1] + '/out', workers=1, run='fake_cells:plain')\n"
    )
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert 'start the sweep under `if __name__ == "__main__":`' in done.stderr
    assert _log(tmp_path) == []


def test_the_journal_and_the_export_agree(sweep: Callable[..., SweepOutcome], tmp_path: Path) -> None:
    outcome = sweep("plain", "grid.windows=[1]")
    view = read_sweep(tmp_path / "out")
    assert [encode_record(f.record) for f in view.finished] == [encode_record(f.record) for f in outcome.finished]
    assert set(view.provenance) == {"created", "qsim", "numpy", "python", "platform"}
    assert "windows = [1]" in view.spec_text


def test_an_export_that_cannot_be_written_leaves_the_old_one(
    sweep: Callable[..., SweepOutcome], tmp_path: Path
) -> None:
    sweep("plain", "grid.windows=[1]")
    before = _results(tmp_path)
    (tmp_path / "out" / ".results.jsonl.part").mkdir()
    with pytest.raises(OutputError, match=r"results\.jsonl' cannot be written"):
        sweep("plain", "grid.windows=[1, 4]", extend=True)
    assert _results(tmp_path) == before
    assert read_sweep(tmp_path / "out").complete


def test_a_callable_that_workers_cannot_import_is_an_error(fakes: ModuleType, tmp_path: Path) -> None:
    config = fakes.study(tmp_path / "tensors")
    with pytest.raises(UsageError, match="cannot be loaded in a worker"):
        run_sweep(config, out=tmp_path / "out", workers=1, run=lambda cell: fakes.plain(cell))


def test_a_callable_of_an_importable_module_runs(fakes: ModuleType, tmp_path: Path) -> None:
    config = fakes.study(tmp_path / "tensors", "grid.windows=[1]")
    outcome = run_sweep(config, out=tmp_path / "out", workers=1, run=fakes.plain)
    assert [f.record.note for f in outcome.finished] == ['correct "1"', 'D01 "1"', 'D02 "1"']


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_a_line_each_five_seconds_and_one_at_the_end() -> None:
    clock, stream = _Clock(), io.StringIO()
    with SweepProgress(stream=stream, clock=clock) as progress:
        for second in range(12):
            clock.now = 100.0 + second
            progress(Tally(total=40, done_before=10, done_now=2 * second, failed=second // 6))
        progress(Tally(total=40, done_before=10, done_now=22, failed=1))
    assert stream.getvalue().splitlines() == [
        "sweep: 20/40 cells, 2 cells/s, about 10 s left",
        "sweep: 31/40 cells, 1 failed, 2.1 cells/s, about 4 s left",
        "sweep: 33/40 cells, 1 failed, 2.1 cells/s, about 3 s left",
    ]


def test_on_a_terminal_there_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = _Terminal()
    with SweepProgress(stream=stream, clock=_Clock(), title="study") as progress:
        progress(Tally(total=4))
        progress(Tally(total=4, done_now=3, crashed=1))
    assert "4/4" in stream.getvalue()
    assert "1 crashed" in stream.getvalue()
    assert "cells" not in stream.getvalue()


def test_progress_ends_at_the_total(fakes: ModuleType, tmp_path: Path) -> None:
    seen: list[Tally] = []
    config = fakes.study(tmp_path / "tensors", "grid.windows=[1]")
    run_sweep(config, out=tmp_path / "out", workers=1, run="fake_cells:raises_on_d02", progress=seen.append)
    assert seen[0] == Tally(total=3)
    assert seen[-1] == Tally(total=3, done_now=2, failed=1)
    assert [tally.ended for tally in seen] == sorted(tally.ended for tally in seen)
