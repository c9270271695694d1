"""The data half of a world: tensors, snapshots and live states by name. Follows events; decides nothing.

``apply`` moves it by one event, in place; ``data_step`` is the same on a copy. Values are frozen and shared between
worlds. Whatever metadata a consumer names is what its operand is decoded with, so an unpaired decode needs no special
case here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from qsim.arrays import F32, frozen
from qsim.errors import CaseError
from qsim.formats import get_format
from qsim.quant import (
    ANY,
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
from qsim.quant.operations import freeze, observation_of_cast, quantize_and_decode
from qsim.sim.control import entry_of
from qsim.sim.env import Env, Metadata
from qsim.sim.events import (
    Allocate,
    Begin,
    Commit,
    Compute,
    Consume,
    Content,
    Drop,
    Event,
    Fetch,
    Fold,
    Load,
    LoadState,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedData:
    """What a save wrote down: states by cell, queues by name."""

    states: Mapping[StateKey, QuantState]
    queues: Mapping[str, tuple[tuple[OpId, Any], ...]]


Value = F32 | Metadata | QuantObservation | QuantizedTensor | SavedData
"""What a slot holds. What a node returns besides arrays is the node's own affair."""
UNWRITTEN = 0xFF
"""The byte of a buffer of codes that nothing was written to, as sanitizers fill memory: NaN in the 8-bit formats, the
most negative number in those without NaN."""


class Data:
    """states: live states by owner (absent: initial). slots: values by name. queues: stashed values, oldest first.
    mail: observations handed in to reductions, and how many ranks have taken what they make.

    decoded, cast: by slot of codes what they were last decoded to, and with which metadata; the newest cast with its
    tensor and snapshot. Both are no part of the state: they save a second look at the same arrays.
    """

    __slots__ = ("cast", "decoded", "mail", "queues", "slots", "states")

    def __init__(self) -> None:
        """Nothing anywhere."""
        self.states: dict[StateKey, QuantState] = {}
        self.slots: dict[Slot, Any] = {}
        self.queues: dict[str, tuple[tuple[OpId, Any], ...]] = {}
        self.mail: dict[str, tuple[tuple[QuantObservation, ...], int]] = {}
        self.decoded: dict[Slot, tuple[QuantizedTensor, Metadata, Metadata | None, F32]] = {}
        self.cast: tuple[F32, QuantSnapshot, QuantizedTensor] | None = None

    def copy(self) -> Data:
        """Another one in the same state; all that they share is immutable."""
        made = Data()
        made.states, made.slots = self.states.copy(), self.slots.copy()
        made.queues, made.mail = self.queues.copy(), self.mail.copy()
        made.decoded, made.cast = self.decoded.copy(), self.cast
        return made

    def state(self, cell: StateKey, env: Env, op: OpId | None = None) -> QuantState:
        """The live state of a cell; the initial one where nothing was committed. op: whose recipe says so, where roles
        share the cell."""
        live = self.states.get(cell)
        if live is not None:
            return live
        role = cell.role_id if cell.role_id != ANY or op is None else op.role_id
        return env.recipe_of(role).initial(cell, env.lead)


def data_step(data: Data, event: Event, env: Env) -> Data:
    """The data after ``event``; the old one stays as it was."""
    after = data.copy()
    apply(after, event, env)
    return after


def apply(data: Data, event: Event, env: Env) -> None:
    """Move ``data`` by one event, in place. CaseError where it reads an empty slot, or a value of another kind."""
    _APPLY[type(event)](data, event, env)


def _load(d: Data, e: Load, env: Env) -> None:
    d.slots[e.out] = env.backend.put(holding(env.load(e.key), e.content))


def _compute(d: Data, e: Compute, env: Env) -> None:
    made = env.nodes[e.node](e.at, *[d.slots[name] for name in e.ins])
    assert len(made) == len(e.outs), f"node {e.node} made {len(made)} values for {len(e.outs)} slots"
    for name, value in zip(e.outs, made, strict=True):
        d.slots[name] = frozen(value)


