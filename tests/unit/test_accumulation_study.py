"""Accumulation studies: what a file may say, the physics they must show, resuming, folders, the figure."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qsim.codec import decode
from qsim.codec.threads import threads
from qsim.errors import StudyError, UsageError
from qsim.formats import get_format
from qsim.gemm import MODELS
from qsim.report.accumulation import _apart, accumulation_figure
from qsim.report.accumulation_table import accumulation_csv, accumulation_notes
from qsim.severity.accumulation import accumulation_error
from qsim.sweep.accumulation import run as runner
from qsim.sweep.accumulation.cell import AccumulationCell, AccumulationRecord
from qsim.sweep.accumulation.run import run_cell
from qsim.sweep.accumulation.schema import SWEPT, AccumulationConfig
from qsim.sweep.config import load_study, read_study, study_kind
from qsim.sweep.identity import case_id, decode_cell, encode_cell, encode_record
from qsim.sweep.journal import Journal
from qsim.sweep.known import registries
from qsim.sweep.sweep import read_sweep, run_sweep
from qsim.workloads import draw_operands

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "studies" / "accumulation.toml"
E4M3 = get_format("float8_e4m3fn")
SMALL = """
schema = 1
kind = "accumulation"
[grid]
models = ["hopper_wgmma", "blackwell_tcgen05"]
data = ["positive", "ones"]
formats = ["e4m3"]
depths = [128, 1024]
promote_every = ["none", 128]
[outputs]
rows = 4
columns = 8
[replicas]
count = 2
"""


def study(*overrides: str, text: str = SMALL) -> AccumulationConfig:
    found = read_study(text, registries(), list(overrides))
    assert isinstance(found, AccumulationConfig)
    return found


def cell(model: str = "hopper_wgmma", data: str = "positive", **changes: object) -> AccumulationCell:
    base = AccumulationCell(
        model=model, data=data, fmt="float8_e4m3fn", depth=4096, promote_every=0, rows=8, columns=8, seed=0, replicas=2
    )
    return msgspec.structs.replace(base, **changes)


def errors(*overrides: str, text: str = SMALL) -> list[str]:
    with pytest.raises(StudyError) as caught:
        study(*overrides, text=text)
    head, *lines = str(caught.value).split("\n")
    assert head == f"study: {len(lines)} error{'s' if len(lines) > 1 else ''}"
    return [line.removeprefix("  ") for line in lines]


def qsim(*args: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="126", **extra)
    return subprocess.run(
        [sys.executable, "-m", "qsim", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


# what a study may say


def test_every_error_is_reported_at_once_with_place_value_and_hint() -> None:
    lines = errors(
        "replica.count=3",
        "kind=lifecycle",
        text="""
