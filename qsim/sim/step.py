"""One event, the whole world: ``step`` is control, then data. It contains no defect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from qsim.arrays import F32, frozen
from qsim.quant import QuantizedTensor
from qsim.record import Record
from qsim.sim.case import Case
from qsim.sim.control import Control, apply, control_step
from qsim.sim.data import Data, data_step, metadata, take
from qsim.sim.data import apply as apply_data
from qsim.sim.env import Env, Metadata
from qsim.sim.events import Consume, Event, Operand, Quantize


class World(NamedTuple):
    """Control says which version lies where, data holds the values."""

    control: Control
    data: Data


def step(world: World, event: Event, env: Env) -> World:
    """The world after ``event``; the old one stays as it was."""
    return World(control_step(world.control, event), data_step(world.data, event, env))


class Used(NamedTuple):
    """One operand of a consumer: the ``seq`` of the quantize that made its codes, and what it was decoded with."""

    cast: int
    descale: Metadata
    center: Metadata | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened: one record an event, and the values that severity measures, by ``seq``.

    inputs and casts: of each quantize. outputs and used: of each consume; used has one entry for each operand
    that was cast. ``records`` alone is what the invariants read.
    """

    records: tuple[Record, ...]
    inputs: Mapping[int, F32]
    casts: Mapping[int, QuantizedTensor]
    outputs: Mapping[int, F32]
    used: Mapping[int, tuple[Used, ...]]


def records_of(case: Case) -> tuple[Record, ...]:
    """The records of a case without touching a tensor: control alone decides every version."""
    control = Control()
    return tuple([apply(control, event) for event in case.schedule])


def run(case: Case, env: Env) -> Trace:
    """Replay a case from its initial state. Pure: the same case and env give the same bits.

    Raises CaseError where the schedule reads what was never written.
    """
    control, data, keeper = Control(), Data(), _Keeper(env)
    records: list[Record] = []
    for seq, event in enumerate(case.schedule):
        records.append(apply(control, event))
        apply_data(data, event, env)
        keeper.keep(seq, event, data)
    return keeper.trace(tuple(records))


def replay(case: Case, env: Env, records: tuple[Record, ...]) -> Trace:
    """The trace of ``run``, given the case's records: the data half alone.

    Control depends on no number, so a study computes ``records_of`` once for all formats, windows and seeds of
    one schedule. Equal to ``run`` in every record and bit.
    """
    data, keeper = Data(), _Keeper(env)
    for seq, event in enumerate(case.schedule):
        apply_data(data, event, env)
        keeper.keep(seq, event, data)
    return keeper.trace(records)


class _Keeper:
    """Collects what a trace holds on to while a run goes by; tensors come to the host when it has ended."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._inputs: dict[int, F32] = {}
        self._casts: dict[int, QuantizedTensor] = {}
        self._outputs: dict[int, F32] = {}
        self._used: dict[int, tuple[Used, ...]] = {}
        self._made: dict[int, int] = {}  # by identity: the casts stay alive here

    def keep(self, seq: int, event: Event, data: Data) -> None:
        """Keep what ``event`` made."""
        if isinstance(event, Quantize) and event.mode.enabled:
            self._inputs[seq] = take(data, event.src, self._env.tensors)
            self._casts[seq] = take(data, event.out, QuantizedTensor)
            self._made[id(self._casts[seq])] = seq
        elif isinstance(event, Consume):
            self._outputs[seq] = take(data, event.out, self._env.tensors)
            cast = [o for o in event.operands if o.descale is not None and id(data.slots[o.codes]) in self._made]
            self._used[seq] = tuple(_used(data, o, self._made) for o in cast)

    def trace(self, records: tuple[Record, ...]) -> Trace:
        """All of it, read-only."""
        fetched: dict[int, F32] = {}  # by identity: what is shared stays shared

        def get(x: F32) -> F32:
            return fetched[id(x)] if id(x) in fetched else fetched.setdefault(id(x), self._env.backend.get(x))

        def get_codes(cast: QuantizedTensor) -> QuantizedTensor:
            codes = self._env.backend.get(cast.codes)
            return cast if codes is cast.codes else replace(cast, codes=frozen(codes))

        return Trace(
            records=records,
            inputs=MappingProxyType({seq: get(x) for seq, x in self._inputs.items()}),
            casts=MappingProxyType({seq: get_codes(cast) for seq, cast in self._casts.items()}),
            outputs=MappingProxyType({seq: get(x) for seq, x in self._outputs.items()}),
            used=MappingProxyType(self._used),
        )


def _used(data: Data, operand: Operand, made: Mapping[int, int]) -> Used:
    assert operand.descale is not None, "the caller leaves out operands that were never cast"
    center = None if operand.center is None else metadata(data, operand.center)
    return Used(made[id(data.slots[operand.codes])], metadata(data, operand.descale), center)
