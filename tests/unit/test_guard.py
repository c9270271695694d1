"""Fail-closed replays: a correct case runs unchanged, the first broken rule stops everything before any tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsim.errors import ProtocolViolation
from qsim.formats import POLICIES
from qsim.quant import OpId
from qsim.sim import CONTRASTS, DEFECTS, PRESETS, Case, Feature, Order, ScheduleSpec, records_of, run, run_guarded
from qsim.sim.events import Commit
from qsim.sim.guard import first_refusal, identity_violations
from qsim.sim.notation import read_schedule
from tests.unit.sim_cases import THREE, WITH_GRADIENTS, case_of, env_of, recipe_of
from tests.unit.test_sim_run import assert_same_trace

SMALL = ScheduleSpec(steps=2, layers=2)


def recipe_for(preset: str):
    return recipe_of("current" if preset == "current" else "centred")


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if not preset.breaks])
def test_a_correct_case_runs_guarded_to_the_same_bits(preset: str) -> None:
    case = case_of(recipe_for(preset), spec=SMALL, preset=preset, body=WITH_GRADIENTS)
    assert_same_trace(run(case, env_of(case)), run_guarded(case, env_of(case)))


@pytest.mark.parametrize("features", [(Feature.WEIGHT_CACHE,), (Feature.NESTED,), (Feature.SAVE_RESTORE,)])
def test_a_correct_case_with_features_is_not_refused(features: tuple[Feature, ...]) -> None:
    spec = replace(SMALL, microbatches=2, order=Order.ALTERNATE, features=frozenset(features))
    case = case_of(recipe_of("delayed"), spec=spec, body=WITH_GRADIENTS)
    assert first_refusal(case, records_of(case)) is None


@pytest.mark.parametrize("name", [*DEFECTS, *CONTRASTS])
def test_every_defect_is_stopped_before_a_tensor_is_loaded(name: str) -> None:
    defect = {**DEFECTS, **CONTRASTS}[name]
    case = defect.apply(case_of(recipe_of("centred"), defect=defect, body=THREE))

    def load(op: OpId) -> None:
        raise AssertionError(f"{op} was loaded")

    with pytest.raises(ProtocolViolation, match=r"^event \d+, owner L.*: .* is broken: .*; the replay fails closed"):
        run_guarded(case, replace(env_of(case), load=load))


def test_the_first_violation_is_named_with_owner_event_and_reason() -> None:
    case = DEFECTS["D04"].apply(case_of(recipe_of("delayed"), spec=SMALL))
    with pytest.raises(ProtocolViolation) as caught:
        run_guarded(case, env_of(case))
    wrong = first_refusal(case, records_of(case))
    assert wrong is not None
    assert f"event {wrong.event}, owner {wrong.owner}: I4 is broken" in str(caught.value)
    assert 1 == caught.value.exit_code


def test_a_live_read_that_happens_to_be_right_is_refused_for_it_names_no_operation() -> None:
    """Commits come once a step, so the live epoch is still the encode's: invariants hold, identity cannot."""
    case = DEFECTS["D01"].apply(case_of(recipe_of("delayed"), spec=SMALL))
    schedule = tuple(e for e in case.schedule if not isinstance(e, Commit))
    found = list(identity_violations(replace(case, schedule=schedule), records_of(replace(case, schedule=schedule))))
    assert {"the descale is read from the live state"} == {v.because.split(" of ")[0] for v in found}
    assert 2 * 2 * 2 * 2 * 2 == len(found)  # steps, layers, GEMMs, forward and recompute, operands


@pytest.mark.parametrize(
    ("consumer", "because"),
    [
        ("U(linear, input[by=~snap@L0], weight)", "the descale was frozen for step 0 microbatch 0 layer 0 QKV.INPUT"),
        ("U(linear, input[codes=~codes.f@L0], weight)", "the codes are of step 0 microbatch 0 layer 0 QKV.INPUT"),
        ("U(linear, input[version=-], weight)", "the version is named by nothing"),
        ("U(linear, input[by=late], weight)", "codes of epoch 0 meet the descale of epoch 1"),
        ("U(linear, input[center=late], weight)", "codes of epoch 0 meet the centre of epoch 1"),
        ("U(linear, input[raw], weight)", None),
        ("U", None),
    ],
)
def test_a_consumer_asserts_step_layer_role_and_epoch_of_codes_and_metadata(consumer: str, because: str | None) -> None:
    text = (
        f"f t0 L0.qkv.input: X P Q O\nf t0 L1.qkv.input: X P Q O C P(into=late) | weight: X P Q O | input: {consumer}\n"
    )
    read = read_schedule(text)
    case = Case(
        schedule=read.schedule, recipe=recipe_of("delayed"), policy=POLICIES["ocp"], context=read.declared.context()
    )
    found = [v.because.split(",")[0].removesuffix(" worker 0") for v in identity_violations(case, records_of(case))]
    assert ([] if because is None else [because]) == found
