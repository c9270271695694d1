"""How a Numba kernel is compiled and cached. Knows no format, no array and no arithmetic.

Numba's own cache sees only the file of a kernel: edit a helper in another file, and the old machine code is loaded.
Here the cache folder carries a digest of every file that a kernel may draw on, so kernels share helpers freely.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from qsim._paths import numba_cache_dir, package_dir

F = TypeVar("F", bound=Callable[..., Any])

KERNEL_ROOMS = ("codec", "gemm", "backends")
OPTIONS = {"error_model": "numpy", "fastmath": False, "nogil": True}  # nothing is contracted, division by 0 is IEEE

FORK_WAIT = 30.0
"""Seconds that a fork waits for another thread that compiles: a kernel takes ten at most."""

_FIRST_CALL = threading.RLock()
_RLOCK = type(_FIRST_CALL)
_FORKING = threading.local()


@functools.cache
def source_digest() -> str:
    """Digest of this file and of every ``*kernels.py``, where all kernels live: another text, another cache folder."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(p for room in KERNEL_ROOMS for p in Path(package_dir() / room).rglob("*kernels.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _our_cache() -> Iterator[None]:
    """Numba's cache folder is ours while a kernel is declared, and the user's own again afterwards."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(numba_cache_dir() / source_digest())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def kernel(*arguments: Any) -> Callable[[F], F]:
    """Compile at the first call, for one signature: inputs read-only, so that writable ones fit too."""
    signature = numba.void(*arguments)

    def wrap(function: F) -> F:
        with _our_cache():
            jit = numba.njit(cache=True, **OPTIONS)(function)
        ready = False

        @functools.wraps(function)
        def call(*values: Any) -> None:
            nonlocal ready, jit
            if not ready:
                with _FIRST_CALL:
                    if not ready:
                        jit = _compiled(jit, function, signature)
                        ready = True
            jit(*values)

        return cast("F", call)

    return wrap


def _compiled(jit: Any, function: Any, signature: Any) -> Any:
    """``jit`` compiled; where its cached code cannot be read (after a full disk, a power cut), without a cache."""
    try:
        jit.compile(signature)
    except NumbaError:
        raise
    except Exception as error:  # whatever a torn file makes of itself when it is read
        folder = numba_cache_dir() / source_digest()
        warnings.warn(
            f"machine code cached in {folder} cannot be read ({type(error).__name__}: {error}) and was compiled anew; "
            "delete that folder",
            RuntimeWarning,
            stacklevel=3,
        )
        jit = numba.njit(**OPTIONS)(function)
        jit.compile(signature)
    jit.disable_compile()  # other arguments are converted or refused, never compiled anew
    return jit


def _compile_locks() -> list[Any]:
    """What a thread that compiles holds, in its order: our lock, and Numba's own where it is the one known."""
    numbas = getattr(global_compiler_lock, "_lock", None)
    return [_FIRST_CALL, numbas] if isinstance(numbas, _RLOCK) else [_FIRST_CALL]


def _before_fork() -> None:
    """Wait for a compile: cut off in the middle, it would leave the child locked, and with half of Numba's state."""
    _FORKING.held = held = []
    for lock in _compile_locks():
        if not lock.acquire(timeout=FORK_WAIT):
            break
        held.append(lock)


def _after_fork() -> None:
    for lock in reversed(_FORKING.held):
        lock.release()


def _after_fork_in_child() -> None:
    """What could not be waited for is renewed: no other thread is left to release it."""
    global _FIRST_CALL
    numbas = _compile_locks()[1:]
    if _FIRST_CALL not in _FORKING.held:
        _FIRST_CALL = threading.RLock()
    if numbas and numbas[0] not in _FORKING.held:
        global_compiler_lock._lock = threading.RLock()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def cached(function: F) -> F:
    """Compile for whatever comes, and cache."""
    with _our_cache():
        return cast("F", numba.njit(cache=True, **OPTIONS)(function))


def helper(function: F) -> F:
    """A function that only kernels call."""
    return cast("F", numba.njit(**OPTIONS)(function))


def inlined(function: F) -> F:
    """A helper whose body goes into its kernel even where LLVM would call it: a row is shorter than a call is dear."""
    return cast("F", numba.njit(forceinline=True, **OPTIONS)(function))


def read(dtype: Any, ndim: int) -> Any:
    """Type of a contiguous array that a kernel reads."""
    return numba.types.Array(dtype, ndim, "C", readonly=True)


def write(dtype: Any, ndim: int) -> Any:
    """Type of a contiguous array that a kernel writes."""
    return numba.types.Array(dtype, ndim, "C")


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index]; an index out of range is harmless. Changes no value."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = target.make_array(signature.args[0])(target, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        address = builder.bitcast(builder.gep(values.data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, word(0), word(3), word(1)])  # to read, keep close, data
        return target.get_dummy_value()

    return numba.types.void(array, numba.types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def read_only(context: Any, array: Any) -> Any:
    """The same array under the type that ``read`` gives, so that scratch goes where an argument goes."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return impl_ret_borrowed(target, builder, signature.return_type, arguments[0])

    return read(array.dtype, array.ndim)(array), build


@intrinsic  # type: ignore[untyped-decorator]
def stretch(context: Any, array: Any, start: Any, size: Any) -> Any:
    """``size`` elements of a contiguous argument from its element ``start`` on, in C order, as one row of its own.

    A slice, but one that counts no reference, checks no bound and may run over the ends of rows. Counting is an atomic
    operation, and a block has some ten slices: as much time as its elements take. For arguments only, which the caller
    keeps: an array made in the kernel may be gone before its stretch.
    """

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = target.make_array(signature.args[0])(target, builder, arguments[0])
        part = target.make_array(signature.return_type)(target, builder)
        populate_array(
            part,
            data=builder.gep(whole.data, [arguments[1]]),
            shape=[arguments[2]],
            strides=[whole.itemsize],
            itemsize=whole.itemsize,
            meminfo=None,
        )
        return part._getvalue()

    row = numba.types.Array(array.dtype, 1, "C", readonly=not array.mutable)
    return row(array, numba.types.intp, numba.types.intp), build
