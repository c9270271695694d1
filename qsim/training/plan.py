"""A training run without its numbers: schedule, records, what it breaks. Touches no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from qsim.errors import CaseError, StudyError
from qsim.formats import POLICIES, get_format
from qsim.quant import Recipe, TensorRole, make_recipe
from qsim.quant.centred import CenterAxis, CenterSource
from qsim.sim import (
    FIXES,
    PRESETS,
    SCOPES,
    Case,
    Defect,
    Order,
    ScheduleSpec,
    broken,
    build_case,
    get_defect,
    in_order,
    lint,
)
from qsim.sim.schedule import Feature, features_of
from qsim.training.config import HIGH_PRECISION, LoopParams, ModelParams, QuantParams, TrainConfig, defects_of
from qsim.training.model import decoder

POLICY = POLICIES["ocp"]
LINEAR_ROLES = {"input": TensorRole.INPUT, "weight": TensorRole.WEIGHT, "grad_output": TensorRole.GRAD_OUTPUT}
ATTENTION_ROLES = {
    "q": TensorRole.ATTN_Q,
    "k": TensorRole.ATTN_K,
    "v": TensorRole.ATTN_V,
    "p": TensorRole.ATTN_P,
}


class TrainPlan(NamedTuple):
    """What no number decides: the schedule, the commits of every owner, what it breaks and is expected to break.

    loop: how the steps go, grown where a defect needs more. violations: their number. Records are not kept: a run has
    tens of thousands.
    """

    case: Case
    loop: LoopParams
    commits: Mapping[str, int]
    violations: int
    broken: tuple[str, ...]
    expected: tuple[str, ...]


def _shaped(protocol: str) -> tuple[tuple[Defect, str], ...]:
    """The defects of a run, with their variants."""
    found = []
    for part in defects_of(protocol):
        name, _, variant = part.partition("/")
        found.append((get_defect(name), variant))
    if len({(defect.id, variant) for defect, variant in found}) < len(found):
        raise StudyError(f'protocol "{protocol}" puts a defect on twice; name each once')
    return tuple(found)


def spec_of(config: TrainConfig) -> ScheduleSpec:
    """The schedule of a run, warm steps included. Raises SpecError, or CaseError where it cannot host its defect."""
    loop = config.loop
    return ScheduleSpec(
        first=loop.first,
        steps=loop.warm_steps + loop.steps,
        microbatches=loop.microbatches,
        layers=config.model.layers,
        workers=loop.workers,
        order=Order(loop.order),
        stages=loop.stages,
        features=features_of(loop.features),
    )


def linear_recipe(quant: QuantParams) -> Recipe:
    """The recipe of the linear layers."""
    return make_recipe(
        quant.recipe, fmt=get_format(quant.fmt), window=quant.window, grad_fmt=get_format(quant.grad_fmt),
        initial_scale=quant.initial_scale,
    )  # fmt: skip


def attention_recipe(quant: QuantParams) -> Recipe:
    """The recipe of attention operands."""
    options: dict[str, object] = {"initial_scale": quant.initial_scale}
    if quant.attention_recipe == "centred":
        options |= {"axis": CenterAxis(quant.center_axis), "source": CenterSource[quant.center_source.upper()]}
        if options["source"] is CenterSource.EMA:
            options["beta"] = quant.center_decay
    return make_recipe(
        quant.attention_recipe, fmt=get_format(quant.attention_fmt), window=quant.attention_window, **options
    )


def roles_of(quant: QuantParams) -> frozenset[int]:
    """The roles that are cast. StudyError for an unknown one."""
    found = set()
    for names, known, where in (
        (quant.linear, LINEAR_ROLES, "linear"),
        (quant.attention, ATTENTION_ROLES, "attention"),
    ):
        for name in names:
            if name not in known:
                raise StudyError(f'quant.{where} "{name}" is unknown; known: {", ".join(known)}')
            found.add(int(known[name]))
    return frozenset(found)


def plan_of(config: TrainConfig) -> TrainPlan:
    """The plan of a run. Raises CaseError where preset, recipe or schedule cannot host its defect."""
    quant = config.quant
    if config.defect == HIGH_PRECISION:
        quant = QuantParams()
    return _plan(config.model, quant, config.loop, config.defect, config.fix)


@lru_cache(maxsize=12)
def _plan(model: ModelParams, quant: QuantParams, loop: LoopParams, name: str, fix: str) -> TrainPlan:
    defects = _shaped(name)
    preset = PRESETS["none" if name == HIGH_PRECISION else loop.preset]
    config = TrainConfig(model=model, quant=quant, loop=loop)
    spec, linear, attention = spec_of(config), linear_recipe(quant), attention_recipe(quant)
    cadence = None
    for defect, variant in defects:
        shaped = defect.shaped(variant)
        spec, cadence = shaped.host(spec), shaped.cadence or cadence
        if spec.layers != model.layers:
            raise CaseError(f"{defect.id} {defect.name} needs {spec.layers} layers: set model.layers")
        shaped.require(preset, attention if quant.attention else linear)
    case = build_case(
        spec, body=decoder(model), preset=preset, recipe=linear, cadence=cadence, policy=POLICY,
        scope=SCOPES[loop.scope] if loop.scope else None,
        recipes={int(role): attention for role in ATTENTION_ROLES.values()}, roles=roles_of(quant),
    )  # fmt: skip
    expected = preset.breaks_on(case.context.traits)
    for defect, variant in defects:
        case = defect.apply(case, variant)
        expected |= defect.shaped(variant).breaks
    if fix:
        case = FIXES[fix].rewrite(case)
    records, violations = lint(case)
    if fix:  # a right fix leaves nothing, at most what the preset breaks by itself; of a wrong one nothing is foretold
        right = bool(defects) and all(fix in defect.fixes for defect, _ in defects)
        expected = frozenset() if right else broken(violations)
    commits = Counter(record.owner for record in records if record.kind in ("commit", "store"))
    found = in_order(broken(violations))
    return TrainPlan(case, _grown(loop, spec), MappingProxyType(commits), len(violations), found, in_order(expected))


def _grown(loop: LoopParams, spec: ScheduleSpec) -> LoopParams:
    """``loop`` as its schedule has become."""
    features = tuple(feature.value for feature in Feature if feature in spec.features)
    return msgspec.structs.replace(
        loop, steps=spec.steps - loop.warm_steps, microbatches=spec.microbatches, workers=spec.workers,
        order=spec.order.value, features=features,
    )  # fmt: skip
