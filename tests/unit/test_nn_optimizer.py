"""The optimizer: torch's steps, masks a replica, clipping, warm-up and loss scale by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from qsim.arrays import AnyArray, same_bits
from qsim.errors import UsageError
from qsim.nn.flat import Flat, gathered, layout_of
from qsim.nn.loss import scale_gradient
from qsim.nn.optimizer import Hyper, OptimizerState, StepReport, grad_norms, initial_state, update
from tests.oracles import need_torch
from tests.unit.nn_cases import EXACT, FAST, Arrays, Decoder

SHAPES = {"gain": (5,), "up": (5, 7), "bias": (7,), "table": (3, 5), "down": (7, 5), "cube": (2, 3, 5)}
SCALE = 1024.0
KINDS = pytest.mark.parametrize("kind", ["adamw", "sgd"])


def tensors(seed: int, replicas: int = 3, dtype: type = np.float32) -> dict[str, AnyArray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(replicas, *shape)).astype(dtype) for name, shape in SHAPES.items()}


def scaled(grads: Arrays, scale: float = SCALE) -> dict[str, AnyArray]:
    return {name: x * x.dtype.type(scale) for name, x in grads.items()}


def one(
    hyper: Hyper, grad: float, *, scale: float = 1.0, p: float = 1.0
) -> tuple[AnyArray, OptimizerState, StepReport]:
    """A step of one matrix of one number."""
    params = {"w": np.full((1, 1, 1), p, np.float32)}
    state = initial_state(EXACT, hyper, params, scale)
    moved, state, report = update(EXACT, hyper, params, {"w": np.full((1, 1, 1), grad, np.float32)}, state, True)
    return moved["w"].reshape(-1), state, report


def same(a: Mapping[str, AnyArray], b: Mapping[str, AnyArray], rows: Any = slice(None)) -> None:
    assert list(a) == list(b)
    for name in a:
        assert same_bits(a[name][rows], b[name][rows]), name


@KINDS
@pytest.mark.parametrize("clip", [0.0, 0.75])
def test_steps_are_torchs(kind: str, clip: float) -> None:
    torch: Any = need_torch()
    hyper = Hyper(kind=kind, lr=2.0**-6, weight_decay=0.25 if kind == "adamw" else 0.0, clip=clip, warmup=4)
    params = tensors(0, 1, np.float64)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in params.items()}
    matrices = [x for x in leaves.values() if x.ndim > 2]
    vectors = [x for x in leaves.values() if x.ndim == 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    there = (
        torch.optim.AdamW(groups, lr=hyper.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.25)
        if kind == "adamw"
        else torch.optim.SGD(groups, lr=hyper.lr, momentum=0.9)
    )
    moved: Mapping[str, AnyArray] = params
    state = initial_state(FAST, hyper, params, SCALE)
    for t in range(6):
        grads = tensors(10 + t, 1, np.float64)
        moved, state, report = update(FAST, hyper, moved, scaled(grads), state, True)
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(grads[name])
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
            assert float(norm) == pytest.approx(float(report.norm[0]), rel=1e-14)
        for group in there.param_groups:
            group["lr"] = hyper.lr * min(1, (t + 1) / 4)
        there.step()
    for name, leaf in leaves.items():
        assert np.allclose(leaf.detach().numpy(), moved[name], rtol=1e-13, atol=1e-14), name


@KINDS
def test_float32_steps_are_near_those_of_float64(kind: str) -> None:
    hyper = Hyper(kind=kind, lr=1e-2, weight_decay=0.1, clip=1.0)
    ends: list[Mapping[str, AnyArray]] = []
    for A, dtype in ((EXACT, np.float32), (FAST, np.float64)):
        moved: Mapping[str, AnyArray] = tensors(0, 2, dtype)
        state = initial_state(A, hyper, moved, SCALE)
        for t in range(5):
            moved, state, _ = update(A, hyper, moved, scaled(tensors(10 + t, 2, dtype)), state, True)
        ends.append(moved)
    for name, wide in ends[1].items():
        assert ends[0][name].dtype == np.float32
        assert np.allclose(wide, ends[0][name], rtol=0, atol=2e-6), name


@KINDS
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_replica_without_a_finite_gradient_keeps_every_bit_and_the_others_do_not_notice(
    kind: str, bad: float
) -> None:
    hyper = Hyper(kind=kind, lr=1e-2, weight_decay=0.1, clip=1.0, dynamic=True)
    params = tensors(0)
    before, state, _ = update(
        EXACT, hyper, params, scaled(tensors(1)), initial_state(EXACT, hyper, params, SCALE), True
    )
    clean = scaled(tensors(2))
    dirty = {name: x.copy() for name, x in clean.items()}
    dirty["cube"][1, 1, 2, 3] = bad
    expected, expected_state, _ = update(EXACT, hyper, before, clean, state, True)
    moved, moved_state, report = update(EXACT, hyper, before, dirty, state, True)
    assert [False, True, False] == report.skipped.tolist()
    assert [True, False, True] == report.finite.tolist()
    others = [0, 2]
    for found, here, kept in ((moved, expected, before), (moved_state.m, expected_state.m, state.m),
                              (moved_state.v, expected_state.v, state.v)):  # fmt: skip
        same(kept, found, 1)
        same(here, found, others)
    for name in ("applied", "power1", "power2"):
        assert getattr(state, name)[1] == getattr(moved_state, name)[1]
        assert (getattr(expected_state, name)[others] == getattr(moved_state, name)[others]).all()
    assert [SCALE, SCALE / 2, SCALE] == moved_state.loss_scale.tolist()
    assert [2, 0, 2] == moved_state.good.tolist()


def test_the_loss_scale_grows_after_an_interval_backs_off_and_stays_within_its_limits() -> None:
    hyper = Hyper(lr=0.0, dynamic=True, growth_interval=2, max_scale=32.0, min_scale=4.0)
    params = {"w": np.ones((1, 2), np.float32)}
    state = initial_state(EXACT, hyper, params, 8.0)
    seen = []
    for good in "+++--+++++++----+":
        grads = {"w": np.full((1, 2), 1.0 if good == "+" else np.inf, np.float32)}
        _, state, report = update(EXACT, hyper, params, grads, state, True)
        seen.append((int(state.loss_scale[0]), int(state.good[0])))
    expected = [(8, 1), (16, 0), (16, 1), (8, 0), (4, 0), (4, 1), (8, 0), (8, 1), (16, 0), (16, 1), (32, 0), (32, 1)]
    expected += [(16, 0), (8, 0), (4, 0), (4, 0), (4, 1)]
    assert expected == seen
    assert 4.0 == report.loss_scale[0]


def test_a_static_loss_scale_stays() -> None:
    hyper = Hyper(lr=0.1, growth_interval=1)
    for grad, good in ((1.0, 1), (np.inf, 0)):
        _, state, _ = one(hyper, grad, scale=8.0)
        assert (8.0, good) == (state.loss_scale[0], state.good[0])


def test_clipping_divides_by_the_norm_of_all_tensors_of_one_replica() -> None:
    hyper = Hyper(kind="sgd", lr=1.0, momentum=0.0, clip=1.0)
    params = {"a": np.zeros((2, 1), np.float32), "b": np.zeros((2, 1, 1), np.float32)}
    grads = {"a": np.array([[6.0], [0.25]], np.float32), "b": np.array([[[8.0]], [[0.5]]], np.float32)}
    moved, _, report = update(EXACT, hyper, params, grads, initial_state(EXACT, hyper, params, 2.0), True)
    assert [5.0, math.sqrt(0.125**2 + 0.25**2)] == report.norm.tolist()
    assert [True, False] == report.clipped.tolist()
    factor = np.float32(1 / (5 + 1e-6))
    assert [[-np.float32(3) * factor], [-0.125]] == moved["a"].tolist()
    assert [[[-np.float32(4) * factor]], [[-0.25]]] == moved["b"].tolist()
    assert {"a": [3.0, 0.125], "b": [4.0, 0.25]} == {name: x.tolist() for name, x in report.norms.items()}


def test_the_rate_rises_with_applied_steps_and_is_float32() -> None:
    hyper = Hyper(kind="sgd", lr=0.1, momentum=0.0, warmup=4)
    params: Mapping[str, AnyArray] = {"w": np.zeros((2, 1), np.float32)}
    state = initial_state(EXACT, hyper, params, 1.0)
    rates = []
    for t in range(6):
        grads = {"w": np.array([[1.0], [np.nan if t == 1 else 1.0]], np.float32)}
        params, state, report = update(EXACT, hyper, params, grads, state, True)
        assert report.lr.dtype == np.float32
        rates.append(report.lr.tolist())
    steps = [float(np.float32(0.1 * n / 4)) for n in (1, 2, 3, 4, 4, 4)]
    assert [[a, b] for a, b in zip(steps, [*steps[:2], *steps[1:]], strict=False)] == rates


def test_the_first_adamw_step_is_the_rate_and_powers_are_products() -> None:
    w, state, report = one(Hyper(lr=2.0**-5, eps=0.0), -3.0)
    assert np.float32(1 + 2.0**-5) == w[0]
    assert 3.0 == report.norm[0]
    assert (1, 0.9, 0.95) == (state.applied[0], state.power1[0], state.power2[0])
    w, _, _ = one(Hyper(lr=2.0**-5, weight_decay=0.5), 0.0, p=4.0)
    assert 4 * (1 - 2.0**-6) == w[0]
    assert state.power1.dtype == state.power2.dtype == np.float64


@KINDS
def test_decay_touches_matrices_alone(kind: str) -> None:
    hyper = Hyper(kind=kind, lr=2.0**-4, weight_decay=0.5)
    params = tensors(0)
    nothing = {name: np.zeros_like(x) for name, x in params.items()}
    moved, _, _ = update(EXACT, hyper, params, nothing, initial_state(EXACT, hyper, params, 1.0), True)
    for name, x in params.items():
        assert same_bits(x * np.float32(1 - 2.0**-5) if x.ndim > 2 else x, moved[name]), name


@KINDS
def test_a_warm_up_call_changes_nothing_and_reports(kind: str) -> None:
    hyper = Hyper(kind=kind, lr=1e-2, clip=0.5, dynamic=True)
    params, grads = tensors(0), tensors(1)
    grads["up"][2] = np.inf
    state = initial_state(EXACT, hyper, params, SCALE)
    moved, after, report = update(EXACT, hyper, params, grads, state, False)
    assert moved is params
    assert after is state
    _, _, enabled = update(EXACT, hyper, params, grads, state, True)
    same(enabled.norms, report.norms)
    for field in fields(StepReport):
        if field.name != "norms":
            assert same_bits(getattr(enabled, field.name), getattr(report, field.name)), field.name
    assert [False, False, True] == report.skipped.tolist()


def test_norms_are_roots_of_sums_by_halves() -> None:
    grads = tensors(5)
    norms = grad_norms(EXACT, grads)
    assert list(grads) == list(norms)
    for name, x in grads.items():
        flat = x.reshape(3, -1).astype(np.float64)
        assert same_bits(np.sqrt(EXACT.total64(flat * flat, 1)), norms[name]), name
    hyper = Hyper(lr=0.1)
    _, _, report = update(EXACT, hyper, grads, grads, initial_state(EXACT, hyper, grads, 1.0), True)
    same(norms, report.norms)
    squares = np.stack([EXACT.total64(np.square(x.reshape(3, -1).astype(np.float64)), 1) for x in grads.values()], 1)
    assert same_bits(np.sqrt(EXACT.total64(squares, 1)), report.norm)


@KINDS
def test_no_bit_depends_on_other_replicas_or_on_how_tensors_come(kind: str) -> None:
    hyper = Hyper(kind=kind, lr=1e-2, weight_decay=0.1, clip=1.0, warmup=3)

    def run(rows: slice, rebuilt: bool) -> tuple[Mapping[str, AnyArray], OptimizerState]:
        moved: Mapping[str, AnyArray] = {name: x[rows] for name, x in tensors(0).items()}
        state = initial_state(EXACT, hyper, moved, SCALE)
        for t in range(3):
            grads = {name: np.asfortranarray(x[rows]) for name, x in scaled(tensors(20 + t)).items()}
            moved, state, _ = update(EXACT, hyper, moved, grads, state, True)
            if rebuilt:
                moved, state = dict(moved), replace(state, m=dict(state.m), v=dict(state.v))
        return moved, state

    (together, state), (alone, state_alone) = run(slice(3), False), run(slice(1, 2), False)
    for a, b in ((together, alone), (state.m, state_alone.m), (state.v, state_alone.v)):
        same({name: x[1:2] for name, x in a.items()}, dict(b))
    same(together, run(slice(3), True)[0])


def test_inputs_stay_and_results_are_read_only_views_of_one_buffer() -> None:
    hyper = Hyper(lr=1e-2, weight_decay=0.1, clip=0.1)
    params, grads = tensors(0), tensors(1)
    state = initial_state(EXACT, hyper, params, 1.0)
    kept = {name: x.copy() for name, x in (params | {f"g {n}": x for n, x in grads.items()}).items()}
    for x in (*params.values(), *grads.values()):
        x.setflags(write=False)
    layout = layout_of(params)
    lying_so = Flat(buffer=gathered(np, grads, layout).buffer, layout=layout)
    moved, state, _ = update(EXACT, hyper, params, grads, state, True)
    moved, state, _ = update(EXACT, hyper, moved, lying_so, state, True)
    same(lying_so, grads)
    same(kept, params | {f"g {n}": x for n, x in grads.items()})
    assert isinstance(moved, Flat)
    assert all(np.shares_memory(moved.buffer, x) and not x.flags.writeable for x in moved.values())
    assert {name: (3, *shape) for name, shape in SHAPES.items()} == {name: x.shape for name, x in moved.items()}


def test_a_decoder_learns_its_batch() -> None:
    decoder = Decoder(layers=1)
    params: Mapping[str, AnyArray] = decoder.parameters(2, np.float32)
    hyper = Hyper(lr=1e-2, clip=1.0, warmup=5)
    state = initial_state(EXACT, hyper, params, SCALE)
    losses = []
    for _ in range(40):
        loss, grads = decoder.gradients(EXACT, params)
        grads = {name: scale_gradient(x, state.loss_scale) for name, x in grads.items()}
        params, state, _ = update(EXACT, hyper, params, grads, state, True)
        losses.append(loss)
    assert (losses[0] > 2).all()
    assert (losses[-1] < 0.6 * losses[0]).all()


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"kind": "lion"}, "unknown optimizer 'lion'; known: adamw, sgd"),
        ({"lr": -1.0}, "lr -1.0 is out of range"),
        ({"lr": math.nan}, "lr nan is out of range"),
        ({"beta1": 1.0}, "beta1 1.0 is out of range"),
        ({"growth": 0.5}, "growth 0.5 is out of range"),
        ({"min_scale": 2.0**30}, "min_scale 1073741824.0 is out of range"),
        ({"warmup": -1}, "warmup -1 is too small"),
        ({"growth_interval": 0}, "growth_interval 0 is too small"),
    ],
)
def test_numbers_out_of_range_are_refused(changed: dict[str, Any], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        Hyper(**{"lr": 1.0} | changed)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    hyper, params = Hyper(lr=0.1), tensors(0)
    state = initial_state(EXACT, hyper, params, 1.0)
    for grads, because in (
        ({name: x for name, x in params.items() if name != "up"}, r"tensors \['up'\] are on one side only"),
        (params | {"up": params["down"]}, r"up is float32 \(3, 7, 5\); it should be float32 \(3, 5, 7\)"),
        (params | {"up": params["up"].astype(np.float64)}, "up is float64"),
    ):
        with pytest.raises(UsageError, match=because):
            update(EXACT, hyper, params, grads, state, True)
    with pytest.raises(UsageError, match=r"tensors of \[1, 3\] replicas"):
        initial_state(EXACT, hyper, params | {"up": params["up"][:1]}, 1.0)
