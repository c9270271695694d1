"""What works on this machine and why the rest does not: libraries, processor, compilers, device. Fixes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked for, whether it is there, what it is, and what to do where it is not.

    needed: False for what qsim does without.
    """

    what: str
    fine: bool
    found: str
    advice: str = ""
    needed: bool = False


def findings() -> list[Finding]:
    """Every check, in an order that leads from what is needed to what is optional; none of them raises."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _cache,
        _threads,
        _processor,
        _compiler,
        _nvrtc,
        _device,
        _others,
    ]
    results: list[Finding] = []
    for check in checks:
        try:
            results.extend(check())
        except Exception as error:  # a doctor does not die of what it finds
            results.append(
                Finding(what=check.__name__.strip("_"), fine=False, found=f"{type(error).__name__}: {error}")
            )
    return results


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def doctor_data() -> dict[str, object]:
    """The findings for a program."""
    found = findings()
    return {
        "works": all(f.fine for f in found if f.needed),
        "gpu": any(f.what == "CUDA device" and f.fine for f in found),
        "findings": [{name: getattr(f, name) for name in Finding.__dataclass_fields__} for f in found],
    }


def doctor_table(found: list[Finding]) -> Table:
    """The findings for a reader."""
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 1))
    for column in ("", "what", "found", "next step"):
        table.add_column(column, overflow="fold")
    for f in found:
        table.add_row("ok" if f.fine else "FAIL" if f.needed else "-", f.what, f.found, f.advice)
    return table


def _python() -> Iterator[Finding]:
    yield Finding(what="Python", fine=sys.version_info >= (3, 11), found=platform.python_version(), needed=True,
                  advice="" if sys.version_info >= (3, 11) else "install Python 3.11 or newer")  # fmt: skip
    for name in ("numpy", "numba", "scipy"):
        try:
            version = importlib.import_module(name).__version__
            yield Finding(what=name, fine=True, found=version, needed=True)
        except Exception as error:  # a broken build raises whatever it likes
            yield Finding(what=name, fine=False, found=f"{type(error).__name__}: {error}", needed=True,
                          advice=f"install {name} anew")  # fmt: skip


def _cache() -> Iterator[Finding]:
    from qsim._paths import cache_dir

    folder = cache_dir()
    fine = os.access(folder, os.W_OK)
    named = os.environ.get("QSIM_CACHE_DIR")
    elsewhere = named is not None and str(folder) != named
    yield Finding(what="cache folder", fine=fine and not elsewhere, found=str(folder),
                  advice=f"QSIM_CACHE_DIR={named} cannot be written" if elsewhere else "")  # fmt: skip


def _threads() -> Iterator[Finding]:
    import numpy as np
    from threadpoolctl import threadpool_info

    from qsim.codec.threads import thread_count

    np.ones((2, 2)) @ np.ones((2, 2))  # so that BLAS is loaded
    yield Finding(what="threads", fine=True, found=f"{thread_count()} for kernels, of {os.cpu_count()} processors")
    for pool in threadpool_info():
        if pool.get("user_api") == "blas":
            kernel = f", {pool['architecture']} kernels" if pool.get("architecture") else ""
            found = f"{pool['internal_api']} {pool.get('version')}, {pool['num_threads']} threads{kernel}"
            yield Finding(what="BLAS", fine=True, found=found)


def _processor() -> Iterator[Finding]:
    from qsim.gemm.int8_kernels import has_instruction

    fast = has_instruction()
    yield Finding(what="int8 dot product", fine=fast, found="512-bit vpdpbusd" if fast else "not on this processor",
                  advice="" if fast else "none: FP4 products go through float32 BLAS, with the same bits")  # fmt: skip


def _compiler() -> Iterator[Finding]:
    path = shutil.which("g++")
    yield Finding(what="C++ compiler", fine=path is not None, found=path or "no g++",
                  advice="" if path else "install g++ to run the CUDA kernels emulated")  # fmt: skip


def _nvrtc() -> Iterator[Finding]:
    from cuda_kernels import KernelBuildError
    from cuda_kernels._kernel import ARCHES, Kernel
    from cuda_kernels._nvrtc import compile_cubin, nvrtc_version

    try:
        version = nvrtc_version()
        for arch in ARCHES:
            compile_cubin(Kernel("swizzle.cu", "qsim_swizzle").text, arch, name="swizzle.cu")
        yield Finding(what="NVRTC", fine=True, found=f"{version}, compiles for {', '.join(ARCHES)}")
    except KernelBuildError as error:
        yield Finding(what="NVRTC", fine=False, found=str(error).splitlines()[0],
                      advice="install the extra cuda13 (or cuda12)")  # fmt: skip


def _device() -> Iterator[Finding]:
    from cuda_kernels import DeviceUnavailableError
    from cuda_kernels._place import cupy_with_device

    try:
        cupy = cupy_with_device()
    except DeviceUnavailableError as error:
        advice = "install the extra cuda13 (or cuda12)" if "CuPy" in str(error) else "needs an NVIDIA driver and device"
        yield Finding(what="CUDA device", fine=False, found=str(error), advice=advice)
        return
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        name, capability = properties["name"].decode(), (properties["major"], properties["minor"])
        old, memory = capability < (8, 0), properties["totalGlobalMem"] >> 20
        yield Finding(what="CUDA device", fine=not old,
                      found=f"{index}: {name}, sm_{capability[0]}{capability[1]}, {memory} MiB",
                      advice="the kernels need compute capability 8.0 or newer" if old else "")  # fmt: skip


def _others() -> Iterator[Finding]:
    uses = {"matplotlib": "figures (extra plot)", "torch": "comparison in tests", "torchao": "comparison in tests",
            "mmaemu": "comparison in tests", "ml_dtypes": "comparison in tests"}  # fmt: skip
    for name, use in uses.items():
        there = importlib.util.find_spec(name) is not None
        yield Finding(
            what=name, fine=there, found="installed" if there else "not installed", advice="" if there else use
        )
