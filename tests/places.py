"""Places for tests of CUDA launchers: a kernel of the test's own, and CuPy's part played by numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_kernels import _kernel
from cuda_kernels._kernel import Kernel
from cuda_kernels._place import Device, Host
from cuda_kernels.host import HostKernel


@dataclass(frozen=True, slots=True)
class Given(Host):
    """The emulation of one kernel that the test built: for that entry, or whatever the launcher asks for."""

    made: HostKernel | None = None
    entry: str = ""

    def built(self, kernel: Kernel) -> HostKernel:
        """What the test built."""
        if self.made is None or self.entry not in ("", kernel.entry):
            return Host.built(self, kernel)
        return self.made


AS_C: dict[type, Callable[[Any], Any]] = {
    np.ndarray: lambda array: ctypes.c_void_p(array.ctypes.data),
    np.uint64: lambda address: ctypes.c_void_p(int(address)),
    np.int64: ctypes.c_longlong,
    np.int32: ctypes.c_int,
    np.uint32: ctypes.c_uint,
    np.float32: ctypes.c_float,
}


def played_device(monkeypatch: Any, capability: str = "90") -> Device:
    """A Device whose CuPy is numpy and whose kernels are emulated: what is tested is the launch."""

    def loaded(kernel: Kernel, _: int, arch: str) -> Any:
        def launch(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
            kernel.on_host(arch)(grid, block, [AS_C[type(arg)](arg) for arg in args], dynamic=shared_mem)

        return launch

    monkeypatch.setattr(_kernel, "_device_kernel", loaded)
    monkeypatch.setattr(Device, "_ACROSS", 2)  # so that a larger array needs the stride
    device = SimpleNamespace(id=0, compute_capability=capability)
    names = ("ndarray", "float32", "uint8", "uint32", "uint64", "int64", "empty", "zeros", "array", "broadcast_to",
             "ascontiguousarray")  # fmt: skip
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    fake = SimpleNamespace(
        __name__="cupy",
        cuda=SimpleNamespace(Device=lambda: device, memory=memory),
        **{name: getattr(np, name) for name in names},
    )
    return Device(fake)
