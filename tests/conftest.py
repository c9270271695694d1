"""What tests of CUDA texts need: g++ to emulate them, NVRTC to compile them, nvdisasm to read that.

A missing one skips; in CI it fails.
"""

from __future__ import annotations

import functools

import pytest

from cuda_kernels import KernelBuildError, host
from cuda_kernels._nvrtc import compile_cubin
from cuda_kernels._sass import disassembler
from tests.oracles import unavailable


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
def nvdisasm() -> None:
    """NVRTC compiles here, and nvdisasm reads what it made."""
    if _nvrtc_missing():
        unavailable(_nvrtc_missing())
    if disassembler() is None:
        unavailable("nvdisasm was not found: install nvidia-cuda-nvdisasm")
