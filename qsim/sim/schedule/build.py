"""Builds schedules: the passes of every step, what happens between them, the commits of a unit. Knows no defect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from qsim.errors import CaseError, UsageError
from qsim.formats import POLICIES, CastPolicy
from qsim.quant import MergeRule, OpId, Recipe, StateKey, TensorRole, Timing
from qsim.sim.case import Case, Context
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    Fold,
    Group,
    Load,
    Observe,
    Operand,
    Optimize,
    Phase,
    Quantize,
    Reduce,
    Schedule,
    Store,
    Wait,
)
from qsim.sim.presets import Cadence, Keeps, Preset, Reads, Trigger, Verb
from qsim.sim.schedule.graph import Graph
from qsim.sim.schedule.layers import backward_layer, forward_layer, recompute_layer, weights_layer, works_of
from qsim.sim.schedule.order import Kind, Pass, parts_of, passes_of
from qsim.sim.schedule.process import restarted, taken_back
from qsim.sim.schedule.spec import Body, Feature, Linear, ScheduleSpec
from qsim.sim.schedule.walk import Walker
from qsim.sim.schedule.writer import Writer, slot
from qsim.sim.scopes import LAYER, LAYER_WORKER, Scope

_NOT_FOR_GRAPHS = (
    Feature.SELECTIVE,
    Feature.CALIBRATION,
    Feature.PADDING,
    Feature.GRAPH_CAPTURE,
    Feature.IDLE_EXPERT,
    Feature.OVERFLOW,
    Feature.TENSOR_PARALLEL,
)
"""Features whose passes a graph has no words for."""

_INTERLUDES = {
    Feature.EVALUATION: Phase.EVALUATE,
    Feature.CALIBRATION: Phase.CALIBRATE,
    Feature.PADDING: Phase.PADDING,
}


def _batch(writer: Writer, step: int, batch: int) -> tuple[OpId, ...]:
    """The first operation of each worker's ``batch``-th microbatch."""
    spec = writer.spec
    if writer.has(Feature.TENSOR_PARALLEL):
        return tuple(OpId(step, batch, worker_id=w) for w in range(spec.workers))
    return tuple(OpId(step, batch * spec.workers + w, worker_id=w) for w in range(spec.workers))


def _entries(writer: Writer, part: range) -> list[tuple[int, int]]:
    """(layer, visit) in the order of forward."""
    if writer.has(Feature.TWICE):
        return [(layer, visit) for layer in part for visit in range(2)]
    return [(layer, visit) for visit in range(writer.spec.visits) for layer in part]


def _pass(writer: Writer, one: Pass, step: int, walker: Walker | None) -> Iterator[Event]:
    """The events of one pass: workers proceed in step, entry by entry."""
    if walker is not None:
        yield from _walked(writer, one, step, walker)
        return
    starts = _batch(writer, step, one.batch)
    entries = _entries(writer, parts_of(writer.spec)[one.part])
    put_off = any(p.kind is Kind.WEIGHTS for p in passes_of(writer.spec))

    def every(order: Iterable[tuple[int, int]]) -> Iterator[OpId]:
        for layer, visit in order:
            for start in starts:
                yield start._replace(layer_id=layer, visit=visit)

    match one.kind:
        case Kind.FORWARD:
            for at in every(entries):
                yield from forward_layer(writer, at)
        case Kind.BACKWARD:
            if writer.has(Feature.NESTED):
                for at in every(entries):
                    yield from recompute_layer(writer, at)
            for at in every(reversed(entries)):
                yield from backward_layer(writer, at, put_off=put_off)
        case Kind.WEIGHTS:
            for at in every(reversed(entries)):
                yield from weights_layer(writer, at)


