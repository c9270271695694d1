"""Cells on the capture that ships: verdicts, and the shape that the figures must have."""

from __future__ import annotations

import msgspec
import pytest

from qsim.sim import DEFECTS
from qsim.sweep.cell import Cell, CellRecord, ScheduleParams, WorkloadParams
from qsim.sweep.run import replay_cell, run_cell

BASE = Cell(
    defect="correct",
    fmt="float8_e4m3fn",
    recipe="delayed",
    window=1,
    preset="seed_correct",
    seed=0,
    replicas=4,
    skip_steps=1,
    backend="numba",
    reproducible=True,
    schedule=ScheduleParams(steps=20),
    workload=WorkloadParams(outputs=8),
)


def cell(**changes: object) -> Cell:
    return msgspec.structs.replace(BASE, **changes)


def outcome(**changes: object) -> CellRecord:
    return run_cell(cell(**changes))


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("recipe", ["delayed", "centred", "current"])
@pytest.mark.parametrize("window", [1, 16])
def test_the_correct_protocol_breaks_nothing_and_replays_to_the_bit(fmt: str, recipe: str, window: int) -> None:
    r = outcome(fmt=fmt, recipe=recipe, window=window, schedule=ScheduleParams(steps=4))
    assert ((), 0, 0.0, 0.0, 1.0) == (r.broken, r.violations, r.replay_mismatch, r.rel_error_max, r.code_match)
    assert 4 * 4 * 4 == r.commits == r.commits_expected  # steps x layers x operands
    assert 0 < r.reference_error_median < 0.5
    assert 0 == r.nonfinite_outputs


NEED_MORE = {"D06": "gradients", "D23": "gradients", "D36": "two formats"}  # than the capture that ships has
FREE = {  # of numbers: a mistake that costs nothing on this data, and breaks its rule all the same
    "D18": "the live value is by luck the same",
    "D19": "entries pile up, and each operation takes its own",
    "D20": "at window 1 the same amax twice is the same state",
    "D28": "the window of 1 holds a 0, so the scale is kept",
    "D37": "at window 1 the same amax twice is the same state",
    "D40": "a guess alone",
    "D41": "nearest rounding draws nothing",
}


@pytest.mark.parametrize("name", sorted(DEFECTS.keys() - NEED_MORE.keys()))
def test_a_defect_of_the_catalogue_comes_out_as_its_row_says(name: str) -> None:
    r = outcome(defect=name, recipe="centred", schedule=ScheduleParams(steps=6))
    assert set(r.broken) == DEFECTS[name].breaks
    assert r.as_expected
    assert r.violations > 0
    if name in FREE:
        assert r.rel_error_max == 0.0
    else:
        assert r.rel_error_max > 0.005  # all others cost something at window 1


@pytest.mark.parametrize("name", NEED_MORE)
def test_a_defect_that_the_capture_cannot_host_says_what_is_missing(name: str) -> None:
    r = outcome(defect=name, recipe="centred", schedule=ScheduleParams(steps=6))
    assert "not_applicable" == r.status
    assert NEED_MORE[name] in r.note


@pytest.mark.parametrize("name", NEED_MORE)
def test_the_seeded_workload_hosts_them(name: str) -> None:
    r = outcome(defect=name, schedule=ScheduleParams(steps=6), workload=WorkloadParams(kind="seeded"))
    assert set(r.broken) == DEFECTS[name].breaks
    if name == "D23":  # what comes one unit late comes just before its use: the history is another one, no scale is
        assert r.rel_error_max == 0.0
    else:
        assert r.rel_error_max > 0.01


def test_numbers_show_much_at_window_one_and_little_at_sixteen_while_invariants_see_both() -> None:
    for name in ("D01", "D02", "D03"):
        one, sixteen = (outcome(defect=name, window=w) for w in (1, 16))
        assert one.broken == sixteen.broken != ()
        assert one.violations == sixteen.violations
        assert one.rel_error_median > 0.02
        assert sixteen.rel_error_median == 0.0
        assert one.rel_error_p99 > sixteen.rel_error_p99 > 0


def test_consume_after_advance_shows_no_replay_mismatch_with_one_microbatch_and_some_with_two() -> None:
    one = outcome(defect="D01", schedule=ScheduleParams(steps=6))
    two = outcome(defect="D01", schedule=ScheduleParams(steps=6, microbatches=2))
    assert 0.0 == one.replay_mismatch < two.replay_mismatch <= 0.5
    assert one.rel_error_median > 0.1
    assert ("I1",) == one.broken == two.broken


