"""The tables of a training study: keys, defaults, what a value may be. Combines nothing and reads no file.

A table stands at the top of a study, for every block, and again in a block for what is its own. The fields are those of
``qsim.training.config``, the defaults too; the table ``workload`` is its DataParams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    StrictBool,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from qsim.quant import CenterAxis, CenterSource
from qsim.sim.schedule.spec import Feature
from qsim.sim.scopes import SCOPES
from qsim.sweep.allowed import Between, Name, Real, Whole, Word, distinct, not_empty, refusal
from qsim.sweep.schema import SEEDS, WRITTEN, Table
from qsim.sweep.training.cell import BITS_OF_THIS_MACHINE, label_of
from qsim.training.config import (
    CONTROLS,
    JOIN,
    RECOMPUTED,
    SAVED,
    DataParams,
    LoopParams,
    ModelParams,
    OptimizerParams,
    QuantParams,
    TrainConfig,
)

LINEAR_ROLES = ("input", "weight", "grad_output")
ATTENTION_ROLES = ("q", "k", "v", "p")
ACCUMULATIONS = ("exact", BITS_OF_THIS_MACHINE, "tf32")

_MODEL, _QUANT, _OPTIMIZER = ModelParams(), QuantParams(), OptimizerParams()
_DATA, _LOOP, _RUN = DataParams(), LoopParams(), TrainConfig()
_Small = Whole(1, 2**16 - 1)  # microbatch and worker share one 32-bit counter word
_Size = Whole(1, 2**16)
_Steps = Whole(1, 2**20)
_Positive = Real(positive=True)
_Share = Between(0.0, 1.0)
_Window = Whole(1, 2**16)


@dataclass(frozen=True, slots=True)
class Subset:
    """A list of different words out of a few; their order means nothing, so it becomes that of ``words``."""

    words: tuple[str, ...]

    def check(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The words in order, or a refusal where one is there twice."""
        return tuple(word for word in self.words if word in distinct(values))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True, slots=True)
class Matched:
    """Steps by number, or how many of the first ones."""

    def check(self, value: Any) -> int | tuple[int, ...]:
        """A count, or the steps in ascending order; a refusal for anything else."""
        step = Whole(0, 2**20 - 1)
        try:
            if not isinstance(value, (list, tuple)):
                return step.check(value)
            return tuple(sorted(distinct(tuple(step.check(each) for each in value))))
        except ValueError as error:
            raise refusal(
                "give a list of different steps from 0, like [0, 9], or how many of the first ones"
            ) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


class ModelTable(Table):
    """ModelParams."""

    layers: Annotated[int, Whole(1, 2**12)] = _MODEL.layers
    width: Annotated[int, _Size] = _MODEL.width
    heads: Annotated[int, _Size] = _MODEL.heads
    hidden: Annotated[int, _Size] = _MODEL.hidden
    context: Annotated[int, _Size] = _MODEL.context
    activation: Annotated[str, Word(("swiglu", "gelu"))] = _MODEL.activation
    statistics: Annotated[str, Word((SAVED, RECOMPUTED))] = _MODEL.statistics
    half: Annotated[str, Word(("float32", "float16", "bfloat16"))] = _MODEL.half
    key_mean: Annotated[float, Real()] = _MODEL.key_mean


class QuantTable(Table):
    """QuantParams."""

    linear: Annotated[tuple[Annotated[str, Word(LINEAR_ROLES)], ...], Subset(LINEAR_ROLES)] = _QUANT.linear
    fmt: Annotated[str, Name("formats")] = _QUANT.fmt
    grad_fmt: Annotated[str, Name("formats")] = _QUANT.grad_fmt
    recipe: Annotated[str, Name("recipes")] = _QUANT.recipe
    window: Annotated[int, _Window] = _QUANT.window
    attention: Annotated[tuple[Annotated[str, Word(ATTENTION_ROLES)], ...], Subset(ATTENTION_ROLES)] = _QUANT.attention
    attention_fmt: Annotated[str, Name("formats")] = _QUANT.attention_fmt
    attention_recipe: Annotated[str, Name("recipes")] = _QUANT.attention_recipe
    attention_window: Annotated[int, _Window] = _QUANT.attention_window
    center_axis: Annotated[str, Word(tuple(axis.value for axis in CenterAxis))] = _QUANT.center_axis
    center_source: Annotated[str, Word(tuple(source.name.lower() for source in CenterSource))] = _QUANT.center_source
    center_decay: Annotated[float, _Share] = _QUANT.center_decay
    initial_scale: Annotated[float, _Positive] = _QUANT.initial_scale


class OptimizerTable(Table):
    """OptimizerParams."""

    kind: Annotated[str, Word(("adamw", "sgd"))] = _OPTIMIZER.kind
    lr: Annotated[float, _Positive] = _OPTIMIZER.lr
    beta1: Annotated[float, _Share] = _OPTIMIZER.beta1
    beta2: Annotated[float, _Share] = _OPTIMIZER.beta2
    eps: Annotated[float, _Positive] = _OPTIMIZER.eps
    weight_decay: Annotated[float, Between(0.0)] = _OPTIMIZER.weight_decay
    momentum: Annotated[float, _Share] = _OPTIMIZER.momentum
    warmup: Annotated[int, Whole(0, 2**20)] = _OPTIMIZER.warmup
    clip: Annotated[float, Between(0.0)] = _OPTIMIZER.clip
    loss_scale: Annotated[float, _Positive] = _OPTIMIZER.loss_scale
    dynamic: StrictBool = _OPTIMIZER.dynamic
    growth_interval: Annotated[int, _Steps] = _OPTIMIZER.growth_interval


