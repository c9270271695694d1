"""Raw CUDA kernels, their launchers, two ways to build them. Never imports qsim.

A kernel ``x.cu`` and its launcher ``x.py`` are twins. The text compiles with NVRTC (``_nvrtc``, needs no GPU)
and, for a check without a GPU, with g++ (``host``). CuPy is imported where a device is asked for.
"""

from __future__ import annotations

from importlib import resources


class KernelBuildError(RuntimeError):
    """A kernel could not be built: a compiler is missing, or it refused the text (its log is the message)."""


class DeviceUnavailableError(RuntimeError):
    """CuPy or a CUDA device is missing, so a kernel cannot be launched."""


class DeviceMemoryError(MemoryError):
    """A device has no room for an array; the message says how much was asked for and what to do."""


def source(name: str) -> str:
    """Text of a kernel or header of this package, ``"encode.cu"``."""
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
