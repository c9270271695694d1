"""The commands schedule and lint, and the options of run that name a schedule: outputs and exit codes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from qsim.sim import Feature, Order
from qsim.sim.notation import SIGNS, read_schedule
from tests.unit.test_cli import ROOT, assert_refused, qsim

BYHAND = str(ROOT / "studies" / "byhand.toml")


def test_a_correct_schedule_is_a_table_and_a_clean_verdict() -> None:
    done = qsim("schedule")
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert ["seq", "ph", "t", "m", "w", "L", "site", "role", "v", "event", "owner"] == lines[0].split()
    assert ["0", "f", "0", "0", "0", "0", "qkv", "input", "0", "X", "L0/qkv/input"] == lines[1].split()
    events = [line.split()[9] for line in lines[1:6]]
    assert ["X", "P@0", "Q@0", "O", "C@0>1"] == events
    assert "invariants broken: none; 0 violations" == lines[-1]


def test_a_defective_schedule_shows_both_epochs_of_an_unpaired_decode_and_exits_with_1() -> None:
    done = qsim("schedule", "--defect", "consume_after_advance")
    assert 1 == done.returncode
    assert "U(linear) input@0/1 weight@0/1" in done.stdout
    assert "invariants broken: I1; 8 violations" in done.stdout
    assert "codes made with L0/qkv/input@0 are decoded with the descale of L0/qkv/input@1" in done.stdout


def test_the_text_that_is_printed_is_a_schedule_that_a_study_can_hold(tmp_path: Path) -> None:
    printed = qsim("schedule", "--preset", "te_fused", "--order", "1f1b", "--layers", "2", "--microbatches", "2",
                   "--feature", "twice", "--text")  # fmt: skip
    assert 1 == printed.returncode  # a queue a module hands out the wrong entry
    assert {"I10"} == read_schedule(printed.stdout).declared.breaks
    study = tmp_path / "mine.toml"
    study.write_text(
        'schema = 1\ngrid = { defects = ["written"], formats = ["e4m3"], recipes = ["delayed"], windows = [1] }\n'
        f"measure.skip_steps = 0\n[schedule]\ntext = '''\n{printed.stdout}'''\n"
    )
    again = qsim("schedule", str(study), "--text")
    assert (1, printed.stdout) == (again.returncode, again.stdout)
    linted = qsim("lint", str(study))
    assert 0 == linted.returncode, linted.stderr
    assert linted.stdout.endswith("breaks I10, as expected\n")


def test_the_table_of_the_page_on_schedules_is_the_real_one() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    block = r"^```console\n\$ python -m qsim schedule studies/byhand.toml\n(.*?)^```$"
    (shown,) = re.findall(block, page, re.DOTALL | re.MULTILINE)
    assert shown.split() == qsim("schedule", BYHAND).stdout.split()
    (text,) = re.findall(r"^\[schedule\]\ntext = \"\"\"\n(.*?)^\"\"\"$", page, re.DOTALL | re.MULTILINE)
    study = tomllib.loads(Path(BYHAND).read_text(encoding="utf-8"))
    assert read_schedule(study["schedule"]["text"]) == read_schedule(text)


def test_the_page_on_schedules_names_every_order_feature_and_sign() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    names = {o.value for o in Order} | {f.value for f in Feature} | {sign.letters for sign in SIGNS}
    assert names == named


def test_json_holds_every_event_and_violation() -> None:
    data = json.loads(qsim("schedule", "--defect", "D04", "--layers", "2", "--json").stdout)
    assert ["I4"] == data["broken"] == data["expected"]
    assert list(range(len(data["events"]))) == [row["seq"] for row in data["events"]]
    assert {"I4"} == {v["invariant"] for v in data["violations"]}
    assert data["events"][1]["event"] == "P@0(cell=L*.qkv.input)"


def test_a_study_prints_its_written_schedule_first_and_another_cell_by_defect() -> None:
    own = qsim("schedule", BYHAND)
    assert 1 == own.returncode
    assert "invariants broken: I1; 2 violations" in own.stdout
    twin = qsim("schedule", BYHAND, "--defect", "correct")
    assert (0, True) == (twin.returncode, "invariants broken: none" in twin.stdout)
    assert_refused(qsim("schedule", BYHAND, "--defect", "D01"), 2, "D01", "written")


def test_lint_tells_each_distinct_schedule_of_a_study_in_one_line() -> None:
    done = qsim("lint", str(ROOT / "studies" / "default.toml"), "--set", "schedule.steps=2")
    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert 1 + 2 * (1 + 8) == len(lines)  # high precision; two recipes of the correct protocol and eight defects
    (d03,) = [line for line in lines if line.startswith("D03 delayed seed_correct: ")]
    assert d03.endswith("breaks I1 I2 I3 I5, as expected")
    (away,) = [line for line in lines if line.startswith("D07 delayed")]
    assert "not applicable: D07 stale_center needs a recipe with a centre" in away


def test_lint_exits_with_1_where_a_verdict_is_not_the_expected_one(tmp_path: Path) -> None:
    study = tmp_path / "odd.toml"
    study.write_text(Path(BYHAND).read_text().replace("declare breaks=I1", "declare breaks=I4"))
    done = qsim("lint", str(study))
    assert 1 == done.returncode
    assert "breaks I1, (!) expected I4" in done.stdout
    data = json.loads(qsim("lint", str(study), "--json").stdout)
    assert {True, False} == {row["as_expected"] for row in data}


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["schedule", "--order", "1f1d"], 2, ["schedule.order", "1f1d", 'did you mean "1f1b"']),
        (["schedule", "--feature", "nestd", "--feature", "twice"], 2, ["schedule.features[0]", "nestd", "nested"]),
        (["schedule", "--order", "1f1b"], 2, ["splits 1 layer(s) over 2 parts"]),
        (["schedule", "--defect", "D07"], 2, ["D07", "centre"]),
        (["schedule", "--text", "--json"], 2, ["--text"]),
        (["schedule", "nowhere.toml"], 3, ["nowhere.toml"]),
        (["lint", "nowhere.toml"], 3, ["nowhere.toml"]),
        (["lint", BYHAND, "--set", "schedule.text=f t0: Z"], 2, ["schedule.text line 1, column 7", "allowed signs"]),
        (["run", "correct", "--feature", "overflw"], 2, ["overflw", "overflow"]),
    ],
)
def test_a_mistake_is_one_clear_message_and_its_exit_code(args: list[str], code: int, words: list[str]) -> None:
    assert_refused(qsim(*args), code, *words)


def test_run_takes_order_stages_and_features() -> None:
    done = qsim("run", "correct", "--steps", "2", "--layers", "2", "--microbatches", "2", "--replicas", "1",
                "--order", "zero_bubble", "--stages", "2", "--feature", "early_stop",
                "--feature", "padding")  # fmt: skip
    assert 0 == done.returncode, done.stderr
    assert "invariants broken: none (as expected); 0 violations" in done.stdout


def test_a_guarded_run_gives_no_output_at_the_first_broken_rule_and_exits_with_1() -> None:
    done = qsim("run", "D01", "--guarded", "--steps", "2", "--layers", "1", "--replicas", "1")
    assert (1, "") == (done.returncode, done.stdout)
    assert "owner L0/qkv/input: " in done.stderr
    assert "fails closed" in done.stderr
    assert "Traceback" not in done.stderr
    fine = qsim("run", "correct", "--guarded", "--steps", "2", "--layers", "1", "--replicas", "1")
    assert 0 == fine.returncode
