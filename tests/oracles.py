"""Outside implementations that tests compare with: found, or the reason why not. Knows no number and no format.

``find_...`` raises OracleMissingError and suits any script. ``need_...`` is for tests: it skips with the reason on a
user's machine and fails in CI, where everything is installed and a skip would hide that a check is gone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import warnings
from types import ModuleType
from typing import NoReturn

import pytest
from packaging.version import Version

INSTALL = {"torch": "make oracles", "torchao": "make oracles", "mmaemu": "make oracles"}
"""How to get a module that is no part of the test extra."""


class OracleMissingError(Exception):
    """An outside implementation is not there; the message says which and how to get it."""


def in_ci() -> bool:
    """True where the environment variable CI says so."""
    return os.environ.get("CI", "").strip().lower() in ("1", "true", "yes", "on")


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or at import the module, with the reason; in CI fail."""
    if in_ci():
        pytest.fail(f"CI must have it: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def find_module(name: str, at_least: str = "") -> ModuleType:
    """The module ``name`` of a distribution of version ``at_least`` or newer; OracleMissingError otherwise.

    Whatever it warns of while it is imported is ignored here and nowhere else: torchao warns of invalid escapes in
    its own text and of libraries for another Python.
    """
    top = name.partition(".")[0]
    advice = f"; {INSTALL[top]} installs it" if top in INSTALL else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        raise OracleMissingError(f"{name} cannot be imported ({type(error).__name__}: {error}){advice}") from error
    if at_least:
        found = importlib.metadata.version(top)
        if Version(found) < Version(at_least):
            raise OracleMissingError(f"{top} {found} is older than {at_least}{advice}")
    return module


def find_compiler() -> str:
    """Path of g++; OracleMissingError where there is none."""
    path = shutil.which("g++")
    if path is None:
        raise OracleMissingError("g++ was not found; install a C++17 compiler under that name")
    return path


def need(name: str, at_least: str = "") -> ModuleType:
    """The module ``name``, as by ``find_module``; a skip or, in CI, a failure otherwise."""
    try:
        return find_module(name, at_least)
    except OracleMissingError as error:
        unavailable(str(error))


def need_torch() -> ModuleType:
    """torch on one thread; 2.13 is the first release whose cast to E4M3 saturates."""
    torch = need("torch", "2.13")
    torch.set_num_threads(1)  # no pool of threads in the process that runs the tests
    return torch
