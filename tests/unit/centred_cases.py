"""One life of a tensor under a centred recipe, which the tests of centred recipes share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qsim.arrays import F32
from qsim.backends import Backend
from qsim.backends.numba_backend import NumbaBackend
from qsim.formats import E4M3FN
from qsim.quant import (
    CenterAxis,
    CenterSource,
    CentredDelayedScaling,
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


def f32(*values):
    return np.array(values, np.float32)


def recipe_of(**options):
    return CentredDelayedScaling(**({"fmt": E4M3FN, "axis": CenterAxis.CHANNEL, "block": 2} | options))


def ema(**options):
    return recipe_of(source=CenterSource.EMA, **options)


def centers(recipe, tensors):
    """The centre after each commit."""
    live, out = recipe.initial(OWNER, (), tensors[0].ndim), []
    for n, x in enumerate(tensors):
        live = step(recipe, live, x, n)[3]
        out.append(live.center.tolist())
    return out
