"""Backends by name. Imports none of them before it is asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from qsim.backends.protocol import Backend, Cast, CastCounts, CastSpec, Observed, Sums
from qsim.errors import UsageError

__all__ = [
    "BACKENDS",
    "Backend",
    "Cast",
    "CastCounts",
    "CastSpec",
    "Observed",
    "Sums",
    "get_backend",
    "resolve_backend",
]

BACKENDS = {
    "oracle": ("qsim.backends.oracle", "OracleBackend"),
    "numba": ("qsim.backends.numba_backend", "NumbaBackend"),
    "emulated": ("qsim.backends.emulated", "EmulatedBackend"),
    "cuda": ("qsim.backends.cuda", "CudaBackend"),
}
"""Name -> module and class; a backend is one file and one line here."""

AUTO = "numba"
"""What ``auto`` means."""


def resolve_backend(name: str) -> str:
    """The name of the backend that ``name`` means here: "auto" becomes the best one; others stay."""
    return AUTO if name == "auto" else name


def get_backend(name: str) -> Backend:
    """The backend of this name, or of the best one for "auto".

    UsageError lists the known ones; BackendError says why one cannot be used here.
    """
    chosen = resolve_backend(name) if isinstance(name, str) else name
    if not isinstance(chosen, str) or chosen not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; known: {', '.join((*BACKENDS, 'auto'))}")
    return _load(chosen)


@cache
def _load(name: str) -> Backend:
    module, class_name = BACKENDS[name]
    found = getattr(importlib.import_module(module), class_name)
    return cast("Backend", found())
