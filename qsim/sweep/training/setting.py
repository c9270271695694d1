"""One setting of a training study: shared tables, a block's own, a point of its grid. Knows no seeds and no files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsim.errors import CaseError
from qsim.formats import FORMATS
from qsim.quant import RECIPES, Recipe, make_recipe
from qsim.sim import CONTRASTS, DEFECTS, PRESETS, Feature, Order, ScheduleSpec, get_defect
from qsim.sim.schedule import SpecError
from qsim.sweep.schema import ScheduleTable
from qsim.sweep.training.tables import ProtocolTable
from qsim.training.config import (
    HIGH_PRECISION,
    DataParams,
    LoopParams,
    ModelParams,
    OptimizerParams,
    QuantParams,
    TrainConfig,
    defects_of,
)

Values = Mapping[str, Any]
"""Key -> value of one table."""

_SIZES = {"steps": "loop", "microbatches": "loop", "layers": "model", "workers": "loop"}
"""Size of a schedule -> the table that gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the protocols of a block have in common. point: (table, key) -> the value that the block's grid chose."""

    shared: Mapping[str, Values]
    own: Mapping[str, Values]
    point: Mapping[tuple[str, str], Any]

    def table(self, name: str) -> dict[str, Any]:
        """One table: shared, but for what the block says, but for what its grid chose."""
        chosen = {key: value for (table, key), value in self.point.items() if table == name}
        return {**self.shared[name], **self.own[name], **chosen}

    def words(self, *, plain: bool = False) -> tuple[str, ...]:
        """The point, like ("quant.window=4",). plain: without what means nothing where nothing is cast."""
        return tuple(
            f"{table}.{key}={value if isinstance(value, str) else json.dumps(value)}"
            for (table, key), value in self.point.items()
            if not (plain and table == "quant")
        )

    def config(self, defect: str, fix: str, digests: Mapping[tuple[str, str], str]) -> TrainConfig:
        """The run of one protocol. high_precision gets the default quantizers, for it uses none."""
        data, loop, run = self.table("workload"), self.table("loop"), self.table("run")
        matched = loop["matched"]
        if isinstance(matched, int):
            loop["matched"] = tuple(range(min(matched, loop["steps"])))
        return TrainConfig(
            model=ModelParams(**self.table("model")),
            quant=QuantParams() if defect == HIGH_PRECISION else QuantParams(**self.table("quant")),
            optimizer=OptimizerParams(**self.table("optimizer")),
            data=DataParams(
                **data,
                text_digest=digests.get(("text", data["text"]), ""),
                checkpoint_digest=digests.get(("checkpoint", data["checkpoint"]), ""),
            ),
            loop=LoopParams(**loop),
            defect=defect,
            fix=fix,
            **run,
        )

    def refusals(self, place: str, protocols: Sequence[ProtocolTable]) -> Iterator[str]:
        """What does not fit together: one line each, its place first. place: of the block."""
        for table, key, text in (*self._model(place), *self._loop(place)):
            yield f"{self._place(place, table, key)}: {text}"
        config = self.config("", "", {})
        casting = [p for p in protocols if p.defect != HIGH_PRECISION]
        if casting and not config.quant.linear and not config.quant.attention:
            names = ", ".join(p.defect for p in casting)
            yield f"{place}.quant: nothing is cast, and {names} cast; give linear or attention at least one role"
        for i, protocol in enumerate(protocols):
            where = f"{place}.protocols[{i}]"
            if protocol.defect == HIGH_PRECISION and protocol.fix:
                yield f"{where}: {HIGH_PRECISION} casts nothing, so there is nothing to fix; leave the fix out"
            yield from (f"{where}: {why}" for why in _unhosted(protocol, config))

    def _place(self, place: str, table: str, key: str) -> str:
        if (table, key) in self.point:
            return f"{place}.grid.{table}.{key}"
        return f"{place}.{table}.{key}" if key in self.own[table] else f"{table}.{key}"

    def _model(self, place: str) -> Iterator[tuple[str, str, str]]:
        model, spread = self.table("model"), self.table("workload")["spread"]
        if model["width"] % model["heads"]:
            width = f"{self._place(place, 'model', 'width')} = {model['width']}"
            yield "model", "heads", f"{model['heads']} heads do not divide {width}; give a divisor of it"
        if spread and len(spread) != model["layers"]:
            layers = f"{self._place(place, 'model', 'layers')} = {model['layers']}"
            text = f"{len(spread)} exponent{'s' * (len(spread) != 1)} for {layers}; give one a layer, or [] for none"
            yield "workload", "spread", text

    def _loop(self, place: str) -> Iterator[tuple[str, str, str]]:
        loop, layers = self.table("loop"), self.table("model")["layers"]
        for step in loop["matched"] if isinstance(loop["matched"], tuple) else ():
            if step >= loop["steps"]:
                steps = f"{self._place(place, 'loop', 'steps')} = {loop['steps']}"
                yield "loop", "matched", f"step {step} is never reached; {steps} runs steps 0 to {loop['steps'] - 1}"
        schedule = ScheduleTable(layers=layers, **{key: loop[key] for key in ScheduleTable.model_fields if key in loop})
        for line in schedule.refusals():
            said = line.replace("schedule.layers", "model.layers").replace("schedule.", "loop.")
            where, _, text = said.partition(": ")
            table, _, key = where.partition(".")
            yield table if table in self.shared else "loop", key or "steps", text


