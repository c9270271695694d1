"""The data half of a world: tensors, snapshots and live states by name. Follows events; decides nothing.

Values are frozen and shared between worlds. Whatever metadata a consumer names is what its operand is decoded
with, so an unpaired decode needs no special case here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from qsim.arrays import F32, AnyArray, frozen
from qsim.backends.protocol import Backend, CastSpec
from qsim.errors import CaseError, UsageError
from qsim.formats import CastPolicy, RoundMode, get_format
from qsim.philox import RandomStream
from qsim.quant import (
    Layout,
    MergeRule,
    OpId,
    QuantizedTensor,
    QuantObservation,
    QuantSnapshot,
    QuantState,
    Recipe,
    StateKey,
    merge_observations,
    observe_for_future_state,
    quantize_with_snapshot,
)
from qsim.quant.operations import freeze
from qsim.quant.state import center_over
from qsim.sim.control import entry_of
from qsim.sim.events import (
    Allocate,
    Begin,
    Commit,
    Consume,
    Content,
    Drop,
    Event,
    Fetch,
    Fold,
    Load,
    LoadState,
    Mode,
    Observe,
    Operand,
    Optimize,
    Part,
    Quantize,
    Reduce,
    Restart,
    Restore,
    SaveState,
    Slot,
    Stash,
    Store,
    Wait,
)

T = TypeVar("T")
Metadata = QuantSnapshot | QuantState


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedData:
    """What a save wrote down: states by cell, queues by name."""

    states: Mapping[StateKey, QuantState]
    queues: Mapping[str, tuple[tuple[OpId, Value], ...]]


Value = F32 | Metadata | QuantObservation | QuantizedTensor | SavedData
UNWRITTEN = 0xFF
"""The byte of a buffer of codes that nothing was written to, as sanitizers fill memory: NaN in the 8-bit formats, the
most negative number in those without NaN."""
_OTHER_WORDS = 0x9E3779B97F4A7C15
"""Odd, of 64 bits: a seed combined with a multiple of it is not the seed of a neighbouring replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """What events need from outside: tensors by key, a backend, a recipe, a cast policy, the replica axes.

    lead: (R,), the replicas; R = 1 is the single case. reproducible: products are exact sums rounded once; False
    takes the plain float32 BLAS product, whose bits depend on the machine. seeds: of stochastic rounding, one a
    replica; none where the policy draws nothing. Holds no state.
    """

    load: Callable[[OpId], F32]
    backend: Backend
    recipe: Recipe
    policy: CastPolicy
    lead: tuple[int]
    reproducible: bool = True
    seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.lead) != 1 or self.lead[0] < 1:
            raise UsageError(f"lead {self.lead} is no replica axis; the simulator runs [R, ...] with lead=(R,), R >= 1")
        draws = self.policy.rounding is RoundMode.STOCHASTIC
        if len(self.seeds) != (self.lead[0] if draws else 0):
            raise UsageError(
                f"policy {self.policy.name} rounds by {self.policy.rounding.value!r} and the env has "
                f"{len(self.seeds)} seed(s) for {self.lead[0]} replica(s); give one a replica to stochastic rounding, "
                "and none to any other"
            )
        if self.recipe.block_recipe is not None:
            raise UsageError(
                f"recipe {self.recipe.name} with elements {self.recipe.block_recipe.name}: the simulator decodes by "
                "one scale a replica; leave elements out, or quantize_with_snapshot and decode_for_consumer yourself"
            )
        if self.recipe.observes_live_center:
            raise UsageError(
                f"recipe {self.recipe.name} with scale_source CURRENT and a centre of earlier tensors: no event "
                "observes about a live centre; use source CURRENT or scale_source DELAYED"
            )

    @property
    def tensors(self) -> type[AnyArray]:
        """Type of the backend's arrays."""
        found: type[AnyArray] = self.backend.xp.ndarray
        return found

    def words(self, op: OpId, bits: int) -> tuple[RandomStream, ...]:
        """The random words that a cast of ``op`` draws, one stream a replica: its own where ``bits`` is 0."""
        return tuple(op.stream(seed ^ (bits * _OTHER_WORDS % 2**64)) for seed in self.seeds)

    def decode(self, tensor: QuantizedTensor, descale: Metadata, center: Metadata | None) -> F32:
        """Decode with the named metadata, whether or not it is paired with the codes."""
        assert tensor.snapshot is not None, "the simulator casts through snapshots only"
        spec = CastSpec(fmt=tensor.snapshot.fmt, policy=self.policy)
        add = None if center is None else center_over(center, tensor.shape[-1])
        return frozen(self.backend.decode(tensor.codes, descale.descale, add, spec))

    def gemm(self, name: str, left: F32, right: F32) -> F32:
        """The product of two operands: linear XW, scores QK^T, dgrad dY W^T, wgrad X^T dY."""
        if name in ("scores", "dgrad"):
            right = right.swapaxes(-1, -2)
        elif name == "wgrad":
            left = left.swapaxes(-1, -2)
        return frozen((self.backend.matmul if self.reproducible else self.backend.xp.matmul)(left, right))


