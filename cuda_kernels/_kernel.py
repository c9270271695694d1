"""One kernel of a text: built for a device or for the CPU, loaded once. Knows no argument of any kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda_kernels import DeviceUnavailableError, source
from cuda_kernels._nvrtc import cached_cubin
from cuda_kernels.host import HostKernel, build

ARCHES = ("sm_80", "sm_89", "sm_90a", "sm_100a")
"""Devices that kernels are compiled for."""

_cubins: Path | None = None


def keep_cubins_in(folder: Path | None) -> None:
    """Where compiled kernels are kept from now on; None: nowhere."""
    global _cubins
    _cubins = folder


@dataclass(frozen=True, slots=True)
class Kernel:
    """``entry`` of the text ``file`` of this package, after the texts of ``prelude``; built for each of ``arches``."""

    file: str
    entry: str
    prelude: tuple[str, ...] = ()
    arches: tuple[str, ...] = ARCHES

    @property
    def text(self) -> str:
        """What both compilers get: one string."""
        return "\n".join(source(name) for name in (*self.prelude, self.file))

    def on_host(self) -> HostKernel:
        """Built with g++, once a process."""
        return _host_kernel(self)

    def on_device(self, cupy: Any) -> Any:
        """Loaded on the CuPy device in force; a module belongs to one device."""
        device = cupy.cuda.Device()
        return _device_kernel(self, device.id, device.compute_capability)


def cupy_with_device() -> Any:
    """CuPy, with a device behind it; DeviceUnavailableError that says what is missing."""
    try:
        import cupy
    except ImportError as cause:
        raise DeviceUnavailableError("CuPy is missing: install the extra cuda13 (or cuda12)") from cause
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as cause:
        raise DeviceUnavailableError(f"no usable CUDA device: {cause}") from cause
    if count == 0:
        raise DeviceUnavailableError("no CUDA device on this machine")
    return cupy


def host_pointers(arrays: Sequence[Any]) -> list[Any]:
    """Addresses of numpy arrays, null for None, as the emulated kernel takes them."""
    return [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in arrays]


def device_pointers(arrays: Sequence[Any]) -> list[Any]:
    """CuPy arrays as they are, null for None."""
    import numpy as np

    return [np.uint64(0) if array is None else array for array in arrays]


@cache
def _host_kernel(kernel: Kernel) -> HostKernel:
    return build(kernel.text, kernel.entry)


@cache
def _device_kernel(kernel: Kernel, device: int, capability: str) -> Any:
    import cupy

    arch = f"sm_{capability}{'a' if int(capability) >= 90 else ''}"
    module = cupy.cuda.function.Module()
    module.load(cached_cubin(kernel.text, arch, name=kernel.file, folder=_cubins))
    return module.get_function(kernel.entry)
