"""A run in a file, and back: parameters, optimizer, quantizer states, to the bit. Trains nothing.

Layout (safetensors): param/NAME, opt/FIELD and opt/FIELD/NAME, state/N/FIELD for owner N of the list in the metadata.
Nothing of a quantizer's state is left out or made anew: scale, descale, centre, window, epoch and last commit are read
back as they were (leaving them out is defect D33).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from qsim.arrays import AnyArray, Bool, frozen
from qsim.errors import InputError
from qsim.nn import OptimizerState
from qsim.quant import OpId, QuantState, StateKey
from qsim.training.config import TrainConfig
from qsim.training.model import shapes
from qsim.training.run import RunState
from qsim.training.weights import load_arrays, require, save_arrays

FORMAT = "qsim run 1"
_MOMENTS = ("m", "v")
_ARRAYS = ("scale", "descale", "center", "amax_history", "center_seen")


class SavedRun(NamedTuple):
    """What a file holds: the state, the configuration that it was trained with, its seeds."""

    state: RunState
    config: TrainConfig
    seeds: tuple[int, ...]


class _Owner(msgspec.Struct, frozen=True, array_like=True):
    """What of a quantizer's state is no array."""

    key: tuple[int, ...]
    epoch: int
    last_commit: tuple[int, ...] | None
    center_block: int


def save_run(path: Path, state: RunState, *, config: TrainConfig, seeds: Sequence[int]) -> None:
    """Write a run down, whole or not at all (a temporary file, then a rename)."""
    arrays: dict[str, AnyArray] = {f"param/{name}": _host(x) for name, x in state.params.items()}
    for field in fields(state.held):
        value = getattr(state.held, field.name)
        if field.name in _MOMENTS:
            arrays |= {f"opt/{field.name}/{name}": _host(x) for name, x in value.items()}
        else:
            arrays[f"opt/{field.name}"] = _host(value)
    owners = []
    for number, (key, held) in enumerate(sorted(state.states.items())):
        owners.append(_Owner(tuple(key), held.epoch, held.last_commit, held.center_block))
        for name in _ARRAYS:
            if (value := getattr(held, name)) is not None:
                arrays[f"state/{number}/{name}"] = value.astype(np.uint8) if value.dtype == np.bool_ else _host(value)
    metadata = {
        "qsim": FORMAT,
        "step": str(state.step),
        "counted": str(state.counted),
        "seeds": json.dumps(list(seeds)),
        "config": msgspec.json.encode(config).decode(),
        "owners": msgspec.json.encode(owners).decode(),
    }
    save_arrays(path, arrays, metadata=metadata)


def load_run(path: Path) -> SavedRun:
    """Read back what ``save_run`` wrote. Raises InputError for a file that is damaged, or no run."""
    arrays, metadata = load_arrays(path)
    if metadata.get("qsim") != FORMAT:
        raise InputError(f"{path}: holds no run of qsim ({metadata.get('qsim', 'no format')}); save one with save_run")
    try:
        config = msgspec.json.decode(metadata["config"], type=TrainConfig)
        owners = msgspec.json.decode(metadata["owners"], type=list[_Owner])
        seeds = tuple(msgspec.json.decode(metadata["seeds"], type=list[int]))
        state = RunState(
            step=int(metadata["step"]),
            counted=int(metadata["counted"]),
            params={name: arrays[f"param/{name}"] for name in shapes(config.model)},
            held=_optimizer(arrays),
            states={StateKey(*owner.key): _state(arrays, n, owner) for n, owner in enumerate(owners)},
        )
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise InputError(f"{path}: is no whole run ({type(error).__name__}: {error}); save it again") from error
    saved = SavedRun(state, config, seeds)
    problem = next(_problems(saved, len(owners)), None)
    if problem is not None:
        raise InputError(f"{path}: {problem}; save the run again")
    require(
        state.params, {name: (len(seeds), *shape) for name, shape in shapes(config.model).items()}, source=str(path)
    )
    return saved


def _problems(saved: SavedRun, owners: int) -> Iterator[str]:
    """What no run can be in, beside parameters of other shapes."""
    state, replicas = saved.state, len(saved.seeds)
    if not replicas or state.step < state.counted or state.counted < 0:
        yield f"{replicas} seeds, step {state.step}, {state.counted} steps counted are no run"
    for name, value in state.params.items():
        if value.dtype != np.float32 or not np.isfinite(value).all():
            yield f"parameter {name} is {value.dtype} and must be float32, every number finite"
    for field in fields(state.held):
        value = getattr(state.held, field.name)
        parts = value.values() if field.name in _MOMENTS else [value]
        if any(x.shape[:1] != (replicas,) for x in parts):
            yield f"optimizer {field.name} is not of {replicas} seeds"
    if not (np.isfinite(state.held.loss_scale).all() and (state.held.loss_scale > 0).all()):
        yield f"loss scale {state.held.loss_scale.tolist()} is no positive number"
    if owners != len(state.states):
        yield f"{owners} quantizer states of {len(state.states)} owners"
    for key, held in state.states.items():
        right = held.scale.shape == held.descale.shape == (replicas,) and held.amax_history.ndim == 2
        if not (right and held.epoch >= 0 and (held.scale > 0).all() and (held.descale > 0).all()):
            yield f"the state of {key} is none: epoch {held.epoch}, scale {held.scale.tolist()}"


def _optimizer(arrays: Mapping[str, AnyArray]) -> OptimizerState:
    found: dict[str, Any] = {}
    for field in fields(OptimizerState):
        if field.name in _MOMENTS:
            start = f"opt/{field.name}/"
            found[field.name] = {name[len(start) :]: x for name, x in arrays.items() if name.startswith(start)}
        else:
            found[field.name] = arrays[f"opt/{field.name}"]
    return OptimizerState(**found)


def _state(arrays: Mapping[str, AnyArray], number: int, owner: _Owner) -> QuantState:
    held = {name: arrays.get(f"state/{number}/{name}") for name in _ARRAYS}
    seen: Bool | None = None
    if held["center_seen"] is not None:
        seen = frozen(held["center_seen"].astype(np.bool_))
    scale, descale, history = (arrays[f"state/{number}/{name}"] for name in ("scale", "descale", "amax_history"))
    return QuantState(
        owner=StateKey(*owner.key),
        epoch=owner.epoch,
        scale=scale,
        descale=descale,
        center=held["center"],
        amax_history=history,
        last_commit=None if owner.last_commit is None else OpId(*owner.last_commit),
        center_seen=seen,
        center_block=owner.center_block,
    )


def _host(x: Any) -> AnyArray:
    return np.asarray(x.get() if hasattr(x, "get") and not isinstance(x, np.ndarray) else x)
