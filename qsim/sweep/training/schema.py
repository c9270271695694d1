"""A training study as typed values, and the cells of its blocks. Reads no file and words no native error.

The keys, their defaults and what is allowed stand in ``tables.py``; ``sweep/config.py`` reads files and words errors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from qsim.sweep.allowed import Whole, distinct, hint, known_names, not_empty, refusal
from qsim.sweep.schema import SEEDS, Table, toml_text
from qsim.sweep.training.cell import TrainingCell
from qsim.sweep.training.setting import Setting, Values
from qsim.sweep.training.tables import (
    SETTINGS,
    BlockGrid,
    LoopTable,
    ModelTable,
    OptimizerTable,
    ProtocolTable,
    QuantTable,
    ReplicasTable,
    RunTable,
    WorkloadTable,
)
from qsim.training.config import HIGH_PRECISION

BLOCKS = "blocks"
BLOCK_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_NAME_ALLOWED = "a block's name has letters, digits, - and _ (at most 40)"


class Block(Table):
    """One setting or, with a grid, several; its protocols, and what differs from the tables of the whole study."""

    protocols: Annotated[tuple[ProtocolTable, ...], AfterValidator(not_empty)]
    model: ModelTable = ModelTable()
    quant: QuantTable = QuantTable()
    optimizer: OptimizerTable = OptimizerTable()
    workload: WorkloadTable = WorkloadTable()
    loop: LoopTable = LoopTable()
    replicas: ReplicasTable = ReplicasTable()
    run: RunTable = RunTable()
    grid: BlockGrid = BlockGrid()

    def axes(self) -> dict[tuple[str, str], tuple[Any, ...]]:
        """(table, key) -> its values, in the order of tables and keys."""
        grid: dict[str, dict[str, tuple[Any, ...]]] = self.grid.model_dump()
        return {(table, key): values for table, keys in grid.items() for key, values in keys.items() if values}

    def refusals(self, place: str) -> Iterator[str]:
        """What is there twice, or would be ignored."""
        keys, labels = ([getattr(p, name) for p in self.protocols] for name in ("key", "shown"))
        for i in range(len(keys)):
            if keys[i] in keys[:i]:
                yield f"{place}.protocols[{i}]: the same as {place}.protocols[{keys.index(keys[i])}]; keep one"
            elif labels[i] in labels[:i]:
                first = f"{place}.protocols[{labels.index(labels[i])}]"
                yield f'{place}.protocols[{i}]: is called "{labels[i]}" like {first}; give it a label of its own'
        for table, key in self.axes():
            if key in getattr(self, table).model_fields_set:
                yield f"{place}.{table}.{key}: would be ignored, for {place}.grid.{table}.{key} is given; keep one"


class TrainingConfig(Table):
    """A whole training study. Build it with ``read_study``, which checks names and ties text and checkpoint to bytes.

    only: names of the blocks that are run, () for all.
    """

    kind: ClassVar[str] = "training"

    schema_version: Annotated[int, Whole(1, 1)] = Field(alias="schema")
    title: str = ""
    only: Annotated[tuple[str, ...], AfterValidator(distinct)] = ()
    model: ModelTable = ModelTable()
    quant: QuantTable = QuantTable()
    optimizer: OptimizerTable = OptimizerTable()
    workload: WorkloadTable = WorkloadTable()
    loop: LoopTable = LoopTable()
    replicas: ReplicasTable = ReplicasTable()
    run: RunTable = RunTable()
    blocks: dict[str, Block]

    _digests: Mapping[tuple[str, str], str] = PrivateAttr(default_factory=dict)  # (key, path) -> sha256 of the bytes

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        wrong = [*self._names(), *(line for name, block in self.blocks.items() for line in self._misfits(name, block))]
        if wrong:
            raise refusal("\n".join(dict.fromkeys(wrong)))  # what is wrong for every block is said once
        return self

    def _names(self) -> Iterator[str]:
        if not self.blocks:
            yield f"{BLOCKS}: there is none; write a table [{BLOCKS}.NAME] with protocols"
        for name in self.blocks:
            if not BLOCK_NAME.fullmatch(name):
                yield f"{BLOCKS}: {name!a} is refused; {_NAME_ALLOWED}"
        for i, name in enumerate(self.only):
            if name not in self.blocks:
                known = known_names(self.blocks)
                yield f'only[{i}]: "{name}" is refused; no block of the study; {known}{hint(name, self.blocks)}'

    def _misfits(self, name: str, block: Block) -> Iterator[str]:
        place = f"{BLOCKS}.{name}"
        yield from block.refusals(place)
        seeds = self._seeds(block)
        if seeds.seed + seeds.count > SEEDS:
            where = f"{place}." if {"seed", "count"} & block.replicas.model_fields_set else ""
            yield (
                f"{where}replicas.seed: {seeds.seed} + replicas.count = {seeds.count} passes the last seed "
                f"{SEEDS - 1}; give at most {SEEDS - seeds.count}"
            )
        for setting in self._settings(block):
            yield from setting.refusals(place, block.protocols)

    def _seeds(self, block: Block) -> ReplicasTable:
        return self.replicas.model_copy(update=block.replicas.model_dump(exclude_unset=True))

    def _settings(self, block: Block) -> Iterator[Setting]:
        """The settings of a block: one for each combination of what its grid lists."""
        own: dict[str, Values] = {t: getattr(block, t).model_dump(exclude_unset=True) for t in SETTINGS}
        shared: dict[str, Values] = {t: getattr(self, t).model_dump() for t in SETTINGS}
        axes = block.axes()
        for values in itertools.product(*axes.values()):
            yield Setting(shared=shared, own=own, point=dict(zip(axes, values, strict=True)))

    def given_files(self) -> Iterator[tuple[str, str, str]]:
        """(key that gives it, "text" or "checkpoint", what is given) of every text and checkpoint of the study."""
        for key in ("text", "checkpoint"):
            yield f"workload.{key}", key, getattr(self.workload, key)
            for name, block in self.blocks.items():
                if key in block.workload.model_fields_set:
                    yield f"{BLOCKS}.{name}.workload.{key}", key, getattr(block.workload, key)
                for given in block.axes().get(("workload", key), ()):
                    yield f"{BLOCKS}.{name}.grid.workload.{key}", key, given

    def with_files(
        self, paths: Mapping[tuple[str, str], str], digests: Mapping[tuple[str, str], str]
    ) -> TrainingConfig:
        """The same study with its files found. paths: (key that gives it, what is given) -> what a cell holds, a name
        or an absolute path. digests: ("text" or "checkpoint", that) -> sha256 of the bytes.
        """

        def placed(table: WorkloadTable, place: str, keys: set[str]) -> WorkloadTable:
            return table.model_copy(update={k: paths[f"{place}.{k}", getattr(table, k)] for k in keys})

        blocks, both = {}, {"text", "checkpoint"}
        for name, block in self.blocks.items():
            place = f"{BLOCKS}.{name}"
            changed: dict[str, Table] = {}
            if own := both & block.workload.model_fields_set:
                changed["workload"] = placed(block.workload, f"{place}.workload", own)
            lists = {
                key: values for (table, key), values in block.axes().items() if table == "workload" and key in both
            }
            if lists:
                found = {k: tuple(paths[f"{place}.grid.workload.{k}", each] for each in v) for k, v in lists.items()}
                workload = block.grid.workload.model_copy(update=found)
                changed["grid"] = block.grid.model_copy(update={"workload": workload})
            blocks[name] = block.model_copy(update=changed)
        shared = placed(self.workload, "workload", both)
        study = self.model_copy(update={"workload": shared, BLOCKS: blocks})
        study._digests = dict(digests)
        return study

    def cells(self) -> tuple[TrainingCell, ...]:
        """One cell for each block, point of its grid, seed and protocol, in this order.

        All protocols of a seed come before the next seed, so that what an interrupted sweep leaves can be compared.
        high_precision casts nothing: it comes once for all points that differ in ``quant`` alone.
        """
        found: dict[tuple[str, int, Any], TrainingCell] = {}
        for name, block in self.blocks.items():
            seeds = self._seeds(block)
            for setting in self._settings(block) if not self.only or name in self.only else ():
                for seed, protocol in itertools.product(range(seeds.seed, seeds.seed + seeds.count), block.protocols):
                    config = setting.config(*protocol.key, self._digests)
                    found.setdefault(
                        (name, seed, config),
                        TrainingCell(
                            block=name,
                            label=protocol.shown,
                            point=setting.words(plain=protocol.defect == HIGH_PRECISION),
                            seed=seed,
                            config=config,
                        ),
                    )
        return tuple(found.values())

    def to_toml(self) -> str:
        """The study as TOML with overrides and defaults written out: reading it back gives the same cells."""
        tables = self.model_dump(by_alias=True) | {"kind": self.kind}
        tables[BLOCKS] = {
            name: {"protocols": [p.plain() for p in block.protocols]}
            | {k: v for k, v in block.model_dump(exclude_unset=True, exclude={"protocols"}).items() if v}
            for name, block in self.blocks.items()
        }
        return toml_text(tables)


def release(raw: Mapping[str, Any], table: str, key: str) -> None:
    """Take a key of a table out of every block: what is set for the whole study holds in all of them."""
    blocks = raw.get(BLOCKS)
    for block in blocks.values() if isinstance(blocks, dict) else ():
        grid = block.get("grid") if isinstance(block, dict) else None
        for tables in (block, grid):
            held = tables.get(table) if isinstance(tables, dict) else None
            if isinstance(held, dict):
                held.pop(key, None)
