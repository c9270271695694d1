"""Where tests of CUDA launchers run: emulated; on a device (QSIM_PLACE=cuda); on a device whose CuPy is numpy (played).

The same tests serve all three: ``launch(encode, x, ...)`` takes numpy arrays and returns numpy arrays. The third is the
dry run of the second on a machine without a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuda_kernels import _kernel, _place, host
from cuda_kernels._kernel import Kernel
from cuda_kernels._place import HOST, POISON, Device, Host, Place, device
from cuda_kernels._tensor_map import emulated_map
from cuda_kernels.host import HostKernel
from tests.played_cupy import PlayedCupy

CHOICE = "QSIM_PLACE"
"""Environment variable: emulated (default), cuda or played."""


@dataclass(frozen=True, slots=True)
class Given(Host):
    """The emulation of one kernel that the test built: for that entry, or whatever the launcher asks for."""

    made: HostKernel | None = None
    entry: str = ""

    def built(self, kernel: Kernel) -> HostKernel:
        """What the test built."""
        if self.made is None or self.entry not in ("", kernel.entry):
            return Host.built(self, kernel)
        return self.made


@dataclass(frozen=True, slots=True)
class Changed(Host):
    """The emulation of kernels whose text was changed, by their entries; of any other as it is."""

    made: Mapping[str, HostKernel] = field(default_factory=dict)

    def built(self, kernel: Kernel) -> HostKernel:
        """What was made for its entry."""
        return self.made.get(kernel.entry) or Host.built(self, kernel)


def changed(kernels: tuple[Kernel, ...], *changes: tuple[str, str]) -> Changed:
    """Where ``kernels`` run with each change (old, new) made at the one place of their text that holds ``old``."""
    made = {}
    for kernel in kernels:
        text = kernel.text
        for old, new in changes:
            assert text.count(old) == 1, (kernel.file, old, text.count(old))
            text = text.replace(old, new)
        made[kernel.entry] = host.build(text, kernel.entry, options=("-O1",))  # the same bits, built sooner
    return Changed(made=made)


def played_device(monkeypatch: Any, capability: str = "90", room: int = 1 << 30) -> Device:
    """A Device whose CuPy is numpy and whose kernels are emulated: what is tested is the launch."""
    cupy = PlayedCupy(capability, room)

    @functools.cache
    def loaded(kernel: Kernel, _: int, arch: str) -> Any:
        return cupy.function(kernel.entry, kernel.on_host(arch))

    monkeypatch.setattr(_kernel, "_device_kernel", loaded)
    monkeypatch.setattr(_place, "device_map", lambda array, box: emulated_map(array._own, box))
    monkeypatch.setattr(Device, "_ACROSS", 2)  # so that a larger array needs the stride
    monkeypatch.setattr(Device, "_DOWN", 3)
    return Device(cupy)


@dataclass(frozen=True, slots=True)
class Poisoned(Device):
    """The device, its fresh arrays filled: what a kernel leaves out is seen."""

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """Every byte is POISON."""
        made = Device.empty(self, shape, dtype)
        made.view(np.uint8).fill(POISON)
        return made


class _ForGood:
    setattr = staticmethod(setattr)


def is_played() -> bool:
    """Whether the device is numpy."""
    return isinstance(place().xp, PlayedCupy)


@functools.cache
def place() -> Place:
    """The place that the environment chooses."""
    chosen = os.environ.get(CHOICE, "emulated")
    if chosen not in ("emulated", "cuda", "played"):
        raise ValueError(f"{CHOICE}={chosen}: choose emulated, cuda or played")
    return {
        "emulated": lambda: HOST,
        "cuda": lambda: Poisoned(device().cupy),
        "played": lambda: played_device(_ForGood),
    }[chosen]()


def launch(launcher: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``launcher`` at ``place()``: numpy arrays go there and come back."""
    return launch_at(None, launcher, *args, **options)


def launch_at(here: Place | None, launcher: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``launcher`` at ``here``, at ``place()`` if None."""
    here = here or place()
    if here.xp is np:
        return launcher(here, *args, **options)
    sent = [_sent(here, arg) for arg in args]
    return _fetched(launcher(here, *sent, **{name: _sent(here, option) for name, option in options.items()}))


def _sent(here: Place, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return here.upload(value)
    if isinstance(value, tuple):
        parts = [_sent(here, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _fetched(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = [_fetched(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.get() if hasattr(value, "get") and hasattr(value, "dtype") else value
