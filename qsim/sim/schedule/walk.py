"""Walks the blocks of a graph: forward, recompute, backward and the sums of gradients follow from their steps.

Says what comes first in a visit of a layer; knows no order of passes and no commit of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from qsim.quant import OpId, TensorRole
from qsim.sim.events import Compute, Drop, Event, Load, Optimize, Phase, Slot
from qsim.sim.presets import Verb
from qsim.sim.schedule.graph import DATA, GRADIENTS, HELD, LEFT, OUT, RIGHT, Block, Graph, Node, Product, Step, made_by
from qsim.sim.schedule.spec import Feature
from qsim.sim.schedule.writer import Side, Writer, slot

ADD = "add"
"""The node that adds two gradients."""
PASS = "pass"
"""The node that gives back what it takes: a copy, for values never change."""
REPORT = "report"
"""The slot that an update fills with what it did."""
STEM, TAIL = -1, -2
"""In place of a layer: the parameters of stem and tail."""


def value_slot(name: str, at: OpId, phase: Phase) -> Slot:
    """The place of a value of one layer visit."""
    return slot(f"v.{phase.value}.{name}", at._replace(site=0, role_id=0))


def param_slot(name: str, layer: int) -> Slot:
    """The place of a parameter; that of stem and tail names no layer."""
    return f"param/{name}" + (f"/L{layer}" if layer >= 0 else "")


def grad_slot(param: Slot) -> Slot:
    """The place of a parameter's gradient, summed over the microbatches of a step."""
    return f"grad/{param.removeprefix('param/')}"


@dataclass(frozen=True, slots=True)
class _Visit:
    """One block, entered once. made: the phase whose values and codes backward reads; gradients: of values, by name."""

    block: Block
    layer: int
    at: OpId
    source: Slot
    made: Phase
    gradients: dict[str, Slot] = field(default_factory=dict)
    used: list[Slot] = field(default_factory=list)

    @property
    def node(self) -> OpId:
        """The key of its nodes."""
        return self.at._replace(site=0, role_id=0)

    def op(self, site: int, role: TensorRole) -> OpId:
        """The cast of one operand."""
        return self.at._replace(site=site, role_id=int(role))

    def gradient(self, name: str, of: str) -> Slot:
        """A place for the gradient of a value, by way of the value ``of``."""
        return value_slot(f"d.{name}.{of}", self.at, Phase.BACKWARD)


