"""Training studies: what a file may say, every error at once, cells and their identity."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qsim import _paths
from qsim.errors import InputError, StudyError
from qsim.sweep import identity
from qsim.sweep.config import load_study, read_study, study_kind
from qsim.sweep.identity import case_id, decode_cell, decode_record_of, encode_cell, encode_record
from qsim.sweep.known import registries
from qsim.sweep.training.cell import TrainingCell, TrainingRecord, label_of
from qsim.sweep.training.schema import TrainingConfig
from qsim.sweep.training.tables import (
    SETTINGS,
    LoopTable,
    ModelTable,
    OptimizerTable,
    ProtocolTable,
    QuantTable,
    RunTable,
    WorkloadTable,
)
from qsim.training.config import (
    DataParams,
    LoopParams,
    ModelParams,
    OptimizerParams,
    QuantParams,
    TrainConfig,
    defects_of,
)
from qsim.training.log import MatchedPoint, StepLog, TrainLog

ARTICLE = Path(__file__).resolve().parents[2] / "studies" / "article.toml"
STUDY = """
schema = 1
kind = "training"
[replicas]
count = 2
[blocks.a]
protocols = ["high_precision", "correct", { defect = "D04 + D02", label = "shared" }]
[blocks.b]
protocols = ["correct", { defect = "D03", fix = "keyed_snapshot" }]
[blocks.b.quant]
window = 16
[blocks.b.loop]
steps = 20
"""
Load = Callable[..., TrainingConfig]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load("key=value", text=STUDY)``, with stand-ins for the text and the checkpoint that ship."""
    text, checkpoint = tmp_path / "text", tmp_path / "checkpoint"
    text.write_bytes(b"to train on " * 100)
    checkpoint.write_bytes(b"weights")
    monkeypatch.setattr(_paths, "sample_text", lambda: text)
    monkeypatch.setattr(_paths, "sample_checkpoint", lambda: checkpoint)

    def call(*overrides: str, text: str | Path = STUDY) -> TrainingConfig:
        found = read_study(text, registries(), list(overrides))
        assert isinstance(found, TrainingConfig)
        return found

    return call


def errors(*overrides: str, text: str = STUDY) -> list[str]:
    with pytest.raises(StudyError) as caught:
        read_study(text, registries(), list(overrides))
    head, *lines = str(caught.value).split("\n")
    assert head == f"study: {len(lines)} error{'s' if len(lines) > 1 else ''}"
    return [line.removeprefix("  ") for line in lines]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of(config: TrainingConfig, block: str) -> list[TrainingCell]:
    return [cell for cell in config.cells() if cell.block == block]


# what a study may say


