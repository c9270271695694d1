"""The command line as a user meets it: outputs, exit codes, one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qsim.codec.scaled.recipes import RECIPES
from qsim.gemm import MODELS

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "replicas.count=2", "--set", "schedule.steps=3", "--set", 'grid.formats=["e4m3"]',
         "--set", "workload.outputs=4"]  # fmt: skip
TINY = [*SMALL, "--set", 'grid.defects=["correct", "D01"]', "--set", 'grid.recipes=["delayed"]',
        "--set", "grid.windows=[1]"]  # fmt: skip


def qsim(*args: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="126")
    return subprocess.run(
        [sys.executable, "-m", "qsim", *args], cwd=cwd or ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert code == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_help_names_every_command() -> None:
    done = qsim("--help")
    assert 0 == done.returncode
    for command in ("demo", "formats", "defects", "run", "sweep", "status"):
        assert f"\n  {command} " in done.stdout


def test_version() -> None:
    assert "qsim 0.1.0\n" == qsim("--version").stdout


def test_demo_tells_three_rows_and_writes_nothing(tmp_path: Path) -> None:
    done = qsim("demo", cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert [] == list(tmp_path.iterdir())
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    assert 3 == len(rows)
    correct, defective, wrong_scope = rows
    assert "100%" in correct
    assert correct.rstrip().endswith("none")
    assert defective.rstrip().endswith("I1 I2 I3 I5")
    assert wrong_scope.rstrip().endswith("I2 I4")


def test_formats_and_defects_are_listed_as_json() -> None:
    formats = json.loads(qsim("formats", "--json").stdout)
    assert [recipe.name for recipe in RECIPES] == [recipe["name"] for recipe in formats["scale_recipes"]]
    assert list(MODELS) == [model["name"] for model in formats["tensor_core_models"]]
    maxima = {f["name"]: f["max"] for f in formats["formats"]}
    assert (448.0, 57344.0, 6.0) == tuple(maxima[n] for n in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"))
    scales, elements = (next(f for f in formats["formats"] if n in f["aliases"]) for n in ("e8m0", "e4m3"))
    assert (2.0**-127, False, False, "all_ones") == tuple(
        scales[key] for key in ("smallest_positive", "signed", "has_zero", "nan")
    )
    assert (2.0**-9, True, True) == tuple(elements[key] for key in ("smallest_positive", "signed", "has_zero"))
    assert "smallest_subnormal" not in scales
    defects = {d["id"]: d for d in json.loads(qsim("defects", "--json").stdout)}
    assert ["I1", "I7"] == defects["D07"]["breaks"]
    assert "single_snapshot" in defects["D04"]["wrong_fixes"]


def test_the_table_of_formats_heads_its_columns_by_what_is_in_them() -> None:
    head, *rows = qsim("formats").stdout.splitlines()[1:]
    columns = ["name", "aliases", "E", "M", "bias", "max", "min positive", "signed", "zero", "inf", "nan", "codes/byte"]
    assert columns == re.split(r"\s{2,}", head.strip())
    (scales,) = [row.split() for row in rows if row.startswith("float8_e8m0fnu")]
    assert ["5.87747e-39", "False", "False", "False", "all_ones", "1"] == scales[-6:]


def test_run_shows_the_violations_of_a_defect_and_none_under_its_fix() -> None:
    args = ("--steps", "3", "--replicas", "2", "--layers", "2")
    broken = qsim("run", "consume_after_advance", *args)
    assert 0 == broken.returncode, broken.stderr
    assert "invariants broken: I1 (as expected)" in broken.stdout
    assert "codes made with L0/qkv/input@0 are decoded with the descale of L0/qkv/input@1" in broken.stdout
    mended = qsim("run", "D01", "--fix", "keyed_snapshot", *args)
    assert 0 == mended.returncode
    assert "invariants broken: none (as expected); 0 violations" in mended.stdout
    wrong = qsim("run", "D04", "--fix", "single_snapshot", *args)
    assert 0 == wrong.returncode
    assert "invariants broken: I2 I4 (as expected)" in wrong.stdout
    harm = qsim("run", "correct", "--fix", "single_snapshot", *args)
    assert 1 == harm.returncode
    assert "(expected none)" in harm.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default study, small, run once with two workers."""
    out = tmp_path_factory.mktemp("swept") / "two"
    done = qsim("sweep", "--out", str(out), "--workers", "2", *SMALL)
    assert 0 == done.returncode, done.stderr
    (out / "stdout.txt").write_text(done.stdout)
    return out


