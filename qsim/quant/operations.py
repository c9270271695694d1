"""The four operations of a stateful quantizer, and the consumer's check. Each fails closed.

begin freezes what an operation encodes with; quantize encodes and changes nothing; observe looks and changes
nothing; commit returns the next state. Recompute calls quantize alone, with the forward's snapshot. There is
no flag for recompute here: what is absent cannot be forgotten.
"""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from qsim.arrays import F32, frozen
from qsim.backends.protocol import Backend, CastSpec
from qsim.codec.means import mean_of
from qsim.errors import ProtocolViolation, UsageError
from qsim.formats import POLICIES, CastPolicy
from qsim.quant.identity import OpId, StateKey
from qsim.quant.recipes import Recipe, Timing
from qsim.quant.state import Layout, QuantizedTensor, QuantObservation, QuantSnapshot, QuantState, frozen_arrays

DEFAULT_POLICY = POLICIES["ocp"]


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
    source = recipe.begin(live, observation)
    return QuantSnapshot(
        owner=live.owner,
        op=op,
        epoch=live.epoch,
        scale=source.scale,
        descale=source.descale,
        center=source.center,
        fmt=recipe.fmt_of(op),
    )


def begin_logical_quantization(
    live: QuantState, *, op: OpId, recipe: Recipe, observation: QuantObservation | None = None
) -> QuantSnapshot:
    """Freeze the metadata that ``op`` and all its consumers use, in forward and in recompute.

    Current scaling requires the observation of this very op; delayed scaling refuses one. Raises
    ProtocolViolation where the state is another owner's, or where ``op`` was committed already (a re-entry
    must use the forward's snapshot).
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
    if (recipe.timing is Timing.CURRENT) != (observation is not None):
        need = "needs the observation of this tensor" if observation is None else "takes no observation at begin"
        raise UsageError(f"recipe {recipe.name} {need}: owner {live.owner}, {op}")
    if observation is not None and observation.op != op:
        _refuse(
            f"begin with the observation of {observation.op}", owner=live.owner, op=op, epoch=live.epoch,
            mend="observe the tensor that is quantized",
        )  # fmt: skip
    return freeze(live, op=op, recipe=recipe, observation=observation)


def quantize_with_snapshot(
    x: F32, snapshot: QuantSnapshot, *, backend: Backend, policy: CastPolicy = DEFAULT_POLICY
) -> QuantizedTensor:
    """Encode x float32 [lead + rest] with a frozen snapshot; reads no live state.

    y = RN(RN(x - center) * scale), then encode (ties to even unless the policy says otherwise).
    """
    _check_lead(x, snapshot)
    cast = backend.quantize(x, snapshot.scale, snapshot.center, CastSpec(fmt=snapshot.fmt, policy=policy))
    return QuantizedTensor(
        codes=frozen(cast.codes),
        scales=None,
        layout=Layout.ONE_PER_BYTE,
        shape=x.shape,
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
) -> QuantObservation:
    """What ``x`` says about scales to come; changes nothing.

    amax is of the residual under the snapshot's centre, or of x about its own mean, as the recipe says.
    Current scaling observes before its snapshot exists: pass None and name ``op`` and the replica axes ``lead``.
    """
    if snapshot is not None:
        _check_lead(x, snapshot)
        op, lead = op or snapshot.op, snapshot.scale.ndim
    if op is None:
        raise UsageError("observe_for_future_state without a snapshot needs op=")
    axes = recipe.mean_axes(x.ndim, lead)
    center = None if snapshot is None else snapshot.center
    if recipe.observes_own_mean:
        sums = backend.observe(x, None, lead=lead, mean_axes=axes).sums
        assert sums is not None, "mean_axes were given"
        seen = backend.observe(x, mean_of(sums), lead=lead, mean_axes=None)
    else:
        seen = backend.observe(x, center, lead=lead, mean_axes=axes)
        sums = seen.sums
    return QuantObservation(
        op=op,
        amax=frozen(seen.amax),
        mean=None if sums is None else frozen_arrays(sums),
        count=frozen(np.full(x.shape[:lead], math.prod(x.shape[lead:]), np.int64)),
        nan_count=frozen(seen.nan_count),
        inf_count=frozen(seen.inf_count),
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
    spec = CastSpec(fmt=snapshot.fmt, policy=policy)
    return backend.decode(tensor.codes, snapshot.descale, snapshot.center, spec)


def _check_lead(x: F32, snapshot: QuantSnapshot) -> None:
    lead = snapshot.scale.shape
    if x.dtype != np.float32 or x.shape[: len(lead)] != lead:
        raise UsageError(
            f"tensor of {snapshot.op} is {x.dtype}{list(x.shape)}; expected float32 with leading axes {list(lead)}"
        )
    center = snapshot.center
    if center is not None and not _broadcasts(center.shape, x.shape):
        raise UsageError(
            f"centre {list(center.shape)} of owner {snapshot.owner} does not fit tensor {list(x.shape)} of "
            f"{snapshot.op}; make the state with initial(..., rest_ndim={x.ndim - len(lead)}), and keep its channels"
        )


def _broadcasts(center: tuple[int, ...], x: tuple[int, ...]) -> bool:
    return len(center) == len(x) and all(c in (1, n) for c, n in zip(center, x, strict=True))
