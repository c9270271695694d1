"""The ``emulated`` backend: the CUDA texts built with g++ and run on this processor. A check, not a speed."""

from __future__ import annotations

from cuda_kernels import KernelBuildError, host
from cuda_kernels._place import HOST, Host, Place
from qsim.backends.kernel_backend import KernelBackend
from qsim.errors import BackendError


class EmulatedBackend(KernelBackend):
    """Every kernel as a device would run it, one block after another. BackendError without a g++ that works."""

    name = "emulated"

    def __init__(self) -> None:
        try:
            host.build('extern "C" __global__ void probe() {}', "probe", options=("-O0",))
        except KernelBuildError as error:
            raise BackendError(f"backend emulated: {str(error).strip()}; or use numba") from error
        super().__init__(HOST)

    def _place_of(self, arch: str | None) -> Place:
        return HOST if arch is None else Host(arch)
