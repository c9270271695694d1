"""Public reports: each breaks what the catalogue names, its repair mends it, and the figures say what was reported."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from qsim.errors import StudyError
from qsim.scenarios import SCENARIOS, Outcome, get_scenario, play_scenario
from qsim.sim import DEFECTS, FIXES


@cache
def played(name: str) -> Outcome:
    return play_scenario(SCENARIOS[name])


def test_there_are_more_than_twenty_reports_of_most_of_the_catalogue() -> None:
    assert len(SCENARIOS) >= 30
    assert all(name == scenario.name for name, scenario in SCENARIOS.items())
    assert len({scenario.defect for scenario in SCENARIOS.values()}) >= 20
    for scenario in SCENARIOS.values():
        assert scenario.defect in DEFECTS
        assert scenario.repair in FIXES
        assert scenario.repair in DEFECTS[scenario.defect].shaped(scenario.variant).fixes


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_report_breaks_what_the_catalogue_names_and_its_repair_leaves_nothing_broken(name: str) -> None:
    outcome = played(name)
    assert outcome.expected == outcome.broken
    assert frozenset() == outcome.after_repair
    assert outcome.as_expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_repair_gives_back_the_numbers_of_the_correct_twin(name: str) -> None:
    assert 0.0 == played(name).mended_error


def test_te_1047_is_right_on_the_first_microbatch_and_far_off_on_the_later_ones() -> None:
    first, *later = [line.truth for line in played("te-1047").lines]
    assert first < 0.1
    assert all(error > 10 * first for error in later)
    assert 3 == len(later)


def test_te_3284_gets_worse_as_sigma_shrinks_and_the_right_scale_does_not() -> None:
    lines = played("te-3284").lines
    stuck, right = [line.truth for line in lines], [line.truth_correct for line in lines]
    assert stuck == sorted(stuck)
    assert stuck[-1] > 10 * stuck[0]
    assert max(right) < 1.5 * min(right)
    assert all(line.scales < -5 for line in lines)  # the scale that is due is larger by more than 2^5


def test_double_insertion_halves_the_window() -> None:
    broken, correct = played("thunder-1424").over_window
    # of exchangeable amaxes the newest is the largest of the last 17 once in 17, of the last 9 once in 9
    assert abs(correct - 1 / 17) < 0.01
    assert abs(broken - 1 / 9) < 0.015


def test_megatron_442_and_te_728_part_the_scales_of_the_ranks() -> None:
    for name in ("megatron-442", "te-728"):
        outcome = played(name)
        assert 2 == len(outcome.lines)
        assert any(line.worst > 0.1 for line in outcome.lines)
        assert 0.0 == outcome.replay  # each rank replays its own mistake


def test_marin_7659_lets_the_last_microbatch_speak_for_all() -> None:
    outcome = played("marin-7659")
    assert "leaves out 3 observation(s)" in outcome.violations[0].because
    assert all(line.error > 0.01 for line in outcome.lines)


def test_te_539_is_not_a_number_from_the_second_microbatch_on() -> None:
    lines = played("te-539").lines
    assert lines[0].error < float("inf")
    assert all(line.error == float("inf") for line in lines[1:])


def test_what_numbers_cannot_see_is_broken_all_the_same() -> None:
    silent = [name for name in SCENARIOS if played(name).replay == 0.0 and played(name).broken]
    assert {"te-1083", "megatron-442", "te-1985", "te-3296"} <= set(silent)


def test_a_wrong_repair_can_be_tried_and_is_told_from_a_right_one() -> None:
    tried = play_scenario(replace(SCENARIOS["te-1047"], repair="per_owner_state"))
    assert frozenset({"I1", "I9"}) == tried.after_repair
    assert not tried.mends
    assert tried.as_expected  # the catalogue says that it does not help
    assert tried.mended_error > 0.5


def test_an_unknown_report_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StudyError, match='scenario "te-1" is unknown; known: te-1047, te-657'):
        get_scenario("te-1")
