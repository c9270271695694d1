"""Build a kernel with g++ and run it on the CPU, one thread at a time. Knows no kernel; needs no GPU.

The text is the one that the GPU compiles; ``host.h`` stands in for CUDA. Kernels with shared memory, barriers
or warp operations are not covered yet.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_kernels import KernelBuildError, source

# O2 alone never reorders floating point; contraction is on by default in g++ and must be off.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared")

_DRIVER = """#include "host.h"
#include "kernel.cu"
extern "C" void qsim_host_launch(const unsigned* grid, const unsigned* block, void** args)
{{
    qsim_host::launch(&{kernel}, grid, block, args);
}}
"""


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


class HostKernel:
    """One kernel as a function on the CPU: threads run one after another, so races cannot show."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launch = library.qsim_host_launch
        self._launch.restype = None
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        """Run the whole grid. args: ctypes values of exactly the kernel's parameter types, in its order."""
        sizes = [(ctypes.c_uint * 3)(*shape, *(1,) * (3 - len(shape))) for shape in (grid, block)]
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        self._launch(*sizes, pointers)


def build(text: str, kernel: str) -> HostKernel:
    """Compile the CUDA ``text`` and load the ``extern "C"`` kernel named ``kernel``.

    KernelBuildError where g++ is missing or refuses the text. Nothing stays on disk.
    """
    path = compiler()
    if path is None:
        raise KernelBuildError("g++ was not found: install a C++ compiler to run kernels on the CPU")
    with tempfile.TemporaryDirectory(prefix="qsim-host-") as folder:
        here = Path(folder)
        (here / "host.h").write_text(source("host.h"), encoding="utf-8")
        (here / "kernel.cu").write_text(text, encoding="utf-8")
        (here / "driver.cpp").write_text(_DRIVER.format(kernel=kernel), encoding="utf-8")
        run = subprocess.run(
            [path, *FLAGS, "-o", "kernel.so", "driver.cpp"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise KernelBuildError(f"g++ could not build {kernel}:\n{run.stderr}")
        return HostKernel(ctypes.CDLL(str(here / "kernel.so")))