def _begin(d: Data, e: Begin, env: Env) -> None:
    seen = None if e.obs is None else take(d, e.obs, QuantObservation)
    live = d.state(e.cell, env, e.op)
    d.slots[e.into] = freeze(live, op=e.op, recipe=env.recipe_of(e.op.role_id), observation=seen)


def _quantize(d: Data, e: Quantize, env: Env) -> None:
    x, snapshot = take(d, e.src, env.tensors), take(d, e.by, QuantSnapshot)
    if not e.mode.enabled:
        d.slots[e.out] = x
        return
    if e.mode.fmt:
        snapshot = replace(snapshot, fmt=get_format(e.mode.fmt))
    streams = env.words(e.op, e.mode.bits)
    if env.ahead:
        made, values = quantize_and_decode(x, snapshot, backend=env.backend, policy=env.policy, streams=streams)
        d.decoded[e.out] = made, snapshot, snapshot if snapshot.center is not None else None, values
    else:
        made = quantize_with_snapshot(x, snapshot, backend=env.backend, policy=env.policy, streams=streams)
    d.slots[e.out] = made
    d.cast = x, snapshot, made


def _observe(d: Data, e: Observe, env: Env) -> None:
    x, recipe = take(d, e.src, env.tensors), env.recipe_of(e.op.role_id)
    snapshot = None if e.by is None else take(d, e.by, QuantSnapshot)
    if d.cast is not None and d.cast[0] is x and d.cast[1] is snapshot:
        seen = observation_of_cast(d.cast[2], recipe=recipe, op=e.op)  # equal in every bit to a look at the tensor
        if seen is not None:
            d.slots[e.into] = seen
            return
    d.slots[e.into] = observe_for_future_state(
        x, snapshot=snapshot, recipe=recipe, backend=env.backend, op=e.op, lead=len(env.lead)
    )


def _commit(d: Data, e: Commit, env: Env) -> None:
    d.states[e.cell] = _advanced(d, d.state(e.cell, env, e.op), e, env)


def _fetch(d: Data, e: Fetch, env: Env) -> None:
    d.slots[e.into] = d.state(e.cell, env, e.op)


def _store(d: Data, e: Store, env: Env) -> None:
    new, live = _advanced(d, take(d, e.base, QuantState), e, env), d.state(e.cell, env, e.op)
    if e.part is Part.SCALE:
        new = replace(new, descale=live.descale)
    elif e.part is Part.DESCALE:
        new = replace(live, descale=new.descale)
    d.states[e.cell] = new


def _consume(d: Data, e: Consume, env: Env) -> None:
    left, right = e.operands
    d.slots[e.out] = env.gemm(e.gemm, _decoded(d, left, env), _decoded(d, right, env))


def _drop(d: Data, e: Drop, env: Env) -> None:
    for name in e.slots:
        d.slots.pop(name, None)
        d.decoded.pop(name, None)


def _stash(d: Data, e: Stash, env: Env) -> None:
    d.queues[e.queue] = (*d.queues.get(e.queue, ()), (e.op, d.slots[e.slot]))


def _restore(d: Data, e: Restore, env: Env) -> None:
    entries = d.queues.get(e.queue, ())
    at = entry_of([key for key, _ in entries], e.op, e.take)
    if at < 0:
        recipe = env.recipe_of(e.op.role_id)
        d.slots[e.into] = freeze(d.state(e.cell, env, e.op), op=e.op, recipe=recipe, observation=None)
    else:
        d.slots[e.into] = entries[at][1]
        d.queues[e.queue] = entries[:at] + entries[at + 1 :]


def _reduce(d: Data, e: Reduce, env: Env) -> None:
    sent, served = d.mail.get(e.group.name, ((), 0))
    d.mail[e.group.name] = (*sent, take(d, e.obs, QuantObservation)), served


def _wait(d: Data, e: Wait, env: Env) -> None:
    sent, served = d.mail[e.group.name]
    d.slots[e.into] = merge_observations(sent)
    if served + 1 >= e.group.size:
        del d.mail[e.group.name]
    else:
        d.mail[e.group.name] = sent, served + 1


