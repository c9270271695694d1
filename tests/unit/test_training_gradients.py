"""Gradients that the walked schedule makes, against central differences and against torch's autograd, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsim.quant import OpId
from qsim.sim.data import Data, apply
from qsim.sim.events import Compute, Phase
from qsim.sim.schedule import REPORT, grad_slot
from qsim.training.config import TrainConfig
from qsim.training.held_out import forward_loss
from qsim.training.model import decoder, place_of, shapes
from qsim.training.plan import plan_of
from qsim.training.run import Source, env_of, nodes_of
from qsim.training.start import parameters_of
from qsim.training.text import open_text
from tests.unit.training_cases import small

PLAIN = {"defect": "high_precision", "accumulation": "blas", "loop": {"steps": 1, "warm_steps": 0}}
VARIANTS = {
    "swiglu": small(**PLAIN),
    "gelu": small(**PLAIN, model={"activation": "gelu"}),
    "statistics recomputed": small(**PLAIN, model={"statistics": "recomputed"}),
    "nothing recomputed": small(**{**PLAIN, "loop": {"steps": 1, "warm_steps": 0, "features": ("no_checkpoint",)}}),
    "accumulated over a pipeline": small(
        **{**PLAIN, "loop": {"steps": 1, "warm_steps": 0, "microbatches": 4, "order": "zero_bubble"}}
    ),
    "workers": small(**{**PLAIN, "loop": {"steps": 1, "warm_steps": 0, "microbatches": 4, "workers": 2}}),
    "every layer entered twice": small(**{**PLAIN, "loop": {"steps": 1, "warm_steps": 0, "features": ("twice",)}}),
    "layers shared": small(**{**PLAIN, "loop": {"steps": 1, "warm_steps": 0, "features": ("shared",)}}),
}


def parameters(config: TrainConfig, seeds: tuple[int, ...] = (3,)) -> dict[str, Any]:
    """float64 parameters, larger than those of a fresh model, so that attention and gates leave their middle."""
    rng = np.random.default_rng(7)
    drawn = parameters_of(config, seeds)
    grown = {"embed": 60, "positions": 60}  # as small as they begin, a norm of them curves within a difference
    return {
        name: (x * grown.get(name, 3) + rng.normal(scale=0.05, size=x.shape)).astype(np.float64)
        for name, x in drawn.items()
    }


def source_of(config: TrainConfig, params: dict[str, Any]) -> Source:
    return Source(
        text=open_text("builtin"), seeds=(3,), batch=config.data.batch, context=config.model.context, params=params
    )


def schedule_gradients(config: TrainConfig, params: dict[str, Any]) -> dict[str, Any]:
    """What lies in the slots of gradients when the update begins."""
    plan, nodes = plan_of(config), nodes_of(config)
    env, data = env_of(config, plan, source_of(config, params), nodes), Data()
    for event in plan.case.schedule:
        if isinstance(event, Compute) and event.phase is Phase.UPDATE and REPORT in event.outs:
            return {name: data.slots[grad_slot(place_of(name))] for name in params}
        apply(data, event, env)
    raise AssertionError("the schedule has no update")


def total_loss(config: TrainConfig, params: dict[str, Any]) -> float:
    """The mean loss of the step's microbatches by a walk over values: no schedule, no backward."""
    nodes, source, data = nodes_of(config), source_of(config, params), Data()
    data.slots |= {place_of(name): value for name, value in params.items()}
    data.slots["held"] = nodes.table()["start"](OpId(0), *params.values())[0]
    losses = []
    for key in {e.key for e in plan_of(config).case.schedule if type(e).__name__ == "Load" and e.key.role_id == 0}:
        losses.append(forward_loss(config, decoder(config.model), nodes, data, source.load(key)))
    return float(np.mean(losses))


ENTERED_AGAIN = ("every layer entered twice", "layers shared")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ENTERED_AGAIN])
def test_gradients_are_the_central_differences_of_the_loss(name: str) -> None:
    config = VARIANTS[name]
    params = parameters(config)
    found = schedule_gradients(config, params)
    rng, worst = np.random.default_rng(5), 0.0

    def slope(parameter: str, at: tuple[int, ...], step: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = params[parameter].copy()
            moved[at] += sign * step
            ends.append(total_loss(config, params | {parameter: moved}))
        return (ends[0] - ends[1]) / (2 * step)

    for parameter, value in params.items():
        largest = float(np.abs(found[parameter]).max())
        for _ in range(3):
            at = tuple(int(rng.integers(n)) for n in value.shape)
            if parameter == "embed":  # a byte that occurs
                at = tuple(int(i) for i in np.unravel_index(np.abs(found[parameter]).argmax(), value.shape))
            expected = (4 * slope(parameter, at, 5e-5) - slope(parameter, at, 1e-4)) / 3  # of fourth order
            worst = max(worst, abs(expected - float(found[parameter][at])) / max(largest, 1e-6))
    assert worst < 2e-8


def torch_gradients(config: TrainConfig, params: dict[str, Any], entries: list[int]) -> dict[str, Any]:
    """The same model in torch, written from its description alone; ``entries``: layers in the order of forward."""
    torch = pytest.importorskip("torch", reason="torch is not installed; make oracles brings it")
    model, source = config.model, source_of(config, params)
    w = {name: torch.tensor(x[0], requires_grad=True) for name, x in params.items()}
    heads, width = model.heads, model.width // model.heads

    def norm(x: Any, gain: Any) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain

    def layer(h: Any, at: str) -> Any:
        q, k, v = (norm(h, w[f"{at}.norm_attn"]) @ w[f"{at}.qkv"]).split(model.width, dim=-1)
        q, k, v = (x.view(*x.shape[:2], heads, width).transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        m = h + o.transpose(1, 2).reshape(h.shape) @ w[f"{at}.proj"]
        u = norm(m, w[f"{at}.norm_ffn"]) @ w[f"{at}.up"]
        if model.activation == "swiglu":
            a, b = u.split(model.hidden, dim=-1)
            g = torch.nn.functional.silu(a) * b
        else:
            g = torch.nn.functional.gelu(u, approximate="tanh")
        return m + g @ w[f"{at}.down"]

    losses = []
    for microbatch in range(config.loop.microbatches):
        data = torch.tensor(source.load(OpId(0, microbatch))[0])
        h = w["embed"][data[:, :-1]] + w["positions"]
        for at in entries:
            h = layer(h, f"L{at}")
        logits = norm(h, w["norm_final"]) @ w["head"]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()))
    torch.stack(losses).mean().backward()
    return {name: x.grad.numpy() for name, x in w.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    config = VARIANTS[name]
    entries = {"every layer entered twice": [0, 0, 1, 1], "layers shared": [0, 1, 0, 1]}.get(name, [0, 1])
    params = parameters(config)
    expected, found = torch_gradients(config, params, entries), schedule_gradients(config, params)
    for parameter, gradient in expected.items():
        np.testing.assert_allclose(gradient, found[parameter][0], rtol=0, atol=1e-12 * np.abs(gradient).max())


def test_every_parameter_has_a_gradient_and_no_other() -> None:
    config = VARIANTS["swiglu"]
    found = schedule_gradients(config, parameters(config))
    assert shapes(config.model) == {name: gradient.shape[1:] for name, gradient in found.items()}
    assert all(np.any(gradient) for gradient in found.values())
