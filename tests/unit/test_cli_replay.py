"""Counterexamples as a user meets them: explore, replay, and the failing test that replay writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOST = "x1~2.1.1.layer.layer.split.own.microbatch.seed_correct.delayed.none.input~0x2-1x3-0~I3~f2851cac"
ENV = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="126")


def qsim(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qsim", *args], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=120
    )


def run_pytest(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(file.parent), str(file)]
    return subprocess.run(command, cwd=file.parent, env=ENV, capture_output=True, text=True, timeout=120)


def words(text: str) -> str:
    """Text without its line breaks and columns."""
    return " ".join(text.split())


TABLE = """
event worker does cells snapshots breaks
1 0 P@0 snap w0 @0
4 0 F@0 base w0 @0
> 6 1 P@0 snap w1 @0
9 1 F@0 base w1 @0
10 1 S L0/qkv/input 0 -> 1
19 0 S L0/qkv/input 1 -> 1 I3
"""


def test_explore_shows_the_counterexample_of_the_first_broken_invariant() -> None:
    done = qsim("explore", "--commit", "split", "--workers", "3", "--layers", "2")
    assert (1, "") == (done.returncode, done.stderr)
    said = words(done.stdout)
    assert "breaks I3 single_commit: a commit on base epoch 0 overwrites epoch 1: a commit is lost" in said
    assert "because its base, epoch 0, was read by event 4 (F@0 of worker 0); in between, event 10 (S of" in said
    assert "however I3 is kept, in this run and in this space, with compare_and_set (all 20 runs)" in said
    assert "It stays broken with descale_in_the_data, keyed_snapshot," in said
    assert words(TABLE) in said
    assert "to 1 step, 1 layer, 2 workers, 1 preemption, 20 events" in said
    assert f"token: {LOST}" in done.stdout.splitlines()


def test_the_token_alone_can_be_handed_on_to_replay() -> None:
    token = qsim("explore", "--commit", "split", "--token")
    assert (1, f"{LOST}\n") == (token.returncode, token.stdout)
    done = qsim("replay", token.stdout.strip())
    assert 1 == done.returncode
    assert words(TABLE) in words(done.stdout)
    nothing = qsim("explore", "--token")
    assert (0, "") == (nothing.returncode, nothing.stdout)


def test_json_carries_token_counterexample_and_severity() -> None:
    done = qsim("explore", "--commit", "split", "--json", "--severity")
    data = json.loads(done.stdout)
    assert (1, LOST) == (done.returncode, data["token"])
    told = data["counterexample"]
    assert ("I3", "lost_commit", 19, 0) == (
        told["invariant"], told["kind"], told["then"]["event"], told["then"]["worker"],
    )  # fmt: skip
    assert [1, 4, 6, 9, 10, 19] == [row["seq"] for row in told["table"]]
    assert not data["severity"]["run"]["identical"]
    assert 2 == data["severity"]["worst"]["measured"]
    again = json.loads(qsim("replay", data["severity"]["worst"]["token"], "--json").stdout)
    assert ["I3"] == again["broken"]


def test_a_correct_space_has_no_counterexample_and_costs_nothing() -> None:
    done = qsim("explore", "--severity")
    assert 0 == done.returncode
    assert "every GEMM output is bit-identical to that of the correct twin" in words(done.stdout)
    assert "token" not in done.stdout


def test_what_cannot_be_measured_is_said_and_the_verdict_stays() -> None:
    done = qsim("explore", "--scope", "layer_worker", "--layers", "5", "--severity")  # the capture has four layers
    assert (0, "") == (done.returncode, done.stderr)
    assert "not measured: schedule.layers 5 is more than the 4 layers" in words(done.stdout)


def test_a_long_run_is_shown_in_part() -> None:
    """24 layers, a read of worker 0 before all of worker 1: 2 + 3 x 24 + 1 rows, of which 8 and 32 are shown."""
    done = qsim("explore", "--layers", "24", "--commit", "split", "--whole")
    rows = done.stdout.split("breaks \n")[-1].splitlines()
    assert "... 35 rows" in words(done.stdout)
    assert 41 == sum(1 for row in rows if row[:1] == " " and row.split()[:1] != [])
    assert " ..." in next(line for line in done.stdout.splitlines() if "..." in line)


def test_another_invariant_can_be_asked_for() -> None:
    chosen = qsim("explore", "--defect", "D03", "--invariant", "I5", "--token")
    assert "~I5~" in chosen.stdout
    absent = qsim("explore", "--commit", "split", "--invariant", "I1")
    assert 1 == absent.returncode  # I3 is broken all the same
    assert "no run breaks I1" in absent.stdout
    unknown = qsim("explore", "--invariant", "I99")
    assert 2 == unknown.returncode
    assert "known: I1" in words(unknown.stderr)


def test_a_run_that_keeps_its_invariant_is_replayed_with_exit_code_0() -> None:
    from qsim.explore import Space, Token

    token = Token(space=Space(), choices=(0, 1, 0, 1), invariant="I3").text()
    done = qsim("replay", token, "--severity")
    assert (0, "") == (done.returncode, done.stderr)
    assert "the run 0 1 0 1 keeps I3 and breaks no invariant" in words(done.stdout)
    assert "bit-identical" in done.stdout


@pytest.mark.parametrize(
    ("token", "said"), [(LOST[:-2], "changed or cut short"), (LOST.replace("0x2", "0x3"), "changed or cut short")]
)
def test_a_broken_token_is_one_clear_line(token: str, said: str) -> None:
    done = qsim("replay", token)
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert said in done.stderr
    assert 'copy it whole from "explore"' in done.stderr


def test_the_written_test_fails_today_and_passes_for_a_mended_protocol(tmp_path: Path) -> None:
    file = tmp_path / "test_found.py"
    wrote = qsim("replay", LOST, "--pytest", str(file))
    assert 1 == wrote.returncode
    assert f"wrote {file}: it fails today" in wrote.stdout
    failed = run_pytest(file)
    assert 1 == failed.returncode, failed.stdout + failed.stderr
    assert "1 failed" in failed.stdout
    assert "a commit on base epoch 0 overwrites epoch 1: a commit is lost" in failed.stdout
    text = file.read_text(encoding="utf-8")
    assert 2 == text.count(".split.")  # in SPACE and in TOKEN
    mended = text.replace('SPACE = "2.1.1.layer.layer.split.', 'SPACE = "2.1.1.layer.layer.atomic.')
    assert mended != text
    file.write_text(mended, encoding="utf-8")
    passed = run_pytest(file)
    assert 0 == passed.returncode, passed.stdout + passed.stderr
    assert "1 passed" in passed.stdout


def test_the_test_written_for_a_correct_space_passes(tmp_path: Path) -> None:
    from qsim.explore import Space, Token

    file = tmp_path / "test_kept.py"
    wrote = qsim("replay", Token(space=Space(), choices=(0, 1, 1, 0), invariant="I3").text(), "--pytest", str(file))
    assert 0 == wrote.returncode
    assert "it passes today" in wrote.stdout
    assert 0 == run_pytest(file).returncode


def test_a_file_that_is_there_is_written_over_only_when_told_so(tmp_path: Path) -> None:
    file = tmp_path / "test_found.py"
    file.write_text("mine", encoding="utf-8")
    refused = qsim("replay", LOST, "--pytest", str(file))
    assert (2, "mine") == (refused.returncode, file.read_text(encoding="utf-8"))
    assert "is there already; name another file, or add --force" in refused.stderr
    forced = qsim("replay", LOST, "--pytest", str(file), "--force")
    assert 1 == forced.returncode
    assert LOST in file.read_text(encoding="utf-8")
    nowhere = qsim("replay", LOST, "--pytest", str(tmp_path / "no" / "test_x.py"))
    assert 3 == nowhere.returncode
    assert "cannot be written" in nowhere.stderr


def test_a_prefix_is_written_as_the_whole_run() -> None:
    """A run cut at its violation may be carried on in another way: the file holds the one that was judged."""
    from qsim.explore import Commits, Space, Token
    from qsim.report.failing_test import file_text

    token = Token(space=Space(workers=3, commit=Commits.SPLIT), choices=(0, 0, 1, 1, 1, 0), invariant="I3")
    assert "RUN = (0, 0, 1, 1, 1, 0, 2, 2, 2)\n" in file_text(token)
    long = Token(space=Space(steps=20, commit=Commits.SPLIT), choices=(1, 0) * 60, invariant="I3")
    assert ["TOKEN"] == [line.split()[0] for line in file_text(long).splitlines() if len(line) > 120]
    compile(file_text(long), "test_long.py", "exec")
