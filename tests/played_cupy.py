"""CuPy played by numpy, as strict as CuPy where it matters: an array of the device never turns into numpy by itself.

For machines without a GPU. Every transfer is counted; a launch runs the kernel emulated. What CuPy itself does on a
device - its allocator, its streams, its own kernels - is not here.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

POISON = 0xEE


class Array:
    """Memory of the device: shapes and views as in CuPy, contents only by ``get``."""

    __array_priority__ = 100

    def __init__(self, own: Any, runtime: PlayedCupy) -> None:
        self._own = own
        self._runtime = runtime

    dtype = property(lambda self: self._own.dtype)
    shape = property(lambda self: self._own.shape)
    ndim = property(lambda self: self._own.ndim)
    size = property(lambda self: self._own.size)
    strides = property(lambda self: self._own.strides)
    itemsize = property(lambda self: self._own.itemsize)
    nbytes = property(lambda self: self._own.nbytes)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._own.flags.c_contiguous))
    data = property(lambda self: SimpleNamespace(ptr=self._own.__array_interface__["data"][0]))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __len__(self) -> int:
        return len(self._own)

    def __bool__(self) -> bool:
        raise TypeError("a test of a device array waits for the device; use .get()")

    def _like(self, own: Any) -> Array:
        return Array(own, self._runtime)

    def get(self) -> Any:
        """A copy on the host; counted."""
        self._runtime.downloads.append((self.shape, str(self.dtype)))
        return np.array(self._own)

    def reshape(self, *shape: Any) -> Array:
        return self._like(self._own.reshape(*shape))

    def view(self, dtype: Any) -> Array:
        return self._like(self._own.view(dtype))

    def swapaxes(self, a: int, b: int) -> Array:
        return self._like(self._own.swapaxes(a, b))

    def astype(self, dtype: Any) -> Array:
        return self._like(self._own.astype(dtype))

    def copy(self) -> Array:
        return self._like(self._own.copy())

    def sum(self) -> Array:
        return self._like(np.asarray(self._own.sum()))

    def _other(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        return other._own if isinstance(other, Array) else other

    def __add__(self, other: Any) -> Array:
        return self._like(self._own + self._other(other))

    def __sub__(self, other: Any) -> Array:
        return self._like(self._own - self._other(other))

    def __mul__(self, other: Any) -> Array:
        return self._like(self._own * self._other(other))

    def __truediv__(self, other: Any) -> Array:
        return self._like(self._own / self._other(other))

    def __or__(self, other: Any) -> Array:
        return self._like(self._own | self._other(other))

    def __lshift__(self, other: Any) -> Array:
        return self._like(self._own << self._other(other))

    def __rshift__(self, other: Any) -> Array:
        return self._like(self._own >> self._other(other))

    def __lt__(self, other: Any) -> Array:
        return self._like(self._own < self._other(other))

    def __gt__(self, other: Any) -> Array:
        return self._like(self._own > self._other(other))

    def __ge__(self, other: Any) -> Array:
        return self._like(self._own >= self._other(other))

    def __int__(self) -> int:
        return int(self.get())

    def __getitem__(self, key: Any) -> Array:
        return self._like(self._own[self._bare(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError("non-scalar numpy.ndarray cannot be used for fill")
        self._own[self._bare(key)] = value._own if isinstance(value, Array) else value

    # What nodes of a model do with arrays besides: as CuPy has it, never together with an array of the host.

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **how: Any) -> Any:
        made = getattr(ufunc, method)(*map(self._bare, args), **{k: self._bare(v) for k, v in how.items()})
        return how["out"][0] if "out" in how else self._wrapped(made)

    def __array_function__(self, function: Any, types: Any, args: Any, how: Any) -> Any:
        bare = [self._bare(arg) for arg in args]
        return self._wrapped(function(*bare, **{k: self._bare(v) for k, v in how.items()}))

    def _bare(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._bare, value))
        return value._own if isinstance(value, Array) else value

    def _wrapped(self, value: Any) -> Any:
        return self._like(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value

    def __getattr__(self, name: str) -> Any:
        """Other methods and operators, by numpy's own."""
        if name.startswith("__") or name not in ("all", "any", "max", "min", "mean", "transpose", "ravel", "argmax"):
            raise AttributeError(name)
        return lambda *args, **how: self._wrapped(getattr(self._own, name)(*map(self._bare, args), **how))

    @property
    def T(self) -> Array:  # noqa: N802 - as in CuPy
        return self._like(self._own.T)

    def _in_place(self, operate: Any, other: Any) -> Array:
        operate(self._own, self._bare(other), out=self._own)
        return self

    def __iadd__(self, other: Any) -> Array:
        return self._in_place(np.add, other)

    def __isub__(self, other: Any) -> Array:
        return self._in_place(np.subtract, other)

    def __imul__(self, other: Any) -> Array:
        return self._in_place(np.multiply, other)

    def __itruediv__(self, other: Any) -> Array:
        return self._in_place(np.divide, other)

    def __iand__(self, other: Any) -> Array:
        return self._in_place(np.bitwise_and, other)

    def __ior__(self, other: Any) -> Array:
        return self._in_place(np.bitwise_or, other)

    def __radd__(self, other: Any) -> Array:
        return self._like(self._bare(other) + self._own)

    def __rsub__(self, other: Any) -> Array:
        return self._like(self._bare(other) - self._own)

    def __rmul__(self, other: Any) -> Array:
        return self._like(self._bare(other) * self._own)

    def __rtruediv__(self, other: Any) -> Array:
        return self._like(self._bare(other) / self._own)

    def __and__(self, other: Any) -> Array:
        return self._like(self._own & self._bare(other))

    def __neg__(self) -> Array:
        return self._like(-self._own)

    def __invert__(self) -> Array:
        return self._like(~self._own)

    def __le__(self, other: Any) -> Array:
        return self._like(self._own <= self._bare(other))

    def __eq__(self, other: Any) -> Any:
        return self._like(self._own == self._bare(other))

    def __ne__(self, other: Any) -> Any:
        return self._like(self._own != self._bare(other))

    __hash__ = object.__hash__


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""