def test_every_error_is_reported_at_once_with_place_value_and_hint() -> None:
    lines = errors(
        "model.layer=3",
        "blocks.a.quant.windo=3",
        "blocks.a.quant=3",
        "kind=lifecycle",
        text="""
schema = 2
kind = "training"
titel = "x"
[quant]
linear = ["inputs"]
fmt = "e4m4"
center_decay = 1.0
[optimizer]
lr = 0.0
clip = -1.0
dynamic = 1
kind = "adam"
[loop]
steps = 0
matched = [1, 1]
features = ["nestd"]
[data]
text = "x"
[run]
accumulation = "fp32"
[blocks.a]
protocol = ["correct"]
[blocks.b]
protocols = ["D3", 7, { defect = "correct+D03" }, "D02+D02", "written", { defect = "D01", lable = "x", fix = "keyed" }]
[blocks.b.model]
half = "fp16"
[blocks.b.workload]
text_digest = "ab"
spread = [61]
[blocks.b.grid]
quant.window = [1, 0]
quant.fmt = ["e4m3", "float8_e4m3fn"]
seed.count = [1]
""",
    )
    expected = {
        "--set model.layer=3": 'unknown key; known: model.layers, .*; did you mean "model.layers"?',
        "--set blocks.a.quant.windo=3": 'unknown key; .*; did you mean "blocks.a.quant.window"?',
        "--set blocks.a.quant=3": "blocks.a.quant is a table; set one of blocks.a.quant.linear, .*",
        "--set kind=lifecycle": "the kind stands in the study file; give the path of another study",
        "schema": "2 is refused; give 1",
        "titel": 'unknown key; known: schema, title, only, .*; did you mean "title"?',
        "quant.linear[0]": '"inputs" is refused; unknown name; known: input, .*; did you mean "input"?',
        "quant.fmt": '"e4m4" is refused; unknown name; .*; did you mean "e4m3"?',
        "quant.center_decay": "1.0 is refused; give a finite number from 0 on, below 1",
        "optimizer.lr": "0.0 is refused; give a finite number above 0",
        "optimizer.clip": "-1.0 is refused; give a finite number from 0 on",
        "optimizer.dynamic": "1 is refused; give true or false",
        "optimizer.kind": '"adam" is refused; unknown name; known: adamw, sgd; did you mean "adamw"?',
        "loop.steps": "0 is refused; give an integer from 1 to 1048576",
        "loop.matched": "[1, 1] is refused; give a list of different steps .* or how many of the first ones",
        "loop.features[0]": '"nestd" is refused; .*; did you mean "nested"?',
        "data": "unknown key; known: .*",
        "run.accumulation": '"fp32" is refused; unknown name; known: exact, blas, tf32',
        "blocks.a.protocol": 'unknown key; known: protocols, .*; did you mean "protocols"?',
        "blocks.a.protocols": "is missing",
        "blocks.b.protocols[0].defect": '"D3" is refused; unknown name; .*',
        "blocks.b.protocols[1]": "7 is refused; give a defect in quotes, or a table with the keys defect, fix, label",
        "blocks.b.protocols[2].defect": '"correct+D03" is refused; "correct" is a protocol by itself; .*',
        "blocks.b.protocols[3].defect": '"D02+D02" is refused; "D02" is there twice; keep one',
        "blocks.b.protocols[4].defect": '"written" is refused; a training study has no schedule .*',
        "blocks.b.protocols[5].lable": 'unknown key; known: defect, fix, label; did you mean "label"?',
        "blocks.b.protocols[5].fix": '"keyed" is refused; unknown name; .*; did you mean "keyed_stash"?',
        "blocks.b.model.half": '"fp16" is refused; unknown name; known: float32, float16, bfloat16',
        "blocks.b.workload.text_digest": "unknown key; known: text, batch, checkpoint, spread",
        "blocks.b.workload.spread[0]": "61 is refused; give an integer from -60 to 60",
        "blocks.b.grid.quant.window[1]": "0 is refused; give an integer from 1 to 65536",
        "blocks.b.grid.quant.fmt": '.* is refused; "float8_e4m3fn" is there twice; keep one',
        "blocks.b.grid.seed": "unknown key; known: model, quant, optimizer, workload, loop, run",
    }
    found = dict(line.split(": ", 1) for line in lines)
    assert set(expected) == set(found)
    for place, text in expected.items():
        pattern = re.escape(text).replace(r"\.\*", ".*")
        assert re.fullmatch(pattern, found[place]) or found[place].startswith(text + "; did you"), (place, found[place])


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (["model.heads=5"], ["model.heads: 5 heads do not divide model.width = 64"]),
        (["blocks.a.workload.spread=[1, -1]"], ["blocks.a.workload.spread: 2 exponents for model.layers = 8"]),
        (
            ["loop.matched=[0, 40]"],
            [
                "loop.matched: step 40 is never reached; loop.steps = 40 runs steps 0 to 39",
                "loop.matched: step 40 is never reached; blocks.b.loop.steps = 20 runs steps 0 to 19",
            ],
        ),
        (["loop.workers=2"], ["loop.microbatches: 1 is no multiple of loop.workers 2"]),
        (["loop.order=1f1b", "model.layers=1"], ["loop.order: 1f1b splits 1 layer(s)"]),
        (["loop.stages=4"], ["loop.stages: 4 means nothing to order forward_first"]),
        (["quant.linear=[]"], ["blocks.a.quant: nothing is cast", "blocks.b.quant: nothing is cast"]),
        (['only=["c"]'], ['only[0]: "c" is refused; no block of the study; known: a, b']),
        ([f"replicas.seed={2**64 - 1}"], [f"replicas.seed: {2**64 - 1} + replicas.count = 2 passes"]),
        ([f"blocks.b.replicas.seed={2**64 - 1}"], ["blocks.b.replicas.seed: "]),
        (["loop.preset=seed_defective"], ["blocks.a.protocols[2]: D04", "blocks.a.protocols[2]: D02", "blocks.b."]),
        (['blocks.b.protocols=["D07"]'], ["blocks.b.protocols[0]: D07 stale_center needs a recipe with a centre"]),
        (['blocks.b.protocols=["D09"]'], ["blocks.b.protocols[0]: D09 concurrent_double_commit needs loop.microb"]),
        (['blocks.b.protocols=["D01", "correct", "D01"]'], ["blocks.b.protocols[2]: the same as blocks.b.proto"]),
        (
            ['blocks.b.protocols=["D01", {defect = "D02", label = "D01"}]'],
            ['blocks.b.protocols[1]: is called "D01" like blocks.b.protocols[0]'],
        ),
        (
            ['blocks.b.protocols=[{defect = "high_precision", fix = "max_merge"}]'],
            ["blocks.b.protocols[0]: high_precision casts nothing, so there is nothing to fix"],
        ),
        (["blocks.b.grid.quant.window=[1, 2]"], ["blocks.b.quant.window: would be ignored"]),
        (["blocks.b.grid.model.heads=[3, 4]"], ["blocks.b.grid.model.heads: 3 heads do not divide"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_an_error_before_anything_runs(overrides: list[str], places: list[str]) -> None:
    lines = errors(*overrides)
    assert len(places) == len(lines), lines
    for place, line in zip(places, lines, strict=True):
        assert line.startswith(place), line


def test_a_centred_attention_recipe_hosts_a_stale_centre_beside_delayed_linear_layers(load: Load) -> None:
    sets = ['blocks.b.protocols=["D07"]', 'quant.attention=["q", "k"]', "quant.attention_recipe=centred"]
    assert ["D07"] * 2 == [cell.config.defect for cell in of(load(*sets), "b")]


def test_a_study_without_blocks_or_with_a_name_that_is_no_key_says_what_to_write() -> None:
    assert ["blocks: is missing; write tables [blocks.NAME], each with protocols"] == errors(
        text='schema = 1\nkind = "training"\n'
    )
    assert ["blocks: there is none; write a table [blocks.NAME] with protocols"] == errors(
        text='schema = 1\nkind = "training"\n[blocks]\n'
    )
    (line,) = errors(text=STUDY.replace("[blocks.a]", '[blocks."a b"]'))
    assert line == "blocks: 'a b' is refused; a block's name has letters, digits, - and _ (at most 40)"
    assert ["blocks: 3 is refused; give a table of tables"] == errors(
        text='schema = 1\nkind = "training"\nblocks = 3\n'
    )


def test_the_tables_have_the_fields_and_defaults_of_the_runs(load: Load) -> None:
    pairs: list[tuple[Any, Any]] = [
        (ModelTable, ModelParams),
        (QuantTable, QuantParams),
        (OptimizerTable, OptimizerParams),
    ]
    assert set(LoopTable.model_fields) | {"first"} == set(LoopParams.__struct_fields__)  # a study begins at the start
    for table, params in pairs:
        assert set(table.model_fields) == set(params.__struct_fields__)
    assert set(WorkloadTable.model_fields) | {"text_digest", "checkpoint_digest"} == set(DataParams.__struct_fields__)
    named = set(SETTINGS) - {"run", "workload"} | set(RunTable.model_fields) | {"data", "defect", "fix"}
    assert named == set(TrainConfig.__struct_fields__)
    cell = of(load(), "a")[1]
    data = DataParams(text_digest=sha(b"to train on " * 100), checkpoint_digest=sha(b"weights"))
    assert cell == TrainingCell(block="a", label="correct", point=(), seed=0, config=TrainConfig(data=data))


def test_the_kind_of_a_file_chooses_the_schema_and_it_is_no_lifecycle_study(load: Load) -> None:
    assert "training" == study_kind(ARTICLE)
    with pytest.raises(StudyError, match='kind "training" is no lifecycle study'):
        load_study(STUDY, registries())


# cells


def test_a_cell_is_a_protocol_and_a_seed_and_all_protocols_of_a_seed_are_adjacent(load: Load) -> None:
    seen = [(c.block, c.seed, c.config.defect, c.config.fix, c.label) for c in load("replicas.seed=5").cells()]
    a = [("high_precision", "", "high_precision"), ("correct", "", "correct"), ("D04+D02", "", "shared")]
    b = [("correct", "", "correct"), ("D03", "keyed_snapshot", "D03 fixed by keyed_snapshot")]
    assert seen == [(name, seed, *p) for name, block in (("a", a), ("b", b)) for seed in (5, 6) for p in block]
    assert ("D04", "D02") == defects_of("D04+D02")
    assert () == defects_of("correct") == defects_of("high_precision")
    assert "b: D03 fixed by keyed_snapshot, seed 6" == load("replicas.seed=5").cells()[-1].name
    assert "D03" == label_of("D03")


def test_a_block_has_its_own_keys_and_a_key_that_is_set_holds_in_every_block(load: Load) -> None:
    def settings(*overrides: str) -> list[tuple[int, int]]:
        config = load(*overrides)
        return [(c.config.quant.window, c.config.loop.steps) for c in (of(config, "a")[1], of(config, "b")[0])]

    assert [(2, 40), (16, 20)] == settings()
    assert [(2, 10), (16, 10)] == settings("loop.steps=10")
    assert [(2, 10), (16, 12)] == settings("loop.steps=10", "blocks.b.loop.steps=12")
    assert [(2, 10), (16, 10)] == settings("blocks.b.loop.steps=12", "loop.steps=10")
    assert [(4, 40), (16, 20)] == settings("blocks.a.quant.window=4")
    assert {3} == {len(of(load("replicas.count=3", "blocks.a.replicas.count=1"), "b")) // 2}
    assert 3 == len(of(load("replicas.count=3", "blocks.a.replicas.count=1"), "a"))


def test_a_grid_makes_a_setting_for_each_combination_and_high_precision_comes_once_for_all_quantizers(
    load: Load,
) -> None:
    grid = ["blocks.a.grid.quant.window=[1, 4]", 'blocks.a.grid.model.half=["float32", "float16"]']
    cells = of(load(*grid, "replicas.count=1"), "a")
    assert [
        (("model.half=float32",), "high_precision"),
        (("model.half=float32", "quant.window=1"), "correct"),
        (("model.half=float32", "quant.window=1"), "shared"),
        (("model.half=float32", "quant.window=4"), "correct"),
        (("model.half=float32", "quant.window=4"), "shared"),
        (("model.half=float16",), "high_precision"),
        (("model.half=float16", "quant.window=1"), "correct"),
        (("model.half=float16", "quant.window=1"), "shared"),
        (("model.half=float16", "quant.window=4"), "correct"),
        (("model.half=float16", "quant.window=4"), "shared"),
    ] == [(c.point, c.label) for c in cells]
    assert [1, 1, 4, 4] == [c.config.quant.window for c in cells[1:5]]
    assert {QuantParams()} == {c.config.quant for c in cells if c.label == "high_precision"}
    assert "a model.half=float16 quant.window=4: shared, seed 0" == cells[-1].name
    assert {8} == {c.config.quant.window for c in of(load(*grid, "quant.window=8"), "a")[1:3]}
    assert 2 * 2 * 3 == len(of(load(*grid, "quant.window=8"), "a"))  # the axis gave way


def test_only_the_blocks_that_are_named_run(load: Load) -> None:
    assert of(load(), "b") == list(load('only=["b"]').cells())


def test_matched_is_a_list_of_steps_or_so_many_of_the_first_ones(load: Load) -> None:
    def matched(*sets: str) -> tuple[int, ...]:
        return load(*sets).cells()[0].config.loop.matched

    assert (0, 1, 2) == matched("loop.matched=3")
    assert (0, 1) == matched("loop.matched=3", "loop.steps=2")
    assert (0, 7, 19) == matched("loop.matched=[19, 0, 7]")
    assert () == matched()


def test_the_order_of_roles_and_features_means_nothing(load: Load) -> None:
    one = load('quant.linear=["weight", "input"]', 'loop.features=["rerun", "nested"]').cells()
    assert one == load('quant.linear=["input", "weight"]', 'loop.features=["nested", "rerun"]').cells()
    assert ("input", "weight") == one[1].config.quant.linear
    assert ("nested", "rerun") == one[1].config.loop.features


def test_a_study_read_back_from_its_effective_text_has_the_same_cells(load: Load, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"another")
    sets = ["loop.steps=7", 'only=["b"]', f'blocks.b.grid.workload.text=["builtin", "{other}"]', 'title=a "b"',
            "workload.checkpoint=scratch", "optimizer.lr=1e-7", "blocks.b.grid.loop.matched=[2, [0, 3]]"]  # fmt: skip
    for overrides in ([], sets):
        config = load(*overrides)
        again = load(text=config.to_toml())
        assert config.cells() == again.cells()
        assert config.to_toml() == again.to_toml()
        assert config.title == again.title


# text and checkpoint


def test_any_file_is_a_text_and_a_case_is_tied_to_its_bytes(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "t.bin").write_bytes(folder.name.encode())
    (there / "study.toml").write_text(STUDY + "[workload]\ntext = 't.bin'\n[blocks.b.workload]\ntext = 'builtin'\n")
    monkeypatch.chdir(here)
    study = Path("..") / "there" / "study.toml"
    a, b = (of(load(text=study), name)[0].config.data for name in "ab")
    assert (str((there / "t.bin").resolve()), sha(b"there")) == (a.text, a.text_digest)
    assert ("builtin", sha(b"to train on " * 100)) == (b.text, b.text_digest)
    for cell in load("workload.text=t.bin", text=study).cells():  # the block's own gives way
        assert (str((here / "t.bin").resolve()), sha(b"here")) == (cell.config.data.text, cell.config.data.text_digest)
    own = ("blocks.b.workload.text=t.bin", "blocks.b.workload.checkpoint=t.bin")
    b = of(load(*own, text=study), "b")[0].config.data
    assert [str((here / "t.bin").resolve()), sha(b"here")] * 2 == [
        b.text, b.text_digest, b.checkpoint, b.checkpoint_digest]  # fmt: skip
    listed = load("blocks.a.grid.workload.text=['t.bin', 'builtin']", "only=['a']", text=study).cells()
    assert {str((here / "t.bin").resolve()): sha(b"here"), "builtin": sha(b"to train on " * 100)} == {
        c.config.data.text: c.config.data.text_digest for c in listed
    }


def test_a_checkpoint_from_scratch_is_no_file_and_has_no_digest(load: Load) -> None:
    data = load("workload.checkpoint=scratch").cells()[0].config.data
    assert ("scratch", "") == (data.checkpoint, data.checkpoint_digest)
    assert 10 == len({case_id(c) for c in load("workload.checkpoint=scratch").cells()})


@pytest.mark.parametrize("what", ["text", "checkpoint"])
def test_a_file_that_is_not_there_is_unreadable_input(load: Load, tmp_path: Path, what: str) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=rf"workload\.{what}: .* cannot be read") as caught:
            load(f"workload.{what}={path}")
        assert 3 == caught.value.exit_code
    with pytest.raises(InputError, match=rf"blocks\.a\.workload\.{what}: "):
        load(f"blocks.a.workload.{what}=none")


# identity


def cell(config: TrainConfig | None = None, **changes: Any) -> TrainingCell:
    data = DataParams(text_digest="d1" * 32, checkpoint_digest="d2" * 32)
    base = TrainingCell(block="a", label="l", point=(), seed=0, config=config or TrainConfig(data=data))
    return msgspec.structs.replace(base, **changes)


def test_a_case_id_is_pinned_so_that_old_journals_stay_readable() -> None:
    assert "eb7d3e4e46e748d303c9" == case_id(cell())


def test_one_learning_rate_in_three_spellings_is_one_case_and_another_seed_is_another(load: Load) -> None:
    ids = [[case_id(c) for c in load(f"optimizer.lr={lr}").cells()] for lr in ("3e-4", "0.0003", "0.30e-3")]
    assert ids[0] == ids[1] == ids[2]
    assert set(ids[0]).isdisjoint(case_id(c) for c in load("optimizer.lr=0.00030000000000000003").cells())
    assert set(ids[0]).isdisjoint(case_id(c) for c in load("replicas.seed=2").cells())
    assert set(ids[0]) & {case_id(c) for c in load("replicas.seed=1").cells()}  # seed 1 is in both


def test_every_parameter_but_paths_label_and_point_is_part_of_a_case() -> None:
    base = cell()
    others = [cell(block="b"), cell(seed=1)]
    for name in TrainConfig.__struct_fields__:
        value = getattr(base.config, name)
        if isinstance(value, msgspec.Struct):
            changed = [(inner, _another(inner, getattr(value, inner))) for inner in value.__struct_fields__]
            parts: list[Any] = [
                msgspec.structs.replace(value, **{k: v}) for k, v in changed if k not in ("text", "checkpoint")
            ]
        else:
            parts = [_another(name, value)]
        others += [cell(msgspec.structs.replace(base.config, **{name: part})) for part in parts]
    assert 1 + len(others) == len({case_id(c) for c in (base, *others)})
    assert 2 + 9 + 13 + 12 + 4 + 11 + 4 == len(others)
    moved = msgspec.structs.replace(base.config.data, text="/x/t", checkpoint="/x/c")
    for same in (cell(label="m"), cell(point=("x=1",)), cell(msgspec.structs.replace(base.config, data=moved))):
        assert case_id(base) == case_id(same)
        assert same == decode_cell(encode_cell(same))


def _another(name: str, value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return (*value, 3 if name in ("spread", "matched") else "x")
    raise AssertionError(value)


@pytest.mark.parametrize("what", ["text", "checkpoint"])
def test_a_cell_whose_file_has_no_digest_is_refused(what: str) -> None:
    data = msgspec.structs.replace(cell().config.data, **{f"{what}_digest": ""})
    with pytest.raises(StudyError, match=f"{what}_digest is empty for 'builtin'"):
        case_id(cell(TrainConfig(data=data)))


def test_another_engine_of_training_makes_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    before = case_id(cell())
    monkeypatch.setattr(identity, "ENGINE", identity.ENGINE + 1)
    assert before == case_id(cell())
    monkeypatch.setattr(identity, "TRAINING_ENGINE", identity.TRAINING_ENGINE + 1)
    assert before != case_id(cell())


def test_a_record_of_a_run_comes_back_to_the_bit() -> None:
    awkward = (math.inf, -0.0, 5e-324, 0.1)
    step = StepLog(
        step=3, loss=awkward, grad_norm=awkward, norm_by_layer={"stem": awkward, "L10": (1.0,)}, norm_by_kind={},
        dominant=("L3.qkv",), lr=(1e-7,), loss_scale=(65536.0,), clipped=(True,), skipped=(False,), reason=("ü",),
        finite_loss=(True,), saturated=(0.0,), flushed=(0.0,), tokens=512,
    )  # fmt: skip
    point = MatchedPoint(
        step=0, point="m0.w0.L3.qkv", same=(True,), digest_forward="a", digest_recompute="b", max_abs=awkward,
        max_rel=awkward, finite_same=(False,), amax_forward=(1.0,), amax_recompute=(2.0,), scale_forward=(0.0,),
        scale_recompute=(0.0,),
    )  # fmt: skip
    log = TrainLog(
        seeds=(2**64 - 1,), steps=(step,), matched=(point,), scales={"L0": (-3.5,)}, commits={"L0": 7}, broken=("I2",),
        expected=("I2",), violations=4, digest=("ab",), final_loss=(math.inf,),
    )  # fmt: skip
    record = TrainingRecord(log=log, accumulation="exact", reproducible=True)
    text = encode_record(record)
    back = decode_record_of(cell(), text)
    assert record == back
    assert isinstance(back, TrainingRecord)
    assert [v.hex() for v in awkward] == [v.hex() for v in back.log.steps[0].norm_by_layer["stem"]]
    assert text == encode_record(back)
    lost = msgspec.structs.replace(record, log=msgspec.structs.replace(log, final_loss=(math.nan,)))
    found = decode_record_of(cell(), encode_record(lost))
    assert isinstance(found, TrainingRecord)
    assert math.isnan(found.log.final_loss[0])
    with pytest.raises(InputError, match="no TrainingRecord in"):
        decode_record_of(cell(), text.replace('"L0":7', '"L0":"7"'))


def test_an_outcome_is_expected_where_exactly_the_foretold_rules_are_broken() -> None:
    log = TrainLog(
        seeds=(0,), steps=(), matched=(), scales={}, commits={}, broken=("I2", "I1"), expected=("I1", "I2"),
        violations=2, digest=("",), final_loss=(0.0,),
    )  # fmt: skip
    for broken, expected in ((("I2", "I1"), True), (("I1",), False), (("I1", "I2", "I3"), False)):
        one = msgspec.structs.replace(log, broken=broken)
        assert expected is TrainingRecord(log=one, accumulation="exact", reproducible=True).as_expected


# the study that ships


def test_the_articles_study_has_its_blocks_protocols_and_settings(load: Load) -> None:
    config = load(text=ARTICLE)
    cells = config.cells()
    # protocols x seeds: timing; short, all, recomputed; scope; dynamic; all, recomputed; centre at 3 x 2 points
    assert 5 * 10 + (2 + 3 + 2) * 5 + 6 * 5 + 5 * 5 + (2 + 2) * 5 + 3 * 6 * 5 == len(cells)
    assert len(cells) == len({case_id(c) for c in cells})
    found = {name: list(dict.fromkeys(c.config.defect for c in of(config, name))) for name in config.blocks}
    assert {
        "timing": ["high_precision", "correct", "D02", "D39", "D03"],
        "timing-short": ["correct", "D03"],
        "timing-all": ["correct", "D02", "D03"],
        "timing-recomputed": ["correct", "D03"],
        "scope": ["correct", "D03", "D04+D02", "D04+D03", "D05", "D04"],
        "scope-dynamic": ["correct", "D03", "D04+D02", "D05", "D04"],
        "scope-all": ["correct", "D05"],
        "scope-recomputed": ["correct", "D05"],
        "centre": ["correct", "D02+D07", "D02+stale_scale"],
    } == found
    assert {"correct", "high_precision", "D02", "D39", "D03"} == {c.config.defect for c in of(config, "timing")}
    one = {name: of(config, name)[1].config for name in config.blocks}
    for name in ("timing", "timing-all"):
        run = one[name]
        assert ("float8_e4m3fn", 4, "saved", "float32") == (
            run.quant.fmt, run.quant.window, run.model.statistics, run.model.half)  # fmt: skip
        matched = tuple(range(10 if name == "timing" else 3))
        steps = 40 if name == "timing" else 20
        assert (steps, 3, matched) == (run.loop.steps, run.loop.warm_steps, run.loop.matched)
        assert () == run.quant.attention
    assert ("input",) == one["timing"].quant.linear
    assert ("input", "weight", "grad_output") == one["timing-all"].quant.linear
    for name, spread, scale, dynamic in (
        ("scope", (2, 1, 1, 0, 0, -1, -1, -2), 2.0**16, False),
        ("scope-dynamic", (2, 1, 1, 0, 0, -1, -1, -2), 2.0**18, True),
    ):
        run = one[name]
        assert ((), ("q", "k"), "float4_e2m1fn", 1) == (
            run.quant.linear, run.quant.attention, run.quant.attention_fmt, run.quant.attention_window)  # fmt: skip
        assert (spread, scale, dynamic) == (run.data.spread, run.optimizer.loss_scale, run.optimizer.dynamic)
        assert ("float16", "saved", 20) == (run.model.half, run.model.statistics, run.loop.steps)
    assert {"exact"} == {c.config.accumulation for c in cells}


def test_the_articles_study_takes_another_text_fewer_steps_and_fast_products(load: Load, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_bytes(b"mine")
    sets = [f"workload.text={os.fspath(text)}", "loop.steps=10", "run.accumulation=blas", "replicas.count=1"]
    cells = load(*sets, text=ARTICLE).cells()
    assert 45 == len(cells)
    assert {(sha(b"mine"), 10, "blas")} == {
        (c.config.data.text_digest, c.config.loop.steps, c.config.accumulation) for c in cells
    }


def test_a_protocol_in_a_study_is_a_name_or_a_table(load: Load) -> None:
    protocols = load().blocks["a"].protocols
    assert ["high_precision", "correct", {"defect": "D04+D02", "label": "shared"}] == [p.plain() for p in protocols]
    assert {"defect": "D03", "fix": "keyed_snapshot"} == ProtocolTable(defect="D03", fix="keyed_snapshot").plain()
