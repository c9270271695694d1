"""Reads captured tensors from .safetensors or .npz. Runs no code from a file; knows no schedule.

Layout. Arrays are [tokens, channels], float16, bfloat16, float32 or float64 (rounded once to float32), by name:

    step{S}.L{L}.{NAME}               an activation of step S, layer L
    step{S}.L{L}.{NAME}.grad_output   the gradient of that GEMM's output [tokens, outputs] (optional)
    L{L}.{NAME}.weight                the weight [channels, outputs] that multiplies it (optional; else seeded)

NAME: qkv_in, ffn_in, gelu (inputs of linear layers), q and k (attention operands). Every name must be there for
every step and layer. Arrays of other names are left alone and listed in ``ignored``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from qsim.arrays import F32, AnyArray, frozen
from qsim.errors import InputError
from qsim.quant import Site, TensorRole

NAMES: Mapping[str, tuple[Site, TensorRole]] = MappingProxyType(
    {
        "qkv_in": (Site.QKV, TensorRole.INPUT),
        "q": (Site.SCORES, TensorRole.ATTN_Q),
        "k": (Site.SCORES, TensorRole.ATTN_K),
        "ffn_in": (Site.FFN_UP, TensorRole.INPUT),
        "gelu": (Site.FFN_DOWN, TensorRole.INPUT),
    }
)
"""Array name -> which GEMM it feeds, and as what."""

_KEY = re.compile(
    rf"(?:step(?P<step>\d+)\.)?L(?P<layer>\d+)\.(?P<name>{'|'.join(NAMES)})(?:\.(?P<kind>weight|grad_output))?"
)
_DTYPES = ("float16", "bfloat16", "float32", "float64")

Key = tuple[int, int, str]
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Activations by (step, layer, name), float32 [tokens, channels], read-only, all finite.

    steps, layers: the numbers in the file, ascending. weights by (layer, name); grads like activations.
    """

    source: str
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    names: tuple[str, ...]
    tokens: int
    activations: Mapping[Key, F32]
    grads: Mapping[Key, F32]
    weights: Mapping[tuple[int, str], F32]
    ignored: tuple[str, ...]

    def distinct_rows(self, layer: int, name: str) -> int:
        """Number of different token rows over all steps: what a resampling can draw on."""
        rows = np.concatenate([self.activations[s, layer, name] for s in self.steps])
        return int(np.unique(rows, axis=0).shape[0])


def read_capture(path: Path) -> Capture:
    """The capture in ``path``. Raises InputError (file, array, what is wrong, next step) for anything unusable."""
    arrays = _read_arrays(path)
    found: dict[Key, F32] = {}
    grads: dict[Key, F32] = {}
    weights: dict[tuple[int, str], F32] = {}
    ignored = []
    for key, array in arrays.items():
        match = _KEY.fullmatch(key)
        if match is None or (match["step"] is None) != (match["kind"] == "weight"):
            ignored.append(key)
        elif match["step"] is None:
            _add(weights, (int(match["layer"]), match["name"]), _usable(path, key, array), f"{path}: {key}")
        else:
            into = grads if match["kind"] else found
            where = int(match["step"]), int(match["layer"]), match["name"]
            _add(into, where, _usable(path, key, array), f"{path}: {key}")
    if not found:
        raise InputError(
            f"{path}: no activation in it; arrays are named like step0.L0.qkv_in ({', '.join(NAMES)}), "
            f"found {_some(arrays)}"
        )
    return _assemble(path, found, grads, weights, tuple(sorted(ignored)))


def _add(into: dict[K, F32], where: K, array: F32, name: str) -> None:
    if where in into:
        raise InputError(f"{name} is there twice (step1 and step01 are one step); keep one of them")
    into[where] = array


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (" ..." if len(listed) > 4 else "") if listed else "none"