class _Stream:
    """Launches are done when they return."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Function:
    """As cupy.cuda.function.Function: a pointer and a call, and no attribute more."""

    __slots__ = ("_run", "ptr")

    def __init__(self, run: Any) -> None:
        self._run, self.ptr = run, id(run)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, shared_mem: int = 0) -> None:
        self._run(grid, block, [AS_C[type(arg)](arg) for arg in args], shared_mem, self.ptr)


class PlayedCupy:
    """The module. room: bytes that one allocation may take."""

    __name__ = "cupy"
    ndarray = Array
    float32, float64, uint8, uint16 = np.float32, np.float64, np.uint8, np.uint16
    uint32, uint64, int32, int64, bool_ = np.uint32, np.uint64, np.int32, np.int64, np.bool_
    nan = np.nan

    def __init__(self, capability: str = "90", room: int = 1 << 30) -> None:
        self.uploads: list[tuple[Any, ...]] = []
        self.downloads: list[tuple[Any, ...]] = []
        self.launches: list[str] = []
        self.shared: dict[int, int] = {}
        self.room = room
        device = SimpleNamespace(id=0, compute_capability=capability, synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            Device=lambda: device,
            Stream=lambda non_blocking=False: _Stream(),
            driver=SimpleNamespace(funcSetAttribute=self._set_attribute),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError, memGetInfo=lambda: (room, 2 * room)
            ),
        )

    def _set_attribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == 8, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        assert value <= 227 << 10, "a block of Hopper has no more"
        self.shared[function] = value

    def function(self, entry: str, emulated: Any) -> Function:
        """What a module gives: a launch beyond 48 KiB of shared memory must have been allowed."""

        def run(grid: Any, block: Any, args: Any, dynamic: int, pointer: int) -> None:
            assert dynamic <= self.shared.get(pointer, 48 << 10), "CUDA_ERROR_INVALID_VALUE"
            self.launches.append(entry)
            emulated(grid, block, args, dynamic=dynamic)

        return Function(run)

    def _own(self, own: Any) -> Array:
        if own.nbytes > self.room:
            raise OutOfMemoryError
        return Array(own, self)

    def empty(self, shape: Any, dtype: Any) -> Array:
        """Poisoned."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size > self.room:
            raise OutOfMemoryError
        return self._own(np.full(size, POISON, np.uint8).view(dtype).reshape(shape))

    def zeros(self, shape: Any, dtype: Any) -> Array:
        return self._own(np.zeros(shape, dtype))

    def full(self, shape: Any, value: Any, dtype: Any) -> Array:
        return self._own(np.full(shape, value, dtype))

    def array(self, x: Array, **how: Any) -> Array:
        return self._own(np.array(x._own, **how))

    def __getattr__(self, name: str) -> Any:
        """What else nodes of a model ask for: numpy's own, on what lies on the device."""
        if not hasattr(np, name) or name.startswith("__"):
            raise AttributeError(name)
        function, one = getattr(np, name), Array(np.zeros(0), self)
        if not callable(function):
            return function

        def played(*args: Any, **how: Any) -> Any:
            made = function(*map(one._bare, args), **{k: one._bare(v) for k, v in how.items()})
            return how["out"] if "out" in how else one._wrapped(made)

        return played

    def asarray(self, x: Any, dtype: Any = None) -> Array:
        """An upload, counted."""
        if isinstance(x, Array):
            return x
        x = np.asarray(x, dtype)
        self.uploads.append((x.shape, str(x.dtype)))
        return self._own(np.array(x))

    def ascontiguousarray(self, x: Array) -> Array:
        return self._own(np.ascontiguousarray(x._own))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return self._own(np.where(condition._own, condition._other(a), condition._other(b)))

    def isnan(self, x: Array) -> Array:
        return self._own(np.isnan(x._own))

    def broadcast_to(self, x: Array, shape: Any) -> Array:
        return Array(np.broadcast_to(x._own, shape), self)

    def matmul(self, a: Array, b: Array) -> Array:
        return self._own(np.matmul(a._own, b._own))


AS_C: dict[type, Any] = {
    np.ndarray: lambda value: (ctypes.c_char * value.nbytes).from_buffer(value),  # a struct, by value
    Array: lambda array: ctypes.c_void_p(array.data.ptr),
    np.uint64: lambda address: ctypes.c_void_p(int(address)),
    np.int64: ctypes.c_longlong,
    np.int32: ctypes.c_int,
    np.uint32: ctypes.c_uint,
    np.float32: ctypes.c_float,
    np.float64: ctypes.c_double,
}
