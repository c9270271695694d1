"""Where a kernel runs: a CUDA device through CuPy, or this processor, emulated. Knows no kernel.

A launcher takes a place first and is one text for both: it checks, sizes and launches through the place.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from cuda_kernels import DeviceMemoryError, DeviceUnavailableError
from cuda_kernels._kernel import LEAST_CAPABILITY, Kernel, arch_of
from cuda_kernels._tensor_map import TensorMap, device_map, emulated_map
from cuda_kernels.host import HostKernel

POISON = 0xEE
"""Every byte of an array that an emulated kernel is to fill: what it leaves out is seen."""

_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_NUMBERS: dict[str, Any] = {
    "int32": ctypes.c_int,
    "uint32": ctypes.c_uint,
    "int64": ctypes.c_longlong,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


class Strided(NamedTuple):
    """An array that a kernel takes as it lies: the address of its first element; strides go beside it as numbers."""

    array: Any


class Place(Protocol):
    """Arrays of module ``xp`` on a device of architecture ``arch``."""

    name: ClassVar[str]

    @property
    def xp(self) -> Any:
        """numpy or cupy."""
        ...

    @property
    def arch(self) -> str:
        """Target of the kernels, ``"sm_90a"``: it decides the bits of ``mma.sync`` and nothing else."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """An array that a kernel is to fill. DeviceMemoryError where there is no room."""
        ...

    def upload(self, array: Any) -> Any:
        """A numpy array as one of this place. DeviceMemoryError where there is no room."""
        ...

    def tensor_map(self, array: Any, box: tuple[int, int]) -> TensorMap:
        """A kernel argument by which TMA loads boxes (rows, columns) of uint8 ``array`` [rows, columns], whose columns
        lie together. ValueError for what TMA cannot load.
        """
        ...

    def room(self) -> AbstractContextManager[None]:
        """Within it, an allocation that finds no room is a DeviceMemoryError, whoever asked for it."""
        ...

    def spread(self, kernel: Kernel, across: int, down: int, args: Sequence[Any]) -> None:
        """Launch for ``across`` x ``down`` items, one a thread; the kernel strides over what the grid leaves.

        args: arrays, contiguous; ``Strided`` ones, which need not be; None for a null pointer; numpy scalars of exactly
        the parameters' types; tensor maps.
        """
        ...

    def tiles(self, kernel: Kernel, count: int, threads: int, args: Sequence[Any], *, dynamic: int = 0) -> None:
        """Launch blocks of exactly ``threads`` for ``count`` tiles; the kernel strides over the tiles.

        dynamic: bytes of dynamic shared memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """The emulation. Few blocks of few threads: strides and tails everywhere, and little to switch between."""

    arch: str = "sm_89"
    blocks: tuple[int, int] = (3, 2)
    threads: int = 64
    name: ClassVar[str] = "emulated"

    @property
    def xp(self) -> Any:
        """numpy."""
        return np

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """Poisoned."""
        kind = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        return np.full(math.prod(shape) * kind.itemsize, POISON, np.uint8).view(kind).reshape(shape)

    def upload(self, array: Any) -> Any:
        """The array itself."""
        return array

    def tensor_map(self, array: Any, box: tuple[int, int]) -> TensorMap:
        """See ``Place.tensor_map``."""
        return emulated_map(array, box)

    def room(self) -> AbstractContextManager[None]:
        """See ``Place.room``."""
        return nullcontext()

    def built(self, kernel: Kernel) -> HostKernel:
        """The kernel as a function on this processor."""
        return kernel.on_host(self.arch)

    def spread(self, kernel: Kernel, across: int, down: int, args: Sequence[Any]) -> None:
        """See ``Place.spread``."""
        grid = min(-(-across // self.threads), self.blocks[0]), min(down, self.blocks[1])
        self.built(kernel)(grid, (self.threads,), [_host_argument(arg) for arg in args])

    def tiles(self, kernel: Kernel, count: int, threads: int, args: Sequence[Any], *, dynamic: int = 0) -> None:
        """See ``Place.tiles``."""
        grid = (min(count, self.blocks[0]),)
        self.built(kernel)(grid, (threads,), [_host_argument(arg) for arg in args], dynamic=dynamic)


HOST = Host()
"""The emulation of a device of compute capability 8.9."""


@dataclass(frozen=True, slots=True)
class Device:
    """The CuPy device in force, on the stream in force."""

    cupy: Any
    name: ClassVar[str] = "cuda"
    _THREADS: ClassVar[int] = 256
    _ACROSS: ClassVar[int] = 4096  # blocks enough to fill any device
    _DOWN: ClassVar[int] = 65535

    @property
    def xp(self) -> Any:
        """cupy."""
        return self.cupy

    @property
    def arch(self) -> str:
        """As NVRTC names it."""
        return arch_of(self.cupy.cuda.Device().compute_capability)

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """Uninitialised."""
        shape = (shape,) if isinstance(shape, int) else shape
        with self.room(_asked(shape, dtype)):
            return self.cupy.empty(shape, dtype)

    def upload(self, array: Any) -> Any:
        """A copy on the device."""
        with self.room(_asked(array.shape, str(array.dtype))):
            return self.cupy.asarray(array)

    @contextmanager
    def room(self, asked: str = "") -> Iterator[None]:
        """See ``Place.room``. asked: the bytes, where they are known."""
        try:
            yield
        except self.cupy.cuda.memory.OutOfMemoryError as cause:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            words = asked or str(cause) or "an array within a launcher"
            raise DeviceMemoryError(
                f"out of device memory: {words}, {free} of {total} are free; "
                "use fewer replicas, smaller tensors, or the numba backend"
            ) from cause

    def tensor_map(self, array: Any, box: tuple[int, int]) -> TensorMap:
        """See ``Place.tensor_map``."""
        return device_map(array, box)

    def spread(self, kernel: Kernel, across: int, down: int, args: Sequence[Any]) -> None:
        """See ``Place.spread``."""
        grid = min(-(-across // self._THREADS), self._ACROSS), min(down, self._DOWN)
        kernel.on_device(self.cupy)(grid, (self._THREADS,), _device_arguments(args))

    def tiles(self, kernel: Kernel, count: int, threads: int, args: Sequence[Any], *, dynamic: int = 0) -> None:
        """See ``Place.tiles``."""
        run = kernel.on_device(self.cupy)
        if dynamic > 48 << 10:  # more than that a kernel must ask for
            self.cupy.cuda.driver.funcSetAttribute(run.ptr, _MOST_DYNAMIC_SHARED, dynamic)
        run((min(count, self._DOWN),), (threads,), _device_arguments(args), shared_mem=dynamic)


def device() -> Device:
    """The device in force; DeviceUnavailableError that says what is missing."""
    return Device(cupy_with_device())


def cupy_with_device() -> Any:
    """CuPy, with a device behind it that the kernels run on; DeviceUnavailableError that says what is missing."""
    try:
        import cupy
    except ImportError as cause:
        raise DeviceUnavailableError("CuPy is missing: install the extra cuda13 (or cuda12)") from cause
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as cause:
        raise DeviceUnavailableError(f"no usable CUDA device: {cause}") from cause
    if count == 0:
        raise DeviceUnavailableError("no CUDA device on this machine")
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < LEAST_CAPABILITY:
        raise DeviceUnavailableError(
            f"the device has compute capability {capability[:-1]}.{capability[-1]}; the kernels need "
            f"{LEAST_CAPABILITY // 10}.{LEAST_CAPABILITY % 10} or newer: use the numba backend"
        )
    return cupy


def at(place: Place, array: Any) -> Any:
    """``array`` at the place: itself where it is the place's, else uploaded."""
    return array if isinstance(array, place.xp.ndarray) else place.upload(np.asarray(array))


def check_array(place: Place, what: str, array: Any, dtype: str, *, optional: bool = False) -> None:
    """TypeError unless ``array`` is the place's and of ``dtype``; None passes where it is ``optional``."""
    if optional and array is None:
        return
    if not (isinstance(array, place.xp.ndarray) and array.dtype == np.dtype(dtype)):
        kind = f"{type(array).__module__}.{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
        raise TypeError(f"{what} is {kind}; the kernel takes a {place.xp.__name__} array of {dtype}")


def _asked(shape: tuple[int, ...], dtype: str) -> str:
    return f"{math.prod(shape) * np.dtype(dtype).itemsize} bytes for {dtype}{list(shape)}"


def _host_argument(arg: Any) -> Any:
    if isinstance(arg, np.generic):
        return _number(arg.dtype.name)(arg.item())
    if isinstance(arg, TensorMap):
        return (ctypes.c_uint64 * arg.words.size).from_buffer(arg.words)
    if isinstance(arg, Strided):
        return ctypes.c_void_p(arg.array.ctypes.data)
    assert arg is None or arg.flags.c_contiguous, "a kernel takes contiguous arrays"
    return ctypes.c_void_p(None if arg is None else arg.ctypes.data)


def _device_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_device_argument(arg) for arg in args)


def _device_argument(arg: Any) -> Any:
    if isinstance(arg, TensorMap):
        return arg.value
    arg = arg.array if isinstance(arg, Strided) else arg
    return np.uint64(0) if arg is None else arg


@cache
def _number(dtype: str) -> Any:
    return _NUMBERS[dtype]
