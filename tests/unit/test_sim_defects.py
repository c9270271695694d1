"""The catalogue: every defect breaks exactly what its row names, and only its fixes silence it."""

from __future__ import annotations

import itertools

import pytest

from qsim.errors import CaseError, StudyError
from qsim.sim import (
    CONTRASTS,
    DEFECTS,
    FIXES,
    PRESETS,
    Cadence,
    Case,
    Order,
    ScheduleSpec,
    broken,
    check,
    get_defect,
    judge,
)
from qsim.sim.step import records_of
from tests.unit.sim_cases import BODY, WITH_GRADIENTS, case_of, recipe_of

CATALOGUE = {  # facts of the project, written here a second time on purpose: the literals in the code must agree
    "D01": {"I1"},
    "D02": {"I2", "I3", "I5"},
    "D03": {"I1", "I2", "I3", "I5"},
    "D04": {"I4"},
    "D05": {"I2", "I4"},
    "D07": {"I1", "I7"},
    "D09": {"I3"},
    "D10": {"I3"},
    "stale_scale": {"I1", "I7"},
}
FIXED_BY = {
    "D01": {"descale_in_the_data", "keyed_snapshot", "functional_state"},
    "D02": {"keyed_snapshot", "functional_state"},
    "D03": {"keyed_snapshot", "functional_state"},
    "D04": {"per_owner_state"},
    "D05": {"per_owner_state"},
    "D07": {"descale_in_the_data", "keyed_snapshot", "functional_state"},
    "D09": {"merged_commit", "commit_of_own_unit", "per_worker_state"},
    "D10": {"compare_and_set", "atomic_commit", "fail_closed_to_one_worker", "per_worker_state"},
    "stale_scale": {"descale_in_the_data", "keyed_snapshot", "functional_state"},
}
RECIPES = ("delayed", "centred", "current")
SPECS = [
    ScheduleSpec(steps=2, layers=2, microbatches=m, workers=w, order=order)
    for m, w, order in itertools.product((1, 2, 4), (1, 2), (Order.FORWARD_FIRST, Order.ALTERNATE))
    if m % w == 0
]
FEW = [SPECS[0], ScheduleSpec(steps=2, layers=3, microbatches=4, workers=2)]
ALL = {**DEFECTS, **CONTRASTS}


def verdict(case: Case) -> set[str]:
    return set(broken(judge(case)))


def hosts(defect_id: str, recipe: str) -> bool:
    return recipe == "centred" or not ALL[defect_id].centred


def test_the_catalogue_holds_the_defects_that_are_built() -> None:
    assert CATALOGUE.keys() <= ALL.keys()  # the others have literals of their own: test_sim_defects_a.py and _b.py
    names = [d.name for d in ALL.values()]
    assert len(set(names)) == len(names)
    assert all(defect_id == d.id for defect_id, d in ALL.items())
    assert all(set(d.fixes) | set(d.wrong_fixes) <= FIXES.keys() for d in ALL.values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("body", [BODY, WITH_GRADIENTS], ids=["plain", "gradients"])
@pytest.mark.parametrize("cadence", [Cadence.MICROBATCH, Cadence.STEP])
def test_the_correct_preset_breaks_nothing(recipe: str, spec: ScheduleSpec, body, cadence: Cadence) -> None:
    assert set() == verdict(case_of(recipe_of(recipe), spec=spec, body=body, cadence=cadence))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("current",)])
def test_every_preset_breaks_what_its_literal_says(preset: str) -> None:
    assert set(PRESETS[preset].breaks) == verdict(case_of(recipe_of("delayed"), preset=preset))


def test_preset_current_breaks_nothing() -> None:
    assert set() == verdict(case_of(recipe_of("current"), preset="current"))


@pytest.mark.parametrize(("defect_id", "recipe"), [p for p in itertools.product(CATALOGUE, RECIPES) if hosts(*p)])
def test_a_defect_breaks_exactly_its_row_on_every_schedule(defect_id: str, recipe: str) -> None:
    defect = ALL[defect_id]
    assert CATALOGUE[defect_id] == defect.breaks
    for spec, body in itertools.product(SPECS, (BODY, WITH_GRADIENTS)):
        case = defect.rewrite(case_of(recipe_of(recipe), defect=defect, spec=spec, body=body))
        assert CATALOGUE[defect_id] == verdict(case), spec


@pytest.mark.parametrize("defect_id", CATALOGUE)
def test_a_defect_breaks_its_row_on_its_minimal_schedule(defect_id: str) -> None:
    defect = ALL[defect_id]
    case = case_of(recipe_of("centred"), defect=defect, spec=defect.minimal)
    assert CATALOGUE[defect_id] == verdict(defect.rewrite(case))


