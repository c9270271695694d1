"""Runs one training configuration for R seeds: events in order, telemetry beside them. Knows no study and no defect.

The schedule is the whole program: what is trained, recomputed, committed and updated stands in its events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from qsim.arrays import F32, frozen
from qsim.backends import get_backend
from qsim.errors import UsageError
from qsim.nn import Arithmetic, Dims, Hyper, OptimizerState
from qsim.quant import OpId, QuantState, StateKey, TensorRole
from qsim.sim import Env
from qsim.sim.data import Data, apply
from qsim.sim.events import Compute, Phase
from qsim.sim.judge import collector_paused
from qsim.sim.schedule import HELD, REPORT
from qsim.training.batches import batches, bytes_needed
from qsim.training.check import check
from qsim.training.config import OptimizerParams, TrainConfig
from qsim.training.held_out import held_out_loss
from qsim.training.log import StepLog, TrainLog
from qsim.training.model import name_of, place_of, shapes
from qsim.training.nodes import Nodes
from qsim.training.plan import POLICY, TrainPlan, plan_of
from qsim.training.start import parameters_of
from qsim.training.telemetry import log_step, scales_of
from qsim.training.text import Text, open_text
from qsim.training.watch import Casts, Matched, Watcher
from qsim.training.weights import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Tensors by key: parameters of R seeds, and the bytes of a microbatch."""

    text: Text
    seeds: tuple[int, ...]
    batch: int
    context: int
    params: Mapping[str, F32]

    def load(self, op: OpId) -> Any:
        """float32 [R, ...] of a parameter; int64 [R, batch, context + 1] of the data: tokens, one more."""
        if op.role_id == TensorRole.WEIGHT:
            return self.params[name_of(op)]
        if op.role_id != TensorRole.INPUT:  # of a gradient no data are loaded, but the zeros of a cleared buffer
            return frozen(np.zeros((len(self.seeds), 1, 1), np.float32))
        tokens, targets = batches(
            self.text, self.seeds, step=op.logical_step, microbatch=op.microbatch, batch=self.batch,
            context=self.context,
        )  # fmt: skip
        return frozen(np.concatenate([tokens, targets[..., -1:]], axis=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All that a run goes on from: parameters [R, ...] by name, what the optimizer holds, quantizer states by owner.

    step: number of the next step, warm ones included; counted: how many of those before it count.
    """

    step: int
    counted: int
    params: Mapping[str, F32]
    held: OptimizerState
    states: Mapping[StateKey, QuantState]


class Trained(NamedTuple):
    """What a run leaves behind: the log, and the state that another run may go on from."""

    log: TrainLog
    state: RunState


def train(config: TrainConfig, seeds: Sequence[int]) -> TrainLog:
    """Train ``config`` once for all ``seeds``, and say what happened.

    Reproducible to the bit unless ``accumulation`` is "blas": the bits of a seed depend neither on the other seeds nor
    on the machine. Raises CaseError where the schedule cannot host the defect, InputError for text and checkpoint.
    """
    return train_on(config, seeds).log


def train_on(
    config: TrainConfig, seeds: Sequence[int], state: RunState | None = None, *, watch: Sequence[Watcher] = ()
) -> Trained:
    """``train``, from a state on if one is given: its parameters in place of a checkpoint, its step first, no warm
    steps. In two parts a run has the same bits as in one. watch: who else looks at the run while it goes by.
    """
    if not seeds:
        raise UsageError("train without seeds; give at least one")
    if state is not None:
        _check_state(state, config, len(seeds))
        loop = msgspec.structs.replace(config.loop, first=state.step, warm_steps=0)
        config = msgspec.structs.replace(config, loop=loop)
    check(config)
    plan = plan_of(config)
    config = msgspec.structs.replace(config, loop=plan.loop)
    text = open_text(config.data.text, at_least=bytes_needed(config.model.context))
    source = Source(
        text=text, seeds=tuple(seeds), batch=config.data.batch, context=config.model.context,
        params=parameters_of(config, seeds, train_on) if state is None else state.params,
    )  # fmt: skip
    nodes = nodes_of(config, None if state is None else state.held)
    run = _Run(config, env_of(config, plan, source, nodes), len(seeds), watch, counted=state.counted if state else 0)
    run.data.states.update({} if state is None else state.states)
    run.go(plan)
    return Trained(run.log(plan, source), run.state(nodes.names))


def _check_state(state: RunState, config: TrainConfig, replicas: int) -> None:
    expected = {name: (replicas, *shape) for name, shape in shapes(config.model).items()}
    require(state.params, expected, source=f"a run state for {replicas} seed(s)")


def nodes_of(config: TrainConfig, held: OptimizerState | None = None) -> Nodes:
    """The nodes of a configuration. held: what its optimizer goes on from."""
    backend = get_backend(config.backend)
    model = config.model
    return Nodes(
        arithmetic=Arithmetic(backend=backend, exact=config.accumulation != "blas"),
        dims=Dims(batch=config.data.batch, context=model.context, heads=model.heads, width=model.width),
        half=model.half,
        mode=config.accumulation,
        microbatches=config.loop.microbatches,
        warm=config.loop.first + config.loop.warm_steps,
        hyper=_hyper(config.optimizer),
        loss_scale=config.optimizer.loss_scale,
        names=tuple(shapes(model)),
        held=held,
        key_mean=model.key_mean,
    )


def _hyper(params: OptimizerParams) -> Hyper:
    return Hyper(
        kind=params.kind, lr=params.lr, beta1=params.beta1, beta2=params.beta2, eps=params.eps,
        weight_decay=params.weight_decay, momentum=params.momentum, warmup=params.warmup, clip=params.clip,
        dynamic=params.dynamic, growth_interval=params.growth_interval,
    )  # fmt: skip


def env_of(config: TrainConfig, plan: TrainPlan, source: Source, nodes: Nodes) -> Env:
    """The env of a run."""
    return Env(
        load=source.load, backend=nodes.arithmetic.backend, recipe=plan.case.recipe, policy=POLICY,
        lead=(len(source.seeds),), reproducible=nodes.arithmetic.exact, recipes=dict(plan.case.recipes),
        nodes=nodes.table(), product=nodes.product, ahead=True,
    )  # fmt: skip


class _Run:
    """One run under way."""

    def __init__(self, config: TrainConfig, env: Env, replicas: int, watch: Sequence[Watcher], *, counted: int) -> None:
        self.config, self.env = config, env
        self.data = Data()
        self.first, self.counted = config.loop.first + config.loop.warm_steps, counted
        numbers = {self.first + step: counted + step for step in config.loop.matched}
        self.matched = Matched(numbers, env)
        self.casts = Casts(replicas)
        self.watch: list[Watcher] = [self.casts, *([self.matched] if config.loop.matched else []), *watch]
        self.steps: list[StepLog] = []

    def go(self, plan: TrainPlan) -> None:
        """All events."""
        data, env, looks = self.data, self.env, [watcher.look for watcher in self.watch]
        with collector_paused():  # values refer to no value, so there is no cycle to find
            for event in plan.case.schedule:
                apply(data, event, env)
                for look in looks:
                    look(event, data)
                if isinstance(event, Compute) and event.phase is Phase.UPDATE and REPORT in event.outs:
                    self._stepped(data)

    def _stepped(self, data: Data) -> None:
        report, (saturated, flushed) = data.slots[REPORT], self.casts.take()
        if report.step >= self.first:
            number = self.counted + report.step - self.first
            done = log_step(self.config, report, number=number, saturated=saturated, flushed=flushed)
            if self.steps and self.steps[-1].step == number:  # the step was taken back and run again
                self.steps.pop()
            self.steps.append(done)

    def state(self, names: Sequence[str]) -> RunState:
        """What another run may go on from."""
        loop, slots = self.config.loop, self.data.slots
        return RunState(
            step=loop.first + loop.warm_steps + loop.steps,
            counted=self.counted + loop.steps,
            params={name: slots[place_of(name)] for name in names},
            held=slots[HELD],
            states=dict(self.data.states),
        )

    def log(self, plan: TrainPlan, source: Source) -> TrainLog:
        """What is left at the end."""
        return TrainLog(
            seeds=source.seeds,
            steps=tuple(self.steps),
            matched=self.matched.found,
            scales=scales_of(self.data),
            commits=dict(plan.commits),
            broken=plan.broken,
            expected=plan.expected,
            violations=plan.violations,
            digest=digests(self.steps, len(source.seeds)),
            final_loss=held_out_loss(
                self.config, nodes_of(self.config), self.data, text=source.text, seeds=source.seeds
            ),
        )


def digests(steps: Sequence[StepLog], replicas: int) -> tuple[str, ...]:
    """sha256 over loss, gradient norm (float64) and skip of every step, a seed: what a run is recognised by."""
    found = []
    for replica in range(replicas):
        rows = [(step.loss[replica], step.grad_norm[replica], float(step.skipped[replica])) for step in steps]
        values = np.asarray(rows, np.float64)
        values[np.isnan(values)] = np.nan  # one NaN for all: processors differ in its sign
        found.append(hashlib.sha256(values.astype("<f8").tobytes()).hexdigest())
    return tuple(found)
