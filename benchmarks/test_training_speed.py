"""A training step against its own matrix products in the same run: read medians as ratios. Run with ``make bench``.

The default model (8 layers, width 64, 64 tokens, batch 8) with FP8 activations. ``own products``: the float32 products
of one step alone, on the operands that the step multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from qsim.nn import Arithmetic
from qsim.sim.data import Data, apply
from qsim.sim.events import Compute, Event
from qsim.sim.judge import collector_paused
from qsim.sim.schedule import REPORT
from qsim.training.config import SCRATCH, DataParams, LoopParams, TrainConfig
from qsim.training.plan import plan_of
from qsim.training.run import Source, env_of, nodes_of
from qsim.training.start import parameters_of
from qsim.training.text import open_text

GROUP = "one training step of the default model"
WARM, ROUNDS = 3, 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers are processes: one thread each."""
    with threadpool_limits(1):
        yield


class Steps:
    """A run that is moved by one step a call."""

    def __init__(self, accumulation: str) -> None:
        """Parameters drawn, and the first steps done."""
        loop = LoopParams(steps=WARM + ROUNDS + 2, warm_steps=0)
        config = TrainConfig(data=DataParams(checkpoint=SCRATCH), loop=loop, accumulation=accumulation)
        plan, nodes = plan_of(config), nodes_of(config)
        source = Source(
            text=open_text("builtin"), seeds=(0,), batch=config.data.batch, context=config.model.context,
            params=parameters_of(config, (0,)),
        )  # fmt: skip
        self.env, self.data = env_of(config, plan, source, nodes), Data()
        self._events: Iterator[Event] = iter(plan.case.schedule)
        for _ in range(WARM):
            self()

    def __call__(self) -> None:
        """All events up to the next update."""
        with collector_paused():  # as a run has it
            for event in self._events:
                apply(self.data, event, self.env)
                if isinstance(event, Compute) and REPORT in event.outs:
                    return
        raise AssertionError("the run is over")


def operands_of_a_step(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Copies of what one step multiplies, as it lies in memory."""
    steps, found = Steps("blas"), list[tuple[Any, Any]]()
    plain = Arithmetic.product

    def kept(self: Arithmetic, a: Any, b: Any) -> Any:
        found.append((a, b))
        return plain(self, a, b)

    monkeypatch.setattr(Arithmetic, "product", kept)
    steps()
    return found


@pytest.mark.benchmark(group=GROUP)
@pytest.mark.parametrize("accumulation", ["blas", "exact"])
def test_step(benchmark: Any, accumulation: str) -> None:
    steps = Steps(accumulation)
    benchmark.pedantic(steps, rounds=ROUNDS, iterations=1)
    assert np.isfinite(steps.data.slots[REPORT].done.norm).all()


@pytest.mark.benchmark(group=GROUP)
def test_peer_own_products(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = operands_of_a_step(monkeypatch)

    def multiply() -> None:
        for a, b in operands:
            np.matmul(a, b)

    benchmark.pedantic(multiply, rounds=ROUNDS, iterations=1)
    assert len(operands) > 100
