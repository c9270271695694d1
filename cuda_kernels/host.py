"""Build a kernel with g++ and run it on the CPU, a block at a time. Knows no kernel; needs no GPU.

The text is the one that the GPU compiles; ``emulation.h`` stands in for CUDA: threads of a block are fibres, so
barriers, shared memory and warp operations work, and a divergent barrier is an error.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_kernels import KernelBuildError, source

# O2 alone never reorders floating point; contraction is on by default in g++ and must be off.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared")

_DRIVER = """#include "emulation.h"
#include "kernel.cu"
extern "C" int qsim_emulated_launch(const unsigned* grid, const unsigned* block, unsigned dynamic, void** args)
{{
    return qsim_emulation::launch(&{kernel}, grid, block, dynamic, args);
}}
"""

SANITIZE = "QSIM_SANITIZE"
"""Environment variable: when set, every kernel is built with AddressSanitizer, which ends the process at the first
access outside an allocation. Its library must be preloaded (``sanitizer``)."""
_SANITIZED = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-O1")  # built sooner, as watchful


class EmulationError(RuntimeError):
    """A block could not finish: a divergent barrier, or lanes that never meet. Where stands on stderr."""


_one_at_a_time = threading.Lock()


def _fresh_lock() -> None:
    """In a forked child, whose parent may have been launching."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


def sanitizer() -> str | None:
    """Path of AddressSanitizer's library of that g++, for LD_PRELOAD, or None."""
    path = compiler()
    if path is None:
        return None
    said = subprocess.run([path, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    library = said.stdout.strip()
    return library if os.path.isabs(library) else None


class HostKernel:
    """One kernel as a function on the CPU: fibres switch at barriers and warp operations, so races cannot show.

    Launches of all threads come one after another: shared memory is a variable of the library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launch = library.qsim_emulated_launch
        self._launch.restype = ctypes.c_int
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, dynamic: int = 0) -> None:
        """Run the whole grid. args: ctypes values of exactly the kernel's parameter types, in its order.

        dynamic: bytes of dynamic shared memory. EmulationError where a block cannot finish.
        """
        sizes = [(ctypes.c_uint * 3)(*shape, *(1,) * (3 - len(shape))) for shape in (grid, block)]
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        with _one_at_a_time:
            finished = self._launch(*sizes, dynamic, pointers)
        if not finished:
            raise EmulationError("a block of the kernel did not finish; stderr says which threads wait where")


def build(text: str, kernel: str, *, options: Sequence[str] = ()) -> HostKernel:
    """Compile the CUDA ``text`` and load the ``extern "C"`` kernel named ``kernel``.

    options: more flags of g++. KernelBuildError where g++ is missing or refuses the text. Nothing stays on disk.
    """
    path = compiler()
    if path is None:
        raise KernelBuildError("g++ was not found: install a C++ compiler to run kernels on the CPU")
    watched = _SANITIZED if os.environ.get(SANITIZE) else ()
    quiet = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # g++ itself is not watched
    try:
        with tempfile.TemporaryDirectory(prefix="qsim-host-") as folder:
            here = Path(folder)
            for header in ("emulation.h", "emulation_words.h"):
                (here / header).write_text(source(header), encoding="utf-8")
            (here / "kernel.cu").write_text(text, encoding="utf-8")
            (here / "driver.cpp").write_text(_DRIVER.format(kernel=kernel), encoding="utf-8")
            run = subprocess.run(
                [path, *FLAGS, *watched, *options, "-o", "kernel.so", "driver.cpp"],
                cwd=here,
                env=quiet,
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode != 0:
                raise KernelBuildError(f"g++ could not build {kernel}:\n{run.stderr}")
            return HostKernel(ctypes.CDLL(str(here / "kernel.so")))
    except OSError as error:
        raise KernelBuildError(
            f"{kernel} could not be built or loaded by {path} in {tempfile.gettempdir()}: {error}; TMPDIR must name a "
            "folder with room where libraries may be loaded from"
        ) from error
