"""The four operations of a stateful quantizer, and the consumer's check. Each fails closed.

begin freezes what an operation encodes with; quantize encodes and changes nothing; observe looks and changes
nothing; commit returns the next state. Recompute calls quantize alone, with the forward's snapshot. There is
no flag for recompute here: what is absent cannot be forgotten.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NoReturn

import numpy as np

from qsim.arrays import F32, I64, frozen
from qsim.backends.protocol import Backend, Cast, CastCounts, CastSpec, Sums
from qsim.errors import ProtocolViolation, UsageError
from qsim.formats import POLICIES, CastPolicy
from qsim.philox import RandomStream
from qsim.quant.identity import OpId, StateKey
from qsim.quant.recipes import Recipe
from qsim.quant.residual_blocks import cast_blocks, decode_blocks
from qsim.quant.state import (
    Layout,
    Metadata,
    QuantizedTensor,
    QuantObservation,
    QuantSnapshot,
    QuantState,
    center_over,
    frozen_arrays,
    spread,
)

DEFAULT_POLICY = POLICIES["ocp"]
_FLOAT32 = np.dtype(np.float32)


def _refuse(what: str, *, owner: StateKey, op: OpId, epoch: int, mend: str) -> NoReturn:
    raise ProtocolViolation(f"{what}: owner {owner}, {op}, epoch {epoch}; {mend}")


def _is_reentry(live: QuantState, op: OpId) -> bool:
    """True where ``op`` is not newer than what its owner committed last (same layer, site, role and worker).

    Newer is a later step, microbatch or visit. An owner that serves several layers or sites is only as guarded
    as its last commit: what it committed before that is judged by the trace rules.
    """
    last = live.last_commit
    return last is not None and last[2:6] == op[2:6] and (*op[:2], op.visit) <= (*last[:2], last.visit)


def freeze(live: QuantState, *, op: OpId, recipe: Recipe, observation: QuantObservation | None) -> QuantSnapshot:
    """The snapshot of ``live`` for ``op``, unguarded: what a simulator of defects calls."""
    source = recipe.begin(live, observation, op=op)
    return QuantSnapshot(
        owner=live.owner,
        op=op,
        epoch=live.epoch,
        scale=source.scale,
        descale=source.descale,
        center=source.center,
        fmt=recipe.fmt_of(op),
        center_seen=source.center_seen,
        center_block=source.center_block,
        elements=recipe.block_recipe,
    )


def begin_logical_quantization(
    live: QuantState, *, op: OpId, recipe: Recipe, observation: QuantObservation | None = None
) -> QuantSnapshot:
    """Freeze the metadata that ``op`` and all its consumers use, in forward and in recompute.

    A scale or centre of the tensor in hand (a first one, where the recipe's initial_rule says so) requires the
    observation of this very op; otherwise delayed scaling refuses one.
    Raises ProtocolViolation where the state is another owner's, where ``op`` was committed already (a re-entry
    must use the forward's snapshot), or where the observation is about a centre that is not in force.
    """
    if not live.owner.owns(op):
        _refuse(
            "begin on another owner's state", owner=live.owner, op=op, epoch=live.epoch,
            mend="give each owner its own state",
        )  # fmt: skip
    if _is_reentry(live, op):
        _refuse(
            "begin after commit", owner=live.owner, op=op, epoch=live.epoch,
            mend="a recompute quantizes with the forward's snapshot and begins nothing",
        )  # fmt: skip
    if recipe.needs_observation(live) != (observation is not None):
        need = "needs the observation of this tensor" if observation is None else "takes no observation at begin"
        raise UsageError(
            f"recipe {recipe.name} {need}: owner {live.owner}, {op}, epoch {live.epoch} "
            f"(initial_rule {recipe.initial_rule.name})"
        )
    if observation is not None and observation.op != op:
        _refuse(
            f"begin with the observation of {observation.op}", owner=live.owner, op=op, epoch=live.epoch,
            mend="observe the tensor that is quantized",
        )  # fmt: skip
    if observation is not None and recipe.observes_live_center and observation.about != live.epoch:
        _refuse(
            f"begin with an observation about the centre of epoch {observation.about}",
            owner=live.owner, op=op, epoch=live.epoch, mend="observe with live=, the state that begins",
        )  # fmt: skip
    return freeze(live, op=op, recipe=recipe, observation=observation)


def quantize_with_snapshot(
    x: F32,
    snapshot: QuantSnapshot,
    *,
    backend: Backend,
    policy: CastPolicy = DEFAULT_POLICY,
    streams: tuple[RandomStream, ...] = (),
) -> QuantizedTensor:
    """Encode x float32 [lead + rest] with a frozen snapshot; reads no live state.

    y = RN(RN(x - center) * scale), then encode (ties to even unless the policy says otherwise). With ``elements`` in
    the snapshot, RN(x - center) of each replica is cast as a matrix by that block recipe. streams: the words of
    stochastic rounding, as in CastSpec.
    """
    center = _fitting_center(x, snapshot, snapshot.op)
    if snapshot.elements is not None:
        return cast_blocks(x, snapshot, snapshot.elements, center=center, backend=backend, policy=policy)
    cast = backend.quantize(x, snapshot.scale, center, CastSpec(fmt=snapshot.fmt, policy=policy, streams=streams))
    return _paired(cast, x.shape, snapshot)


def quantize_and_decode(
    x: F32,
    snapshot: QuantSnapshot,
    *,
    backend: Backend,
    policy: CastPolicy = DEFAULT_POLICY,
    streams: tuple[RandomStream, ...] = (),
) -> tuple[QuantizedTensor, F32]:
    """``quantize_with_snapshot``, and what its codes decode to with the same snapshot: float32, read-only.

    For a consumer that is known beforehand to decode with the tensor's own metadata: one pass in place of two.
    """
    center = _fitting_center(x, snapshot, snapshot.op)
    if snapshot.elements is not None:
        tensor = quantize_with_snapshot(x, snapshot, backend=backend, policy=policy, streams=streams)
        return tensor, frozen(decode_for_consumer(tensor, op=snapshot.op, backend=backend, policy=policy))
    spec = CastSpec(fmt=snapshot.fmt, policy=policy, streams=streams)
    cast, values = backend.quantize_and_decode(x, snapshot.scale, snapshot.descale, center, spec)
    return _paired(cast, x.shape, snapshot), frozen(values)


def _paired(cast: Cast, shape: tuple[int, ...], snapshot: QuantSnapshot) -> QuantizedTensor:
    return QuantizedTensor(
        codes=frozen(cast.codes),
        scales=None,
        layout=Layout.ONE_PER_BYTE,
        shape=shape,
        snapshot=snapshot,
        amax=frozen(cast.amax),
        counts=frozen_arrays(cast.counts),
    )


def observe_for_future_state(
    x: F32,
    *,
    snapshot: QuantSnapshot | None,
    recipe: Recipe,
    backend: Backend,
    op: OpId | None = None,
    lead: int = 0,
    live: QuantState | None = None,
) -> QuantObservation:
    """What ``x`` says about scales and centres to come; changes nothing.

    amax is of the residual under the snapshot's centre, or under the centre that follows from x, as the recipe says.
    What begin needs of the tensor in hand is observed before a snapshot exists: pass None and name ``op`` and the
    replica axes ``lead``, or ``live``, the state that begins, where the scale is of the residual about its centre.
    """
    held: Metadata | None = live if snapshot is None else snapshot
    if held is not None:
        op, lead = op or (None if snapshot is None else snapshot.op), held.scale.ndim
    if op is None:
        raise UsageError("observe_for_future_state without a snapshot needs op=")
    if held is None and recipe.observes_live_center:
        raise UsageError(
            f"recipe {recipe.name} scales by the residual about a centre of earlier tensors: owner unknown, {op}; "
            "pass live=, the state that begins"
        )
    if live is not None and not live.owner.owns(op):
        _refuse(
            "observe about another owner's centre", owner=live.owner, op=op, epoch=live.epoch,
            mend="observe with live=, the state that begins",
        )  # fmt: skip
    unmade = snapshot is None and recipe.observes_next_center  # the centre in force is not the one held
    center = None if held is None or unmade else _fitting_center(x, held, op)
    sums: Sums | None
    if recipe.observes_next_center:
        sums = _sums_of(x, recipe, lead, backend)
        after = recipe.center_after(held, sums)
        seen = backend.observe(x, spread(after, recipe.center_block, _columns(x.shape)), lead=lead, mean_axes=None)
    elif recipe.center_block:
        sums = _sums_of(x, recipe, lead, backend)
        seen = backend.observe(x, center, lead=lead, mean_axes=None)
    else:
        seen = backend.observe(x, center, lead=lead, mean_axes=recipe.mean_axes(x.ndim, lead))
        sums = seen.sums
    about = None if held is None or recipe.observes_next_center or not recipe.centred else held.epoch
    return QuantObservation(
        op=op,
        amax=frozen(seen.amax),
        mean=None if sums is None else frozen_arrays(sums),
        count=_elements(x.shape, lead),
        nan_count=frozen(seen.nan_count),
        inf_count=frozen(seen.inf_count),
        about=about,
    )


@lru_cache(maxsize=256)
def _elements(shape: tuple[int, ...], lead: int) -> I64:
    """How many elements every replica of a tensor has, int64 [lead]."""
    return frozen(np.full(shape[:lead], math.prod(shape[lead:]), np.int64))


def observation_of_cast(tensor: QuantizedTensor, *, recipe: Recipe, op: OpId | None = None) -> QuantObservation | None:
    """What ``observe_for_future_state`` finds about the cast's own snapshot, from what the cast saw; reads no tensor.

    The amax of a cast is of the residual under its snapshot's centre, and its counts of NaN and Inf are of the tensor.
    That is all where the recipe observes about this centre and asks for no mean. None where it asks for more, as every
    centred recipe does, and for a cast without snapshot, without counts, or with block scales.
    """
    snapshot, counts = tensor.snapshot, tensor.counts
    if snapshot is None or tensor.recipe is not None or not isinstance(counts, CastCounts):
        return None
    lead = snapshot.scale.ndim
    if recipe.observes_next_center or recipe.mean_axes(len(tensor.shape), lead) is not None:
        return None
    return QuantObservation(
        op=op or snapshot.op,
        amax=tensor.amax,
        mean=None,
        count=_elements(tensor.shape, lead),
        nan_count=counts.nan,
        inf_count=counts.inf,
        about=snapshot.epoch if recipe.centred else None,
    )


def commit_quant_observation(live: QuantState, observation: QuantObservation, *, recipe: Recipe) -> QuantState:
    """The next state: history rolled, scale, descale and centre renewed together, epoch + 1.

    Raises ProtocolViolation where the observation is another owner's, or where this op (or a later one of the
    same layer, site, role and worker) was the newest that the state has folded in. An owner that several of those
    share remembers one of them only: there the invariants of a trace find what this guard cannot.
    """
    op = observation.op
    if not live.owner.owns(op):
        _refuse(
            "commit of another owner's observation", owner=live.owner, op=op, epoch=live.epoch,
            mend="commit it to its own state",
        )  # fmt: skip
    if _is_reentry(live, op):
        _refuse(
            "second commit in one logical unit", owner=live.owner, op=op, epoch=live.epoch,
            mend="commit once per unit; a recompute commits nothing",
        )  # fmt: skip
    return recipe.advance(live, observation)


def decode_for_consumer(
    tensor: QuantizedTensor, *, op: OpId, backend: Backend, policy: CastPolicy = DEFAULT_POLICY
) -> F32:
    """Decode with the metadata that the codes are paired with, after proving that they belong to ``op``.

    The identity check of a consumer: step, microbatch, layer, site, role and worker must agree.
    """
    snapshot = tensor.snapshot
    if snapshot is None:
        raise UsageError(f"a plain cast has no snapshot to decode with ({op}); decode its codes with qsim.decode")
    if snapshot.op[:6] != op[:6]:
        _refuse(
            f"consumer of {op} given codes of {snapshot.op}", owner=snapshot.owner, op=op, epoch=snapshot.epoch,
            mend="consume the tensor that this operation quantized",
        )  # fmt: skip
    center = center_over(snapshot, _columns(tensor.shape))
    if tensor.recipe is not None:
        return decode_blocks(tensor, tensor.recipe, lead=snapshot.scale.shape, center=center, backend=backend)
    return backend.decode(tensor.codes, snapshot.descale, center, CastSpec(fmt=snapshot.fmt, policy=policy))


def _fitting_center(x: F32, held: Metadata, op: OpId) -> F32 | None:
    lead = held.scale.shape
    if x.dtype != _FLOAT32 or x.shape[: len(lead)] != lead:
        raise UsageError(f"tensor of {op} is {x.dtype}{list(x.shape)}; expected float32 with leading axes {list(lead)}")
    center = center_over(held, _columns(x.shape))
    if center is not None and not _broadcasts(center.shape, x.shape):
        raise UsageError(
            f"centre {list(center.shape)} of owner {held.owner} does not fit tensor {list(x.shape)} of {op}; make the "
            f"state with initial(..., rest_ndim={x.ndim - len(lead)}), and keep its channels (tokens, of a token or "
            "block centre)"
        )
    return center


def _columns(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _broadcasts(center: tuple[int, ...], x: tuple[int, ...]) -> bool:
    return len(center) == len(x) and all(c in (1, n) for c, n in zip(center, x, strict=True))


def _sums_of(x: F32, recipe: Recipe, lead: int, backend: Backend) -> Sums:
    """The sums that a centre is the mean of; of blocks, by folding the last axis, a short tail filled with NaN.

    Sums leave NaN out of total and count, so a tail block counts what is there.
    """
    axes, block = recipe.mean_axes(x.ndim, lead), recipe.center_block
    if not block:
        sums = backend.observe(x, None, lead=lead, mean_axes=axes).sums
        assert sums is not None, "mean_axes were given"
        return sums
    if x.ndim == lead:
        raise UsageError(f"a block centre of a tensor {list(x.shape)} with {lead} replica axes: it has no columns")
    grid = (*x.shape[:-1], -(-x.shape[-1] // block))
    padded = backend.xp.full((*grid[:-1], grid[-1] * block), np.nan, np.float32)
    padded[..., : x.shape[-1]] = backend.put(x)
    sums = backend.observe(padded.reshape(*grid, block), None, lead=lead, mean_axes=axes).sums
    assert sums is not None, "mean_axes were given"
    return Sums(total=sums.total.reshape(grid), exponent=sums.exponent.reshape(grid), count=sums.count.reshape(grid))
