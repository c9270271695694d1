"""The shipped training text: what the script makes, what lies beside it, and that a wheel holds it."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import platform
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from qsim._paths import sample_text
from qsim.training.text import TEXT_SHA256, open_text

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "qsim" / "training" / "data"
FILES = ("topics.txt", "LICENSE-PYTHON.txt", "PROVENANCE.md")


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("excerpt_topics", ROOT / "studies" / "excerpt_topics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _load_script()


def topics(**changed: str) -> dict[str, str]:
    """Topics of the right names, each of one sentence of its own."""
    return {name: f"{name} has a sentence that no other topic has.\n" for name in script.TOPICS} | changed


# ---- the shipped file -----------------------------------------------------------------------------------


def test_the_files_have_the_sha256_and_sizes_written_in_their_provenance() -> None:
    written = re.findall(r"^\| (\S+) \| `([0-9a-f]{64})` \| (\d+) bytes", (DATA / FILES[2]).read_text(), re.MULTILINE)
    payloads = [(name, (DATA / name).read_bytes()) for name in FILES[:2]]
    assert [(name, hashlib.sha256(p).hexdigest(), str(len(p))) for name, p in payloads] == written
    assert TEXT_SHA256 == written[0][1]


def test_the_text_is_about_100_kb_of_ascii_without_control_characters() -> None:
    payload = (DATA / "topics.txt").read_bytes()
    assert 95_000 < len(payload) < 105_000
    assert {10, *range(32, 127)} >= set(payload)
    assert 92 == len(set(payload))


def test_the_licence_names_its_owner_and_the_provenance_says_what_was_changed() -> None:
    licence = (DATA / "LICENSE-PYTHON.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "2023 Python Software Foundation;\nAll Rights Reserved" in licence
    provenance = (DATA / "PROVENANCE.md").read_text()
    assert "Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved" in provenance
    assert "Changes made to the topics" in provenance
    assert ", ".join(script.TOPICS) in provenance.replace("\n  ", " ")


def test_the_held_out_tenth_shares_no_long_paragraph_with_the_rest() -> None:
    payload = (DATA / "topics.txt").read_bytes()
    border = len(payload) - len(payload) // 10
    trained, held = (set(part.decode().split("\n\n")) for part in (payload[:border], payload[border:]))
    assert len(held) > 50
    assert set() == {p for p in trained & held if len(p) >= script.LONG_PARAGRAPH}


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the topics differ by version")
def test_the_script_makes_the_shipped_bytes(tmp_path: Path) -> None:
    assert 0 == script.main(["--out", str(tmp_path / "made.txt"), "--check", str(DATA / "topics.txt")])
    assert (DATA / "topics.txt").read_bytes() == (tmp_path / "made.txt").read_bytes()


def test_a_wheel_holds_the_files() -> None:
    """Hatch ships what lies in its packages and is not ignored, and the licences that are listed."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"packages", "force-include"} == set(wheel)  # nothing excludes
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    for name in FILES:
        parts = (DATA / name).relative_to(ROOT).parts
        assert parts[0] in wheel["packages"]
        assert [] == [pattern for pattern in ignored for part in parts if fnmatch.fnmatch(part, pattern)]
    assert "qsim/training/data/LICENSE-PYTHON.txt" in pyproject["project"]["license-files"]
    assert DATA / "topics.txt" == sample_text()


def test_no_checkout_changes_its_line_endings() -> None:
    assert "qsim/training/data/* -text" in (ROOT / ".gitattributes").read_text().splitlines()
    assert b"\r" not in (DATA / "topics.txt").read_bytes()


# ---- the script -----------------------------------------------------------------------------------------


def test_topics_are_joined_by_an_empty_line_in_the_order_of_the_script() -> None:
    given = topics()
    shuffled = dict(reversed(given.items())) | {"other": "left out"}
    assert "\n".join(given[name] for name in script.TOPICS).encode() == script.excerpt(shuffled)


def test_typography_is_spelled_in_ascii() -> None:
    topic = "\n“a” and ‘b’s’ … – — °\n\n"
    made = script.excerpt(topics(identifiers=topic)).split(b"\n")[0]
    assert b"\"a\" and 'b's' ... - -- deg" == made


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strings": "a ß"}, r"^topic 'strings' holds 'ß': add it to SPELLING$"),
        ({"with": "try has a sentence that no other topic has."}, r"^topics 'try' and 'with' share 'try has a"),
    ],
)
def test_a_topic_that_cannot_be_taken_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(script.ExcerptError, match=message):
        script.excerpt(topics(**changed))


def test_short_paragraphs_may_repeat_and_a_missing_topic_may_not() -> None:
    script.excerpt(topics(**{"with": "For example:\n\nx", "try": "For example:\n\ny"}))
    given = topics()
    del given["del"]
    with pytest.raises(script.ExcerptError, match="no topic 'del'"):
        script.excerpt(given)


def test_the_command_says_when_a_file_is_another_and_when_it_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(b"other")
    assert 1 == script.main(["--check", str(tmp_path / "x")])
    assert "x holds something else" in capsys.readouterr().out
    assert 2 == script.main(["--check", str(tmp_path / "none")])
    assert "excerpt_topics: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main([])


def test_the_built_in_text_is_the_shipped_file() -> None:
    text = open_text("builtin")
    assert (DATA / "topics.txt").read_bytes() == text.data.tobytes()
    assert ("builtin", TEXT_SHA256) == (text.name, text.sha256)
