"""The shipped decoder: the file, what is said of it, and the script that makes it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from qsim._paths import sample_checkpoint
from qsim.training.config import ModelParams
from qsim.training.model import shapes
from qsim.training.text import TEXT_SHA256
from qsim.training.weights import load_weights, require

ROOT = Path(__file__).parents[2]
TWO_STEPS = "907f41aa7f7cd78a836e89b787de06bfbb1a1740446b001ccfb4f065288a2a27"
"""sha256 of the weights after two steps, on every machine."""


def script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "studies/train_decoder.py", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_file_is_the_one_that_the_provenance_names_and_holds_the_default_model() -> None:
    payload = sample_checkpoint().read_bytes()
    assert len(payload) < 1 << 20
    assert hashlib.sha256(payload).hexdigest() in sample_checkpoint().with_name("DECODER.md").read_text()
    weights, metadata = load_weights(sample_checkpoint())
    require(weights, shapes(ModelParams()))
    assert {"text": TEXT_SHA256, "steps": "2500", "seed": "1"}.items() <= metadata.items()


def test_the_script_makes_the_same_bytes_here_as_elsewhere(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "two"), "--steps", "2")
    assert 0 == done.returncode, done.stderr
    assert TWO_STEPS == hashlib.sha256((tmp_path / "two").read_bytes()).hexdigest()
    assert TWO_STEPS in done.stdout


def test_a_check_tells_other_bytes(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    done = script("--check", str(tmp_path / "other"), "--steps", "1")
    assert 1 == done.returncode
    assert "training gives" in done.stdout
    assert 2 == script("--check", str(tmp_path / "other"), "--steps", "0").returncode
