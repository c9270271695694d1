"""Writes the events of one operand and of one GEMM, as a preset orders them. Knows no order of passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
from qsim.sim.schedule.graph import Graph, Product
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


class Side(NamedTuple):
    """One operand of a GEMM: its cast, the phase that made the codes, the slot of the tensor itself ("": that which is
    loaded for the op). raw: it is multiplied as it is, whatever its role.
    """

    op: OpId
    made: Phase
    src: Slot = ""
    raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes events; ``fold`` is how its commits merge, ``trigger`` the preset's or what ranks force on it.

    recipes: of roles that have one of their own. roles: those that are cast, None for all.
    """

    spec: ScheduleSpec
    body: Body | Graph
    preset: Preset
    scope: Scope
    trigger: Trigger
    fold: Fold
    recipe: Recipe
    recipes: tuple[tuple[int, Recipe], ...] = ()
    roles: frozenset[int] | None = None

    def recipe_of(self, op: OpId) -> Recipe:
        """The recipe that casts ``op``."""
        return dict(self.recipes).get(op.role_id, self.recipe) if self.recipes else self.recipe

    def casts(self, op: OpId) -> bool:
        """True where the operand ``op`` is cast at all."""
        return self.preset.reads is not Reads.RAW and (self.roles is None or op.role_id in self.roles)

    @property
    def last_site(self) -> int:
        """The site of the last GEMM of a layer."""
        body = self.body
        products = [s for s in body.layer.steps if isinstance(s, Product)] if isinstance(body, Graph) else body
        return products[-1].site

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
        return weight and self.has(Feature.WEIGHT_CACHE) and self.casts(op)

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
        if op.role_id == TensorRole.WEIGHT or isinstance(self.body, Graph):
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
        if self.has(Feature.MIXED_FORMATS) and op.site == self.last_site:
            return Mode(fmt=FORMATS[OTHER_FORMAT].name)
        return PLAIN

    def cast(self, op: OpId, phase: Phase, *, src: Slot = "", replayed: bool = True) -> Iterator[Event]:
        """What the preset does with one operand in ``phase``. src: where the tensor lies, "": where it was loaded to.
        replayed: some recompute will ask for it again.

        Current scaling observes before it begins, whatever the order of the verbs. Phases that train nothing take a
        snapshot of the live state and encode.
        """
        if not self.casts(op) or (self.cached(op) and (phase is not Phase.FORWARD or op != self.filler(op))):
            return
        verbs, src = self.verbs(phase), src or slot("x", op)
        cell, meta = self.scope(op), self.snapshot_slot(op, phase)
        seen, looks_first = slot(f"obs.{phase.value}", op), self.recipe_of(op).may_need_observation
        if looks_first and Verb.BEGIN in verbs:
            yield Observe(phase, op, src, None, seen)
            verbs = tuple(v for v in verbs if v is not Verb.OBSERVE)
        if self.queued and phase is Phase.RECOMPUTE:
            take = Take.LIFO if self.preset.keeps is Keeps.LIFO else Take.FIFO
            yield Restore(phase, op, queue_of(cell), meta, take, cell)
        for verb in verbs:
            match verb:
                case Verb.BEGIN:
                    yield Begin(phase, op, cell, meta, seen if looks_first else None)
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

    def operand(self, side: Side) -> Operand:
        """The operand whose codes were made in phase ``made``, decoded as the preset reads metadata."""
        op, made = side.op, side.made
        if side.raw or not self.casts(op):
            return Operand(op, side.src or slot("x", op), None, None, None)
        cached = self.cached(op)
        of = self.filler(op) if cached else op
        meta = slot("live", op) if self.preset.reads is Reads.LIVE else self.snapshot_slot(op, made)
        return Operand(of, self.codes_slot(op, made), meta, meta if self.recipe_of(op).centred else None, meta, cached)

    def consume(self, gemm: str, op: OpId, phase: Phase, left: Side, right: Side, *, out: Slot = "") -> Iterator[Event]:
        """One GEMM; a preset that reads live state fetches it just before. out: "" for a slot of its own."""
        if self.preset.reads is Reads.LIVE:
            for side in (left, right):
                if not side.raw and self.casts(side.op):
                    yield Fetch(phase, side.op, self.scope(side.op), slot("live", side.op))
        operands = self.operand(left), self.operand(right)
        yield Consume(phase, op, gemm, operands, out or slot(f"out.{phase.value}.{gemm}", op))

    def verbs(self, phase: Phase) -> tuple[Verb, ...]:
        """What happens to an operand in ``phase``; a gradient has its own owner and is cast as in forward."""
        match phase:
            case Phase.FORWARD | Phase.BACKWARD:
                return self.preset.forward
            case Phase.RECOMPUTE:
                return self.preset.recompute
            case _:
                return tuple(verb for verb in self.preset.forward if verb in (Verb.BEGIN, Verb.QUANTIZE))
