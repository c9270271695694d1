"""Schedules: what is there, in which order, and what is absent."""

from __future__ import annotations

import pytest

from qsim.errors import CaseError, UsageError
from qsim.quant import OpId, TensorRole
from qsim.sim import DEFECTS, PRESETS, Linear, Order, ScheduleSpec, build_case
from qsim.sim.control import Control, control_step
from qsim.sim.events import Begin, Commit, Consume, Drop, Fetch, Load, Observe, Phase, Quantize, Store
from qsim.sim.presets import Cadence
from tests.unit.sim_cases import BODY, WITH_GRADIENTS, case_of, recipe_of

DELAYED = recipe_of("delayed")


def kinds(case, phase: Phase) -> list[str]:
    return [type(e).__name__ for e in case.schedule if e.phase is phase]


def test_forward_of_one_operand_is_begin_quantize_observe_commit_then_the_gemm() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=1))
    cast = ["Load", "Begin", "Quantize", "Observe", "Commit"]
    assert (cast * 2 + ["Consume", "Drop"]) * 2 == kinds(case, Phase.FORWARD)


def test_recompute_loads_quantizes_and_consumes_and_does_nothing_else() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=2, layers=2))
    assert {"Load", "Quantize", "Consume", "Drop"} == set(kinds(case, Phase.RECOMPUTE))


def test_forward_ascends_through_the_layers_and_recompute_descends() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=4))
    visited = {
        phase: [e.op.layer_id for e in case.schedule if isinstance(e, Consume) and e.phase is phase]
        for phase in (Phase.FORWARD, Phase.RECOMPUTE)
    }
    assert [0, 0, 1, 1, 2, 2, 3, 3] == visited[Phase.FORWARD]
    assert [3, 3, 2, 2, 1, 1, 0, 0] == visited[Phase.RECOMPUTE]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order.FORWARD_FIRST, ["f0", "f1", "f2", "r2", "r1", "r0"]),
        (Order.ALTERNATE, ["f0", "r0", "f1", "r1", "f2", "r2"]),
    ],
)
def test_microbatches_follow_each_other_as_the_order_says(order: Order, expected: list[str]) -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=1, microbatches=3, order=order))
    visits = [e.phase.value + str(e.op.microbatch) for e in case.schedule if isinstance(e, Consume)]
    assert expected == list(dict.fromkeys(visits))


def test_two_workers_take_turns_layer_by_layer() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=2, microbatches=2, workers=2))
    forward = [
        (e.op.layer_id, e.op.worker_id) for e in case.schedule if isinstance(e, Consume) and e.phase is Phase.FORWARD
    ]
    assert [(0, 0), (0, 1), (1, 0), (1, 1)] == list(dict.fromkeys(forward))


def test_recompute_names_the_snapshot_slot_that_forward_filled() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=2, microbatches=2))
    into = {e.op: e.into for e in case.schedule if isinstance(e, Begin)}
    replayed = {e.op: e.by for e in case.schedule if isinstance(e, Quantize) and e.phase is Phase.RECOMPUTE}
    assert len(into) == 16
    assert into == replayed


def test_cadence_step_commits_once_an_owner_after_all_microbatches_with_all_their_observations() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=2, layers=1, microbatches=3), cadence=Cadence.STEP)
    commits = [e for e in case.schedule if isinstance(e, Commit)]
    assert [3] * 8 == [len(e.obs) for e in commits]
    assert {Phase.UPDATE} == {e.phase for e in commits}
    seen = [e.into for e in case.schedule if isinstance(e, Observe) and e.op.logical_step == 0]
    assert sorted(seen) == sorted(name for e in commits[:4] for name in e.obs)


def test_current_scaling_observes_before_it_begins() -> None:
    case = case_of(recipe_of("current"), spec=ScheduleSpec(steps=1, layers=1))
    first = [type(e) for e in case.schedule if e.phase is Phase.FORWARD][:5]
    assert [Load, Observe, Begin, Quantize, Commit] == first
    begins = [e for e in case.schedule if isinstance(e, Begin)]
    assert all(e.obs is not None for e in begins)


def test_preset_current_commits_nothing_and_preset_none_casts_nothing() -> None:
    current = case_of(recipe_of("current"), preset="current")
    assert not any(isinstance(e, Commit) for e in current.schedule)
    none = case_of(DELAYED, preset="none")
    assert {Load, Consume, Drop} == {type(e) for e in none.schedule}
    assert all(o.descale is None for e in none.schedule if isinstance(e, Consume) for o in e.operands)


def test_preset_current_refuses_a_recipe_that_would_never_leave_its_initial_scale() -> None:
    with pytest.raises(CaseError, match='recipe "delayed" would keep its initial scale'):
        case_of(DELAYED, preset="current")