def _unhosted(protocol: ProtocolTable, config: TrainConfig) -> Iterator[str]:
    """Why a schedule, preset or recipe cannot host a defect of the protocol. Names that no registry has are let pass:
    a study may be read without one.
    """
    loop, recipes = config.loop, _recipes(config.quant)
    if loop.preset not in PRESETS or loop.order not in {order.value for order in Order}:
        return
    try:
        spec = ScheduleSpec(
            steps=loop.steps,
            microbatches=loop.microbatches,
            layers=config.model.layers,
            workers=loop.workers,
            order=Order(loop.order),
            stages=loop.stages,
            features=frozenset(Feature(name) for name in loop.features),
        )
    except SpecError:  # said for the setting
        return
    for name in defects_of(protocol.defect):
        if name.partition("/")[0] not in {**DEFECTS, **CONTRASTS}:
            continue
        defect = get_defect(name)
        try:
            needed = defect.host(spec)
            for recipe in [r for r in recipes if r.centred][:1] or recipes[:1]:
                defect.require(PRESETS[loop.preset], recipe)
        except CaseError as error:
            yield str(error)
            continue
        if lacks := _lacks(spec, needed):
            yield (
                f"{defect.id} {defect.name} needs {lacks}; all protocols of a block run one schedule: set it, or give "
                "this one a block of its own"
            )


def _recipes(quant: QuantParams) -> list[Recipe]:
    """The recipes of what is cast."""
    used = [(quant.recipe, quant.fmt, quant.window)] if quant.linear else []
    used += [(quant.attention_recipe, quant.attention_fmt, quant.attention_window)] if quant.attention else []
    return [
        make_recipe(name, fmt=FORMATS[fmt], window=window)
        for name, fmt, window in used
        if name in RECIPES and fmt in FORMATS
    ]


def _lacks(spec: ScheduleSpec, needed: ScheduleSpec) -> str:
    """What ``needed`` has beyond ``spec``, in the keys of a study."""
    found = [
        f"{table}.{size} = {getattr(needed, size)}"
        for size, table in _SIZES.items()
        if getattr(needed, size) != getattr(spec, size)
    ]
    if needed.order is not spec.order:
        found.append(f"loop.order = {needed.order.value}")
    if more := needed.features - spec.features:
        found.append(f"loop.features {', '.join(sorted(more))}")
    return " and ".join(found)
