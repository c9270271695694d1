"""Nodes: gradients against central differences and torch, and bits that depend on nothing but a replica's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsim.arrays import AnyArray, same_bits
from tests.oracles import need_torch
from tests.unit.nn_cases import CASES, EXACT, FAST, Arrays, Decoder, NodeCase

EACH_NODE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
STEP = 1e-5
TWO_LAYERS = Decoder(layers=2)


def weights(case: NodeCase, y: AnyArray) -> AnyArray:
    return np.random.default_rng(1).normal(size=y.shape).astype(y.dtype)


def worst(expected: Arrays, actual: Arrays) -> float:
    """The largest difference, relative to the largest number of its array."""
    assert expected.keys() == actual.keys()
    return max(float(np.abs(expected[n] - actual[n]).max() / np.abs(expected[n]).max()) for n in expected)


@EACH_NODE
def test_a_backward_is_the_central_difference_of_its_forward(case: NodeCase) -> None:
    x = case.inputs(2, np.float64)
    dy = weights(case, case.forward(FAST, x))
    numeric = {}
    for name, array in x.items():
        numeric[name] = np.empty_like(array)
        for index in np.ndindex(array.shape):
            both = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * STEP
                both.append(float((case.forward(FAST, {**x, name: moved}) * dy).sum()))
            numeric[name][index] = (both[0] - both[1]) / (2 * STEP)
    analytic = case.backward(FAST, x, dy)
    assert all(array.dtype == np.float64 for array in analytic.values())
    assert worst(numeric, analytic) < 3e-9


@EACH_NODE
def test_forward_and_backward_are_torchs(case: NodeCase) -> None:
    torch: Any = need_torch()
    x = case.inputs(3, np.float64)
    y = case.forward(FAST, x)
    dy = weights(case, y)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in x.items()}
    there = case.by_torch(torch, leaves)
    there.backward(torch.tensor(dy))
    assert worst({"y": there.detach().numpy()}, {"y": y}) < 1e-14
    assert worst({name: leaf.grad.numpy() for name, leaf in leaves.items()}, case.backward(FAST, x, dy)) < 1e-13


@EACH_NODE
def test_no_bit_of_a_replica_depends_on_the_others(case: NodeCase) -> None:
    x = case.inputs(3)
    y = case.forward(EXACT, x)
    dy = weights(case, y)
    together = {"y": y, **case.backward(EXACT, x, dy)}
    assert all(array.dtype == np.float32 for array in together.values())
    one = {name: array[:1] for name, array in x.items()}
    alone = {"y": case.forward(EXACT, one), **case.backward(EXACT, one, dy[:1])}
    for name, array in together.items():
        assert same_bits(array[:1], alone[name]), name


@EACH_NODE
def test_layout_changes_no_bit_and_read_only_inputs_stay_as_they_are(case: NodeCase) -> None:
    x = case.inputs(2)
    y = case.forward(EXACT, x)
    dy = weights(case, y)
    dx = case.backward(EXACT, x, dy)
    other = {name: np.asfortranarray(array) for name, array in x.items()}
    for array in (*x.values(), *other.values(), dy):
        array.setflags(write=False)
    before = {name: array.copy() for name, array in x.items()}
    assert same_bits(y, case.forward(EXACT, other))
    for name, array in case.backward(EXACT, other, np.asfortranarray(dy)).items():
        assert same_bits(dx[name], array), name
    case.backward(EXACT, x, dy)
    for name, array in before.items():
        assert same_bits(array, x[name]), name


@EACH_NODE
def test_exact_and_fast_agree_but_for_rounding(case: NodeCase) -> None:
    x = case.inputs(2)
    y = case.forward(EXACT, x)
    dy = weights(case, y)
    fast = case.forward(FAST, x)
    assert fast.dtype == np.float32
    assert worst({"y": y}, {"y": fast}) < 1e-6
    assert worst(case.backward(EXACT, x, dy), case.backward(FAST, x, dy)) < 5e-6


def test_two_layers_have_torchs_loss_and_gradients() -> None:
    torch: Any = need_torch()
    w = TWO_LAYERS.parameters(2, np.float64)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in w.items()}
    there = TWO_LAYERS.by_torch(torch, leaves)
    there.sum().backward()
    loss, gradients = TWO_LAYERS.gradients(FAST, w)
    assert worst({"loss": there.detach().numpy()}, {"loss": loss}) < 1e-14
    assert worst({name: leaf.grad.numpy() for name, leaf in leaves.items()}, gradients) < 1e-12


def test_two_layers_in_float32_are_near_those_in_float64_and_do_not_depend_on_replicas() -> None:
    wide = TWO_LAYERS.gradients(FAST, TWO_LAYERS.parameters(3, np.float64))[1]
    w = TWO_LAYERS.parameters(3, np.float32)
    loss, gradients = TWO_LAYERS.gradients(EXACT, w)
    assert worst(wide, gradients) < 1e-5
    loss_alone, alone = TWO_LAYERS.gradients(EXACT, {name: array[:1] for name, array in w.items()})
    assert same_bits(loss[:1], loss_alone)
    for name, array in gradients.items():
        assert same_bits(array[:1], alone[name]), name
