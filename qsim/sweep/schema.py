"""A study as typed values, and the cells of its grid. Knows no registry: known names are passed in.

The keys, their defaults and what is allowed are the fields below; config.py reads files and words errors.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, model_validator

from qsim.sweep.allowed import Name, Real, Whole, not_empty, refusal
from qsim.sweep.cell import Cell, ScheduleParams, WorkloadParams

HIGH_PRECISION = "high_precision"  # a control that casts nothing: format, recipe and window mean nothing to it
CURRENT = "current"  # a recipe without memory: no window
SEEDS = 2**64  # the key of the random streams has two 32-bit words

_SCHEDULE = ScheduleParams()
_WORKLOAD = WorkloadParams()
_Small = Whole(1, 2**16 - 1)  # microbatch and worker share one 32-bit counter word
_Step = Whole(0, 2**32 - 1)


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
        wrong = []
        if self.measure.skip_steps >= self.schedule.steps:
            wrong.append(
                f"measure.skip_steps: {self.measure.skip_steps} leaves none of the {self.schedule.steps} "
                f"steps of schedule.steps to measure; give at most {self.schedule.steps - 1}"
            )
        for i, step in enumerate(self.workload.outlier_steps):
            if step >= self.schedule.steps:
                wrong.append(
                    f"workload.outlier_steps[{i}]: {step} is never reached; "
                    f"schedule.steps = {self.schedule.steps} runs steps 0 to {self.schedule.steps - 1}"
                )
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
            schedule=ScheduleParams(**self.schedule.model_dump()),
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
    """Plain values and tables of them as TOML; plain values first."""
    lines = [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        assert math.isfinite(value)
        return repr(value)
    # JSON strings are TOML strings, but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