def test_a_sweep_ends_with_a_table_a_csv_and_a_picture(swept: Path) -> None:
    text = (swept / "stdout.txt").read_text()
    assert "recipe delayed, window 16" in text
    assert "D03 consume_and_recompute_advance I1 I2 I3 I5" in text
    assert "distinct token rows" in text
    assert "Not applicable: D07 stale_center needs a recipe with a centre" in text
    assert (swept / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    header, *rows = (swept / "severity.csv").read_text().splitlines()
    assert header.startswith("defect,name,format,recipe,window,mean_shift,status,broken,expected,as_expected,k,")
    assert 1 + 9 * 4 == len(rows)  # high precision once; nine defects and controls x recipes x windows


def test_one_worker_and_two_give_the_same_bytes(swept: Path, tmp_path: Path) -> None:
    assert 0 == qsim("sweep", "--out", str(tmp_path / "one"), "--workers", "1", *SMALL).returncode
    for name in ("results.jsonl", "severity.csv"):
        assert (swept / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_killed_in_the_middle_and_called_again_it_gives_the_same_bytes(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    args = [sys.executable, "-m", "qsim", "sweep", "--out", str(out), "--workers", "2", *SMALL]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    first = subprocess.Popen(args, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        done, deadline = 0, time.monotonic() + 90
        while done < 5 and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.2)
            status = qsim("status", str(out))
            done = int(status.stdout.split(": ")[1].split(" of ")[0]) if status.returncode == 0 else 0
        assert first.poll() is None, "the sweep ended before it could be killed"
        assert 5 <= done < 37
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    again = qsim("sweep", "--out", str(out), "--workers", "2", *SMALL)
    assert 0 == again.returncode, again.stderr
    before = int(again.stdout.rsplit("cells done now, ", 1)[1].split(" before")[0])
    assert done <= before < 37
    for name in ("results.jsonl", "severity.csv"):
        assert (swept / name).read_bytes() == (out / name).read_bytes()


def test_a_finished_sweep_called_again_runs_nothing(swept: Path) -> None:
    done = qsim("sweep", "--out", str(swept), *SMALL)
    assert 0 == done.returncode
    assert "nothing to run: all 37 cells were done before" in done.stdout
    assert "37 of 37 cells done, 0 pending, 0 failed, 0 crashed" in qsim("status", str(swept)).stdout


def test_products_that_are_missing_stale_or_cut_short_are_written_anew(swept: Path) -> None:
    table, figure = swept / "severity.csv", swept / "heatmap.png"
    whole = table.read_bytes(), figure.read_bytes()
    for broken in (b"", whole[0][:300]):
        table.write_bytes(broken)
        figure.write_bytes(whole[1][: len(whole[1]) // 2])
        assert 0 == qsim("sweep", "--out", str(swept), *SMALL).returncode
        assert whole == (table.read_bytes(), figure.read_bytes())
    table.unlink()
    figure.unlink()
    assert 0 == qsim("sweep", "--out", str(swept), *SMALL).returncode
    assert whole == (table.read_bytes(), figure.read_bytes())


def test_a_reader_that_goes_away_costs_nothing_and_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qsim", "sweep", *TINY, "--out", str(tmp_path / "out"), "--workers", "1"]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        errors = child.stderr.read().decode()
        assert (0, False) == (child.wait(), "Traceback" in errors)
    assert {"severity.csv", "heatmap.png", "results.jsonl"} <= {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_output_device_is_one_clear_line() -> None:
    with Path("/dev/full").open("w") as full:
        env = dict(os.environ, PYTHONPATH=str(ROOT))
        done = subprocess.run(
            [sys.executable, "-m", "qsim", "formats"], cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert_refused(done, 3, "standard output cannot be written")


def test_overrides_get_a_folder_of_their_own_and_leave_the_default_alone(tmp_path: Path) -> None:
    for _ in range(2):
        assert 0 == qsim("sweep", *TINY, "--workers", "1", cwd=tmp_path).returncode
    (folder,) = (tmp_path / "qsim-out").iterdir()
    assert folder.name.startswith("default-")


def test_a_users_own_capture_is_replayed(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        f"step{s}.L{layer}.{name}": rng.normal(size=(5, 12)).astype(np.float16)
        for s in range(4) for layer in range(2) for name in ("qkv_in", "ffn_in", "q", "k")
    }  # fmt: skip
    np.savez(tmp_path / "mine.npz", **arrays)
    done = qsim("sweep", *TINY, "--set", "workload.tensors=mine.npz", "--set", "schedule.layers=2", cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert "20 distinct token rows" in done.stdout


def test_shaping_is_printed_where_it_is_used(tmp_path: Path) -> None:
    shaping = ["--set", "workload.mean_shift=2.0", "--set", "workload.layer_spread=[2, 1, 0, -1]",
               "--set", "workload.outlier_steps=[2]"]  # fmt: skip
    done = qsim("sweep", *TINY, *shaping, cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert "mean_shift 2 sigma, layer_spread 2^[2, 1, 0, -1], outlier_steps [2] x8" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["sweep", "nowhere.toml"], 3, ["nowhere.toml"]),
        (["sweep", "--set", "grid.windwos=[1]"], 2, ["windwos", 'did you mean "grid.windows"']),
        (["sweep", "--set", 'grid.defects=["D99"]'], 2, ["grid.defects[0]", "D99", "D01"]),
        (["sweep", "--set", 'grid.formats=["e4m3x"]'], 2, ["e4m3x"]),
        (["sweep", "--set", "workload.tensors=gone.npz"], 3, ["gone.npz"]),
        (["sweep", "--workers", "0"], 2, ["--workers"]),
        (["sweep", "--backend", "gpu"], 2, ["gpu", "numba", "emulated", "cuda"]),
        (["run", "D99"], 2, ["D99"]),
        (["run", "D01", "--steps", "4000000000"], 2, ["one replay takes at most 1000000"]),
        (["run", "D01", "--tensors", "~nobody-of-this-name/x.npz"], 3, ["~nobody-of-this-name/x.npz"]),
        (["sweep", "--set", "schedule.steps=" + "1" * 5000], 2, ["schedule.steps"]),
        (["sweep", "--set", "schedule.steps=" + "[" * 3000], 2, ["schedule.steps"]),
        (["sweep", "--set", "workload.mean_shift=1e300"], 2, ["mean_shift 1e+300 sigma", "overflow float32"]),
        (["run", "D07"], 2, ["D07 stale_center needs a recipe with a centre"]),
        (["run", "D01", "--fix", "prayer"], 2, ["prayer", "keyed_snapshot"]),
        (["run", "D01", "--layers", "9"], 2, ["schedule.layers 9"]),
        (["run", "D01", "--workers", "2"], 2, ["microbatches: 1 is no multiple of schedule.workers 2"]),
        (["status", "nowhere"], 3, ["nowhere"]),
        (["swep"], 2, ["No such command"]),
    ],
)
def test_a_mistake_is_one_clear_message_and_an_exit_code(args: list[str], code: int, words: list[str]) -> None:
    assert_refused(qsim(*args), code, *words)


def write_capture(path: Path, change: object) -> Path:
    arrays = {
        f"step{s}.L{layer}.{name}": np.ones((4, 8), np.float32) * (1 + s)
        for s in range(3) for layer in range(4) for name in ("q", "k")
    }  # fmt: skip
    arrays["step1.L2.q"] = change  # type: ignore[assignment]
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (np.full((4, 8), np.nan, np.float32), ["step1.L2.q", "nan"]),
        (np.ones((4, 8), np.int32), ["step1.L2.q", "float16, bfloat16, float32, float64"]),
        (np.ones((3, 8), np.float32), ["step1.L2.q", "3 tokens"]),
        (np.array([None, 1]), ["pickle"]),
    ],
)
def test_a_bad_capture_is_refused_with_its_array_and_loses_nothing(
    change: object, words: list[str], tmp_path: Path
) -> None:
    path = write_capture(tmp_path / "bad.npz", change)
    done = qsim("sweep", *TINY, "--set", f"workload.tensors={path}", "--out", str(tmp_path / "out"))
    assert_refused(done, 3, "bad.npz", *words)


def test_an_output_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("here first")
    assert_refused(qsim("sweep", *TINY, "--out", str(blocker / "out")), 3, str(blocker))
    assert_refused(qsim("sweep", *TINY, "--out", str(blocker)), 3, str(blocker))
    assert "here first" == blocker.read_text()


def test_another_study_in_the_same_folder_is_refused_and_keeps_what_is_there(swept: Path) -> None:
    before = (swept / "results.jsonl").read_bytes()
    assert_refused(qsim("sweep", "--out", str(swept), *TINY), 2, "--out", "--extend")
    assert before == (swept / "results.jsonl").read_bytes()