def test_a_stale_centre_overtakes_a_stale_scale_as_k_grows() -> None:
    def medians(shift: float) -> tuple[float, float, float]:
        workload = WorkloadParams(outputs=8, mean_shift=shift)
        center, scale = (
            outcome(defect=name, fmt="float4_e2m1fn", recipe="centred", workload=workload, skip_steps=2)
            for name in ("D07", "stale_scale")
        )
        assert center.k == scale.k
        return center.k, center.rel_error_median, scale.rel_error_median

    (k0, center0, scale0), (k2, center2, scale2), (k8, center8, scale8) = (medians(s) for s in (0.0, 2.0, 8.0))
    assert k0 < 0.1 < 1.9 < k2 < 2.1 < 7.5 < k8 < 8.5
    assert scale0 > 5 * center0  # k near 0: only the gain hurts
    assert center2 > scale2  # k = 2: the shift does
    assert center8 > 2 * scale8
    assert center0 < center2
    assert scale0 > scale2 > scale8


def test_current_scaling_makes_state_defects_free_in_numbers_and_not_in_invariants() -> None:
    for name in ("D01", "D02", "D04"):
        r = outcome(defect=name, recipe="current", schedule=ScheduleParams(steps=4))
        assert set(r.broken) == DEFECTS[name].breaks
        assert 0.0 == r.rel_error_max


def test_a_fix_brings_every_figure_back_to_the_correct_twin() -> None:
    for name, fix in (("D01", "keyed_snapshot"), ("D03", "keyed_snapshot"), ("D05", "per_owner_state")):
        r = replay_cell(cell(defect=name, schedule=ScheduleParams(steps=4)), fix=fix).record
        assert ((), (), 0.0, 1.0, 0.0) == (r.broken, r.expected, r.rel_error_max, r.code_match, r.replay_mismatch)
    wrong = replay_cell(cell(defect="D04", schedule=ScheduleParams(steps=4)), fix="single_snapshot").record
    assert ("I2", "I4") == wrong.broken
    assert wrong.as_expected  # the catalogue names it as a wrong fix: something stays broken
    harm = replay_cell(cell(defect="correct", schedule=ScheduleParams(steps=4)), fix="single_snapshot").record
    assert not harm.as_expected


def test_a_replica_gives_the_same_figures_alone_and_among_others() -> None:
    many = outcome(defect="D03", schedule=ScheduleParams(steps=4))
    for replica in range(4):
        alone = outcome(defect="D03", seed=replica, replicas=1, schedule=ScheduleParams(steps=4))
        assert alone.rel_error_replica[0] == many.rel_error_replica[replica]


def test_what_cannot_be_hosted_is_not_applicable_and_says_why() -> None:
    r = outcome(defect="D07")
    assert ("not_applicable", "D07 stale_center needs a recipe with a centre; recipe \"delayed\" has none") == (
        r.status, r.note,
    )  # fmt: skip
    assert "commits nothing" in outcome(defect="D01", preset="current", recipe="current").note
    assert r.as_expected


def test_a_defective_preset_is_measured_against_the_correct_one() -> None:
    preset = outcome(preset="seed_defective", schedule=ScheduleParams(steps=4))
    rewritten = outcome(defect="D03", schedule=ScheduleParams(steps=4))
    assert preset.as_expected
    assert preset.output_digest == rewritten.output_digest
    assert preset.rel_error_replica == rewritten.rel_error_replica


def test_the_high_precision_control_casts_nothing_and_errs_nowhere() -> None:
    r = outcome(defect="high_precision", fmt="float32", recipe="none", schedule=ScheduleParams(steps=4))
    assert ((), 0, 0.0, 0.0) == (r.broken, r.commits, r.rel_error_max, r.reference_error_median)


def test_distinct_rows_of_the_capture_are_reported() -> None:
    assert 148 == outcome(schedule=ScheduleParams(steps=2)).distinct_rows


def test_layer_spread_and_outliers_make_a_shared_scope_worse() -> None:
    plain = outcome(defect="D04", schedule=ScheduleParams(steps=8))
    spread = outcome(
        defect="D04",
        schedule=ScheduleParams(steps=8),
        workload=WorkloadParams(outputs=8, layer_spread=(3, 0, -3, -6)),
    )
    # layer 0 encodes with what the last layer left: a scale 2^9 too large, so it saturates
    assert spread.rel_error_p99 > 2 * plain.rel_error_p99
    assert spread.saturated_share > 10 * plain.saturated_share
    calm, burst = (
        outcome(
            defect="D01",
            window=16,
            schedule=ScheduleParams(steps=8),
            workload=WorkloadParams(outputs=8, outlier_steps=s),
        )
        for s in ((), (5,))
    )
    assert burst.rel_error_max > 5 * calm.rel_error_max