class Walker:
    """Writes the events of one graph. Remembers from step to step of the writing which gradients have begun."""

    def __init__(self, graph: Graph, writer: Writer, chain: Sequence[tuple[int, int]]) -> None:
        """chain: (layer, visit) of every entry, in the order of forward."""
        self.graph, self.writer = graph, writer
        self._place = {entry: at for at, entry in enumerate(chain)}
        self._begun: set[Slot] = set()
        self._losses: list[Slot] = []
        self._outward: dict[Slot, Slot] = {}  # hidden state -> where its gradient lies
        self._put_off: dict[OpId, tuple[_Visit, list[Slot]]] = {}
        self.replays = not writer.has(Feature.NO_CHECKPOINT)

    # ---- before the first step, and at the end of each --------------------------------------------------------

    def params(self) -> Iterator[tuple[OpId, Slot]]:
        """Every parameter: its key and its place, those of the stem first, of the tail last."""
        blocks = [(STEM, self.graph.stem), *((i, self.graph.layer) for i in range(self.writer.spec.layers))]
        for layer, block in (*blocks, (TAIL, self.graph.tail)):
            for name, site in block.params.items():
                yield OpId(0, 0, max(layer, 0), site, int(TensorRole.WEIGHT)), param_slot(name, layer)

    def start(self) -> Iterator[Event]:
        """Parameters are loaded; what the update holds beside them is made."""
        params = dict(self.params())
        yield from (Load(Phase.FORWARD, key, name) for key, name in params.items())
        yield Compute(Phase.FORWARD, OpId(0), self.graph.start, tuple(params.values()), (HELD,))

    def update(self, step: int) -> Iterator[Event]:
        """The optimizer: parameters move on, gradients and losses go."""
        params = tuple(name for _, name in self.params())
        grads = tuple(grad_slot(name) for name in params)
        at = OpId(step, role_id=int(TensorRole.WEIGHT))
        yield Optimize(Phase.UPDATE, OpId(step))  # first, so that what the update makes is of the next version
        ins = (HELD, *self._losses, *params, *grads)
        yield Compute(Phase.UPDATE, at, self.graph.update, ins, (HELD, REPORT, *params))
        yield Drop(Phase.UPDATE, (*grads, *self._losses))
        self._begun.clear()
        self._losses.clear()

    def kept(self) -> tuple[Slot, ...]:
        """What a checkpoint of the model holds: all that lives from step to step but the quantizers' states."""
        return (HELD, *(name for _, name in self.params()))

    # ---- passes ------------------------------------------------------------------------------------------------

    def enter(self, at: OpId, phase: Phase = Phase.FORWARD) -> Iterator[Event]:
        """The data of a microbatch, and the stem."""
        key = at._replace(layer_id=0, visit=0, site=self.graph.batch, role_id=int(TensorRole.INPUT))
        yield Load(phase, key, self._data(at))
        yield from self._forward(self._stem(at), phase, self._hidden(0, at))

    def forward(self, at: OpId, phase: Phase = Phase.FORWARD) -> Iterator[Event]:
        """One layer visit in forward, or in a phase that trains nothing."""
        visit = self._layer(at)
        yield from self._forward(visit, phase, self._hidden(self._place[at.layer_id, at.visit] + 1, at))
        if phase is not Phase.FORWARD:
            yield Drop(phase, (visit.source,))

    def leave(self, at: OpId, phase: Phase = Phase.FORWARD) -> Iterator[Event]:
        """The tail: its loss, and the gradient of its result."""
        visit = self._tail(at)
        yield from self._forward(visit, phase, value_slot(self.graph.tail.result, visit.at, phase))
        loss = value_slot(self.graph.loss, visit.at, phase)
        if phase is Phase.FORWARD:
            self._losses.append(loss)
        else:
            logits = value_slot(self.graph.tail.result, visit.at, phase)
            yield Drop(phase, (visit.source, loss, logits, self._data(at)))

    def enter_backward(self, at: OpId) -> Iterator[Event]:
        """Backward of the tail, from the gradient that its forward made."""
        visit = self._tail(at)
        self._outward[visit.source] = ""
        visit.gradients[self.graph.tail.result] = value_slot(self.graph.outward, visit.at, Phase.FORWARD)
        yield from self._backward(visit)

    def backward(self, at: OpId, *, put_off: bool) -> Iterator[Event]:
        """Recompute of one layer visit, then its backward, step by step from the last to the first."""
        visit = self._layer(at)
        yield from self.recompute(at)
        after = self._hidden(self._place[at.layer_id, at.visit] + 1, at)
        visit.gradients[self.graph.layer.result] = self._outward.pop(after)
        yield from self._backward(visit, put_off=put_off)

    def weights(self, at: OpId) -> Iterator[Event]:
        """The gradients of weights that were put off."""
        visit, gone = self._put_off.pop(at)
        for step in reversed(visit.block.steps):
            if isinstance(step, Product) and step.right in visit.block.params:
                yield from self._weight_gradient(visit, step)
        yield Drop(Phase.BACKWARD, tuple(gone))

    def leave_backward(self, at: OpId) -> Iterator[Event]:
        """Backward of the stem; the data go."""
        visit = self._stem(at)
        visit.gradients[self.graph.stem.result] = self._outward.pop(self._hidden(0, at))
        yield from self._backward(visit)
        yield Drop(Phase.BACKWARD, (self._data(at),))

    def recompute(self, at: OpId) -> Iterator[Event]:
        """One layer visit again, from its source and what forward saved."""
        if not self.replays:
            return
        visit, whole = self._layer(at), not self.writer.has(Feature.EARLY_STOP)
        for step, multiplied in visit.block.again(visit.block.saves, whole=whole):
            yield from self._step(visit, step, Phase.RECOMPUTE, multiplied=multiplied)

    def nested(self, at: OpId) -> Iterator[Event]:
        """A recompute whose values go again, as that of an outer checkpoint does."""
        yield from self.recompute(at)
        yield Drop(Phase.RECOMPUTE, tuple(self._made_of(self._layer(at))))

    # ---- visits and places ---------------------------------------------------------------------------------------

    def _stem(self, at: OpId) -> _Visit:
        return _Visit(self.graph.stem, STEM, at._replace(layer_id=0, visit=0), "", Phase.FORWARD)

    def _layer(self, at: OpId) -> _Visit:
        made = Phase.RECOMPUTE if self.replays else Phase.FORWARD
        return _Visit(
            self.graph.layer, at.layer_id, at, self._hidden(self._place[at.layer_id, at.visit], at), made
        )  # fmt: skip

    def _tail(self, at: OpId) -> _Visit:
        source = self._hidden(len(self._place), at)  # its values lie beside those of layer 0 and share no name
        return _Visit(self.graph.tail, TAIL, at._replace(layer_id=0, visit=0), source, Phase.FORWARD)

    def _hidden(self, place: int, at: OpId) -> Slot:
        return slot("hidden", at._replace(layer_id=place, visit=0, site=0, role_id=0))

    def _data(self, at: OpId) -> Slot:
        return slot(DATA, at._replace(layer_id=0, visit=0, site=self.graph.batch, role_id=0))

    def _saved(self, block: Block) -> frozenset[str]:
        """Values that forward keeps for backward beside the source."""
        if block is self.graph.layer and self.replays:
            return block.saves
        made = {self.graph.loss, self.graph.outward} if block is self.graph.tail else set()
        return block.wanted | made

    def _where(self, visit: _Visit, phase: Phase, name: str) -> Slot:
        """The place of a value, as it is read in ``phase``."""
        if name in visit.block.params:
            return param_slot(name, visit.layer)
        if name == DATA:
            return self._data(visit.at)
        if name == HELD:
            return HELD
        if name == visit.block.source:
            return visit.source
        if phase is Phase.RECOMPUTE and name in visit.block.saves:
            phase = Phase.FORWARD
        return value_slot(name, visit.at, phase)

    # ---- forward and recompute -----------------------------------------------------------------------------------

    def _forward(self, visit: _Visit, phase: Phase, result: Slot) -> Iterator[Event]:
        for step in visit.block.steps:
            yield from self._step(visit, step, phase, multiplied=True, result=result)
        kept = self._saved(visit.block) if phase is Phase.FORWARD else {self.graph.loss}
        made = {name for step in visit.block.steps for name in made_by(step)} - {visit.block.result} - kept
        gone = [value_slot(name, visit.at, phase) for name in sorted(made)]
        for step in visit.block.steps:
            if isinstance(step, Product) and (phase is not Phase.FORWARD or visit.made is Phase.RECOMPUTE):
                gone += self._codes(visit, step, phase)
                gone += self._snapshots(visit, step) if phase is not Phase.FORWARD else []
        if gone:
            yield Drop(phase, tuple(gone))

    def _step(self, visit: _Visit, step: Step, phase: Phase, *, multiplied: bool, result: Slot = "") -> Iterator[Event]:
        """One step in forward, in recompute, or in a phase that trains nothing. result: the block's own place."""

        def into(name: str) -> Slot:
            return result if result and name == visit.block.result else value_slot(name, visit.at, phase)

        if isinstance(step, Node):
            ins = tuple(self._where(visit, phase, name) for name in step.ins)
            yield Compute(phase, visit.node, step.kind, ins, tuple(map(into, step.outs)))
            return
        sides = self._sides(visit, step, phase)
        for side in sides if step.cast else ():
            yield from self.writer.cast(side.op, phase, src=side.src, replayed=self.replays)
        if multiplied:
            yield from self.writer.consume(step.gemm, sides[0].op, phase, *sides, out=into(step.out))

    def _sides(self, visit: _Visit, step: Product, made: Phase) -> tuple[Side, Side]:
        """The operands of a product, their codes made in phase ``made``."""
        names, (left, right) = (step.left, step.right), step.roles
        a, b = (self._where(visit, made, name) for name in names)
        raw = not step.cast
        return Side(visit.op(step.site, left), made, a, raw), Side(visit.op(step.site, right), made, b, raw)

    # ---- backward ------------------------------------------------------------------------------------------------

    def _backward(self, visit: _Visit, *, put_off: bool = False) -> Iterator[Event]:
        """Gradients of all that the block has, from that of its result."""
        visit.used.append(visit.gradients[visit.block.result])
        for step in reversed(visit.block.steps):
            if isinstance(step, Product):
                yield from self._product_gradients(visit, step, put_off=put_off)
            elif step.passes:
                for name in step.grads:
                    yield from self._add(visit, name, visit.gradients[step.outs[0]])
            elif step.grads:
                yield from self._node_gradients(visit, step)
        gone = [*visit.used, *self._made_of(visit), *self._kept_of(visit)]
        if visit.block.source:
            self._outward[visit.source] = visit.gradients[visit.block.source]
            gone = [name for name in gone if name != visit.gradients[visit.block.source]] + [visit.source]
        gone = list(dict.fromkeys(gone))
        if put_off:
            self._put_off[visit.at] = visit, gone
        else:
            yield Drop(Phase.BACKWARD, tuple(gone))

    def _node_gradients(self, visit: _Visit, step: Node) -> Iterator[Event]:
        reads = tuple(
            visit.gradients[name[2:]] if name.startswith("d:") else self._where(visit, visit.made, name)
            for name in step.reads
        )
        outs = tuple(self._first_place(visit, name) or visit.gradient(name, step.outs[0]) for name in step.grads)
        ins = (*reads, *(visit.gradients[name] for name in step.flows))
        yield Compute(Phase.BACKWARD, visit.node, f"{step.kind}.backward", ins, outs)
        for name, made in zip(step.grads, outs, strict=True):
            yield from self._add(visit, name, made)

    def _product_gradients(self, visit: _Visit, step: Product, *, put_off: bool) -> Iterator[Event]:
        sides = self._sides_of_gradient(visit, step)
        if step.grad_role is not None:
            yield from self.writer.cast(sides[OUT].op, Phase.BACKWARD, src=sides[OUT].src)
        for name, (gemm, a, b) in zip((step.left, step.right), GRADIENTS[step.gemm], strict=True):
            if name not in visit.block.params:
                out = visit.gradient(name, step.out)
                yield from self.writer.consume(gemm, sides[OUT].op, Phase.BACKWARD, sides[a], sides[b], out=out)
                yield from self._add(visit, name, out)
            elif not put_off:
                yield from self._weight_gradient(visit, step)

    def _sides_of_gradient(self, visit: _Visit, step: Product) -> dict[str, Side]:
        left, right = self._sides(visit, step, visit.made)
        raw = step.grad_role is None
        op = visit.op(step.site, TensorRole.GRAD_OUTPUT)
        return {LEFT: left, RIGHT: right, OUT: Side(op, Phase.BACKWARD, visit.gradients[step.out], raw)}

    def _weight_gradient(self, visit: _Visit, step: Product) -> Iterator[Event]:
        """The gradient of a parameter that a product reads."""
        sides = self._sides_of_gradient(visit, step)
        gemm, a, b = GRADIENTS[step.gemm][1]
        out = self._first_place(visit, step.right) or visit.gradient(step.right, step.out)
        yield from self.writer.consume(gemm, sides[OUT].op, Phase.BACKWARD, sides[a], sides[b], out=out)
        yield from self._add(visit, step.right, out)

    def _first_place(self, visit: _Visit, name: str) -> Slot:
        """Where the first gradient of a parameter in a step goes at once; "" for any other."""
        if name not in visit.block.params:
            return ""
        place = grad_slot(param_slot(name, visit.layer))
        return "" if place in self._begun else place

    def _add(self, visit: _Visit, name: str, made: Slot) -> Iterator[Event]:
        """Another gradient of ``name``: added to what is there."""
        if name in visit.block.params:
            place = grad_slot(param_slot(name, visit.layer))
            if place in self._begun:
                yield Compute(Phase.BACKWARD, visit.node, ADD, (place, made), (place,))
                yield Drop(Phase.BACKWARD, (made,))
            self._begun.add(place)
            return
        if name in visit.gradients:
            total = visit.gradient(name, "sum")
            yield Compute(Phase.BACKWARD, visit.node, ADD, (visit.gradients[name], made), (total,))
            visit.used.append(made)
            made = total
        visit.gradients[name] = made
        visit.used.append(made)

    # ---- what goes when ------------------------------------------------------------------------------------------

    def _made_of(self, visit: _Visit) -> list[Slot]:
        """Values and codes of the pass that backward reads."""
        steps: Sequence[Step] = visit.block.steps
        if visit.made is Phase.RECOMPUTE:
            steps = [step for step, _ in visit.block.again(visit.block.saves, whole=True)]
        values = [value_slot(name, visit.at, visit.made) for step in steps for name in made_by(step)]
        loss = value_slot(self.graph.loss, visit.at, visit.made)  # the update reads it
        products = [step for step in visit.block.steps if isinstance(step, Product)]
        return [v for v in values if v != loss] + [c for step in products for c in self._codes(visit, step, visit.made)]

    def _kept_of(self, visit: _Visit) -> list[Slot]:
        """What forward kept for backward, the metadata of all casts, codes of gradients."""
        gone = [value_slot(name, visit.at, Phase.FORWARD) for name in sorted(visit.block.saves)]
        for step in visit.block.steps:
            if isinstance(step, Product):
                gone += self._snapshots(visit, step)
                op = visit.op(step.site, TensorRole.GRAD_OUTPUT)
                if step.grad_role is not None and self.writer.casts(op):
                    gone += [self.writer.codes_slot(op, Phase.BACKWARD), slot("snap", op)]
        return gone

    def _cast_ops(self, visit: _Visit, step: Product) -> list[OpId]:
        ops = [visit.op(step.site, role) for role in step.roles] if step.cast else []
        return [op for op in ops if self.writer.casts(op) and not self.writer.cached(op)]

    def _codes(self, visit: _Visit, step: Product, phase: Phase) -> list[Slot]:
        return [self.writer.codes_slot(op, phase) for op in self._cast_ops(visit, step)]

    def _snapshots(self, visit: _Visit, step: Product) -> list[Slot]:
        own = self.writer.queued or Verb.BEGIN in self.writer.preset.recompute
        kinds = ("snap", "snap.r") if own else ("snap",)
        return [slot(kind, op) for op in self._cast_ops(visit, step) for kind in kinds]