def _optimize(d: Data, e: Optimize, env: Env) -> None:
    """Weights are loaded by key, or moved by a node: there is nothing to do here."""


def _save_state(d: Data, e: SaveState, env: Env) -> None:
    states = {cell: d.states[cell] for cell in e.cells if cell in d.states}
    d.slots[e.into] = SavedData(states=MappingProxyType(states), queues=MappingProxyType(d.queues.copy()))


def _restart(d: Data, e: Restart, env: Env) -> None:
    d.slots = {name: d.slots[name] for name in e.keep}
    d.states, d.queues, d.mail, d.decoded, d.cast = {}, {}, {}, {}, None


def _load_state(d: Data, e: LoadState, env: Env) -> None:
    _read_back(d, take(d, e.source, SavedData), e.parts, env)


def _allocate(d: Data, e: Allocate, env: Env) -> None:
    d.slots.update(dict.fromkeys(e.slots, _unwritten(e.like, env)))


_APPLY: dict[type, Callable[[Data, Any, Env], None]] = {
    Load: _load,
    Compute: _compute,
    Begin: _begin,
    Quantize: _quantize,
    Observe: _observe,
    Commit: _commit,
    Fetch: _fetch,
    Store: _store,
    Consume: _consume,
    Drop: _drop,
    Stash: _stash,
    Restore: _restore,
    Reduce: _reduce,
    Wait: _wait,
    Optimize: _optimize,
    SaveState: _save_state,
    Restart: _restart,
    LoadState: _load_state,
    Allocate: _allocate,
}


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


def _advanced(data: Data, live: QuantState, event: Commit | Store, env: Env) -> QuantState:
    """The successor of ``live``, by the rules of this commit."""
    recipe, fold = env.recipe_of(event.op.role_id), event.fold
    own = recipe.merge_rule is fold.merge and recipe.zero_rule is fold.zero and fold.amount is None
    if not (own and recipe.nonfinite_rule is fold.nonfinite):
        recipe = _by_rules(recipe, fold)
    return recipe.advance(live, recipe.merge([take(data, name, QuantObservation) for name in event.obs]))


@lru_cache(maxsize=256)
def _by_rules(recipe: Recipe, fold: Fold) -> Recipe:
    """``recipe`` with the rules of one commit in place of its own."""
    clip = fold.amount if fold.merge is MergeRule.CLIP else None
    decay = fold.amount if fold.merge is MergeRule.DECAY else None
    return replace(
        recipe, merge_rule=fold.merge, zero_rule=fold.zero, nonfinite_rule=fold.nonfinite, amax_bound=clip, decay=decay
    )


def _read_back(data: Data, saved: SavedData, parts: Iterable[str], env: Env) -> None:
    for cell, state in saved.states.items():
        live = data.state(cell, env)
        taken = state if "state" in parts else live
        data.states[cell] = replace(taken, descale=(state if "descale" in parts else live).descale)
    if "queues" in parts:
        data.queues = dict(saved.queues)


def _unwritten(like: OpId, env: Env) -> QuantizedTensor:
    recipe = env.recipe_of(like.role_id)
    x, fmt = env.load(like), recipe.fmt_of(like)
    cell = StateKey(like.layer_id, like.site, like.role_id)
    return QuantizedTensor(
        codes=env.backend.put(frozen(np.full(x.shape, UNWRITTEN & (fmt.code_count - 1), np.uint8))),
        scales=None,
        layout=Layout.ONE_PER_BYTE,
        shape=x.shape,
        snapshot=freeze(recipe.initial(cell, env.lead), op=like, recipe=recipe, observation=None),
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
    codes, descale = take(data, operand.codes, QuantizedTensor), metadata(data, operand.descale)
    held = data.decoded.get(operand.codes)
    if held is not None and held[0] is codes and held[1] is descale and held[2] is center:
        return held[3]
    out = env.decode(codes, descale, center)
    data.decoded[operand.codes] = codes, descale, center, out
    return out


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