def _assemble(
    path: Path,
    found: dict[Key, F32],
    grads: dict[Key, F32],
    weights: dict[tuple[int, str], F32],
    ignored: tuple[str, ...],
) -> Capture:
    steps, layers = sorted({k[0] for k in found}), sorted({k[1] for k in found})
    names = [name for name in NAMES if any(k[2] == name for k in found)]
    tokens = next(iter(found.values())).shape[0]
    width: dict[str, int] = {}
    for name in names:
        for step in steps:
            for layer in layers:
                key = f"step{step}.L{layer}.{name}"
                array = found.get((step, layer, name))
                if array is None:
                    raise InputError(f"{path}: {key} is missing; every name needs every step and layer")
                if array.shape[0] != tokens:
                    raise InputError(f"{path}: {key} has {array.shape[0]} tokens, others have {tokens}")
                if array.shape[1] != width.setdefault(name, array.shape[1]):
                    raise InputError(f"{path}: {key} has {array.shape[1]} channels, others have {width[name]}")
    if ("q" in names) != ("k" in names) or width.get("q") != width.get("k"):
        raise InputError(f"{path}: q and k are multiplied with each other: both must be there, with equal channels")
    for (layer, name), weight in weights.items():
        if name in width and weight.shape[0] != width[name]:
            raise InputError(
                f"{path}: L{layer}.{name}.weight is {list(weight.shape)}; its first axis must be the "
                f"{width[name]} channels of {name}"
            )
    if grads and set(grads) != {k for k in found if k[2] in {g[2] for g in grads}}:
        raise InputError(f"{path}: grad_output arrays must be there for every step and layer of their name")
    outputs: dict[tuple[int, str], int] = {at: weight.shape[1] for at, weight in weights.items()}
    for (step, layer, name), grad in sorted(grads.items()):
        expected = tokens, outputs.setdefault((layer, name), grad.shape[1])
        if grad.shape != expected:
            raise InputError(
                f"{path}: step{step}.L{layer}.{name}.grad_output is {list(grad.shape)}; expected "
                f"{list(expected)}: the tokens of the activations, the outputs of its weight or first gradient"
            )
    return Capture(
        source=path.name,
        steps=tuple(steps),
        layers=tuple(layers),
        names=tuple(names),
        tokens=tokens,
        activations=MappingProxyType(found),
        grads=MappingProxyType(grads),
        weights=MappingProxyType(weights),
        ignored=ignored,
    )


def _read_arrays(path: Path) -> dict[str, AnyArray]:
    if not _is_file(path):
        raise InputError(f"{path}: no such file; give a .safetensors or .npz capture, or leave out workload.tensors")
    match path.suffix:
        case ".safetensors":
            return _read_safetensors(path)
        case ".npz":
            return _read_npz(path)
        case other:
            raise InputError(f'{path}: "{other}" is not a capture format; use .safetensors or .npz (no pickles)')


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be entered
        return False


def _read_npz(path: Path) -> dict[str, AnyArray]:
    try:
        # np.load(path) would leave the file open where the archive is broken
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: np.asarray(archive[key]) for key in archive.files if _KEY.fullmatch(key)} | {
                key: np.empty(0) for key in archive.files if not _KEY.fullmatch(key)
            }
    except Exception as error:  # a damaged archive breaks zipfile, zlib, tokenize or numpy in ways they do not name
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: cannot be read as .npz without pickles ({reason})") from error


def _read_safetensors(path: Path) -> dict[str, AnyArray]:
    from safetensors import SafetensorError, deserialize

    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as .safetensors ({error})") from error
    try:
        return {key: _tensor(entry) if _KEY.fullmatch(key) else np.empty(0) for key, entry in entries}
    except ValueError as error:  # a shape that its bytes do not fill
        raise InputError(f"{path}: cannot be read as .safetensors ({error})") from error


def _tensor(entry: Mapping[str, Any]) -> AnyArray:
    """One safetensors entry as an array; bfloat16 (which numpy lacks) widens exactly; others keep their name."""
    numpy_names = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    data, shape, kind = entry["data"], tuple(entry["shape"]), entry["dtype"]
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if kind in numpy_names:
        return np.frombuffer(data, numpy_names[kind]).reshape(shape)
    return np.empty(0, np.uint8)  # any other type: refused by name in _usable


def _usable(path: Path, key: str, array: AnyArray) -> F32:
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        raise InputError(f"{path}: {key} is no float tensor; use one of {', '.join(_DTYPES)}")
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(f"{path}: {key} has shape {list(array.shape)}; expected [tokens, channels], neither empty")
    with np.errstate(over="ignore"):
        x = array.astype(np.float32)
    if not np.isfinite(x).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
        raise InputError(f"{path}: {key} holds {x[where]} at {list(where)}; a capture must be finite float32")
    return frozen(np.ascontiguousarray(x))