schema = 1
kind = "accumulation"
titel = "x"
[grid]
models = ["hopper_wgmm", "blackwell_nvfp4"]
data = ["positiv"]
formats = ["e4m3", "float8_e4m3fn"]
depth = [128]
depths = [0, 128, 128.0]
promote_every = ["never", 0, "none", -1]
[outputs]
rows = 0
[replicas]
steps = 3
[run]
backend = "numba"
""",
    )
    expected = {
        "--set replica.count=3": 'unknown key; known: schema, .*; did you mean "replicas.count"?',
        "--set kind=lifecycle": "the kind stands in the study file; give the path of another study",
        "titel": 'unknown key; known: schema, title, .*; did you mean "title"?',
        "run": "unknown key; known: schema, title, grid, outputs, replicas, kind",
        "grid.models[0]": '"hopper_wgmm" is refused; unknown name; known: .*; did you mean "hopper_wgmma"?',
        "grid.models[1]": '"blackwell_nvfp4" is refused; unknown name; .*',
        "grid.data[0]": '"positiv" is refused; unknown name; .*; did you mean "positive"?',
        "grid.formats[1]": '"float8_e4m3fn" is refused; the same as grid.formats[0]; keep one',
        "grid.depth": 'unknown key; .*; did you mean "depths"?',
        "grid.depths[0]": "0 is refused; give an integer from 1 to 1048576",
        "grid.depths[2]": "128.0 is refused; the same as grid.depths[1]; keep one",
        "grid.promote_every[0]": '"never" is refused; give "none" (or 0) for never, or an integer up to 1048576',
        "grid.promote_every[2]": '"none" is refused; the same as grid.promote_every[1]; keep one',
        "grid.promote_every[3]": '-1 is refused; give "none" (or 0) for never, or an integer up to 1048576',
        "outputs.rows": "0 is refused; give an integer from 1 to 4096",
        "replicas.steps": "unknown key; known: seed, count",
    }
    found = dict(line.split(": ", 1) for line in lines)
    assert set(expected) == set(found)
    for place, text in expected.items():
        assert re.fullmatch(re.escape(text).replace(r"\.\*", ".*"), found[place]), found[place]


def test_values_that_would_make_no_cell_or_do_not_fit_in_memory_are_errors() -> None:
    lines = errors(
        'grid.models=["hopper_mma_sync", "blackwell_tcgen05"]', 'grid.formats=["e2m1", "float8_e4m3fnuz"]',
        "grid.promote_every=[16, 96]", "grid.depths=[8, 1048576, 262144]", "outputs.rows=16", "replicas.count=64",
        f"replicas.seed={2**64 - 1}",
    )  # fmt: skip
    assert [
        "grid.models[0]",
        "grid.formats[1]",
        "grid.promote_every[0]",
        "grid.depths[1]",
        "grid.depths[2]",
        "replicas.seed",
    ] == [line.split(":")[0] for line in lines]
    assert "hopper_mma_sync takes float8_e4m3fn, float8_e5m2" in lines[0]
    assert "16 cuts an instruction of every model" in lines[2]
    assert "1048576 x 16 elements of an operand are more than 4194304" in lines[3]
    assert "262144 x 24 x 64 seeds are more than 134217728 codes" in lines[4]
    (line,) = errors('grid.models=["ada_mma_sync", "hopper_wgmma"]', "grid.promote_every=[16]")
    assert line.startswith("grid.models[1]: no grid.promote_every is a multiple of 32")


def test_the_kind_chooses_the_schema_and_a_wrong_kind_is_an_error_with_a_hint() -> None:
    assert ("accumulation", "lifecycle") == (study_kind(STUDY), study_kind(ROOT / "studies" / "default.toml"))
    (line,) = errors(text=SMALL.replace('"accumulation"', '"acumulation"'))
    assert line == (
        'kind: "acumulation" is refused; unknown kind of study; known: lifecycle, accumulation, training; '
        'did you mean "accumulation"?'
    )
    with pytest.raises(StudyError, match='kind "accumulation" is no lifecycle study'):
        load_study(SMALL, registries())
    (line,) = errors(text='schema = 1\nkind = "accumulation"\n')
    assert line == "grid: is missing, a table with the keys models, data, formats, depths, promote_every"


def test_cells_leave_out_what_a_model_cannot_do_and_neighbours_share_operands() -> None:
    cells = study(
        'grid.models=["ada_mma_sync", "hopper_wgmma", "blackwell_tcgen05"]', 'grid.formats=["e4m3", "e2m1"]',
        'grid.data=["normal"]', "grid.promote_every=[48, 96]", "replicas.seed=5",
    ).cells()  # fmt: skip
    one_depth = [("ada_mma_sync", 48), ("ada_mma_sync", 96), ("hopper_wgmma", 96), ("blackwell_tcgen05", 96)]
    expected = [("float8_e4m3fn", d, *pair) for d in (128, 1024) for pair in one_depth]
    expected += [("float4_e2m1fn", d, "blackwell_tcgen05", 96) for d in (128, 1024)]
    assert expected == [(c.fmt, c.depth, c.model, c.promote_every) for c in cells]
    assert {(5, 2, 4, 8)} == {(c.seed, c.replicas, c.rows, c.columns) for c in cells}
    assert {(0, 1)} == {(c.seed, c.replicas) for c in study('grid.data=["ones"]').cells()}


def test_a_study_read_back_from_its_effective_text_has_the_same_cells() -> None:
    first = read_study(STUDY, registries(), ["replicas.count=3"])
    again = read_study(first.to_toml(), registries())
    assert first.cells() == again.cells()
    assert tomllib.loads(STUDY.read_text())["title"] == again.title
    assert 4 * 3 * 9 * 3 == len(first.cells())


def test_every_model_that_a_study_may_name_multiplies_in_some_format() -> None:
    assert {"hopper_wgmma", "hopper_mma_sync", "ada_mma_sync", "blackwell_tcgen05", "blackwell_mma_sync"} == set(SWEPT)
    for name in SWEPT:
        record = run_cell(cell(name, depth=100, rows=2, columns=3, fmt=MODELS[name].formats[-1]))
        assert (0, 12) == (record.nonfinite, record.outputs)


# identity


def test_the_identity_of_a_cell_is_pinned_and_every_parameter_is_part_of_it() -> None:
    base = cell()
    assert "aaba8a914b7587b5f8b3" == case_id(base)
    others = [
        msgspec.structs.replace(base, **{f: v + 1 if isinstance(v, int) else v + "x"})
        for f, v in msgspec.structs.asdict(base).items()
    ]
    assert 1 + 9 == len({case_id(c) for c in (base, *others)})
    assert base == decode_cell(encode_cell(base))


# operands


def test_operands_are_a_pure_function_of_seed_and_kind_and_grow_with_k() -> None:
    a, b = draw_operands("normal", E4M3, depth=256, rows=3, columns=5, seed=7)
    again = draw_operands("normal", E4M3, depth=64, rows=3, columns=5, seed=7)
    assert ((3, 256), (5, 256)) == (a.shape, b.shape)
    np.testing.assert_array_equal(a[:, :64], again[0])
    np.testing.assert_array_equal(b[:, :64], again[1])
    left, right = draw_operands("normal", E4M3, depth=8, rows=3, columns=3, seed=7)
    assert not np.array_equal(left, right)
    assert not np.array_equal(left, draw_operands("normal", E4M3, depth=8, rows=3, columns=3, seed=8)[0])
    positive = draw_operands("positive", E4M3, depth=256, rows=3, columns=5, seed=7)[0]
    np.testing.assert_array_equal(positive, a & 0x7F)
    assert {0x38} == set(draw_operands("ones", E4M3, depth=8, rows=2, columns=2, seed=7)[0].ravel().tolist())
    values = decode(draw_operands("normal", E4M3, depth=4096, rows=16, columns=1, seed=0)[0], E4M3)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.01


# measures


def test_the_measures_are_their_formulas() -> None:
    exact = np.array([[4.0, -2.0], [1.0, 0.0]], np.float32)
    acc = np.array([[3.0, -2.0], [1.5, -0.0]], np.float32)
    error = accumulation_error(acc, exact)
    assert (1.25 / 21) ** 0.5 == error.rel_error
    assert (-0.5 / 4) / (7 / 4) == error.bias
    assert (0.5, 0.5, 0) == (error.worst, error.differ, error.nonfinite)
    assert (0.0,) * 5 == tuple(accumulation_error(exact, exact))
    assert np.inf == accumulation_error(np.array([[1.0]], np.float32), np.zeros((1, 1), np.float32)).worst
    spoilt = accumulation_error(np.array([[np.inf, 1.0]], np.float32), np.ones((1, 2), np.float32))
    assert (np.inf, np.inf, 0.5, 1) == (spoilt.rel_error, spoilt.worst, spoilt.differ, spoilt.nonfinite)


# physics


def test_ones_stall_at_two_to_the_14_on_hopper_wgmma_and_on_no_wide_model() -> None:
    stalled = run_cell(cell(data="ones", depth=32768, replicas=1))
    assert (16384.0, 16384.0, (-0.5,)) == (stalled.lowest, stalled.highest, stalled.bias)
    assert (0.0,) == run_cell(cell(data="ones", depth=16384, replicas=1)).bias
    assert (0.0,) == run_cell(cell(data="ones", depth=32768, replicas=1, promote_every=128)).bias
    for model in ("hopper_mma_sync", "blackwell_tcgen05"):
        assert (0.0,) == run_cell(cell(model, "ones", depth=32768, replicas=1)).rel_error


def test_fast_accumulation_of_positive_numbers_is_low_by_7_percent_at_4096_and_22_at_16384() -> None:
    for depth, low, high in ((4096, -0.073, -0.068), (16384, -0.225, -0.215)):
        bias = run_cell(cell(depth=depth)).bias
        assert all(low < each < high for each in bias), (depth, bias)


def test_promotion_every_128_holds_the_bias_at_6e_4_for_every_k() -> None:
    for depth in (4096, 16384):
        bias = run_cell(cell(depth=depth, promote_every=128)).bias
        assert all(-6.5e-4 < each < -5.5e-4 for each in bias), (depth, bias)


def test_wide_accumulators_stay_within_1e_4_and_only_hoppers_is_unbiased() -> None:
    for depth in (4096, 16384):
        rounded, truncated = (run_cell(cell(m, depth=depth)) for m in ("hopper_mma_sync", "blackwell_tcgen05"))
        assert max(*rounded.rel_error, *truncated.rel_error) < 1e-4
        assert max(abs(b) for b in rounded.bias) < 1e-7
        assert all(-1e-4 < b < -5e-7 for b in truncated.bias)


def test_with_both_signs_the_relative_error_grows_with_k_and_the_bias_does_not() -> None:
    records = [run_cell(cell(data="normal", depth=k)) for k in (128, 1024, 4096, 16384)]
    found = [r.rel_error_median for r in records]
    assert found == sorted(found)
    assert 5e-5 < found[0] < 2e-4
    assert 2e-3 < found[-1] < 4e-3
    assert max(abs(r.bias_median) for r in records) < 1e-3


# running


SMALL_DIGEST = "ac2fe63a7e6d9866dfa663cb3d4d8cd3ba0790dfe99ff8a1165f6b49b38b9177"


def test_the_digest_is_the_same_on_a_rerun_and_for_any_workers_and_threads(tmp_path: Path) -> None:
    digests = []
    for name, workers, count in (("a", 1, "1"), ("b", 2, "1"), ("c", 1, "2")):
        out = tmp_path / name
        args = ["sweep", str(write(tmp_path)), "--out", str(out), "--workers", str(workers)]
        for words in ("16 cells done now, 0 before", "nothing to run: all 16 cells were done before"):
            done = qsim(*args, QSIM_THREADS=count)
            assert 0 == done.returncode, done.stderr
            assert words in done.stdout
            digests.append(done.stdout.rsplit("sha256 of the results: ", 1)[1].strip())
        data = (out / "results.jsonl").read_bytes()
        assert f"{digests[-1]}  results.jsonl\n" == (out / "results.sha256").read_text()
        assert hashlib.sha256(data).hexdigest() == digests[-1]
    assert [SMALL_DIGEST] * 6 == digests


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_one_thread_and_two_give_the_same_record(count: int) -> None:
    runner._drawn.cache_clear()
    large = cell(depth=8192, rows=64, columns=64, replicas=1, promote_every=1024)
    with threads(count):
        assert "cd179e9f55a631a4" == run_cell(large).output_digest


def test_truncated_results_are_written_anew_and_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    config, out = study(), tmp_path / "out"
    cells = config.cells()
    with Journal.open(out, cells, spec_text=config.to_toml(), provenance={}) as journal:
        for each in cells[:9]:  # a sweep that was killed: no results.jsonl yet
            journal.finish(case_id(each), encode_record(run_cell(each)))
    outcome = run_sweep(config, out=out, workers=1)
    assert (9, 7, 16, SMALL_DIGEST) == (outcome.done_before, outcome.done_now, outcome.total, outcome.digest)
    whole = (out / "results.jsonl").read_bytes()
    (out / "results.jsonl").write_bytes(whole[: len(whole) // 2])
    again = run_sweep(config, out=out, workers=1)
    assert (16, 0) == (again.done_before, again.done_now)
    assert whole == (out / "results.jsonl").read_bytes()
    with closing(sqlite3.connect(out / "journal.sqlite")) as db, db:
        db.execute("DELETE FROM results WHERE rowid IN (SELECT rowid FROM results LIMIT 4)")
    mended = run_sweep(config, out=out, workers=1)
    assert (12, 4, SMALL_DIGEST) == (mended.done_before, mended.done_now, mended.digest)


def test_killed_in_the_middle_it_keeps_what_is_finished(tmp_path: Path) -> None:
    out, path = tmp_path / "out", write(tmp_path)
    sets = ["--set", "grid.depths=[4096, 8192, 16384]", "--set", "outputs.rows=64", "--set", "outputs.columns=64"]
    args = [sys.executable, "-m", "qsim", "sweep", str(path), "--out", str(out), "--workers", "1", *sets]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(args, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 60
        while finished(out) < 2 and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.02)
        assert first.poll() is None, "the sweep ended before it could be killed"
        first.send_signal(signal.SIGKILL)
    before = finished(out)
    assert 2 <= before < 24
    assert f"{before} of 24 cells done" in qsim("status", str(out)).stdout
    again = qsim(*args[3:])
    assert 0 == again.returncode, again.stderr
    assert f"{24 - before} cells done now, {before} before" in again.stdout


def finished(out: Path) -> int:
    return len(read_sweep(out).finished) if (out / "journal.sqlite").is_file() and ready(out) else 0


def ready(out: Path) -> bool:
    with closing(sqlite3.connect(out / "journal.sqlite", timeout=10)) as db:
        return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'results'").fetchone()[0])


def test_a_folder_of_one_kind_is_not_extended_by_another(tmp_path: Path) -> None:
    run_sweep(study("grid.depths=[128]", 'grid.data=["ones"]'), out=tmp_path, workers=1)
    before = (tmp_path / "results.jsonl").read_bytes()
    done = qsim("sweep", "--out", str(tmp_path), "--extend", "--set", "replicas.count=1")
    assert (2, "") == (done.returncode, done.stdout)
    assert "holds a study of kind accumulation, and this one is of kind lifecycle" in done.stderr
    assert before == (tmp_path / "results.jsonl").read_bytes()
    more = run_sweep(study('grid.data=["ones"]'), out=tmp_path, workers=1, extend=True)
    assert (4, 4) == (more.done_before, more.done_now)


@pytest.mark.parametrize("option", [["--backend", "numba"], ["--fast"]])
def test_options_that_mean_nothing_here_are_refused(option: list[str]) -> None:
    done = qsim("sweep", str(STUDY), *option)
    assert 2 == done.returncode
    assert f"leave {option[0]} out" in " ".join(done.stderr.split())


# what a reader gets


def rows(*overrides: str) -> list[tuple[AccumulationCell, AccumulationRecord]]:
    return [(c, run_cell(c)) for c in study(*overrides).cells()]


def test_a_sweep_leaves_table_records_study_and_figure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = qsim("sweep", str(write(tmp_path)), "--out", str(out), "--workers", "1", "--set", "grid.depths=[32768]")
    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("positive, e4m3fn: bias against K")]
    assert ["model", "promote", "32768"] == lines[at + 1].split()
    assert ["hopper_wgmma", "never", "-0.368"] == lines[at + 2].split()
    assert "hopper_wgmma, promote never: ones stall at 16384 (K = 32768)." in lines
    names = {"accumulation.csv", "accumulation.png", "journal.sqlite", "results.jsonl", "results.sha256", "study.toml"}
    assert names <= {p.name for p in out.iterdir()}
    assert "accumulation" == tomllib.loads((out / "study.toml").read_text())["kind"]
    first = json.loads((out / "results.jsonl").read_text().splitlines()[0])
    assert {"case", "cell", "state", "record"} == set(first)
    status = qsim("status", str(out), "--table")
    assert (0, True) == (status.returncode, "8 of 8 cells done, 0 pending" in status.stdout)
    assert lines[at + 2] in status.stdout.splitlines()


def test_the_csv_holds_medians_intervals_and_the_worst_seed() -> None:
    found = rows("grid.depths=[1024]")
    header, *lines = [line.split(",") for line in accumulation_csv(found).splitlines()]
    assert len(found) == len(lines)
    line, (_, record) = dict(zip(header, lines[0], strict=True)), found[0]
    assert ("hopper_wgmma", "positive", "0") == (line["model"], line["data"], line["promote_every"])
    assert (min(record.bias), max(record.bias)) == (float(line["bias_low"]), float(line["bias_high"]))
    assert float(line["bias_low"]) <= float(line["bias"]) <= float(line["bias_high"])
    assert max(record.worst) == float(line["worst"])


def test_the_notes_name_what_was_left_out() -> None:
    found = rows('grid.models=["ada_mma_sync", "hopper_wgmma"]', "grid.promote_every=[0, 16]", "grid.depths=[128]")
    assert "Left out, for the model cannot do it: hopper_wgmma promoted every 16." == accumulation_notes(found)[-1]
    assert ["no cell has an outcome"] == accumulation_notes([])


def test_the_figure_draws_a_curve_for_each_model_and_promotion_with_labels_that_do_not_overlap() -> None:
    pytest.importorskip("matplotlib")
    models = 'grid.models=["hopper_wgmma", "hopper_mma_sync", "blackwell_tcgen05"]'
    found = rows(models, 'grid.data=["positive", "normal"]', "grid.depths=[128, 1024, 16384]")
    fig = accumulation_figure(found, title="t")
    fig.canvas.draw()
    left, right = fig.axes
    curves = [line for line in left.lines if len(line.get_xdata()) == 3]
    assert 6 == len(curves)
    drawn = {tuple(line.get_ydata()) for line in curves}
    assert tuple(r.bias_median for c, r in found if (c.model, c.promote_every, c.data) == (
        "hopper_wgmma", 0, "positive")) in drawn  # fmt: skip
    for ax in (left, right):
        boxes = sorted((t.get_window_extent() for t in ax.texts), key=lambda box: box.y0)
        assert 2 <= len(boxes)
        assert all(low.y1 <= high.y0 + 2 for low, high in itertools.pairwise(boxes))
        assert all(box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1 for box in boxes)


def test_labels_are_pushed_apart_as_little_as_needed() -> None:
    assert [-1.5, 2.5, 10.0] == _apart([0.0, 1.0, 10.0], 4.0)
    assert [-3.0, 1.0, 5.0, 9.0] == _apart([2.0, 2.0, 3.0, 5.0], 4.0)


def test_the_picture_of_a_sweep_is_readable_in_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    accumulation_figure(rows("grid.depths=[128, 1024]"), title="t").savefig(tmp_path / "a.png")
    width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert (792, 594) == (width, height)  # one panel: no data of both signs


def test_without_matplotlib_there_is_a_table_and_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r'the figure needs .*; install "qsim\[plot\]"'):
        accumulation_figure(rows("grid.depths=[128]"), title="t")
    with pytest.raises(UsageError, match="nothing to draw"):
        accumulation_figure(rows("grid.depths=[128]", 'grid.data=["ones"]'), title="t")


# the published studies


def test_lifecycle_studies_have_the_cells_that_were_published() -> None:
    pins = {"default.toml": "85358e938c8f2afb", "center.toml": "599b3c6e8dd5a722"}
    for name, pin in pins.items():
        ids = [case_id(c) for c in load_study(ROOT / "studies" / name, registries()).cells()]
        assert pin == hashlib.sha256("".join(ids).encode()).hexdigest()[:16], name
