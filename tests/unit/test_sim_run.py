"""Replays with numbers: bits of forward and recompute, replicas, twins, and what a defect does to values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends import get_backend
from qsim.errors import CaseError
from qsim.quant import OpId, QuantState
from qsim.severity import replay_mismatch
from qsim.sim import CONTRASTS, DEFECTS, FIXES, ScheduleSpec, Trace, check, records_of, replay, run
from qsim.sim.control import Control
from qsim.sim.data import Data, data_step
from qsim.sim.events import Begin, Commit, Consume, Fetch, Phase
from qsim.sim.step import World, step
from tests.unit.sim_cases import WITH_GRADIENTS, case_of, env_of, recipe_of, tensors

FORMATS = ("e4m3", "e5m2", "e2m1")
RECIPES = ("delayed", "centred", "current")
BUILT = ("D01", "D02", "D03", "D04", "D05", "D07", "D09", "D10", *CONTRASTS)  # the others: test_sim_defects_b_run.py
OTHER_PROTOCOLS = (
    "per_worker_state",
    "compare_and_set",
    "atomic_commit",
    "fail_closed_to_one_worker",
)  # correct too, but not the twin's: a scope of their own; workers that begin together


def assert_same_trace(expected: Trace, actual: Trace) -> None:
    assert expected.records == actual.records
    assert expected.outputs.keys() == actual.outputs.keys()
    for seq, output in expected.outputs.items():
        assert same_bits(output, actual.outputs[seq]), f"output of event {seq}"
    for seq, cast in expected.casts.items():
        assert same_bits(cast.codes, actual.casts[seq].codes), f"codes of event {seq}"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("window", [1, 16])
def test_in_the_correct_preset_recompute_gives_forward_bit_for_bit(fmt: str, recipe: str, window: int) -> None:
    case = case_of(recipe_of(recipe, fmt, window), spec=ScheduleSpec(steps=4, layers=3, microbatches=2))
    trace = run(case, env_of(case))
    assert not replay_mismatch(trace).any()
    assert len(replay_mismatch(trace)) == 4 * 3 * 2 * 2
    commits = [(r.owner, r.op[:2]) for r in trace.records if r.kind == "commit"]
    assert len(commits) == len(set(commits)) == 4 * 3 * 2 * 4


def test_consume_after_advance_is_invisible_to_replay_with_one_microbatch_and_caught_all_the_same() -> None:
    recipe = recipe_of("delayed")
    for microbatches, share in ((1, 0.0), (2, 0.5), (4, 0.75)):
        spec = ScheduleSpec(steps=4, layers=2, microbatches=microbatches)
        case = DEFECTS["D01"].rewrite(case_of(recipe, spec=spec))
        trace = run(case, env_of(case))
        # each microbatch but the last of a step finds the live state moved on: those differ, the last does not
        assert share == replay_mismatch(trace).mean()
        assert {v.invariant for v in check(trace.records, scope=case.context.scope, unit=case.context.unit)} == {"I1"}


def test_recompute_advances_changes_the_recomputed_tensor_and_leaves_forward_of_step_zero_alone() -> None:
    case = case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=2, layers=2))
    correct, bad = run(case, env_of(case)), run(DEFECTS["D02"].rewrite(case), env_of(case))

    def outputs(trace: Trace, phase: str, at: int) -> list[np.ndarray]:
        kept = [r for r in trace.records if r.kind == "consume" and r.phase == phase and r.op[0] == at]
        return [trace.outputs[r.seq] for r in sorted(kept, key=lambda r: r.op)]

    pairs = list(zip(outputs(correct, "f", 0), outputs(bad, "f", 0), strict=True))
    assert all(same_bits(a, b) for a, b in pairs)
    assert not any(same_bits(a, b) for a, b in zip(outputs(correct, "r", 0), outputs(bad, "r", 0), strict=True))


@pytest.mark.parametrize("name", BUILT)
def test_a_fix_gives_back_the_numbers_of_the_correct_twin(name: str) -> None:
    defect = {**DEFECTS, **CONTRASTS}[name]
    host = case_of(recipe_of("centred", "e2m1"), defect=defect, spec=ScheduleSpec(steps=3, layers=2))
    env = env_of(host)
    correct = run(host, env)
    wanted = {(r.phase, r.op, r.gemm): correct.outputs[r.seq] for r in correct.records if r.kind == "consume"}
    for fix in defect.fixes:
        if fix in OTHER_PROTOCOLS:
            continue
        mended = run(FIXES[fix].rewrite(defect.rewrite(host)), env)
        got = {(r.phase, r.op, r.gemm): mended.outputs[r.seq] for r in mended.records if r.kind == "consume"}
        assert wanted.keys() == got.keys()
        assert all(same_bits(wanted[key], got[key]) for key in wanted), fix


@pytest.mark.parametrize("name", [None, *BUILT])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_the_bits_of_a_replica_do_not_depend_on_the_others(name: str | None, fmt: str) -> None:
    defect = None if name is None else {**DEFECTS, **CONTRASTS}[name]
    case = case_of(recipe_of("centred", fmt, 2), defect=defect, spec=ScheduleSpec(steps=3, layers=2))
    case = case if defect is None else defect.rewrite(case)
    together = run(case, env_of(case, seeds=(5, 6, 7)))
    for replica, seed in enumerate((5, 6, 7)):
        alone = run(case, env_of(case, seeds=(seed,)))
        assert alone.records == together.records
        for seq, output in alone.outputs.items():
            assert same_bits(output[0], np.ascontiguousarray(together.outputs[seq][replica])), (seed, seq)


@pytest.mark.parametrize("name", [None, "D03", "D10"])
def test_replay_from_records_equals_run_in_every_record_and_bit(name: str | None) -> None:
    defect = None if name is None else DEFECTS[name]
    case = case_of(recipe_of("centred"), defect=defect, body=WITH_GRADIENTS)
    case = case if defect is None else defect.rewrite(case)
    assert_same_trace(run(case, env_of(case)), replay(case, env_of(case), records_of(case)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_oracle_backend_replays_to_the_same_bits(recipe: str) -> None:
    case = DEFECTS["D03"].rewrite(case_of(recipe_of(recipe, "e2m1"), spec=ScheduleSpec(steps=2, layers=1)))
    fast, slow = (run(case, env_of(case, seeds=(3,), backend=name)) for name in ("numba", "oracle"))
    assert_same_trace(slow, fast)


def test_running_twice_gives_one_result() -> None:
    case = DEFECTS["D03"].rewrite(case_of(recipe_of("centred", "e5m2")))
    assert_same_trace(run(case, env_of(case)), run(case, env_of(case)))


def test_a_step_leaves_the_world_before_it_as_it_was() -> None:
    case = case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=1, layers=1))
    env = env_of(case)
    world = World(Control(), Data())
    for event in case.schedule:
        control, slots, states = world.control.copy(), dict(world.data.slots), dict(world.data.states)
        after = step(world, event, env)
        assert control == world.control
        assert slots.keys() == world.data.slots.keys()
        assert all(slots[name] is world.data.slots[name] for name in slots)
        assert states == dict(world.data.states)
        world = after


def test_every_tensor_that_a_world_holds_is_read_only() -> None:
    case = case_of(recipe_of("centred"), spec=ScheduleSpec(steps=1, layers=1))
    trace = run(case, env_of(case))
    cast = next(iter(trace.casts.values()))
    for array in (next(iter(trace.outputs.values())), cast.codes, cast.amax, cast.snapshot.scale, cast.snapshot.center):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_control_and_data_agree_on_every_epoch() -> None:
    for name in ("D03", "D04", "D09", "D10"):
        defect = DEFECTS[name]
        case = defect.rewrite(case_of(recipe_of("delayed"), defect=defect))
        env = env_of(case)
        world = World(Control(), Data())
        for event in case.schedule:
            world = step(world, event, env)
            for cell, state in world.data.states.items():
                assert state.epoch == world.control.epoch(cell)


def test_a_consumer_decodes_with_exactly_the_metadata_that_it_names() -> None:
    case = DEFECTS["D01"].rewrite(case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=2, layers=1)))
    trace = run(case, env_of(case))
    commits = {(r.owner, r.epoch_after) for r in trace.records if r.kind == "commit"}
    for record in trace.records:
        if record.kind != "consume":
            continue
        for operand, used in zip(record.operands, trace.used[record.seq], strict=True):
            assert isinstance(used.descale, QuantState)
            assert operand.descale.epoch == used.descale.epoch
            assert (operand.descale.owner, operand.descale.epoch) in commits
            assert trace.casts[used.cast].snapshot.epoch == operand.codes.epoch == used.descale.epoch - 1


def test_gradients_flow_through_their_own_format_and_owner() -> None:
    recipe = replace(recipe_of("delayed"), grad_fmt=recipe_of("delayed", "e5m2").fmt)
    case = case_of(recipe, spec=ScheduleSpec(steps=2, layers=2), body=WITH_GRADIENTS)
    env = env_of(case)
    trace = run(case, env)
    made = {r.op[4]: trace.casts[r.seq].snapshot.fmt.name for r in trace.records if r.kind == "quantize"}
    assert {0: "float8_e4m3fn", 1: "float8_e4m3fn", 2: "float8_e5m2", 3: "float8_e4m3fn", 4: "float8_e4m3fn"} == made
    shapes = {r.gemm: trace.outputs[r.seq].shape[1:] for r in trace.records if r.kind == "consume"}
    assert {"linear": (4, 3), "scores": (4, 4), "dgrad": (4, 6), "wgrad": (6, 3)} == shapes


def test_the_high_precision_control_multiplies_the_tensors_themselves() -> None:
    case = case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=1, layers=1), preset="none")
    trace = run(case, env_of(case, seeds=(4,)))
    load, matmul = tensors((4,)), get_backend("oracle").matmul
    at = OpId(0, 0, 0)
    want = matmul(load(at), load(at._replace(role_id=1)))
    first = next(r for r in trace.records if r.kind == "consume")
    assert same_bits(want, trace.outputs[first.seq])
    assert not trace.casts


def test_fast_mode_takes_the_plain_float32_product() -> None:
    case = case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=1, layers=1), preset="none")
    env = replace(env_of(case, seeds=(4,)), reproducible=False)
    load, at = tensors((4,)), OpId(0, 0, 0)
    first = next(iter(run(case, env).outputs.values()))
    assert same_bits(np.matmul(load(at), load(at._replace(role_id=1))), first)


def test_a_slot_with_the_wrong_kind_of_value_is_an_error() -> None:
    case = case_of(recipe_of("delayed"), spec=ScheduleSpec(steps=1, layers=1))
    env = env_of(case)
    consume = next(e for e in case.schedule if isinstance(e, Consume))
    begin = next(e for e in case.schedule if isinstance(e, Begin))
    data = data_step(Data(), begin, env)
    with pytest.raises(CaseError, match="holds a QuantSnapshot; this event needs a QuantObservation"):
        data_step(data, Commit(Phase.FORWARD, begin.op, begin.cell, (begin.into,)), env)
    fetched = data_step(data, Fetch(Phase.FORWARD, begin.op, begin.cell, consume.operands[0].codes), env)
    with pytest.raises(CaseError, match="holds a QuantState; this event needs a QuantizedTensor"):
        data_step(fetched, consume, env)
