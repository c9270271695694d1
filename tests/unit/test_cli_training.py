"""The command line of the closed loop: the article's walk, and a training study from the file to its products."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_cli import assert_refused, qsim

STUDY = """
schema = 1
kind = "training"
title = "two protocols"
[model]
layers = 2
width = 16
heads = 2
hidden = 24
context = 8
[workload]
checkpoint = "scratch"
batch = 2
[loop]
steps = 3
warm_steps = 1
matched = 1
[replicas]
count = 2
[blocks.small]
protocols = ["correct", { defect = "D03", label = "unpaired" }, "high_precision"]
[blocks.small.quant]
linear = ["input"]
window = 1
"""


def test_the_walk_names_each_control_and_what_it_rules_out(tmp_path: Path) -> None:
    picture = tmp_path / "why.png"
    done = qsim(
        "run", "article", "--replicas", "1", "--steps", "4", "--control", "low_precision_off", "--control",
        "matched_points", "--figure", str(picture),
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    words = " ".join(done.stdout.split())
    assert "low_precision_off: nothing is cast. Then it comes from the low-precision path" in words
    assert (
        "matched_points: forward and recompute of one run, tensor by tensor. Then a product's output differs" in words
    )
    assert "0 of 288" in words  # of the control: nothing differs
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["article", "--control", "tf32"], ['control "tf32" is unknown; known: accumulation, low_precision_off']),
        (["article", "--window", "4"], ["article is a training run of its own; leave --window out"]),
        (["D03", "--control", "accumulation"], ['only "run article" has it; leave --control out']),
        (["D03", "--figure", "x.png"], ['only "run article" has it; leave --figure out']),
    ],
)
def test_a_mistake_about_the_walk_is_one_clear_message(args: list[str], words: list[str]) -> None:
    assert_refused(qsim("run", *args), 2, *words)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the small study has run."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "small.toml").write_text(STUDY)
    done = qsim("sweep", "small.toml", "--out", "out", cwd=folder)
    assert 0 == done.returncode, done.stderr
    assert "6 cells done now, 0 before" in done.stdout
    assert "small: gradient norms" in done.stdout
    assert "Controls (small): of 6 steps of the twin" in " ".join(done.stdout.split())
    return folder


def test_a_training_study_leaves_a_table_of_every_seed_and_three_pictures(swept: Path) -> None:
    header, *rows = (swept / "out" / "training.csv").read_text().splitlines()
    assert header.startswith("protocol,setting,seed,steps,broken,expected")
    assert 6 == len(rows)
    assert all(
        (swept / "out" / name).read_bytes().startswith(b"\x89PNG") for name in ("traces.png", "spikes.png", "skips.png")
    )


def test_one_worker_gives_the_bytes_of_two(swept: Path) -> None:
    done = qsim("sweep", "small.toml", "--out", "one", "--workers", "1", cwd=swept)
    assert 0 == done.returncode, done.stderr
    assert (swept / "out" / "results.sha256").read_text().split()[0] == (
        swept / "one" / "results.sha256"
    ).read_text().split()[0]


def test_a_text_of_ones_own_is_another_case_and_one_too_short_is_refused(swept: Path) -> None:
    (swept / "mine.txt").write_bytes(b"a text of my own, long enough for a window and what is held out " * 20)
    done = qsim("sweep", "small.toml", "--set", "workload.text=mine.txt", "--set", "replicas.count=1", cwd=swept)
    assert 0 == done.returncode, done.stderr
    assert "3 cells done now, 0 before" in done.stdout
    (swept / "short.txt").write_bytes(b"short")
    done = qsim("sweep", "small.toml", "--set", "workload.text=short.txt", "--out", "short", cwd=swept)
    assert done.returncode in (1, 3)
    assert "Traceback" not in done.stderr
    assert "short.txt: 5 bytes, and at least 90 are needed" in done.stderr


def test_a_fast_study_says_so(swept: Path) -> None:
    done = qsim("sweep", "small.toml", "--fast", "--set", "replicas.count=1", cwd=swept)
    assert 0 == done.returncode, done.stderr
    assert "not reproducible to the bit on another machine (--fast)" in " ".join(done.stdout.split())