def _walked(writer: Writer, one: Pass, step: int, walker: Walker) -> Iterator[Event]:
    """A pass of a graph: the first part begins with the stem, the last one ends with the tail."""
    starts, parts = _batch(writer, step, one.batch), parts_of(writer.spec)
    visits = [
        start._replace(layer_id=layer, visit=visit)
        for layer, visit in _entries(writer, parts[one.part])
        for start in starts
    ]
    put_off = any(p.kind is Kind.WEIGHTS for p in passes_of(writer.spec))
    first, last = one.part == 0, one.part == len(parts) - 1
    match one.kind:
        case Kind.FORWARD:
            for start in starts if first else ():
                yield from walker.enter(start)
            for at in visits:
                yield from walker.forward(at)
            for start in starts if last else ():
                yield from walker.leave(start)
        case Kind.BACKWARD:
            for start in starts if last else ():
                yield from walker.enter_backward(start)
            for at in visits if writer.has(Feature.NESTED) else ():
                yield from walker.nested(at)
            for at in _backwards(visits, len(starts)):
                yield from walker.backward(at, put_off=put_off)
            for start in starts if first else ():
                yield from walker.leave_backward(start)
        case Kind.WEIGHTS:
            for at in _backwards(visits, len(starts)):
                yield from walker.weights(at)


def _backwards(visits: list[OpId], workers: int) -> list[OpId]:
    """Entries in reverse, the workers of each in order."""
    entries = [visits[i : i + workers] for i in range(0, len(visits), workers)]
    return [at for entry in reversed(entries) for at in entry]


_PHASE_OF = {Kind.FORWARD: Phase.FORWARD, Kind.BACKWARD: Phase.BACKWARD, Kind.WEIGHTS: Phase.UPDATE}


def _step(writer: Writer, step: int, walker: Walker | None) -> list[Event]:
    """One step: its passes, the commits of its units, and what a graph does with its gradients."""
    events: list[Event] = []
    for one in passes_of(writer.spec):
        part = list(_pass(writer, one, step, walker))
        if writer.trigger is Trigger.EXIT:
            part += _commits(writer, part, _PHASE_OF[one.kind], f"t{step}/b{one.batch}")
        events += part
    if writer.trigger in (Trigger.CALL, Trigger.GRADIENTS):
        events += _commits(writer, events, Phase.UPDATE, f"t{step}")
    if walker is not None:
        events += walker.update(step)
    return events


def _commits(writer: Writer, events: Iterable[Event], phase: Phase, unit: str) -> list[Event]:
    """One merged commit for each owner and unit observed in ``events``; ranks reduce first, under the name ``unit``."""
    seen: dict[tuple[StateKey, tuple[int, ...]], list[Observe]] = {}
    for event in events:
        if isinstance(event, Observe) and event.phase in (Phase.FORWARD, Phase.BACKWARD):
            unit_of = event.op[:1] if phase is Phase.UPDATE else event.op[:2]
            seen.setdefault((writer.scope(event.op), unit_of), []).append(event)
    if writer.spec.ranks > 1:
        return list(_reduced(writer, {cell: observed for (cell, _), observed in seen.items()}, phase, unit))
    return [
        Commit(phase, observed[-1].op, cell, tuple(o.into for o in observed), writer.fold)
        for (cell, _), observed in seen.items()
    ]


def _reduced(writer: Writer, seen: dict[StateKey, list[Observe]], phase: Phase, unit: str) -> Iterator[Event]:
    """Every rank hands in what it saw, then waits, then commits: the same collectives in the same order on each."""
    groups = {cell: Group(f"{cell._replace(worker_id=-1)}/{unit}", writer.spec.ranks) for cell in seen}
    for cell, observed in seen.items():
        for one in observed:
            yield Reduce(phase, one.op, _round(groups[cell], observed, one), one.into)
    for cell, observed in seen.items():
        for one in observed:
            yield Wait(phase, one.op, _round(groups[cell], observed, one), slot("obs.group", one.op))
    for cell, observed in seen.items():
        merged = tuple(slot("obs.group", one.op) for one in observed)
        yield Commit(phase, observed[-1].op, cell, merged, writer.fold)


def _round(group: Group, observed: list[Observe], one: Observe) -> Group:
    """The n-th observation of every rank meets those of the others in one round."""
    return group if len(observed) == 1 else group._replace(name=f"{group.name}/{observed.index(one)}")


