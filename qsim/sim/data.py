"""The data half of a world: tensors, snapshots and live states by name. Follows events; decides nothing.

Values are frozen and shared between worlds. Whatever metadata a consumer names is what its operand is decoded
with, so an unpaired decode needs no special case here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from qsim.arrays import F32, AnyArray, frozen
from qsim.backends.protocol import Backend, CastSpec
from qsim.errors import CaseError, UsageError
from qsim.formats import CastPolicy
from qsim.quant import (
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
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    Load,
    Observe,
    Operand,
    Quantize,
    Slot,
    Store,
)

T = TypeVar("T")
Metadata = QuantSnapshot | QuantState
Value = F32 | Metadata | QuantObservation | QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """What events need from outside: tensors by key, a backend, a recipe, a cast policy, the replica axes.

    lead: (R,), the replicas; R = 1 is the single case. reproducible: products are exact sums rounded once; False
    takes the plain float32 BLAS product, whose bits depend on the machine. Holds no state.
    """

    load: Callable[[OpId], F32]
    backend: Backend
    recipe: Recipe
    policy: CastPolicy
    lead: tuple[int]
    reproducible: bool = True

    def __post_init__(self) -> None:
        if len(self.lead) != 1 or self.lead[0] < 1:
            raise UsageError(f"lead {self.lead} is no replica axis; the simulator runs [R, ...] with lead=(R,), R >= 1")
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


class Data(NamedTuple):
    """Live states by owner, values by slot."""

    states: Mapping[StateKey, QuantState]
    slots: Mapping[Slot, Value]


def _state(data: Data, cell: StateKey, env: Env) -> QuantState:
    live = data.states.get(cell)
    return env.recipe.initial(cell, env.lead) if live is None else live


def data_step(data: Data, event: Event, env: Env) -> Data:
    """The data after ``event``."""
    slots = data.slots
    match event:
        case Load(_, key, out):
            return _put(data, out, env.backend.put(env.load(key)))
        case Begin(_, op, cell, into, obs):
            seen = None if obs is None else take(data, obs, QuantObservation)
            return _put(data, into, freeze(_state(data, cell, env), op=op, recipe=env.recipe, observation=seen))
        case Quantize(_, _, src, by, out):
            tensor = quantize_with_snapshot(
                take(data, src, env.tensors),
                take(data, by, QuantSnapshot),
                backend=env.backend,
                policy=env.policy,
            )
            return _put(data, out, tensor)
        case Observe(_, op, src, by, into):
            snapshot = None if by is None else take(data, by, QuantSnapshot)
            seen = observe_for_future_state(
                take(data, src, env.tensors),
                snapshot=snapshot,
                recipe=env.recipe,
                backend=env.backend,
                op=op,
                lead=len(env.lead),
            )
            return _put(data, into, seen)
        case Commit(_, _, cell, obs):
            merged = merge_observations([take(data, name, QuantObservation) for name in obs])
            return _set(data, cell, env.recipe.advance(_state(data, cell, env), merged))
        case Fetch(_, _, cell, into):
            return _put(data, into, _state(data, cell, env))
        case Store(_, _, cell, base, obs):
            merged = merge_observations([take(data, name, QuantObservation) for name in obs])
            return _set(data, cell, env.recipe.advance(take(data, base, QuantState), merged))
        case Consume(_, _, gemm, (left, right), out):
            return _put(data, out, env.gemm(gemm, _decoded(data, left, env), _decoded(data, right, env)))
        case Drop(_, gone):
            return Data(data.states, {name: value for name, value in slots.items() if name not in gone})


def _decoded(data: Data, operand: Operand, env: Env) -> F32:
    if operand.descale is None:
        return take(data, operand.codes, env.tensors)
    center = None if operand.center is None else metadata(data, operand.center)
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
    return Data(data.states, {**data.slots, name: value})


def _set(data: Data, cell: StateKey, state: QuantState) -> Data:
    return Data({**data.states, cell: state}, data.slots)
