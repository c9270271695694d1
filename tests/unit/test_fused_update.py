"""AdamW in one pass: the bits of the array formula over steps, with clipping, decay, odd sizes and skipped replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qsim.arrays import F32, AnyArray
from qsim.backends import get_backend
from qsim.backends.fused import FusedNodes
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError
from qsim.nn import Arithmetic, Hyper, initial_state, update

FORMULA = Arithmetic(backend=get_backend("oracle"))
FUSED = Arithmetic(backend=get_backend("numba"))
SHAPES = {
    "one": (1, 1),
    "gain": (5,),
    "up": (5, 17),
    "bias": (16,),
    "table": (3, 11),
    "wide": (33, 64),
    "cube": (2, 3, 5),
}
HYPERS = (
    Hyper(lr=2.0**-4),
    Hyper(lr=0.01, clip=0.5, weight_decay=0.1, warmup=3, dynamic=True),
    Hyper(lr=0.003, clip=1e6, weight_decay=0.1, beta1=0.0, eps=0.0),
)


def tensors(seed: int, replicas: int) -> dict[str, F32]:
    rng = np.random.default_rng(seed)
    made: dict[str, F32] = {}
    for name, shape in SHAPES.items():
        x = rng.normal(size=(3, *shape)) * np.exp2(rng.integers(-60, 8, (3, *shape)))
        x[rng.random(x.shape) < 0.1] = 0
        made[name] = x.astype(np.float32)[:replicas]
    return made


def trained(A: Arithmetic, hyper: Hyper, replicas: int) -> list[Mapping[str, AnyArray]]:
    """Parameters, moments and norms after every step; the last replica's third gradient is not finite.

    The loss scale is no power of two, so that unscaling rounds.
    """
    params: Mapping[str, Any] = tensors(0, replicas)
    state = initial_state(A, hyper, params, 1000.0)
    seen: list[Mapping[str, AnyArray]] = []
    for step in range(5):
        grads = tensors(1 + step, replicas)
        if step == 2 and replicas == 3:
            grads["up"][2, 1, 3], grads["gain"][2, 1] = np.inf, np.nan
        params, state, report = update(A, hyper, params, grads, state, True)
        seen += [dict(params), dict(state.m), dict(state.v), dict(report.norms), {"norm": report.norm}]
        seen.append({"skipped": report.skipped, "scale": state.loss_scale, "power": state.power2})
    return seen


@pytest.mark.parametrize("hyper", HYPERS, ids=["plain", "all", "edge"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_step_has_the_bits_of_its_formula(hyper: Hyper, replicas: int) -> None:
    for number, (expected, actual) in enumerate(
        zip(trained(FORMULA, hyper, replicas), trained(FUSED, hyper, replicas), strict=True)
    ):
        assert list(expected) == list(actual)
        for name, x in expected.items():
            assert (x.shape, x.dtype) == (actual[name].shape, actual[name].dtype)
            whole = ~np.isnan(x)
            assert np.array_equal(whole, ~np.isnan(actual[name]))
            assert_same_bytes(x[whole], actual[name][whole], f"{name}, {number}")


def assert_same_bytes(expected: AnyArray, actual: AnyArray, what: str) -> None:
    if expected.dtype == np.float32:
        assert_bits_equal(expected, actual, what=what)
    assert expected.tobytes() == actual.tobytes(), what


def test_no_bit_of_a_replica_depends_on_the_others() -> None:
    for together, alone in zip(trained(FUSED, HYPERS[1], 3), trained(FUSED, HYPERS[1], 1), strict=True):
        for name, x in alone.items():
            assert_same_bytes(x, together[name][:1], name)


def test_gradients_in_another_order_of_memory_give_the_same_bits_and_results_are_read_only() -> None:
    params, hyper = tensors(0, 3), HYPERS[1]
    state = initial_state(FUSED, hyper, params, 1.0)
    expected, there, _ = update(FUSED, hyper, params, tensors(1, 3), state, True)
    turned = {name: np.asfortranarray(x) for name, x in tensors(1, 3).items()}
    actual, _, _ = update(FUSED, hyper, {n: np.asfortranarray(x) for n, x in params.items()}, turned, state, True)
    for name, x in expected.items():
        assert_bits_equal(x, actual[name])
        assert not x.flags.writeable
        assert not there.m[name].flags.writeable


def test_tensors_that_do_not_fit_are_refused() -> None:
    params, hyper = tensors(0, 1), HYPERS[0]
    state = initial_state(FUSED, hyper, params, 1.0)
    changes: tuple[Mapping[str, AnyArray], ...] = (
        {"up": np.zeros((1, 17, 5), np.float32)},
        {"gain": np.zeros((1, 5))},
        {"more": params["up"]},
    )
    for change in changes:
        with pytest.raises(UsageError, match=r"up is|gain is|one side only"):
            update(FUSED, hyper, params, {**params, **change}, state, True)
    one = np.zeros((1, 4), np.float32)
    common: dict[str, Any] = {
        "factors": np.ones((4, 1), np.float32), "kept": np.ones(1, np.float32), "betas": np.ones(4, np.float32),
        "matrices": 0, "skipped": np.zeros(1, np.bool_),
    }  # fmt: skip
    with pytest.raises(UsageError, match="do not fill moments"):
        FusedNodes().adamw([(0, one[:, :3], one[:, :3])], one, one, **common)
    with pytest.raises(UsageError, match="v is"):
        FusedNodes().adamw([(0, one, one)], one, one[:, :3], **common)
