"""Places for tests of CUDA launchers: a kernel of the test's own, and a device whose CuPy is played by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda_kernels import _kernel
from cuda_kernels._kernel import Kernel
from cuda_kernels._place import Device, Host
from cuda_kernels.host import HostKernel
from tests.played_cupy import AS_C, PlayedCupy


@dataclass(frozen=True, slots=True)
class Given(Host):
    """The emulation of one kernel that the test built, whatever the launcher asks for."""

    made: HostKernel | None = None

    def built(self, kernel: Kernel) -> HostKernel:
        """What the test built."""
        return self.made or super().built(kernel)


def played_device(monkeypatch: Any, capability: str = "90", room: int = 1 << 30) -> Device:
    """A Device whose CuPy is numpy and whose kernels are emulated: what is tested is the launch."""
    cupy = PlayedCupy(capability, room)

    def loaded(kernel: Kernel, _: int, arch: str) -> Any:
        def launch(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
            cupy.launches.append(kernel.entry)
            kernel.on_host(arch)(grid, block, [AS_C[type(arg)](arg) for arg in args], dynamic=shared_mem)

        return launch

    monkeypatch.setattr(_kernel, "_device_kernel", loaded)
    monkeypatch.setattr(Device, "_ACROSS", 2)  # so that a larger array needs the stride
    monkeypatch.setattr(Device, "_DOWN", 3)
    return Device(cupy)
