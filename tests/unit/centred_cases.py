"""One life of a tensor under a centred recipe, which the tests of centred recipes share."""

from __future__ import annotations

from typing import NamedTuple

from qsim.arrays import F32
from qsim.backends import Backend
from qsim.backends.numba_backend import NumbaBackend
from qsim.quant import (
    OpId,
    QuantizedTensor,
    QuantObservation,
    QuantSnapshot,
    QuantState,
    Recipe,
    StateKey,
    Timing,
    begin_logical_quantization,
    commit_quant_observation,
    decode_for_consumer,
    observe_for_future_state,
    quantize_with_snapshot,
)

NUMBA = NumbaBackend()
OWNER = StateKey(0, 0, 0)


class Life(NamedTuple):
    """What came out of one step."""

    snapshot: QuantSnapshot
    codes: QuantizedTensor
    decoded: F32
    after: QuantState


def observed(recipe: Recipe, live: QuantState, x: F32, op: OpId, backend: Backend = NUMBA) -> QuantObservation:
    """What the recipe wants to know of ``x`` before the commit: under the snapshot, or before there is one."""
    here = {"recipe": recipe, "backend": backend, "op": op}
    if recipe.timing is Timing.CURRENT:
        held = live if recipe.observes_live_center else None
        return observe_for_future_state(x, snapshot=None, lead=live.scale.ndim, live=held, **here)
    return observe_for_future_state(x, snapshot=begin_logical_quantization(live, op=op, recipe=recipe), **here)


def step(recipe: Recipe, live: QuantState, x: F32, n: int, backend: Backend = NUMBA) -> Life:
    """Observe, begin, quantize, decode, commit of logical step ``n``."""
    op = OpId(n)
    seen = observed(recipe, live, x, op, backend)
    early = seen if recipe.timing is Timing.CURRENT else None
    snapshot = begin_logical_quantization(live, op=op, recipe=recipe, observation=early)
    codes = quantize_with_snapshot(x, snapshot, backend=backend)
    decoded = decode_for_consumer(codes, op=op, backend=backend)
    return Life(snapshot, codes, decoded, commit_quant_observation(live, seen, recipe=recipe))
