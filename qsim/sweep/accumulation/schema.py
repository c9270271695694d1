"""An accumulation study as typed values, and the cells of its grid. Reads no file and words no native error.

The keys, their defaults and what is allowed are the fields below; ``sweep/config.py`` reads files and words errors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from qsim.formats import FORMATS
from qsim.gemm.models import MODELS, TensorCoreModel
from qsim.sweep.accumulation.cell import NEVER, AccumulationCell
from qsim.sweep.allowed import Name, Whole, not_empty, refusal
from qsim.sweep.schema import SEEDS, Table, toml_text

NEVER_WORD = "none"
DRAWN_AT_ONCE = 2**22  # elements of one operand: half a gigabyte while their random words are made
HELD = 2**27  # codes of all seeds of a cell, a byte each
SWEPT = tuple(
    name for name, model in MODELS.items() if model.scale_format is None and not set(model.formats).isdisjoint(FORMATS)
)
"""Models that multiply 8-bit codes without block scales."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """An integer of k, or "none" for a chain that is never cut; both "none" and 0 become 0."""

    high: int

    def check(self, value: Any) -> int:
        """The number of k, or a refusal."""
        if value == NEVER_WORD:
            return NEVER
        try:
            return Whole(NEVER, self.high).check(value)
        except ValueError as error:
            raise refusal(f'give "{NEVER_WORD}" (or 0) for never, or an integer up to {self.high}') from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


class AccumulationGrid(Table):
    """The product of all lists is the grid, without what a model cannot do: see ``AccumulationConfig.cells``."""

    models: Annotated[tuple[Annotated[str, Name("models")], ...], AfterValidator(not_empty)]
    data: Annotated[tuple[Annotated[str, Name("data")], ...], AfterValidator(not_empty)]
    formats: Annotated[tuple[Annotated[str, Name("formats")], ...], AfterValidator(not_empty)]
    depths: Annotated[tuple[Annotated[int, Whole(1, 2**20)], ...], AfterValidator(not_empty)]
    promote_every: Annotated[tuple[Annotated[int, Promotion(2**20)], ...], AfterValidator(not_empty)] = (NEVER,)


class OutputsTable(Table):
    """How many sums a seed makes: rows x columns."""

    rows: Annotated[int, Whole(1, 2**12)] = 16
    columns: Annotated[int, Whole(1, 2**12)] = 16


class AccumulationReplicas(Table):
    """Seeds seed .. seed + count - 1, the same for every cell: common random numbers. Ones need no second seed."""

    seed: Annotated[int, Whole(0, SEEDS - 1)] = 0
    count: Annotated[int, Whole(1, 2**12)] = 4


class AccumulationConfig(Table):
    """A whole accumulation study. Build it with ``read_study``, which checks names."""

    kind: ClassVar[str] = "accumulation"

    schema_version: Annotated[int, Whole(1, 1)] = Field(alias="schema")
    title: str = ""
    grid: AccumulationGrid
    outputs: OutputsTable = OutputsTable()
    replicas: AccumulationReplicas = AccumulationReplicas()

    @model_validator(mode="after")
    def _fits_together(self) -> AccumulationConfig:
        wrong = [*self._misfits(), *self._too_large()]
        if self.replicas.seed + self.replicas.count > SEEDS:
            wrong.append(
                f"replicas.seed: {self.replicas.seed} + replicas.count = {self.replicas.count} passes the "
                f"last seed {SEEDS - 1}; give at most {SEEDS - self.replicas.count}"
            )
        if wrong:
            raise refusal("\n".join(wrong))
        return self

    def _misfits(self) -> list[str]:
        """Values of an axis that would make no cell at all."""
        grid, models, wrong = self.grid, self._models(), []
        steps = ", ".join(f"{m.name} {m.step}" for m in models)
        for i, model in enumerate(models):
            if set(model.formats).isdisjoint(grid.formats):
                wrong.append(f"grid.models[{i}]: {model.name} takes {', '.join(model.formats)}; give one of them")
            if not any(fits(model, every) for every in grid.promote_every):
                wrong.append(
                    f"grid.models[{i}]: no grid.promote_every is a multiple of {model.step}, the k of one instruction "
                    f'of {model.name}; add "{NEVER_WORD}", or leave the model out'
                )
        for i, fmt in enumerate(grid.formats):
            if not any(fmt in model.formats for model in models):
                wrong.append(f"grid.formats[{i}]: no model of grid.models takes {fmt}; leave it out")
        for i, every in enumerate(grid.promote_every):
            if not any(fits(model, every) for model in models):
                wrong.append(
                    f"grid.promote_every[{i}]: {every} cuts an instruction of every model; give multiples of the k of "
                    f"one: {steps}"
                )
        return wrong

    def _too_large(self) -> list[str]:
        sides, wrong = (self.outputs.rows, self.outputs.columns), []
        for i, depth in enumerate(self.grid.depths):
            if depth * max(sides) > DRAWN_AT_ONCE:
                wrong.append(
                    f"grid.depths[{i}]: {depth} x {max(sides)} elements of an operand are more than {DRAWN_AT_ONCE}; "
                    "give smaller depths, outputs.rows or outputs.columns"
                )
            elif depth * sum(sides) * self.replicas.count > HELD:
                wrong.append(
                    f"grid.depths[{i}]: {depth} x {sum(sides)} x {self.replicas.count} seeds are more than {HELD} "
                    "codes; give a smaller replicas.count"
                )
        return wrong

    def _models(self) -> list[TensorCoreModel]:
        return [MODELS[name] for name in self.grid.models if name in MODELS]

    def cells(self) -> tuple[AccumulationCell, ...]:
        """The grid in a fixed order; cells of one (data, format, depth) are adjacent and share their operands.

        A model comes without the formats that it does not take, and without promotions that would cut an instruction.
        "ones" is the same for every seed, so it takes one.
        """
        grid, found = self.grid, []
        for data, fmt, depth in itertools.product(grid.data, grid.formats, grid.depths):
            for model, every in itertools.product(self._models(), grid.promote_every):
                if fmt in model.formats and fits(model, every):
                    found.append(
                        AccumulationCell(
                            model=model.name,
                            data=data,
                            fmt=fmt,
                            depth=depth,
                            promote_every=every,
                            rows=self.outputs.rows,
                            columns=self.outputs.columns,
                            seed=0 if data == "ones" else self.replicas.seed,
                            replicas=1 if data == "ones" else self.replicas.count,
                        )
                    )
        return tuple(found)

    def to_toml(self) -> str:
        """The study as TOML with overrides and defaults written out: reading it back gives the same cells."""
        return toml_text(self.model_dump(by_alias=True) | {"kind": self.kind})


def fits(model: TensorCoreModel, promote_every: int) -> bool:
    """True where a chain of this many k ends at the end of an instruction."""
    return promote_every % model.step == 0
