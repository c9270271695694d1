"""NVIDIA's cuda_fp8.h, cuda_fp6.h and cuda_fp4.h on the CPU, called on arrays. Holds no expected code.

The headers come from the wheels nvidia-cuda-runtime, -crt and -cccl, and g++ compiles them with nvidia_headers.cpp.
The conversions are NVIDIA's text, so they are an implementation independent of qsim.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.metadata
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

import numpy as np

from qsim.arrays import F32, U8, AnyArray
from tests.oracles import OracleMissingError, find_compiler, unavailable

SOURCE = Path(__file__).with_name("nvidia_headers.cpp")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared")
HEADERS = (
    ("nvidia-cuda-runtime", "cuda_fp8.h"),
    ("nvidia-cuda-runtime", "cuda_fp6.h"),
    ("nvidia-cuda-runtime", "cuda_fp4.h"),
    ("nvidia-cuda-crt", "crt/host_defines.h"),
    ("nvidia-cuda-cccl", "nv/target"),
)
"""Distribution, and a header as an #include names it: every folder with it is searched by the compiler."""

# The order of the enums Kind and Source in nvidia_headers.cpp.
KINDS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float8_e8m0fnu")
SOURCES = ("float32", "float64", "float16", "bfloat16")


class Rounding(enum.IntEnum):
    """cudaRoundMode. FP8 has NEAREST; FP6 and FP4 NEAREST and ZERO; E8M0 ZERO and UP, both of the magnitude."""

    NEAREST = 0
    ZERO = 1
    UP = 2


def include_folders(headers: tuple[tuple[str, str], ...] = HEADERS) -> list[Path]:
    """Folders that hold the headers; OracleMissingError names the first distribution or header that is missing."""
    folders: list[Path] = []
    for distribution, header in headers:
        try:
            files = importlib.metadata.files(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            raise OracleMissingError(f"{distribution} is not installed; the test extra holds it") from None
        wanted = PurePosixPath(header).parts
        found = [Path(str(f.locate())).parents[len(wanted) - 1] for f in files if f.parts[-len(wanted) :] == wanted]
        if not found:
            raise OracleMissingError(f"{distribution} {importlib.metadata.version(distribution)} has no {header}")
        folders += [folder for folder in found if folder not in folders]
    return folders


class NvidiaHeaders:
    """The library as functions on contiguous arrays. ctypes releases the lock of Python, so threads may share it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def encode(
        self,
        x: AnyArray,
        fmt: str,
        *,
        saturate: bool = True,
        rounding: Rounding = Rounding.NEAREST,
        out: U8 | None = None,
    ) -> U8:
        """Codes [n] of ``x`` [n]: float32, float64, float16 or bfloat16. FP6 and FP4 saturate always.

        Policies of qsim: saturate is "cuda", no saturation "cuda_nosat". ValueError where the headers have no such
        conversion.
        """
        codes = np.empty(x.size, np.uint8) if out is None else out
        _check(codes.dtype == np.uint8 and codes.size == x.size, "out must be uint8 of the size of x")
        done = self._library.qsim_nv_encode(
            KINDS.index(fmt), SOURCES.index(x.dtype.name), int(saturate), int(rounding), *_pointers(x, codes), _size(x)
        )
        _check(done == 0, f"the headers have no conversion of {x.dtype} to {fmt} with {rounding.name}")
        return codes

    def decode(self, codes: U8, fmt: str) -> F32:
        """Values [n] of ``codes`` [n], by way of the float16 (E8M0: bfloat16) that the headers give; exact."""
        bits = np.empty(codes.size, np.uint16)
        self._library.qsim_nv_decode(KINDS.index(fmt), *_pointers(codes, bits), _size(codes))
        if fmt == "float8_e8m0fnu":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return bits.view(np.float16).astype(np.float32)

    def encode_vectors(self, x: F32, fmt: str, width: int) -> U8:
        """The bytes, as they lie in memory, of the x2 or x4 types (``width``) made of consecutive elements of ``x``."""
        _check(x.dtype == np.float32 and width in (2, 4) and x.size % width == 0, "x: float32, a multiple of 2 or 4")
        made = np.empty(x.size // 2 if fmt == "float4_e2m1fn" else x.size, np.uint8)
        call = self._library.qsim_nv_encode_x2 if width == 2 else self._library.qsim_nv_encode_x4
        done = call(KINDS.index(fmt), *_pointers(x, made), ctypes.c_size_t(x.size // width))
        _check(done == 0, f"the headers have no x{width} type of {fmt}")
        return made

    def decode_fp4x2(self, packed: U8) -> F32:
        """Values [2 n] of packed E2M1 bytes [n], by way of float16."""
        bits = np.empty(2 * packed.size, np.uint16)
        self._library.qsim_nv_decode_fp4x2(*_pointers(packed, bits), _size(packed))
        return bits.view(np.float16).astype(np.float32)


@functools.cache
def load() -> NvidiaHeaders:
    """Compile and load, once a process; nothing stays on disk. About two seconds.

    OracleMissingError without g++ or the headers; RuntimeError with the compiler's words where it refuses them.
    """
    compiler = find_compiler()
    includes = [argument for folder in include_folders() for argument in ("-isystem", str(folder))]
    with tempfile.TemporaryDirectory(prefix="qsim-nvidia-") as folder:
        library = Path(folder) / "nvidia_headers.so"
        run = subprocess.run(
            [compiler, *FLAGS, *includes, "-o", str(library), str(SOURCE)], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise RuntimeError(f"{compiler} could not build {SOURCE.name} with NVIDIA's headers:\n{run.stderr}")
        return NvidiaHeaders(ctypes.CDLL(str(library)))


def need_nvidia_headers() -> NvidiaHeaders:
    """``load`` for tests: a skip with the reason, in CI a failure, without g++ or the headers."""
    try:
        return load()
    except OracleMissingError as error:
        unavailable(str(error))


def _pointers(*arrays: AnyArray) -> tuple[ctypes.c_void_p, ...]:
    _check(all(a.flags.c_contiguous and a.dtype.isnative for a in arrays), "arrays must be contiguous and native")
    return tuple(ctypes.c_void_p(array.ctypes.data) for array in arrays)


def _size(array: AnyArray) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.size)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