@pytest.mark.parametrize(("defect_id", "fix"), list(itertools.product(CATALOGUE, FIXES)))
def test_only_its_fixes_silence_a_defect(defect_id: str, fix: str) -> None:
    defect = ALL[defect_id]
    assert FIXED_BY[defect_id] == set(defect.fixes)
    for spec, body in zip(FEW, (BODY, WITH_GRADIENTS), strict=True):
        host = case_of(recipe_of("centred"), defect=defect, spec=spec, body=body)
        mended = FIXES[fix].rewrite(defect.rewrite(host))
        assert (verdict(mended) == set()) == (fix in FIXED_BY[defect_id]), spec


@pytest.mark.parametrize("defect_id", CATALOGUE)
def test_a_wrong_fix_is_named_as_wrong_and_leaves_something_broken(defect_id: str) -> None:
    defect = ALL[defect_id]
    host = case_of(recipe_of("centred"), defect=defect)
    assert not set(defect.wrong_fixes) & set(defect.fixes)
    assert defect.wrong_fixes
    for name in defect.wrong_fixes:
        assert verdict(FIXES[name].rewrite(defect.rewrite(host)))


def test_the_wrong_fix_of_shared_scope_is_snapshot_on_shared_scope() -> None:
    host = case_of(recipe_of("delayed"), defect=DEFECTS["D05"])
    wrong = FIXES["single_snapshot"].rewrite(DEFECTS["D04"].rewrite(host))
    assert DEFECTS["D05"].rewrite(host) == wrong
    assert CATALOGUE["D05"] == verdict(wrong)


@pytest.mark.parametrize("fix", [name for name in FIXES if name != "single_snapshot"])
@pytest.mark.parametrize("cadence", [Cadence.MICROBATCH, Cadence.STEP])
def test_a_right_fix_leaves_a_correct_case_correct(fix: str, cadence: Cadence) -> None:
    case = case_of(recipe_of("centred"), spec=ScheduleSpec(layers=2, microbatches=2, workers=2), cadence=cadence)
    assert set() == verdict(FIXES[fix].rewrite(case))


def test_two_commits_or_an_epoch_lost_are_told_apart() -> None:
    because = {}
    for name in ("D09", "D10"):
        defect = DEFECTS[name]
        case = defect.rewrite(case_of(recipe_of("delayed"), defect=defect))
        found = check(records_of(case), scope=case.context.scope, unit=case.context.unit)
        because[name] = {v.because.split(" ", 2)[1] if name == "D09" else v.because[-16:] for v in found}
    assert {"2"} == because["D09"]
    assert {"a commit is lost"} == because["D10"]


def test_a_host_grows_to_what_a_defect_needs_and_no_further() -> None:
    small = ScheduleSpec(steps=5, layers=1, microbatches=3)
    assert ScheduleSpec(steps=5, layers=1, microbatches=4, workers=2) == DEFECTS["D09"].host(small)
    assert ScheduleSpec(steps=5, layers=2, microbatches=3) == DEFECTS["D05"].host(small)
    assert small == DEFECTS["D01"].host(small)
    large = ScheduleSpec(steps=9, layers=7, microbatches=6, workers=3)
    assert large == DEFECTS["D10"].host(large)


def test_a_defect_that_cannot_be_hosted_says_what_is_missing() -> None:
    with pytest.raises(CaseError, match="D07 stale_center needs a recipe with a centre"):
        DEFECTS["D07"].require(PRESETS["seed_correct"], recipe_of("delayed"))
    with pytest.raises(CaseError, match='preset "none" commits nothing'):
        DEFECTS["D01"].require(PRESETS["none"], recipe_of("delayed"))
    with pytest.raises(CaseError, match='preset "seed_defective" is defective itself'):
        DEFECTS["D01"].require(PRESETS["seed_defective"], recipe_of("delayed"))
    one_worker = case_of(recipe_of("delayed"))
    with pytest.raises(CaseError, match=r"needs schedule\.workers >= 2"):
        DEFECTS["D10"].rewrite(one_worker)


def test_a_defect_is_found_by_id_and_by_name() -> None:
    assert DEFECTS["D04"] is get_defect("D04") is get_defect("shared_scope")
    with pytest.raises(StudyError, match='defect "D4" is unknown; known: D01'):
        get_defect("D4")


def test_a_rewrite_changes_nothing_in_the_case_it_is_given() -> None:
    for defect in (ALL[name] for name in CATALOGUE):
        case = case_of(recipe_of("centred"), defect=defect)
        before = hash(case.schedule)
        defect.rewrite(case)
        assert before == hash(case.schedule)
