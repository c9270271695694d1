"""The pages: their Python examples run, in their order, and print what they say. Reads no README."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def examples(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_page_of_the_codecs_has_examples():
    assert 4 <= len(examples(ROOT / "docs" / "codecs.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_and_print_what_their_comments_say(page):
    script = "\n".join(examples(page))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=env)
    assert (0, "") == (done.returncode, done.stderr)
    assert re.findall(r"^print\(.*\)  # (.*)$", script, re.MULTILINE) == done.stdout.splitlines()
