"""What ``make gpu`` runs on a device, dry: CuPy played by numpy, kernels emulated. It must be able to run at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("gpp")
WITHOUT_CUPY = "import sys; sys.modules['cupy'] = None; from benchmarks.gpu import main; sys.exit(main())"
ROOT = Path(__file__).parents[2]


def played(*words):
    return subprocess.run(
        [sys.executable, "-m", *words], env={**os.environ, "QSIM_PLACE": "played"}, cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_the_tests_of_a_device_run():
    done = played("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_benchmark_runs_and_prints_no_figure():
    done = played("benchmarks.gpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.endswith(": ran; a dry run has no figures") for line in lines)


def test_without_a_device_there_are_no_figures():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUPY],
        env={**os.environ, "QSIM_PLACE": "emulated"}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no figures: CuPy is missing")
