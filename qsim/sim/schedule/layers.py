"""Walks the body of a layer: forward, recompute and backward are generated from one list of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qsim.quant import OpId, TensorRole
from qsim.sim.events import Drop, Event, Phase, Slot
from qsim.sim.presets import Reads
from qsim.sim.schedule.graph import Graph
from qsim.sim.schedule.spec import Feature, Linear, Scores
from qsim.sim.schedule.writer import Side, Writer, slot

_PAIRS = {
    Linear: ("linear", TensorRole.INPUT, TensorRole.WEIGHT),
    Scores: ("scores", TensorRole.ATTN_Q, TensorRole.ATTN_K),
}


class Work(NamedTuple):
    """One GEMM of one layer visit, with what a checkpoint says about it.

    replayed: it is recomputed before backward. whole: the recompute runs the GEMM too, not its casts alone.
    """

    node: Linear | Scores
    gemm: str
    left: OpId
    right: OpId
    replayed: bool
    whole: bool

    @property
    def gradients(self) -> bool:
        """True where backward has GEMMs of its own."""
        return isinstance(self.node, Linear) and self.node.gradients

    @property
    def made(self) -> Phase:
        """The phase whose codes backward reads."""
        return Phase.RECOMPUTE if self.replayed else Phase.FORWARD


def works_of(writer: Writer, at: OpId) -> tuple[Work, ...]:
    """The GEMMs of one layer visit, in forward order."""
    body = writer.body
    assert not isinstance(body, Graph), "a graph has a walker of its own"
    scores: tuple[Linear | Scores, ...] = tuple(n for n in body if isinstance(n, Scores)) or body[-1:]
    found = []
    for node in body:
        gemm, left, right = _PAIRS[type(node)]
        replayed = whole = True
        if writer.has(Feature.NO_CHECKPOINT) or (writer.has(Feature.SELECTIVE) and node not in scores):
            replayed = whole = False
        elif writer.has(Feature.EARLY_STOP) and node is body[-1]:
            # backward wants the operands of the last GEMM, never its output: without gradients not even those
            replayed, whole = isinstance(node, Linear) and node.gradients, False
        of = at._replace(site=node.site)
        found.append(Work(node, gemm, of._replace(role_id=int(left)), of._replace(role_id=int(right)), replayed, whole))
    return tuple(found)


def forward_layer(writer: Writer, at: OpId, phase: Phase = Phase.FORWARD) -> Iterator[Event]:
    """One layer in forward, or in a phase that trains nothing."""
    for work in works_of(writer, at):
        kept = phase is Phase.FORWARD and not work.replayed and work.gradients
        for op in (work.left, work.right):
            yield from writer.load(op, phase)
            yield from writer.cast(op, phase, replayed=work.replayed)
        yield from writer.consume(work.gemm, work.left, phase, Side(work.left, phase), Side(work.right, phase))
        gone = [] if kept and writer.preset.reads is Reads.RAW else _tensors(work)
        if not kept:
            gone += _codes(writer, work, phase)
        if phase is not Phase.FORWARD or not (work.replayed or work.gradients):
            gone += _snapshots(writer, work)
        yield Drop(phase, tuple(gone))


def recompute_layer(writer: Writer, at: OpId) -> Iterator[Event]:
    """One layer again, as a nested checkpoint does before the recompute that backward asks for; its codes go."""
    phase = Phase.RECOMPUTE
    for work in works_of(writer, at):
        yield from _again(writer, work)
        yield Drop(phase, tuple(_tensors(work) + _codes(writer, work, phase)))


def backward_layer(writer: Writer, at: OpId, *, put_off: bool) -> Iterator[Event]:
    """Recompute of one layer, each GEMM followed by what backward does with its codes.

    put_off: gradients of weights come later (``weights_layer``), so their operands stay.
    """
    for work in works_of(writer, at):
        phase = Phase.RECOMPUTE if work.replayed else Phase.BACKWARD
        if work.replayed:
            yield from _again(writer, work)
        if work.gradients:
            yield from _gradients(writer, work, put_off=put_off)
        if not (work.gradients and put_off):
            yield Drop(phase, tuple(_tensors(work) + _codes(writer, work, work.made) + _snapshots(writer, work)))


def weights_layer(writer: Writer, at: OpId) -> Iterator[Event]:
    """The gradients of weights that were put off."""
    for work in works_of(writer, at):
        if work.gradients:
            yield from _weight_gradient(writer, work)
            gone = _tensors(work) + _codes(writer, work, work.made) + _snapshots(writer, work)
            yield Drop(Phase.BACKWARD, tuple(gone))


def _again(writer: Writer, work: Work) -> Iterator[Event]:
    phase = Phase.RECOMPUTE
    for op in (work.left, work.right):
        yield from writer.load(op, phase)
        yield from writer.cast(op, phase)
    if work.whole:
        yield from writer.consume(work.gemm, work.left, phase, Side(work.left, phase), Side(work.right, phase))


def gradient_of(work: Work) -> OpId:
    """The operation that casts the gradient of this GEMM's output."""
    return work.left._replace(role_id=int(TensorRole.GRAD_OUTPUT))


def _gradients(writer: Writer, work: Work, *, put_off: bool) -> Iterator[Event]:
    """dX = dY W^T and dW = X^T dY, from the codes that recompute (or forward) made."""
    phase, grad = Phase.BACKWARD, gradient_of(work)
    yield from writer.load(grad, phase)
    yield from writer.cast(grad, phase)
    yield from writer.consume("dgrad", grad, phase, Side(grad, phase), Side(work.right, work.made))
    if not put_off:
        yield from _weight_gradient(writer, work)


def _weight_gradient(writer: Writer, work: Work) -> Iterator[Event]:
    phase, grad = Phase.BACKWARD, gradient_of(work)
    yield from writer.consume("wgrad", grad, phase, Side(work.left, work.made), Side(grad, phase))
    gone = [slot("x", grad)]
    if writer.preset.reads is not Reads.RAW:
        gone += [writer.codes_slot(grad, phase), slot("snap", grad)]
    yield Drop(phase, tuple(gone))


def _tensors(work: Work) -> list[Slot]:
    return [slot("x", op) for op in (work.left, work.right)]


def _codes(writer: Writer, work: Work, phase: Phase) -> list[Slot]:
    """Codes that nothing reads any more; a cache lives on."""
    if writer.preset.reads is Reads.RAW:
        return []
    return [writer.codes_slot(op, phase) for op in (work.left, work.right) if not writer.cached(op)]


def _snapshots(writer: Writer, work: Work) -> list[Slot]:
    if writer.preset.reads is Reads.RAW:
        return []
    ops = [op for op in (work.left, work.right) if not writer.cached(op)]
    kinds = ("snap", "snap.r") if writer.queued else ("snap",)
    return [slot(kind, op) for op in ops for kind in kinds]
