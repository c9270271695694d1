"""Writes the events of one operand and of one GEMM, as a preset orders them. Knows no order of passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qsim.formats import FORMATS
from qsim.quant import OpId, Recipe, StateKey, TensorRole
from qsim.sim.events import (
    PLAIN,
    Begin,
    Commit,
    Consume,
    Content,
    Event,
    Fetch,
    Fold,
    Load,
    Mode,
    Observe,
    Operand,
    Phase,
    Quantize,
    Restore,
    Slot,
    Stash,
    Take,
)
from qsim.sim.presets import Keeps, Preset, Reads, Trigger, Verb
from qsim.sim.schedule.spec import Body, Feature, ScheduleSpec
from qsim.sim.scopes import Scope

OTHER_FORMAT = "float8_e5m2"
"""What the last GEMM of a layer is cast to where formats are mixed."""


def slot(kind: str, op: OpId) -> Slot:
    """The name of a value of ``op``: unique within a step, the same in every step, and in recompute as in forward."""
    visit = f"/v{op.visit}" if op.visit else ""
    return f"{kind}/m{op.microbatch}/w{op.worker_id}/L{op.layer_id}/s{op.site}/r{op.role_id}{visit}"


def queue_of(cell: StateKey) -> str:
    """The stash of a module: one a cell."""
    return f"stash/{cell}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes events; ``fold`` is how its commits merge, ``trigger`` the preset's or what ranks force on it."""

    spec: ScheduleSpec
    body: Body
    preset: Preset
    scope: Scope
    trigger: Trigger
    fold: Fold
    recipe: Recipe

    @property
    def queued(self) -> bool:
        """True where a queue carries the metadata to recompute."""
        return self.preset.keeps in (Keeps.FIFO, Keeps.LIFO)

    def has(self, feature: Feature) -> bool:
        """True where the schedule has this feature."""
        return feature in self.spec.features

    def cached(self, op: OpId) -> bool:
        """True for a weight that is read from a cache; a pass that trains nothing casts its own."""
        weight = op.role_id == TensorRole.WEIGHT and op.microbatch < self.spec.microbatches
        return weight and self.has(Feature.WEIGHT_CACHE) and self.preset.reads is not Reads.RAW

    def filler(self, op: OpId) -> OpId:
        """The operation whose cast fills the cache that ``op`` reads: its worker's first microbatch."""
        first = 0 if self.has(Feature.TENSOR_PARALLEL) else op.worker_id
        return op._replace(microbatch=first, visit=0)

    def snapshot_slot(self, op: OpId, phase: Phase) -> Slot:
        """Where the metadata of ``op`` lies: forward's snapshot, unless recompute begins or restores its own."""
        if self.cached(op):
            return slot("cache.snap", self.filler(op)._replace(microbatch=0))
        own = phase is Phase.RECOMPUTE and (self.queued or Verb.BEGIN in self.preset.recompute)
        return slot("snap.r" if own else "snap", op)

    def codes_slot(self, op: OpId, phase: Phase) -> Slot:
        """Where the codes of ``op`` lie."""
        if self.cached(op):
            return slot("cache", self.filler(op)._replace(microbatch=0))
        return slot(f"codes.{phase.value}", op)

    def content(self, op: OpId) -> Content:
        """What the tensor of ``op`` holds."""
        if op.role_id == TensorRole.WEIGHT:
            return Content.NORMAL
        if self.has(Feature.IDLE_EXPERT) and op.layer_id == self.spec.layers - 1 and op.logical_step % 2:
            return Content.EMPTY
        node = self.body[0]
        first = OpId(0, 0, 0, node.site, op.role_id)
        if self.has(Feature.OVERFLOW) and op == first and op.role_id in (TensorRole.INPUT, TensorRole.ATTN_Q):
            return Content.NONFINITE
        return Content.NORMAL

    def load(self, op: OpId, phase: Phase) -> Iterator[Event]:
        """Bring the tensor of ``op`` in; nothing where only its cache is read."""
        if not (self.cached(op) and (phase is not Phase.FORWARD or op != self.filler(op))):
            yield Load(phase, op, slot("x", op), self.content(op))

    def mode(self, op: OpId) -> Mode:
        """The context of a cast."""
        if self.has(Feature.MIXED_FORMATS) and op.site == self.body[-1].site:
            return Mode(fmt=FORMATS[OTHER_FORMAT].name)
        return PLAIN

    def cast(self, op: OpId, phase: Phase, *, replayed: bool = True) -> Iterator[Event]:
        """What the preset does with one operand in ``phase``. replayed: some recompute will ask for it again.

        Current scaling observes before it begins, whatever the order of the verbs. Phases that train nothing take a
        snapshot of the live state and encode.
        """
        if self.cached(op) and (phase is not Phase.FORWARD or op != self.filler(op)):
            return
        verbs = self.verbs(phase)
        cell, src, meta = self.scope(op), slot("x", op), self.snapshot_slot(op, phase)
        seen = slot(f"obs.{phase.value}", op)
        if self.recipe.may_need_observation and Verb.BEGIN in verbs:
            yield Observe(phase, op, src, None, seen)
            verbs = tuple(v for v in verbs if v is not Verb.OBSERVE)
        if self.queued and phase is Phase.RECOMPUTE:
            take = Take.LIFO if self.preset.keeps is Keeps.LIFO else Take.FIFO
            yield Restore(phase, op, queue_of(cell), meta, take, cell)
        for verb in verbs:
            match verb:
                case Verb.BEGIN:
                    yield Begin(phase, op, cell, meta, seen if self.recipe.may_need_observation else None)
                    if self.queued and phase is Phase.FORWARD and replayed and not self.cached(op):
                        yield Stash(phase, op, queue_of(cell), meta)
                case Verb.QUANTIZE:
                    yield Quantize(phase, op, src, meta, self.codes_slot(op, phase), self.mode(op))
                case Verb.OBSERVE:
                    yield Observe(phase, op, src, meta, seen)
                case Verb.COMMIT:
                    yield from self._commit_in_call(op, phase)

    def _commit_in_call(self, op: OpId, phase: Phase) -> Iterator[Event]:
        """The commit of a cast, where casts commit; a module that is entered again waits for its last visit.

        A recompute that commits does so in every call: it visits in another order, and no unit is its own.
        """
        if self.trigger is not Trigger.CAST:
            return
        if phase is Phase.RECOMPUTE:
            yield Commit(phase, op, self.scope(op), (slot(f"obs.{phase.value}", op),), self.fold)
            return
        last = op.visit == self.spec.visits - 1 if phase is not Phase.BACKWARD else op.visit == 0
        if self.cached(op) or last:
            visits = (0,) if self.cached(op) else range(self.spec.visits)
            seen = tuple(slot(f"obs.{phase.value}", op._replace(visit=v)) for v in visits)
            yield Commit(phase, op, self.scope(op), seen, self.fold)

    def operand(self, op: OpId, made: Phase) -> Operand:
        """The operand whose codes were made in phase ``made``, decoded as the preset reads metadata."""
        cached = self.cached(op)
        of = self.filler(op) if cached else op
        match self.preset.reads:
            case Reads.RAW:
                return Operand(op, slot("x", op), None, None, None)
            case Reads.SNAPSHOT:
                meta = self.snapshot_slot(op, made)
            case Reads.LIVE:
                meta = slot("live", op)
        return Operand(of, self.codes_slot(op, made), meta, meta if self.recipe.centred else None, meta, cached)

    def consume(
        self, gemm: str, op: OpId, phase: Phase, left: tuple[OpId, Phase], right: tuple[OpId, Phase]
    ) -> Iterator[Event]:
        """One GEMM; a preset that reads live state fetches it just before."""
        if self.preset.reads is Reads.LIVE:
            for operand, _ in (left, right):
                yield Fetch(phase, operand, self.scope(operand), slot("live", operand))
        out = slot(f"out.{phase.value}.{gemm}", op)
        yield Consume(phase, op, gemm, (self.operand(*left), self.operand(*right)), out)

    def verbs(self, phase: Phase) -> tuple[Verb, ...]:
        """What happens to an operand in ``phase``; a gradient has its own owner and is cast as in forward."""
        match phase:
            case Phase.FORWARD | Phase.BACKWARD:
                return self.preset.forward
            case Phase.RECOMPUTE:
                return self.preset.recompute
            case _:
                return tuple(verb for verb in self.preset.forward if verb in (Verb.BEGIN, Verb.QUANTIZE))
