"""What tests of CUDA texts need: g++ to emulate them, NVRTC to compile them, nvdisasm to read that.

A missing one skips; in CI it fails.
"""

from __future__ import annotations

import functools
import os

import pytest

from cuda_kernels import KernelBuildError, host
from cuda_kernels._nvrtc import compile_cubin
from cuda_kernels._sass import disassembler
from qsim.backends import Backend, get_backend
from qsim.errors import BackendError
from tests.backends import PLAYED
from tests.oracles import unavailable
from tests.places import CHOICE, played_device


@functools.cache
def _nvrtc_missing() -> str:
    """Why NVRTC cannot be used, or nothing."""
    try:
        compile_cubin('extern "C" __global__ void nothing() {}', "sm_80")
    except KernelBuildError as error:
        return str(error)
    return ""


@pytest.fixture
def nvrtc() -> None:
    """NVRTC compiles here."""
    if _nvrtc_missing():
        unavailable(_nvrtc_missing())


@pytest.fixture
def gpp() -> None:
    """g++ is here."""
    if host.compiler() is None:
        unavailable("g++ was not found")


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend that the parameter names; a machine without g++ or without a device skips with the reason."""
    name = request.param
    if name in ("emulated", PLAYED) and host.compiler() is None:
        unavailable("g++ was not found")
    if name == PLAYED or (name == "cuda" and os.environ.get(CHOICE) == PLAYED):
        from qsim.backends.cuda import CudaBackend

        monkeypatch.setattr("qsim.backends.cuda.nvrtc_version", lambda: "played")
        return CudaBackend(played_device(monkeypatch))
    try:
        return get_backend(name)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def nvdisasm() -> None:
    """NVRTC compiles here, and nvdisasm reads what it made."""
    if _nvrtc_missing():
        unavailable(_nvrtc_missing())
    if disassembler() is None:
        unavailable("nvdisasm was not found: install nvidia-cuda-nvdisasm")
