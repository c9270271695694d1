"""Schedules in study files: keys, refusals, cells, verdicts and sweeps of built and of written schedules."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qsim._paths import sample_capture
from qsim.errors import ProtocolViolation, StudyError
from qsim.quant import OpId
from qsim.sim import PRESETS, Feature, Order, ScheduleSpec, broken, judge, lint
from qsim.sweep.cell import Cell, ScheduleParams
from qsim.sweep.config import load_study
from qsim.sweep.identity import case_id, decode_cell, encode_cell
from qsim.sweep.known import registries
from qsim.sweep.plan import lint_cells, params_of, plan_of_cell, spec_of
from qsim.sweep.run import replay_cell, run_cell
from qsim.workloads import Shaping, open_replay
from tests.unit.sim_cases import WITH_GRADIENTS, case_of, recipe_of

GRID = '\n[grid]\ndefects = [{}]\nformats = ["e4m3"]\nrecipes = ["delayed"]\nwindows = [1]\n'
LATE = (
    "f t{0} L0.qkv.input: X P Q O C F | weight: X P Q O C F | input: U(linear, input[by=~live], weight[by=~live])\n"
    "r t{0} L0.qkv.input: X Q | weight: X Q | input: U\n"
)
TEXT = "declare breaks=I1\n" + LATE.format(0) + LATE.format(1)


def study(schedule: str, *sets: str, defects: str = '"correct"') -> tuple[Cell, ...]:
    text = f"schema = 1{GRID.format(defects)}[replicas]\ncount = 2\n[workload]\noutputs = 2\n[schedule]\n{schedule}"
    return load_study(text, registries(), list(sets)).cells()


def refused(schedule: str, *sets: str, defects: str = '"correct"') -> list[str]:
    with pytest.raises(StudyError) as caught:
        study(schedule, *sets, defects=defects)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def by_hand(text: str, *sets: str, defects: str = '"written"') -> tuple[Cell, ...]:
    return study(f"text = '''{text}'''", *sets, defects=defects)


@pytest.mark.parametrize("order", Order)
def test_a_study_may_name_any_order(order: Order) -> None:
    (cell,) = study(f'order = "{order.value}"\nlayers = 4\nmicrobatches = 2')
    assert order is spec_of(cell.schedule).order


def test_features_have_one_order_whatever_the_study_says() -> None:
    one = study('features = ["nested", "evaluation", "twice"]')
    other = study('features = ["twice", "nested", "evaluation"]')
    assert ("nested", "twice", "evaluation") == one[0].schedule.features
    assert case_id(one[0]) == case_id(other[0])
    assert case_id(one[0]) != case_id(study("")[0])
    assert decode_cell(encode_cell(one[0])) == one[0]


def test_a_cell_of_an_older_journal_is_the_case_it_was() -> None:
    (cell,) = study("")
    text = encode_cell(cell)
    assert not {"stages", "features", "text"} & msgspec.json.decode(text)["schedule"].keys()
    assert cell == decode_cell(text)
    staged = study('order = "1f1b"\nstages = 3')[0]
    assert 3 == decode_cell(encode_cell(staged)).schedule.stages


def test_params_and_spec_say_the_same() -> None:
    spec = ScheduleSpec(
        steps=3, layers=8, microbatches=8, workers=2, order=Order.INTERLEAVED, stages=4,
        features=frozenset({Feature.DATA_PARALLEL, Feature.OVERFLOW}),
    )  # fmt: skip
    assert spec == spec_of(params_of(spec))
    assert ("overflow", "data_parallel") == params_of(spec).features


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        ('features = ["nestd"]\norder = "zero_buble"', [
            'schedule.order: "zero_buble" is refused; unknown name; known: forward_first, alternate, 1f1b, '
            'interleaved, zero_bubble; did you mean "zero_bubble"?',
            'schedule.features[0]: "nestd" is refused; unknown name; known: no_checkpoint,',
        ]),
        ('features = ["nested", "nested"]', ['schedule.features: ["nested", "nested"] is refused; "nested" is there']),
        ('features = ["nested", "early_stop", "tensor_parallel"]\norder = "1f1b"\nstages = 9', [
            "schedule.features: nested and early_stop are all of group checkpoint; keep one of them",
            "schedule.features: of parallel ranks need schedule.workers >= 2; it is 1",
            "schedule.order: 1f1b splits 4 layer(s) over 9 parts (schedule.stages 9)",
        ]),
        ('order = "interleaved"\nmicrobatches = 3', ["schedule.order: interleaved runs 3 microbatches"]),
        ("stages = 3", ["schedule.stages: 3 means nothing to order forward_first; take a pipelined one, like 1f1b"]),
        ("stages = 0", ["schedule.stages: 0 is refused; give an integer from 1 to 4096"]),
        ("microbatches = 3\nworkers = 2", ["schedule.microbatches: 3 is no multiple of schedule.workers 2"]),
        ('steps = 2\nlayers = 1\nmicrobatches = 65535\nfeatures = ["padding"]', [
            "schedule.microbatches: 65535 leaves no number for the microbatch of an interlude"]),
        ("text = 3", ["schedule.text: 3 is refused; give a text in quotes"]),
        ("steps = 3\ntext = 'f: X Z'", [
            "schedule.steps: means nothing beside schedule.text",
            'schedule.text line 1, column 6: found "Z"; allowed signs: X, P, Q',
        ]),
        ("text = 'f: X P U'", ["schedule.text event 2: reads slot codes.f/m0/w0/L0/s0/r0, which nothing"]),
        ("text = 'f: X P Q'", ["schedule.text event 0: the schedule has no GEMM in phase f; write at least one U"]),
        ("text = 'f: X O(by=-) S(base=~obs.f)'", ["schedule.text event 2: reads slot obs.f/m0/w0/L0/s0/r0 as a state"]),
        ("text = 'f m70000: X'", ["schedule.text event 0: microbatch 70000 of Load is outside 0 to 65535"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_when_the_study_is_read(schedule: str, lines: list[str]) -> None:
    found = refused(schedule, defects='"written"' if "text = '" in schedule else '"correct"')
    assert len(lines) == len(found), found
    for expected, line in zip(lines, found, strict=True):
        assert line.startswith(expected)


def test_a_written_schedule_hosts_no_defect_and_written_needs_one() -> None:
    (line,) = refused(f"text = '''{TEXT}'''", defects='"written", "D01"')
    assert line.startswith("grid.defects[1]: D01 rewrites what is built")
    (line,) = refused("", defects='"written"')
    assert line == "grid.defects[0]: written is a schedule.text, and there is none; write one"


def test_measured_steps_are_those_of_the_text() -> None:
    (line,) = refused(f"text = '''{TEXT}'''", "measure.skip_steps=2", defects='"written"')
    assert line == "measure.skip_steps: 2 leaves none of the 2 steps of the text to measure; give at most 1"


def test_comments_and_spaces_of_a_text_are_no_part_of_the_case() -> None:
    (plain,), (spaced,) = by_hand(TEXT), by_hand(TEXT.replace(" | ", "   |  ") + "# the end\n")
    assert case_id(plain) == case_id(spaced)
    assert (2, 1, 1, 1) == tuple(getattr(plain.schedule, n) for n in ("steps", "microbatches", "layers", "workers"))


def test_a_study_with_a_text_reads_back_from_what_a_sweep_writes() -> None:
    grid = GRID.format('"written"')
    text = f"schema = 1{grid}[schedule]\ntext = '''{TEXT}'''"
    config = load_study(text, registries())
    assert config.cells() == load_study(config.to_toml(), registries()).cells()


def test_a_written_schedule_is_priced_against_its_twin() -> None:
    cells = by_hand(TEXT, defects='"correct", "high_precision", "written"')
    records = {cell.defect: run_cell(cell) for cell in cells}
    assert all(record.as_expected for record in records.values())
    assert ((), ("I1",)) == (records["correct"].broken, records["written"].broken)
    assert 0.0 == records["correct"].rel_error_max < records["written"].rel_error_max
    assert 4 == records["correct"].commits == records["written"].commits
    again = by_hand(TEXT.replace("declare breaks=I1\n", ""))[0]
    assert not run_cell(again).as_expected


def test_a_text_that_loads_what_no_tensor_is_says_what_there_is() -> None:
    (cell,) = by_hand("f t0 L0.s15.input: X | weight: X | input: U(linear, input[raw], weight[raw])\n",
                      "measure.skip_steps=0")  # fmt: skip
    with pytest.raises(StudyError, match=r"loads s15\.input, s15\.weight; the tensors .* are qkv\.input, qkv\.weight"):
        run_cell(cell)


@pytest.mark.parametrize("feature", Feature)
def test_a_cell_with_a_feature_runs_end_to_end_as_the_catalogue_says(feature: Feature) -> None:
    ranks = feature in (Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL)
    schedule = f'steps = 2\nlayers = 2\nmicrobatches = 2\nworkers = {2 if ranks else 1}\nfeatures = ["{feature}"]'
    correct, d01 = study(schedule, defects='"correct", "D01"')
    first = run_cell(correct)
    assert ("ok", (), 0.0) == (first.status, first.broken, first.rel_error_max)
    if feature is not Feature.CALIBRATION:  # its passes multiply tensors that were never cast, which D01 refuses
        second = run_cell(d01)
        assert ("ok", True) == (second.status, "I1" in second.broken), second.note
        assert second.rel_error_max > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_the_verdict_of_a_preset_is_the_one_that_its_traits_predict(preset: str) -> None:
    recipe = recipe_of("current" if preset == "current" else "delayed")
    seen = 0
    for feature in Feature:
        for order in (Order.FORWARD_FIRST, Order.ALTERNATE):
            ranks = feature in (Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL)
            if ranks and PRESETS[preset].breaks:
                continue
            spec = ScheduleSpec(
                layers=2, microbatches=2, workers=2 if ranks else 1, order=order, features=frozenset({feature})
            )
            case = case_of(recipe, spec=spec, preset=preset, body=WITH_GRADIENTS)
            assert PRESETS[preset].breaks_on(case.context.traits) == broken(judge(case)), feature
            seen += 1
    assert seen >= 2 * (len(Feature) - 2)


def test_a_preset_with_a_fault_is_measured_against_a_correct_protocol_of_its_cadence() -> None:
    (cell,) = study("steps = 3\nlayers = 2\nmicrobatches = 2", "run.preset=torchao_delayed")
    outcome = replay_cell(cell)
    assert (("I5",), ("I5",)) == (outcome.record.broken, outcome.record.expected)
    assert outcome.record.commits == outcome.record.commits_expected
    assert outcome.record.rel_error_max > 0


def test_a_defect_whose_larger_schedule_does_not_fit_is_not_applicable() -> None:
    """D09 needs two workers; one microbatch each is no multiple of two stages."""
    (cell,) = study('steps = 2\norder = "interleaved"\nmicrobatches = 2', defects='"D09"')
    record = run_cell(cell)
    assert "not_applicable" == record.status
    assert "D09 concurrent_double_commit needs more than fits: schedule.order interleaved runs 1" in record.note


def test_without_recompute_there_is_no_replay_to_mismatch() -> None:
    (cell,) = study('steps = 2\nlayers = 1\nfeatures = ["no_checkpoint"]', defects='"D01"')
    record = run_cell(cell)
    assert ("ok", ("I1",), 0.0) == (record.status, record.broken, record.replay_mismatch)
    assert record.rel_error_max > 0


def test_a_guarded_cell_stops_with_the_first_violation_and_a_correct_one_keeps_its_bits() -> None:
    correct, d01 = study("steps = 2\nlayers = 1", defects='"correct", "D01"')
    assert replay_cell(correct).record == replay_cell(correct, guarded=True).record
    with pytest.raises(ProtocolViolation, match=r"^event \d+, owner L0/qkv/input"):
        replay_cell(d01, guarded=True)


def test_lint_judges_each_distinct_schedule_once_and_says_why_one_cannot_be() -> None:
    cells = study("steps = 2\nlayers = 1", 'grid.formats=["e4m3", "e5m2"]', "grid.windows=[1, 4]",
                  defects='"correct", "D01", "D07"')  # fmt: skip
    found = list(lint_cells(cells))
    assert 12 == len(cells)
    assert ["correct", "D01", "D07"] == [one.cell.defect for one in found]
    assert [(), ("I1",)] == [one.plan.broken for one in found if one.plan is not None]
    assert "needs a recipe with a centre" in found[2].why


def test_the_verdict_of_a_plan_is_that_of_the_replay() -> None:
    (cell,) = study("steps = 2\nlayers = 2", defects='"D03"')
    assert plan_of_cell(cell).violations == replay_cell(cell).violations


@pytest.mark.parametrize("collecting", [True, False])
def test_lint_leaves_the_collector_as_it_was_even_where_it_fails(collecting: bool) -> None:
    case = case_of(recipe_of("delayed"))
    (gc.enable if collecting else gc.disable)()
    try:
        assert len(case.schedule) == len(lint(case).records)
        with pytest.raises(AttributeError):
            lint(None)  # type: ignore[arg-type]
        assert collecting is gc.isenabled()
    finally:
        gc.enable()


def test_a_second_visit_draws_other_rows_and_the_first_draws_what_it_always_drew() -> None:
    replay = open_replay(Path(sample_capture()), shaping=Shaping(tokens=6), seeds=(3,), layers=2, microbatches=1)
    once, short = OpId(1), open_replay(
        Path(sample_capture()), shaping=Shaping(tokens=12), seeds=(3,), layers=2, microbatches=1
    )  # fmt: skip
    twice = replay.load(once._replace(visit=1))
    assert (replay.load(once) == short.load(once)[:, :6]).all()
    assert (twice == short.load(once)[:, 6:]).all()  # the words that follow those of visit 0
    assert not (twice == replay.load(once)).all()
    rank = replay.load(once._replace(worker_id=1))
    assert np.array_equal(rank, replay.load(once))  # tensor-parallel ranks share the rows


def test_defaults_of_the_table_are_those_of_the_cell() -> None:
    assert ScheduleParams() == study("")[0].schedule