@dataclass(frozen=True, slots=True)
class Data:
    """Live states by owner, values by slot, queues of stashed values, observations handed in to reductions."""

    states: Mapping[StateKey, QuantState] = field(default_factory=dict)
    slots: Mapping[Slot, Value] = field(default_factory=dict)
    queues: Mapping[str, tuple[tuple[OpId, Value], ...]] = field(default_factory=dict)
    mail: Mapping[str, tuple[QuantObservation, ...]] = field(default_factory=dict)


def _state(data: Data, cell: StateKey, env: Env) -> QuantState:
    live = data.states.get(cell)
    return env.recipe.initial(cell, env.lead) if live is None else live


def data_step(data: Data, event: Event, env: Env) -> Data:
    """The data after ``event``."""
    match event:
        case Load(_, key, out, content):
            return _put(data, out, env.backend.put(holding(env.load(key), content)))
        case Begin(_, op, cell, into, obs):
            seen = None if obs is None else take(data, obs, QuantObservation)
            return _put(data, into, freeze(_state(data, cell, env), op=op, recipe=env.recipe, observation=seen))
        case Quantize(_, op, src, by, out, mode):
            return _put(data, out, _cast(take(data, src, env.tensors), take(data, by, QuantSnapshot), op, mode, env))
        case Observe(_, op, src, by, into):
            snapshot = None if by is None else take(data, by, QuantSnapshot)
            observed = observe_for_future_state(
                take(data, src, env.tensors),
                snapshot=snapshot,
                recipe=env.recipe,
                backend=env.backend,
                op=op,
                lead=len(env.lead),
            )
            return _put(data, into, observed)
        case Commit(_, _, cell, obs, fold):
            return _set(data, cell, _advanced(data, _state(data, cell, env), obs, fold, env))
        case Fetch(_, _, cell, into):
            return _put(data, into, _state(data, cell, env))
        case Store(_, _, cell, base, obs, fold, part):
            new, live = _advanced(data, take(data, base, QuantState), obs, fold, env), _state(data, cell, env)
            if part is Part.SCALE:
                new = replace(new, descale=live.descale)
            elif part is Part.DESCALE:
                new = replace(live, descale=new.descale)
            return _set(data, cell, new)
        case Consume(_, _, gemm, (left, right), out):
            return _put(data, out, env.gemm(gemm, _decoded(data, left, env), _decoded(data, right, env)))
        case Drop(_, gone):
            return replace(data, slots={name: value for name, value in data.slots.items() if name not in gone})
        case _:
            return _moved(data, event, env)


def _moved(data: Data, event: Event, env: Env) -> Data:
    """The data after an event that computes nothing: values change their place."""
    match event:
        case Stash(_, op, queue, name):
            return replace(data, queues={**data.queues, queue: (*data.queues.get(queue, ()), (op, data.slots[name]))})
        case Restore(_, op, queue, into, how, cell):
            entries = data.queues.get(queue, ())
            at = entry_of([key for key, _ in entries], op, how)
            if at < 0:
                live = _state(data, cell, env)
                return _put(data, into, freeze(live, op=op, recipe=env.recipe, observation=None))
            left = replace(data, queues={**data.queues, queue: entries[:at] + entries[at + 1 :]})
            return _put(left, into, entries[at][1])
        case Reduce(_, _, group, obs):
            sent = (*data.mail.get(group.name, ()), take(data, obs, QuantObservation))
            return replace(data, mail={**data.mail, group.name: sent})
        case Wait(_, _, group, into):
            return _put(data, into, merge_observations(data.mail[group.name]))
        case SaveState(_, cells, into):
            states = {cell: data.states[cell] for cell in cells if cell in data.states}
            return _put(data, into, SavedData(states=MappingProxyType(states), queues=data.queues))
        case Restart(_, keep):
            return Data(slots={name: data.slots[name] for name in keep})
        case LoadState(_, source, parts):
            return _loaded(data, take(data, source, SavedData), parts, env)
        case Allocate(_, like, names):
            return replace(data, slots={**data.slots, **dict.fromkeys(names, _unwritten(like, env))})
        case Optimize():
            return data
        case _:
            raise AssertionError(f"{type(event).__name__} is an event that data_step does not know")


