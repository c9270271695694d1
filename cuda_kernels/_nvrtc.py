"""Compile CUDA text to a cubin with NVRTC, and keep it on disk. Needs no GPU; knows no kernel.

CuPy's own compile path is not used: it appends -ftz=true last, and the last one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_kernels import KernelBuildError

_SEAL = hashlib.sha256().digest_size

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What NVRTC made of one text: machine code, the compiler's log, and PTX where it was asked for."""

    arch: str
    cubin: bytes
    log: str
    ptx: str | None


def compile_cubin(
    text: str, arch: str, *, name: str = "kernel.cu", ptx: bool = False, options: tuple[str, ...] = ()
) -> Compiled:
    """Compile ``text`` for one ``arch``, such as "sm_90a"; float32 arithmetic stays IEEE (see ``OPTIONS``).

    KernelBuildError where NVRTC is missing, is too old for ``arch`` or refuses the text.
    """
    nvrtc = _nvrtc()
    program = _ok(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None))
    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *OPTIONS, *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        log = _bytes(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        message = log.rstrip(b"\0").decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(f"NVRTC could not build {name} for {arch}: {_text(nvrtc, status)}\n{message}")
        cubin = _bytes(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        assembly = _bytes(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program) if ptx else None
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(
        arch=arch,
        cubin=cubin,
        log=message,
        ptx=None if assembly is None else assembly.rstrip(b"\0").decode(),
    )


def cached_cubin(
    text: str, arch: str, *, name: str = "kernel.cu", folder: Path | None, options: tuple[str, ...] = ()
) -> bytes:
    """The cubin of ``compile_cubin``, read from ``folder`` where this text was compiled before; None keeps nothing.

    A file's name is a digest of text, arch, flags and NVRTC's version; a torn or foreign file is compiled anew. A
    folder that cannot be written costs the time of a compilation, nothing else.
    """
    if folder is None:
        return compile_cubin(text, arch, name=name, options=options).cubin
    parts = (text, arch, *OPTIONS, *options, nvrtc_version())
    path = folder / f"{Path(name).stem}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.cubin"
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    body, seal = kept[:-_SEAL], kept[-_SEAL:]
    if body[:4] == b"\x7fELF" and seal == hashlib.sha256(body).digest():
        return body
    cubin = compile_cubin(text, arch, name=name, options=options).cubin
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        part.write_bytes(cubin + hashlib.sha256(cubin).digest())
        part.replace(path)
    return cubin


def nvrtc_version() -> str:
    """Version of NVRTC, as "13.0"; KernelBuildError without it."""
    nvrtc = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _ok(nvrtc, (status,))
    return f"{major}.{minor}"


def _nvrtc() -> Any:
    """The NVRTC bindings, with the library behind them loaded."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the bindings import without the library and look for it at the first call
    except (ImportError, OSError, RuntimeError) as cause:
        raise KernelBuildError(
            "NVRTC was not found: install the extra cuda13 (or cuda12), or cuda-bindings with "
            f"nvidia-cuda-nvrtc and nvidia-cuda-runtime ({type(cause).__name__}: {cause})"
        ) from cause
    return nvrtc


def _ok(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The value of a call, or KernelBuildError with NVRTC's own words."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC failed: {_text(nvrtc, status)}")
    return values[0] if values else None


def _text(nvrtc: Any, status: Any) -> str:
    return str(nvrtc.nvrtcGetErrorString(status)[1].decode())


def _bytes(nvrtc: Any, size: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_ok(nvrtc, size(program)))
    _ok(nvrtc, get(program, buffer))
    return bytes(buffer)
