"""One kernel of a text: built for a device or for the CPU, loaded once. Knows no argument of any kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda_kernels import DeviceUnavailableError, source
from cuda_kernels._nvrtc import cached_cubin
from cuda_kernels.host import HostKernel, build

ARCHES = ("sm_80", "sm_89", "sm_90a", "sm_100a")
"""Devices that kernels are compiled for."""
LEAST_CAPABILITY = 80
"""Ten times the least compute capability."""

_ARCH = "QSIM_EMULATED_ARCH"  # a macro of the emulation: ten times the compute capability

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

    def on_host(self, arch: str) -> HostKernel:
        """Built with g++, once a process and, where the text asks for it, once an emulated architecture."""
        number = _number(arch)
        return _host_kernel(self, (f"-D{_ARCH}={number}",) if _ARCH in self.text else ())

    def on_device(self, cupy: Any) -> Any:
        """Loaded on the CuPy device in force; a module belongs to one device.

        DeviceUnavailableError where the device is none that the kernel is for.
        """
        device = cupy.cuda.Device()
        arch = arch_of(device.compute_capability)
        if not self.runs_on(arch):
            raise DeviceUnavailableError(f"{self.entry} runs on {', '.join(self.arches)}; this device is {arch}")
        return _device_kernel(self, device.id, arch)

    def runs_on(self, arch: str) -> bool:
        """Whether a device of ``arch`` can run it: a target of one architecture alone ("a"), or a later device."""
        plain = [_number(own) for own in self.arches if not own.endswith("a")]
        return arch in self.arches or bool(plain and _number(arch) >= min(plain))


def arch_of(capability: str) -> str:
    """Target of a device of CuPy's compute capability, ``"90"``: with all that this architecture alone has."""
    return f"sm_{capability}{'a' if int(capability) >= 90 else ''}"


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").removesuffix("a"))


@cache
def _host_kernel(kernel: Kernel, options: tuple[str, ...]) -> HostKernel:
    return build(kernel.text, kernel.entry, options=options)


@cache
def _device_kernel(kernel: Kernel, device: int, arch: str) -> Any:
    import cupy

    module = cupy.cuda.function.Module()
    module.load(cached_cubin(kernel.text, arch, name=kernel.file, folder=_cubins))
    return module.get_function(kernel.entry)
