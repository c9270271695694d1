"""Where files live: package data, caches. The only module that names a folder; knows no format of any file."""

from __future__ import annotations

import getpass
import os
import tempfile
from importlib import resources
from pathlib import Path


def package_dir() -> Path:
    """The folder of the installed package."""
    return Path(str(resources.files("qsim")))


def _data_dir(name: str, beside: Path) -> Path:
    """A data folder: inside an installed wheel, or at the top of a source checkout."""
    installed = package_dir() / f"_{name}"
    return installed if installed.is_dir() else beside / name


def studies_dir() -> Path:
    """Study files that ship with qsim (in a wheel: ``qsim/_studies``; in a checkout: ``studies``)."""
    return _data_dir("studies", package_dir().parent)


def sample_capture() -> Path:
    """The small real activation capture that ships with qsim."""
    return package_dir() / "workloads" / "data" / "minilm_sample.safetensors"


def sample_text() -> Path:
    """The text that ships with qsim; its licence and provenance lie beside it."""
    return package_dir() / "training" / "data" / "topics.txt"


def sample_checkpoint() -> Path:
    """The trained model that ships with qsim; how it was made lies beside it."""
    return package_dir() / "training" / "data" / "decoder.safetensors"


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user id, as in some containers
        return str(os.getuid()) if hasattr(os, "getuid") else "user"


def cache_dir() -> Path:
    """A writable cache folder: QSIM_CACHE_DIR, else XDG_CACHE_HOME/qsim, else ~/.cache/qsim, else a temporary one."""
    candidates = []
    if explicit := os.environ.get("QSIM_CACHE_DIR"):
        candidates.append(Path(explicit))
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(xdg) / "qsim")
    home = os.path.expanduser("~")
    if home != "~":
        candidates.append(Path(home) / ".cache" / "qsim")
    candidates.append(Path(tempfile.gettempdir()) / f"qsim-{_user()}")
    for folder in candidates:
        if _usable(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="qsim-"))


def numba_cache_dir() -> Path:
    """Where compiled kernels are kept: under NUMBA_CACHE_DIR where the user set it, else under ``cache_dir``.

    Without it Numba raises at import time where both the package folder and the home folder are read-only.
    """
    explicit = os.environ.get("NUMBA_CACHE_DIR")
    return Path(explicit) / "qsim" if explicit else cache_dir() / "numba"