def _interlude(writer: Writer, step: int, phase: Phase, walker: Walker | None) -> Iterator[Event]:
    """A pass of a microbatch of its own that trains nothing."""
    if walker is not None:
        for start in _batch(writer, step, writer.spec.batches):
            yield from walker.enter(start, phase)
            for part in parts_of(writer.spec):
                for layer, visit in _entries(writer, part):
                    yield from walker.forward(start._replace(layer_id=layer, visit=visit), phase)
            yield from walker.leave(start, phase)
        return
    for part in parts_of(writer.spec):
        for layer in part:
            for start in _batch(writer, step, writer.spec.batches):
                at = start._replace(layer_id=layer)
                yield from _looked_at(writer, at) if phase is Phase.CALIBRATE else forward_layer(writer, at, phase)


def _looked_at(writer: Writer, at: OpId) -> Iterator[Event]:
    """A high-precision pass: amaxes are observed, and no state takes them in."""
    phase = Phase.CALIBRATE
    for work in works_of(writer, at):
        ops = work.left, work.right
        for op in ops:
            yield Load(phase, op, slot("x", op))
            yield Observe(phase, op, slot("x", op), None, slot("obs.cal", op))
        left, right = (Operand(op, slot("x", op), None, None, None) for op in ops)
        yield Consume(phase, work.left, work.gemm, (left, right), slot(f"out.cal.{work.gemm}", work.left))
        yield Drop(phase, tuple(name for op in ops for name in (slot("x", op), slot("obs.cal", op))))


def build_schedule(writer: Writer) -> Schedule:
    """All events of the spec's steps, in order."""
    spec = writer.spec
    walker = _walker_of(writer)
    steps = [_step(writer, spec.first + step, walker) for step in range(spec.steps)]
    cells = tuple(dict.fromkeys(cell for step in steps for event in step if (cell := cell_of(event)) is not None))
    events: list[Event] = []
    if walker is not None:
        events += walker.start()
    if writer.has(Feature.GRAPH_CAPTURE):
        events += _interlude(writer, spec.first, Phase.CAPTURE, walker)
    for step, part in enumerate(steps, spec.first):
        for feature, phase in _INTERLUDES.items():
            if writer.has(feature):
                events += _interlude(writer, step, phase, walker)
        if writer.has(Feature.RERUN) and step == spec.first + spec.steps - 1:
            events += taken_back(part, cells, walker)
        events += part
        if writer.has(Feature.WEIGHT_CACHE) and walker is None:
            events.append(Optimize(Phase.UPDATE, OpId(step)))
        if writer.has(Feature.SAVE_RESTORE) and step == spec.first:
            events += restarted(cells, walker)
    return tuple(events)


def _walker_of(writer: Writer) -> Walker | None:
    """What walks a graph; None for a body of GEMMs over tensors that are loaded."""
    if not isinstance(writer.body, Graph):
        return None
    chain = [entry for part in parts_of(writer.spec) for entry in _entries(writer, part)]
    return Walker(writer.body, writer, chain)


def cell_of(event: Event) -> StateKey | None:
    """The cell that an event reads or advances, None for the others."""
    return event.cell if isinstance(event, (Begin, Commit, Fetch, Store)) else None