def test_preset_seed_defective_orders_events_as_d03_rewrites_seed_correct() -> None:
    spec = ScheduleSpec(steps=2, layers=2)
    preset = case_of(DELAYED, spec=spec, preset="seed_defective", body=WITH_GRADIENTS)
    rewritten = DEFECTS["D03"].rewrite(case_of(DELAYED, spec=spec, body=WITH_GRADIENTS))
    plain = [[e for e in case.schedule if not isinstance(e, (Drop, Fetch))] for case in (preset, rewritten)]
    assert plain[0] == plain[1]
    fetched = [sorted(str(e) for e in case.schedule if isinstance(e, Fetch)) for case in (preset, rewritten)]
    assert fetched[0] == fetched[1]
    assert PRESETS["seed_defective"].breaks == DEFECTS["D03"].breaks


def test_gradients_have_their_own_owner_and_consume_what_recompute_made() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=1), body=(Linear(0, True),))
    grads = [e for e in case.schedule if isinstance(e, Commit) and e.phase is Phase.BACKWARD]
    assert [int(TensorRole.GRAD_OUTPUT)] == [e.cell.role_id for e in grads]
    gemms = {e.gemm: [o.codes[:7] for o in e.operands] for e in case.schedule if isinstance(e, Consume)}
    assert {"linear", "dgrad", "wgrad"} == set(gemms)
    assert ["codes.b", "codes.r"] == gemms["dgrad"]
    assert ["codes.r", "codes.b"] == gemms["wgrad"]


def slots_filled(case) -> tuple[set[str], Control, int]:
    """All slots that a case ever fills, the control at its end, and how many codes it held at most."""
    control, names, most = Control(), set(), 0
    for event in case.schedule:
        control = control_step(control, event)
        names |= set(control.slots)
        most = max(most, sum(name.startswith("codes") for name in control.slots))
    return names, control, most


def test_slots_are_bounded_however_many_steps_are_run() -> None:
    few, many = (slots_filled(case_of(DELAYED, spec=ScheduleSpec(steps=s, layers=2)))[0] for s in (2, 9))
    assert few == many


def test_tensors_and_codes_are_dropped_before_the_next_gemm_needs_the_room() -> None:
    _, control, most = slots_filled(case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=3)))
    assert most == 2
    left = {name.split("/")[0] for name in control.slots}
    assert {"obs.f", "out.f.linear", "out.f.scores", "out.r.linear", "out.r.scores"} == left


def test_reading_an_empty_slot_is_an_error_that_names_event_and_slot() -> None:
    case = case_of(DELAYED, spec=ScheduleSpec(steps=1, layers=1))
    with pytest.raises(CaseError, match=r"event 0 reads slot x/m0/w0/L0/s0/r0"):
        control_step(Control(), case.schedule[2])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"steps": 0}, "schedule.steps is 0"),
        ({"layers": -1}, "schedule.layers is -1"),
        ({"microbatches": 3, "workers": 2}, "microbatches 3 is no multiple of schedule.workers 2"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScheduleSpec(**sizes)


def test_a_store_writes_the_successor_of_what_it_fetched_not_of_what_is_live() -> None:
    case = DEFECTS["D10"].rewrite(case_of(DELAYED, defect=DEFECTS["D10"], spec=ScheduleSpec(steps=1, layers=1)))
    control, epochs = Control(), []
    for event in case.schedule:
        control = control_step(control, event)
        if isinstance(event, Store):
            epochs.append(control.epoch(event.cell))
    assert [1] * 8 == epochs


def test_build_case_declares_the_scope_and_the_unit_that_it_wrote() -> None:
    case = build_case(ScheduleSpec(), body=BODY, preset=PRESETS["seed_correct"], recipe=DELAYED, cadence=Cadence.STEP)
    assert Cadence.STEP is case.context.unit
    begins = [e for e in case.schedule if isinstance(e, Begin)]
    assert all(e.cell == case.context.scope(e.op) for e in begins)
    assert OpId(0, 0, 1, 1, int(TensorRole.ATTN_K)) in {e.op for e in begins}


def test_cadence_step_commits_what_backward_observed_too() -> None:
    spec = ScheduleSpec(steps=1, layers=1, microbatches=2)
    case = case_of(DELAYED, spec=spec, body=(Linear(0, True),), cadence=Cadence.STEP)
    commits = {TensorRole(e.op.role_id).name: len(e.obs) for e in case.schedule if isinstance(e, Commit)}
    assert {"INPUT": 2, "WEIGHT": 2, "GRAD_OUTPUT": 2} == commits
