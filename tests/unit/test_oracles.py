"""Outside oracles: a missing one skips with the reason on a user's machine and fails in CI; CI installs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.nvidia_headers import include_folders, load, need_nvidia_headers
from tests.oracles import OracleMissingError, find_compiler, find_module, in_ci, need, unavailable

ROOT = Path(__file__).resolve().parents[2]
Skipped, Failed = pytest.skip.Exception, pytest.fail.Exception


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("1", True), ("True", True), ("false", False), ("0", False), ("", False)]
)
def test_ci_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("CI", value)
    assert expected is in_ci()


def test_without_the_variable_it_is_a_users_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert in_ci() is False


# Both outcomes are caught in both tests: one that is not caught would skip the test that asks about it.
def test_a_missing_module_skips_with_the_reason_on_a_users_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises((Skipped, Failed)) as outcome:
        need("no_such_oracle")
    assert outcome.type is Skipped
    assert outcome.value.allow_module_level
    reason = "no_such_oracle cannot be imported (ModuleNotFoundError: No module named 'no_such_oracle')"
    assert reason == outcome.value.msg


@pytest.mark.parametrize("value", ["true", "1"])
def test_a_missing_module_fails_in_ci(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises((Skipped, Failed), match=r"^CI must have it: no_such_oracle cannot be imported") as outcome:
        need("no_such_oracle")
    assert outcome.type is Failed


@pytest.mark.parametrize(("value", "expected"), [("false", Skipped), ("true", Failed)])
def test_missing_headers_skip_or_fail_as_a_missing_module_does(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: type
) -> None:
    monkeypatch.setenv("CI", value)
    monkeypatch.setenv("PATH", "")
    load.cache_clear()
    with pytest.raises((Skipped, Failed), match=r"g\+\+ was not found") as outcome:
        need_nvidia_headers()
    assert outcome.type is expected


def test_a_module_that_is_too_old_is_missing() -> None:
    with pytest.raises(OracleMissingError, match=f"^numpy {re.escape(np.__version__)} is older than 999.1$"):
        find_module("numpy", "999.1")
    assert np is find_module("numpy", "2.1")


def test_a_missing_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(OracleMissingError, match=r"; make oracles installs it$"):
        find_module("torch", "2.13")


def test_a_module_that_warns_while_it_is_imported_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "oracle_that_warns.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)\nX = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_module("oracle_that_warns").X == 7
    with pytest.raises(UserWarning, match="still an error"):
        warnings.warn("still an error", stacklevel=1)


def test_a_module_whose_library_cannot_be_loaded_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "oracle_that_breaks.py").write_text("raise OSError('libsomething.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OracleMissingError, match=r"cannot be imported \(OSError: libsomething.so: cannot open\)"):
        find_module("oracle_that_breaks")


def test_a_missing_compiler_and_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OracleMissingError, match=r"^g\+\+ was not found"):
        find_compiler()
    with pytest.raises(OracleMissingError, match=r"^no-such-wheel is not installed; the test extra holds it$"):
        include_folders((("no-such-wheel", "cuda_fp8.h"),))
    with pytest.raises(OracleMissingError, match=f"^numpy {re.escape(np.__version__)} has no cuda_fp8.h$"):
        include_folders((("numpy", "cuda_fp8.h"),))


def planned(target: str, **environment: str) -> str:
    """What make would run for ``target`` in a checkout without .venv; it runs nothing."""
    if shutil.which("make") is None:
        unavailable("make was not found")
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH")}
    arguments = ["make", "--dry-run", "--always-make", target]
    run = subprocess.run(arguments, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=True)
    return run.stdout


def test_make_test_installs_the_oracles_exactly_where_ci_is_set() -> None:
    torch = "pip install .* torch==2\\.13\\.0\n"
    others = 'uv pip install .* "torchao>=0\\.18,<0\\.19" "mmaemu>=0\\.1,<0\\.2"\n'
    plans = {
        "user": planned("test"),
        "empty": planned("test", CI=""),
        "ci": planned("test", CI="true"),
        "asked": planned("oracles"),
    }
    assert {"ci", "asked"} == {name for name, plan in plans.items() if re.search(torch, plan)}
    assert {"ci", "asked"} == {name for name, plan in plans.items() if re.search(others, plan)}
    assert not any(re.search("uv pip install .*torch(?!ao)", plan) for plan in plans.values())


def test_make_takes_another_torch() -> None:
    assert "pip install --quiet" in (plan := planned("oracles", TORCH="torch==2.14 --no-deps"))
    assert " torch==2.14 --no-deps\n" in plan
    assert "torch==2.13.0" not in plan


def test_the_makefile_and_the_extra_name_the_same_oracles_and_the_pins_name_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    assert extras["oracle"] == re.findall(r"^(?:TORCH|TORCHAO|MMAEMU) +\??:?= *(.+)$", makefile, re.MULTILINE)
    assert [] == re.findall(r"^torch.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.skipif(not (ROOT / ".ci" / "run").is_file(), reason="only a checkout has .ci/run")
@pytest.mark.parametrize(("environment", "said"), [({}, "true test"), ({"CI": "1"}, "1 test")])
def test_the_ci_script_is_make_test_with_ci_set(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    (tmp_path / "make").write_text('#!/bin/sh\necho "$CI $*"\n')
    (tmp_path / "make").chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if k != "CI"} | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        [ROOT / ".ci" / "run"], env=clean | environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert f"{said}\n" == run.stdout