def build_case(
    spec: ScheduleSpec,
    *,
    body: Body | Graph,
    preset: Preset,
    recipe: Recipe,
    scope: Scope | None = None,
    cadence: Cadence | None = None,
    policy: CastPolicy = POLICIES["ocp"],
    recipes: Mapping[int, Recipe] | None = None,
    roles: frozenset[int] | None = None,
) -> Case:
    """A case of one preset. scope: owners, by default of each layer, site and role (and worker, where workers are
    ranks). cadence: the unit of a commit, None for the preset's own; STEP makes a preset that commits in every cast
    or at every exit commit once a step instead. recipes: of roles that have one of their own. roles: those that are
    cast, None for all.

    Raises CaseError where preset, recipe and spec do not fit, UsageError for a body that names a site twice.
    """
    _check_body(body, spec)
    scope = scope or (LAYER_WORKER if spec.ranks > 1 else LAYER)
    if preset.cadence is Cadence.NEVER:
        cadence = Cadence.NEVER
        for one in (recipe, *(recipes or {}).values()):
            if preset.reads is not Reads.RAW and one.timing is not Timing.CURRENT:
                raise CaseError(
                    f'preset "{preset.name}" commits nothing, so recipe "{one.name}" would keep its initial '
                    f'scale for ever; use recipe "current"'
                )
    unit = cadence or preset.cadence
    if preset.breaks and unit is not preset.cadence:
        raise CaseError(
            f'preset "{preset.name}" is defective by its {preset.cadence.value} commits; it has no other unit'
        )
    if preset.breaks and spec.ranks > 1:
        raise CaseError(
            f'preset "{preset.name}" commits inside its calls, where ranks cannot reduce; take a correct preset, or '
            "no data_parallel and no tensor_parallel"
        )
    recipe = ruled(recipe, preset)
    others = tuple((role, ruled(one, preset)) for role, one in (recipes or {}).items())
    writer = Writer(
        spec=spec,
        body=body,
        preset=preset,
        scope=scope,
        trigger=_trigger(spec, preset, unit),
        fold=_fold(recipe),
        recipe=recipe,
        recipes=others,
        roles=roles,
    )
    schedule = build_schedule(writer)
    traits = spec.traits() | _traits(body, [recipe, *(one for _, one in others)], preset)
    again = (e for e in schedule if e.phase is Phase.RECOMPUTE)
    if isinstance(body, Graph):
        again = (e for e in again if isinstance(e, Quantize))
        traits -= {"weights"} if roles is not None and TensorRole.WEIGHT not in roles else set()
        traits -= {"gradients"} if roles is not None and TensorRole.GRAD_OUTPUT not in roles else set()
    if not any(again):  # an early stop may leave nothing to do again
        traits = traits - {"recompute"} | {"nothing recomputed"}
    context = Context(scope=scope, unit=unit, fold=writer.fold, ranks=spec.ranks, traits=traits)
    return Case(schedule=schedule, recipe=recipe, policy=policy, context=context, recipes=others)


def _check_body(body: Body | Graph, spec: ScheduleSpec) -> None:
    if isinstance(body, Graph):
        barred = [feature for feature in _NOT_FOR_GRAPHS if feature in spec.features]
        if barred:
            raise CaseError(f"a training run has no {' and no '.join(barred)}: leave it out, or replay tensors")
        return
    sites = [node.site for node in body]
    if not body or len(set(sites)) < len(sites):
        raise UsageError(f"a body with sites {sites}: it needs at least one GEMM, and each a site of its own")


def ruled(recipe: Recipe, preset: Preset) -> Recipe:
    """``recipe`` with the rules of the preset's system in place of its own, as far as it has such a rule."""
    known = {field.name for field in fields(recipe)}
    return replace(recipe, **{name: rule for name, rule in preset.rules if name in known})


def _fold(recipe: Recipe) -> Fold:
    amount = recipe.amax_bound if recipe.merge_rule is MergeRule.CLIP else recipe.decay
    return Fold(recipe.merge_rule, recipe.zero_rule, recipe.nonfinite_rule, amount)


def _trigger(spec: ScheduleSpec, preset: Preset, unit: Cadence) -> Trigger:
    """The preset's own trigger, but where another unit was asked for, or where ranks must meet before a commit."""
    if unit is Cadence.NEVER:
        return Trigger.NEVER
    if unit is Cadence.STEP:
        return preset.trigger if preset.trigger in (Trigger.CALL, Trigger.GRADIENTS) else Trigger.CALL
    if preset.trigger in (Trigger.CALL, Trigger.GRADIENTS):
        return Trigger.EXIT
    if spec.ranks > 1 and Verb.COMMIT in preset.forward:
        return Trigger.EXIT
    return preset.trigger


def _traits(body: Body | Graph, recipes: Sequence[Recipe], preset: Preset) -> frozenset[str]:
    if isinstance(body, Graph):
        found = {"gradients", "weights", "two sites", "dataflow"}
    else:
        found = {"gradients"} if any(getattr(node, "gradients", False) for node in body) else set()
        found |= {"weights"} if any(isinstance(node, Linear) for node in body) else set()
        found |= {"two sites"} if len(body) > 1 else set()
    found |= {"centre"} if any(recipe.centred for recipe in recipes) else set()
    found |= {"queue"} if preset.keeps in (Keeps.FIFO, Keeps.LIFO) else set()
    found |= {"reread"} if Verb.BEGIN in preset.recompute else set()
    return frozenset(found)