class WorkloadTable(Table):
    """DataParams, without the digests: those are computed, never given."""

    text: str = _DATA.text
    batch: Annotated[int, Whole(1, 2**24)] = _DATA.batch
    checkpoint: str = _DATA.checkpoint
    spread: tuple[Annotated[int, Whole(-60, 60)], ...] = _DATA.spread


class LoopTable(Table):
    """LoopParams of a run from its start; matched may also be a number: so many of the first steps."""

    steps: Annotated[int, _Steps] = _LOOP.steps
    warm_steps: Annotated[int, Whole(0, 2**16)] = _LOOP.warm_steps
    microbatches: Annotated[int, _Small] = _LOOP.microbatches
    workers: Annotated[int, _Small] = _LOOP.workers
    order: Annotated[str, Name("orders")] = _LOOP.order
    stages: Annotated[int, Whole(1, 2**12)] = _LOOP.stages
    features: Annotated[tuple[Annotated[str, Name("features")], ...], Subset(tuple(f.value for f in Feature))] = (
        _LOOP.features
    )
    preset: Annotated[str, Name("presets")] = _LOOP.preset
    scope: Annotated[str, Word(("", *SCOPES))] = _LOOP.scope
    matched: Annotated[int | tuple[int, ...], Matched()] = _LOOP.matched


class ReplicasTable(Table):
    """Seeds seed .. seed + count - 1, the same for every protocol; each is a run of its own."""

    seed: Annotated[int, Whole(0, SEEDS - 1)] = 0
    count: Annotated[int, Whole(1, 2**12)] = 5


class RunTable(Table):
    """How every run is computed."""

    accumulation: Annotated[str, Word(ACCUMULATIONS)] = _RUN.accumulation
    backend: Annotated[str, Name("backends")] = _RUN.backend


@dataclass(frozen=True, slots=True)
class Chain:
    """A control, or defects of the catalogue with "+" between them, applied from left to right."""

    def check(self, value: str, info: ValidationInfo) -> str:
        """The protocol without blanks, or a refusal."""
        if value.strip() in CONTROLS:
            return value.strip()
        parts = tuple(Name("defects").check(part.strip(), info) for part in value.split(JOIN))
        for part in parts:
            if part in CONTROLS:
                raise refusal(f'"{part}" is a protocol by itself; leave it out, or give a protocol of its own')
            if part == WRITTEN:
                raise refusal("a training study has no schedule that is written by hand; give a defect or a control")
        return JOIN.join(distinct(parts))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.check, handler(source))


class ProtocolTable(Table):
    """What one line of a table runs: "D03", or { defect = "D04+D02", fix = "per_owner_state", label = "shared" }."""

    defect: Annotated[str, Chain()]
    fix: Annotated[str, Name("fixes")] = ""
    label: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: Any) -> Any:
        if not isinstance(value, (str, dict)):
            raise refusal("give a defect in quotes, or a table with the keys defect, fix, label")
        return {"defect": value} if isinstance(value, str) else value

    @property
    def key(self) -> tuple[str, str]:
        """Defect and fix; "" for none."""
        return self.defect, self.fix

    @property
    def shown(self) -> str:
        """The label, its own or a given one."""
        return self.label or label_of(*self.key)

    def plain(self) -> str | dict[str, str]:
        """What a study file would say."""
        given = {k: v for k, v in self.model_dump().items() if v}
        return self.defect if len(given) == 1 else given


SETTINGS: Mapping[str, type[Table]] = {
    "model": ModelTable,
    "quant": QuantTable,
    "optimizer": OptimizerTable,
    "workload": WorkloadTable,
    "loop": LoopTable,
    "run": RunTable,
}
"""The tables that make a setting; a block may give any of their keys again, and its grid may give lists of them."""


def _axes(table: type[Table]) -> type[Table]:
    """A table with the same keys, each a list of values that the key itself takes."""
    keys: dict[str, Any] = {}
    for name, field in table.model_fields.items():
        value: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        keys[name] = (Annotated[tuple[value, ...], AfterValidator(not_empty), AfterValidator(distinct)], Field(()))
    return create_model(f"{table.__name__}Axes", __base__=Table, **keys)


if TYPE_CHECKING:

    class BlockGrid(Table):
        """What a type checker may know of the class below."""

        workload: Table = Table()
else:
    BlockGrid = create_model(
        "BlockGrid", __base__=Table, **{name: (axes := _axes(table), axes()) for name, table in SETTINGS.items()}
    )
    """[blocks.NAME.grid]: quant.window = [1, 2, 4] makes a setting for each; several keys, for each combination."""
