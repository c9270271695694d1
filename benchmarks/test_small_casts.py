"""What one cast of a small tensor costs a training loop, against named peers in the same run: read medians as ratios.

Run with ``make bench``. At 32,768 elements a call is some microseconds of arithmetic, and as much of Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qsim.arrays import F32
from qsim.backends import Backend, get_backend
from qsim.formats import E4M3FN
from qsim.quant import (
    OpId,
    QuantizedTensor,
    QuantSnapshot,
    Recipe,
    StateKey,
    commit_quant_observation,
    decode_for_consumer,
    make_recipe,
    observation_of_cast,
    observe_for_future_state,
    quantize_and_decode,
    quantize_with_snapshot,
)
from qsim.quant.operations import freeze

CAST = "cast and decode float32 [1, 512, 64] as e4m3"
STATE = "observe and commit a tensor [1, 512, 64], window 16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A tensor, the snapshot that it is cast with, and the state that it is observed for."""

    x: F32
    snapshot: QuantSnapshot
    recipe: Recipe
    backend: Backend


@pytest.fixture(scope="module")
def small() -> Small:
    x = np.random.default_rng(0).standard_normal((1, 512, 64), np.float32)
    recipe, backend = make_recipe("delayed", fmt=E4M3FN, window=16), get_backend("numba")
    live = recipe.initial(StateKey(0, 0, 0), (1,))
    first = freeze(live, op=OpId(0), recipe=recipe, observation=None)
    seen = observe_for_future_state(x, snapshot=first, recipe=recipe, backend=backend)
    live = commit_quant_observation(live, seen, recipe=recipe)
    snapshot = freeze(live, op=OpId(1), recipe=recipe, observation=None)
    return Small(x=x, snapshot=snapshot, recipe=recipe, backend=backend)


def two_passes(small: Small) -> tuple[QuantizedTensor, F32]:
    tensor = quantize_with_snapshot(small.x, small.snapshot, backend=small.backend)
    return tensor, decode_for_consumer(tensor, op=small.snapshot.op, backend=small.backend)


@pytest.mark.benchmark(group=CAST)
def test_cast_then_decode(benchmark: Any, small: Small) -> None:
    _, values = benchmark(two_passes, small)
    assert np.abs(values - small.x).max() < 0.2  # half a unit of e4m3 at an amax of some 4


@pytest.mark.benchmark(group=CAST)
def test_cast_and_decode_in_one_pass(benchmark: Any, small: Small) -> None:
    tensor, values = benchmark(quantize_and_decode, small.x, small.snapshot, backend=small.backend)
    expected_tensor, expected = two_passes(small)
    assert expected_tensor.same_bits(tensor)
    assert expected.tobytes() == values.tobytes()


@pytest.mark.benchmark(group=CAST)
def test_peer_ml_dtypes_round_trip(benchmark: Any, small: Small) -> None:
    """Codes and values alone: no counts, no amax. Dividing by the scale is not its product with the descale."""

    def round_trip(x: F32, scale: np.float32) -> F32:
        values: F32 = (x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale
        return values

    values = benchmark(round_trip, small.x, small.snapshot.scale[0])
    assert np.allclose(two_passes(small)[1], values, rtol=1e-6)


@pytest.mark.benchmark(group=CAST)
def test_peer_copy(benchmark: Any, small: Small) -> None:
    assert benchmark(np.copy, small.x).any()


@pytest.mark.benchmark(group=STATE)
def test_observe_and_commit(benchmark: Any, small: Small) -> None:
    live = small.recipe.initial(StateKey(0, 0, 0), (1,))

    def advance() -> int:
        seen = observe_for_future_state(small.x, snapshot=small.snapshot, recipe=small.recipe, backend=small.backend)
        return commit_quant_observation(live, seen, recipe=small.recipe).epoch

    assert benchmark(advance) == 1


@pytest.mark.benchmark(group=STATE)
def test_commit_what_the_cast_saw(benchmark: Any, small: Small) -> None:
    live, tensor = small.recipe.initial(StateKey(0, 0, 0), (1,)), two_passes(small)[0]

    def advance() -> int:
        seen = observation_of_cast(tensor, recipe=small.recipe)
        assert seen is not None
        return commit_quant_observation(live, seen, recipe=small.recipe).epoch

    assert benchmark(advance) == 1


@pytest.mark.benchmark(group=STATE)
def test_peer_numpy_amax_and_one_scale(benchmark: Any, small: Small) -> None:
    """The largest magnitude and a quotient: no window, no rule, no state."""

    def advance(x: F32) -> F32:
        scale: F32 = np.float32(448) / np.abs(x).max(axis=(1, 2))
        return scale

    assert benchmark(advance, small.x)[0] > 0
