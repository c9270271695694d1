"""A study as typed values, and the cells of its grid. Known names are passed in; schedules are checked as built.

The keys, their defaults and what is allowed are the fields below; config.py reads files and words errors.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, model_validator

from qsim.sim.notation import byhand
from qsim.sim.schedule import Feature, Order, ScheduleSpec, SpecError
from qsim.sweep.allowed import Name, Real, Whole, distinct, not_empty, refusal
from qsim.sweep.cell import Cell, ScheduleParams, WorkloadParams

HIGH_PRECISION = "high_precision"  # a control that casts nothing: format, recipe and window mean nothing to it
WRITTEN = "written"  # the schedule that stands in the study as text
CURRENT = "current"  # a recipe without memory: no window
SEEDS = 2**64  # the key of the random streams has two 32-bit words

_SCHEDULE = ScheduleParams()
_WORKLOAD = WorkloadParams()
_Small = Whole(1, 2**16 - 1)  # microbatch and worker share one 32-bit counter word
_Step = Whole(0, 2**32 - 1)
INTERLUDES = {Feature.EVALUATION, Feature.CALIBRATION, Feature.PADDING, Feature.GRAPH_CAPTURE}
"""Features whose passes run on microbatches of their own, numbered after those of the step."""


class Table(BaseModel):
    """A table of a study: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class GridTable(Table):
    """The product of all lists is the grid."""

    defects: Annotated[tuple[Annotated[str, Name("defects")], ...], AfterValidator(not_empty)]
    formats: Annotated[tuple[Annotated[str, Name("formats")], ...], AfterValidator(not_empty)]
    recipes: Annotated[tuple[Annotated[str, Name("recipes")], ...], AfterValidator(not_empty)]
    windows: Annotated[tuple[Annotated[int, Whole(1, 2**16)], ...], AfterValidator(not_empty)]
    mean_shift: Annotated[tuple[Annotated[float, Real()], ...], AfterValidator(not_empty)] | None = None


class ReplicasTable(Table):
    """Seeds seed .. seed + count - 1, the same for every cell: common random numbers."""

    seed: Annotated[int, Whole(0, SEEDS - 1)] = 0
    count: Annotated[int, Whole(1, 2**20)] = 16


class ScheduleTable(Table):
    """ScheduleParams."""

    steps: Annotated[int, Whole(1, 2**32 - 1)] = _SCHEDULE.steps
    microbatches: Annotated[int, _Small] = _SCHEDULE.microbatches
    layers: Annotated[int, Whole(1, 2**12)] = _SCHEDULE.layers
    workers: Annotated[int, _Small] = _SCHEDULE.workers
    order: Annotated[str, Name("orders")] = _SCHEDULE.order
    stages: Annotated[int, Whole(1, 2**12)] = _SCHEDULE.stages
    features: Annotated[tuple[Annotated[str, Name("features")], ...], AfterValidator(distinct)] = _SCHEDULE.features
    text: str = _SCHEDULE.text

    def params(self) -> ScheduleParams:
        """What a cell holds: features in the order of their registry; of a text its own spelling and its sizes."""
        if self.text:
            return msgspec.structs.replace(_SCHEDULE, text=byhand.canonical(self.text), **byhand.sizes_of(self.text))
        order = {feature.value: i for i, feature in enumerate(Feature)}
        features = tuple(sorted(self.features, key=lambda name: order.get(name, len(order))))
        return ScheduleParams(**self.model_dump() | {"features": features})

    def refusals(self) -> Iterator[str]:
        """Why sizes, order and features, or the text, do not fit: one line each, its place first."""
        if self.text:
            for name in ScheduleParams.__struct_fields__:
                if name != "text" and getattr(self, name) != getattr(_SCHEDULE, name):
                    yield f"schedule.{name}: means nothing beside schedule.text, which says it all; keep one of the two"
            yield from (f"schedule.text {problem}" for problem in byhand.refusals(self.text))
            return
        known = {order.value for order in Order}
        if self.order not in known:  # only where no registry was passed in
            return
        try:
            spec = ScheduleSpec(
                steps=self.steps,
                microbatches=self.microbatches,
                layers=self.layers,
                workers=self.workers,
                order=Order(self.order),
                stages=self.stages,
                features=frozenset(Feature(name) for name in self.features),
            )
        except SpecError as error:
            for problem in error.problems:
                place, rest = problem.split(" ", 1)
                yield f"{place.rstrip(':')}: {rest}"
            return
        if not spec.order.pipelined and self.stages != _SCHEDULE.stages:
            yield f"schedule.stages: {self.stages} means nothing to order {self.order}; take a pipelined one, like 1f1b"
        if spec.features & INTERLUDES and self.microbatches + self.workers > 2**16 - 1:
            yield f"schedule.microbatches: {self.microbatches} leaves no number for the microbatch of an interlude"


