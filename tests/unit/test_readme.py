"""The README: its Python example runs and prints what it says, its commands and options exist. Reads no other page."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from qsim.cli import app
from qsim.scenarios import SCENARIOS
from qsim.sim import RULES
from qsim.sweep.known import registries
from qsim.sweep.schema import SweepConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?:`|^\$ )python -m qsim ([^`\n]+)", README, re.MULTILINE)))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(*arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=240, env=env
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize(
    ("example", "lines"), list(zip(blocks("python"), (2, 1, 3), strict=True)), ids=["codec", "gemm", "lifecycle"]
)
def test_a_python_example_prints_what_its_comments_say(example, lines):
    promised = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    printed = run("-c", example).splitlines()
    assert len(promised) == len(printed) == lines
    for words, line in zip(promised, printed, strict=True):
        assert words.split(": ")[0] == line


def test_the_demo_output_in_the_readme_is_the_real_one():
    (shown,) = [block for block in blocks("console") if "qsim demo" in block]
    assert shown.split("\n", 1)[1].split() == run("-m", "qsim", "demo").split()


def test_the_readme_names_commands():
    commands = {
        "demo",
        "explore",
        "formats",
        "bench",
        "defects",
        "run",
        "schedule",
        "lint",
        "sweep",
        "status",
        "doctor",
    }
    assert commands == {line.split()[0] for line in COMMANDS}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_option_in_the_readme_exists(line):
    name, *words = shlex.split(line, comments=True)
    command = get_command(app).commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_option_named_in_the_studies_section_belongs_to_sweep():
    section = README.split("## Studies")[1].split("\n## ")[0]
    known = {option for p in get_command(app).commands["sweep"].params for option in p.opts}
    named = set(re.findall(r"^- `(--[a-z]+)", section, re.MULTILINE))
    assert {"--set", "--out", "--workers", "--fast", "--extend"} == named
    assert named <= known


def documented_keys():
    """``key`` -> default as the table writes it; ``.name`` continues the table of the key before it."""
    section = README.split("## Studies")[1].split("\n## ")[0]
    keys = {}
    for left, right in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", section, re.MULTILINE):
        names = re.findall(r"`([^`]*)`", left)
        table = names[0].partition(".")[0]
        names = [table + name if name.startswith(".") else name for name in names]
        defaults = re.findall(r"\[\]|[^, ]+", right.replace("`", ""))
        keys |= dict(zip(names, defaults if len(defaults) == len(names) else [right] * len(names), strict=True))
    return keys


def test_the_table_of_study_keys_is_complete_and_its_defaults_are_right():
    real = {}
    for name, field in SweepConfig.model_fields.items():
        key, inner = field.alias or name, getattr(field.annotation, "model_fields", None)
        for part, value in (inner or {"": field}).items():
            real[f"{key}.{part}" if part else key] = value
    named = documented_keys()
    assert sorted(real) == sorted(named)
    for key, field in real.items():
        if field.is_required():
            assert named[key] == "required", key
        elif field.default is None:
            assert named[key] == "none", key
        else:
            told = named[key]
            want = list(field.default) if isinstance(field.default, tuple) else field.default
            assert want == (told if isinstance(want, str) and told != '""' else tomllib.loads(f"v = {told}")["v"]), key


def test_names_in_the_readme_are_registered():
    known = registries()
    scope = README.split("## What it is")[1].split("\n## ")[0]
    for kind, names in (("Stateful recipes", known.recipes), ("Presets", known.presets)):
        (line,) = re.findall(rf"^- {kind}: (.*(?:\n  .*)*)", scope, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line)) == set(names)
    assert "All forty-one defects of the catalogue" in scope
    assert {f"D{n:02}" for n in range(1, 42)} == {name for name in known.defects if re.fullmatch(r"D\d\d", name)}
    assert f"{len(SCENARIOS)} public reports as scenarios" in scope
    assert "thirteen\n  invariants" in scope
    assert len(RULES) == 13


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_of_the_readme_leads_to_a_file(target):
    assert (ROOT / target).exists()