def holding(x: F32, content: Content) -> F32:
    """``x`` [R, ...] as its content says: zeros where no tokens came, one Inf a replica where it is not finite."""
    match content:
        case Content.NORMAL:
            return x
        case Content.EMPTY:
            return frozen(np.zeros_like(x))
        case Content.NONFINITE:
            poisoned = x.copy()
            poisoned.reshape(x.shape[0], -1)[:, 0] = np.inf
            return frozen(poisoned)


def _cast(x: F32, snapshot: QuantSnapshot, op: OpId, mode: Mode, env: Env) -> F32 | QuantizedTensor:
    """The codes of ``x`` in a context; ``x`` itself where low precision is off."""
    if not mode.enabled:
        return x
    if mode.fmt:
        snapshot = replace(snapshot, fmt=get_format(mode.fmt))
    streams = env.words(op, mode.bits)
    return quantize_with_snapshot(x, snapshot, backend=env.backend, policy=env.policy, streams=streams)


def _advanced(data: Data, live: QuantState, obs: tuple[Slot, ...], fold: Fold, env: Env) -> QuantState:
    """The successor of ``live``, by the rules of this commit."""
    recipe = _by_rules(env.recipe, fold)
    return recipe.advance(live, recipe.merge([take(data, name, QuantObservation) for name in obs]))


@lru_cache(maxsize=256)
def _by_rules(recipe: Recipe, fold: Fold) -> Recipe:
    """``recipe`` with the rules of one commit in place of its own."""
    clip = fold.amount if fold.merge is MergeRule.CLIP else None
    decay = fold.amount if fold.merge is MergeRule.DECAY else None
    return replace(
        recipe, merge_rule=fold.merge, zero_rule=fold.zero, nonfinite_rule=fold.nonfinite, amax_bound=clip, decay=decay
    )


def _loaded(data: Data, saved: SavedData, parts: Iterable[str], env: Env) -> Data:
    states = dict(data.states)
    for cell, state in saved.states.items():
        live = _state(data, cell, env)
        taken = state if "state" in parts else live
        states[cell] = replace(taken, descale=(state if "descale" in parts else live).descale)
    return replace(data, states=states, queues=saved.queues if "queues" in parts else data.queues)


def _unwritten(like: OpId, env: Env) -> QuantizedTensor:
    x, fmt = env.load(like), env.recipe.fmt_of(like)
    cell = StateKey(like.layer_id, like.site, like.role_id)
    return QuantizedTensor(
        codes=env.backend.put(frozen(np.full(x.shape, UNWRITTEN & (fmt.code_count - 1), np.uint8))),
        scales=None,
        layout=Layout.ONE_PER_BYTE,
        shape=x.shape,
        snapshot=freeze(env.recipe.initial(cell, env.lead), op=like, recipe=env.recipe, observation=None),
        amax=frozen(np.zeros(env.lead, np.float32)),
        counts=None,
    )


def _decoded(data: Data, operand: Operand, env: Env) -> F32:
    if operand.descale is None:
        return take(data, operand.codes, env.tensors)
    center = None if operand.center is None else metadata(data, operand.center)
    codes = data.slots[operand.codes]
    if isinstance(codes, env.tensors):
        return codes  # low precision was off when it was made
    codes = take(data, operand.codes, QuantizedTensor)
    return env.decode(codes, metadata(data, operand.descale), center)


def take(data: Data, name: Slot, kind: type[T]) -> T:
    """The value in a slot, which must be of this kind; CaseError otherwise."""
    value = data.slots[name]
    if not isinstance(value, kind):
        raise CaseError(f"slot {name} holds a {type(value).__name__}; this event needs a {kind.__name__}")
    return value


def metadata(data: Data, name: Slot) -> Metadata:
    """The snapshot or fetched state in a slot; CaseError for anything else."""
    value = data.slots[name]
    if not isinstance(value, (QuantSnapshot, QuantState)):
        raise CaseError(f"slot {name} holds a {type(value).__name__}; a decode needs a snapshot or a state")
    return value


def _put(data: Data, name: Slot, value: Value) -> Data:
    return replace(data, slots={**data.slots, name: value})


def _set(data: Data, cell: StateKey, state: QuantState) -> Data:
    return replace(data, states={**data.states, cell: state})