class WorkloadTable(Table):
    """WorkloadParams, without the digest of the tensors: that is computed, never given."""

    kind: Annotated[str, Name("workloads")] = _WORKLOAD.kind
    tensors: str = _WORKLOAD.tensors
    tokens: Annotated[int, Whole(1, 2**20)] = _WORKLOAD.tokens
    outputs: Annotated[int, Whole(1, 2**20)] = _WORKLOAD.outputs
    mean_shift: Annotated[float, Real()] = _WORKLOAD.mean_shift
    layer_spread: tuple[Annotated[int, Whole(-60, 60)], ...] = _WORKLOAD.layer_spread
    outlier_steps: tuple[Annotated[int, _Step], ...] = _WORKLOAD.outlier_steps
    outlier_factor: Annotated[float, Real(positive=True)] = _WORKLOAD.outlier_factor


class MeasureTable(Table):
    """What enters the figures: steps from skip_steps on."""

    skip_steps: Annotated[int, _Step] = 1


class RunTable(Table):
    """How every cell is run."""

    preset: Annotated[str, Name("presets")] = "seed_correct"
    backend: Annotated[str, Name("backends")] = "numba"
    reproducible: StrictBool = True


class SweepConfig(Table):
    """A whole study. Build it with load_study, which checks names and ties the tensors to their bytes."""

    kind: ClassVar[str] = "lifecycle"

    schema_version: Annotated[int, Whole(1, 1)] = Field(alias="schema")
    title: str = ""
    grid: GridTable
    replicas: ReplicasTable = ReplicasTable()
    schedule: ScheduleTable = ScheduleTable()
    workload: WorkloadTable = WorkloadTable()
    measure: MeasureTable = MeasureTable()
    run: RunTable = RunTable()

    _tensors: tuple[str, str] = PrivateAttr(default=("", ""))  # path for the cells, sha256 of the bytes

    @model_validator(mode="after")
    def _fits_together(self) -> SweepConfig:
        wrong = list(self.schedule.refusals())
        wrong += [] if wrong and self.schedule.text else self._steps_apart()
        for i, defect in enumerate(self.grid.defects):
            if self.schedule.text and defect not in ("correct", HIGH_PRECISION, WRITTEN):
                wrong.append(
                    f"grid.defects[{i}]: {defect} rewrites what is built; a schedule.text is what it is: "
                    f'take "{WRITTEN}", and say in its first line what it breaks'
                )
            elif defect == WRITTEN and not self.schedule.text:
                wrong.append(f"grid.defects[{i}]: {WRITTEN} is a schedule.text, and there is none; write one")
        if self.replicas.seed + self.replicas.count > SEEDS:
            wrong.append(
                f"replicas.seed: {self.replicas.seed} + replicas.count = {self.replicas.count} passes the "
                f"last seed {SEEDS - 1}; give at most {SEEDS - self.replicas.count}"
            )
        if self.grid.mean_shift is not None and "mean_shift" in self.workload.model_fields_set:
            wrong.append(
                f"workload.mean_shift: {self.workload.mean_shift} would be ignored, for grid.mean_shift is "
                "given; keep one of the two"
            )
        if wrong:
            raise refusal("\n".join(wrong))
        return self

    def _steps_apart(self) -> list[str]:
        steps, wrong = self.schedule.params().steps, []
        whose = "the text" if self.schedule.text else "schedule.steps"
        if self.measure.skip_steps >= steps:
            wrong.append(
                f"measure.skip_steps: {self.measure.skip_steps} leaves none of the {steps} "
                f"steps of {whose} to measure; give at most {steps - 1}"
            )
        for i, step in enumerate(self.workload.outlier_steps):
            if step >= steps:
                wrong.append(
                    f"workload.outlier_steps[{i}]: {step} is never reached; "
                    f"{whose} = {steps} runs steps 0 to {steps - 1}"
                )
        return wrong

    @property
    def mean_shifts(self) -> tuple[float, ...]:
        """The values of the grid's axis; one value where the study has no such axis."""
        return (self.workload.mean_shift,) if self.grid.mean_shift is None else self.grid.mean_shift

    @property
    def tensors_digest(self) -> str:
        """sha256 of the tensors' bytes; empty before load_study."""
        return self._tensors[1]

    def with_tensors(self, path: str, digest: str) -> SweepConfig:
        """The same study with tensors found: "builtin" or an absolute path, and the sha256 of the bytes."""
        found = self.model_copy()
        found._tensors = (path, digest)
        return found

    def cells(self) -> tuple[Cell, ...]:
        """The grid in a fixed order; cells of one (mean_shift, format, recipe, window) are adjacent.

        high_precision comes once for each mean_shift (as float32, none, 1); current takes one window, 1.
        """
        found = []
        for shift in self.mean_shifts:
            if HIGH_PRECISION in self.grid.defects:
                found.append(self._cell(HIGH_PRECISION, ("float32", "none", 1), shift))
            for setting in self._settings():
                found += [self._cell(d, setting, shift) for d in self.grid.defects if d != HIGH_PRECISION]
        return tuple(found)

    def _settings(self) -> Iterator[tuple[str, str, int]]:
        for fmt, recipe in itertools.product(self.grid.formats, self.grid.recipes):
            for window in (1,) if recipe == CURRENT else self.grid.windows:
                yield fmt, recipe, window

    def _cell(self, defect: str, setting: tuple[str, str, int], shift: float) -> Cell:
        fmt, recipe, window = setting
        path, digest = self._tensors
        workload = self.workload.model_dump() | {
            "tensors": path or self.workload.tensors,
            "tensors_digest": digest,
            "mean_shift": shift,
        }
        return Cell(
            defect=defect,
            fmt=fmt,
            recipe=recipe,
            window=window,
            preset=self.run.preset,
            seed=self.replicas.seed,
            replicas=self.replicas.count,
            skip_steps=self.measure.skip_steps,
            backend=self.run.backend,
            reproducible=self.run.reproducible,
            schedule=self.schedule.params(),
            workload=WorkloadParams(**workload),
        )

    def to_toml(self) -> str:
        """The study as TOML with overrides and defaults written out: reading it back gives the same cells."""
        tables = self.model_dump(by_alias=True)
        if self._tensors[0]:
            tables["workload"]["tensors"] = self._tensors[0]
        if tables["grid"]["mean_shift"] is None:
            del tables["grid"]["mean_shift"]
        else:
            del tables["workload"]["mean_shift"]
        return toml_text(tables)


def toml_text(tables: Mapping[str, Any]) -> str:
    """Plain values, and tables of them in any depth, as TOML; plain values first."""
    return "\n".join(_toml_lines(tables, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from (f"{key} = {_toml(value)}" for key, value in table.items() if not isinstance(value, dict))
    for name, inner in table.items():
        if isinstance(inner, dict):
            yield from ("", f"[{path}{name}]", *_toml_lines(inner, f"{path}{name}."))


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, float):
        assert math.isfinite(value)
        return repr(value)
    # JSON strings are TOML strings, but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
