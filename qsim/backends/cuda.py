"""The ``cuda`` backend: the CUDA texts on the CuPy device in force, on the stream in force."""

from __future__ import annotations

from cuda_kernels import DeviceUnavailableError, KernelBuildError
from cuda_kernels._kernel import keep_cubins_in
from cuda_kernels._nvrtc import nvrtc_version
from cuda_kernels._place import Device, device
from qsim._paths import cache_dir
from qsim.backends.kernel_backend import KernelBackend
from qsim.errors import BackendError


class CudaBackend(KernelBackend):
    """Tensors stay on the device. BackendError says what is missing."""

    name = "cuda"

    def __init__(self, place: Device | None = None) -> None:
        try:
            own = place or device()
            nvrtc_version()
        except (DeviceUnavailableError, KernelBuildError) as error:
            raise BackendError(f"backend cuda: {error}; python -m qsim doctor says what works here") from error
        keep_cubins_in(cache_dir() / "cubins")
        super().__init__(own)
