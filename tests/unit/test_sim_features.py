"""What each feature of a schedule does, in events."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.errors import UsageError
from qsim.quant import OpId, TensorRole
from qsim.severity import replay_mismatch
from qsim.sim import PRESETS, Feature, Linear, Order, ScheduleSpec, Scores, build_case, run
from qsim.sim.events import (
    Commit,
    Consume,
    Event,
    Load,
    LoadState,
    Observe,
    Optimize,
    Phase,
    Quantize,
    Reduce,
    Restart,
    SaveState,
    Wait,
)
from qsim.sim.schedule import features_of
from tests.unit.sim_cases import THREE as BODY
from tests.unit.sim_cases import env_of, recipe_of

DELAYED = recipe_of("delayed")


def events_of(*features: Feature, preset: str = "seed_correct", **sizes: object) -> tuple[Event, ...]:
    return case_with(*features, preset=preset, **sizes).schedule


def case_with(*features: Feature, preset: str = "seed_correct", **sizes: object):
    spec = ScheduleSpec(**{"steps": 1, "layers": 2, "features": frozenset(features), **sizes})  # type: ignore[arg-type]
    return build_case(spec, body=BODY, preset=PRESETS[preset], recipe=DELAYED)


def consumed(schedule: tuple[Event, ...], phase: Phase) -> list[tuple[int, int, str]]:
    """(layer, site, gemm) of every GEMM of a phase, in order."""
    return [(e.op.layer_id, e.op.site, e.gemm) for e in schedule if isinstance(e, Consume) and e.phase is phase]


def casts(schedule: tuple[Event, ...], phase: Phase) -> Counter[OpId]:
    return Counter(e.op for e in schedule if isinstance(e, Quantize) and e.phase is phase)


FORWARD = [(layer, site, gemm) for layer in (0, 1) for site, gemm in ((0, "linear"), (1, "scores"), (2, "linear"))]
AGAIN = FORWARD[3:] + FORWARD[:3]


def test_without_a_checkpoint_nothing_is_recomputed_and_backward_reads_what_forward_made() -> None:
    schedule = events_of(Feature.NO_CHECKPOINT)
    assert [] == consumed(schedule, Phase.RECOMPUTE)
    assert not casts(schedule, Phase.RECOMPUTE)
    gradients = [e for e in schedule if isinstance(e, Consume) and e.phase is Phase.BACKWARD]
    assert {"codes.f", "codes.b"} == {o.codes.split("/")[0] for e in gradients for o in e.operands}


def test_a_selective_checkpoint_recomputes_the_scores_alone() -> None:
    schedule = events_of(Feature.SELECTIVE)
    assert [(1, 1, "scores"), (0, 1, "scores")] == consumed(schedule, Phase.RECOMPUTE)
    made = {
        o.codes.split("/")[0]
        for e in schedule
        if isinstance(e, Consume) and e.phase is Phase.BACKWARD
        for o in e.operands
        if o.of.role_id != TensorRole.GRAD_OUTPUT
    }
    assert {"codes.f"} == made


def test_a_nested_checkpoint_recomputes_every_gemm_twice_upwards_and_then_downwards() -> None:
    schedule = events_of(Feature.NESTED)
    assert FORWARD + AGAIN == consumed(schedule, Phase.RECOMPUTE)
    assert {2} == set(casts(schedule, Phase.RECOMPUTE).values())


def test_an_early_stop_leaves_the_last_gemm_out_but_not_its_operands_where_backward_needs_them() -> None:
    schedule = events_of(Feature.EARLY_STOP)
    assert [(1, 0, "linear"), (1, 1, "scores"), (0, 0, "linear"), (0, 1, "scores")] == consumed(
        schedule, Phase.RECOMPUTE
    )
    assert {0, 1, 2} == {op.site for op in casts(schedule, Phase.RECOMPUTE)}
    spec = ScheduleSpec(steps=1, layers=1, features=frozenset({Feature.EARLY_STOP}))
    bare = build_case(spec, body=(Linear(0), Scores(1)), preset=PRESETS["seed_correct"], recipe=DELAYED).schedule
    assert {0} == {op.site for op in casts(bare, Phase.RECOMPUTE)}


@pytest.mark.parametrize(
    ("feature", "forward"),
    [(Feature.TWICE, [(0, 0), (0, 1), (1, 0), (1, 1)]), (Feature.SHARED, [(0, 0), (1, 0), (0, 1), (1, 1)])],
)
def test_a_module_that_is_entered_again_has_one_state_and_one_commit_of_both_visits(feature, forward) -> None:
    schedule = events_of(feature)
    seen = [
        (e.op.layer_id, e.op.visit)
        for e in schedule
        if isinstance(e, Consume) and e.phase is Phase.FORWARD and e.op.site == 0
    ]
    assert forward == seen
    again = [
        (e.op.layer_id, e.op.visit)
        for e in schedule
        if isinstance(e, Consume) and e.phase is Phase.RECOMPUTE and e.op.site == 0
    ]
    assert forward[::-1] == again
    commits = [e for e in schedule if isinstance(e, Commit)]
    assert {1} == set(Counter(e.cell for e in commits).values())
    assert {2} == {len(e.obs) for e in commits}


@pytest.mark.parametrize(
    ("feature", "phase"),
    [(Feature.EVALUATION, "e"), (Feature.PADDING, "pad"), (Feature.GRAPH_CAPTURE, "cap")],
)
def test_an_interlude_encodes_and_multiplies_and_leaves_no_trace_in_any_state(feature: Feature, phase: str) -> None:
    schedule = events_of(feature, steps=2, microbatches=3)
    mine = [e for e in schedule if e.phase == phase]
    assert {"Load", "Begin", "Quantize", "Consume", "Drop"} == {type(e).__name__ for e in mine}
    assert {3} == {e.op.microbatch for e in mine if isinstance(e, Quantize)}
    steps = {e.op.logical_step for e in mine if isinstance(e, Quantize)}
    assert ({0} if feature is Feature.GRAPH_CAPTURE else {0, 1}) == steps
    plain = events_of(steps=2, microbatches=3)
    assert list(plain) == [e for e in schedule if e.phase != phase]


def test_a_calibration_pass_looks_at_tensors_that_nobody_commits() -> None:
    schedule = events_of(Feature.CALIBRATION)
    mine = [e for e in schedule if e.phase is Phase.CALIBRATE]
    looked = {e.into for e in mine if isinstance(e, Observe)}
    assert len(looked) == 2 * 3 * 2
    assert not looked & {name for e in schedule if isinstance(e, Commit) for name in e.obs}
    assert all(o.descale is None for e in mine if isinstance(e, Consume) for o in e.operands)


def test_a_weight_is_cast_once_a_step_and_every_other_microbatch_and_recompute_reads_the_cache() -> None:
    schedule = events_of(Feature.WEIGHT_CACHE, steps=2, microbatches=3)
    weights = [op for op in casts(schedule, Phase.FORWARD) if op.role_id == TensorRole.WEIGHT]
    assert {(0, 0), (1, 0)} == {(op.logical_step, op.microbatch) for op in weights}
    assert len(weights) == 2 * 2 * 2
    assert not [op for op in casts(schedule, Phase.RECOMPUTE) if op.role_id == TensorRole.WEIGHT]
    read = [o for e in schedule if isinstance(e, Consume) for o in e.operands if o.of.role_id == TensorRole.WEIGHT]
    assert all(o.cached and o.codes.startswith("cache/") and o.of.microbatch == 0 for o in read)
    assert len(read) == 2 * 3 * 2 * 2 * 3  # steps, microbatches, layers, linears; forward, recompute, dgrad
    assert 2 == sum(isinstance(e, Optimize) for e in schedule)


def test_save_and_restore_end_the_process_after_the_first_step_and_go_on_with_the_same_numbers() -> None:
    plain, restored = case_with(steps=3), case_with(Feature.SAVE_RESTORE, steps=3)
    extra = [type(e) for e in restored.schedule if isinstance(e, (SaveState, Restart, LoadState))]
    assert [SaveState, Restart, LoadState] == extra
    a, b = (run(case, env_of(case)) for case in (plain, restored))
    for x, y in zip(a.outputs.values(), b.outputs.values(), strict=True):
        assert same_bits(x, y)


def test_a_rerun_takes_the_last_step_back_and_gives_its_numbers_again() -> None:
    case = case_with(Feature.RERUN, steps=2)
    trace = run(case, env_of(case))
    outputs = [trace.outputs[r.seq] for r in trace.records if r.kind == "consume" and r.op[0] == 1]
    half = len(outputs) // 2
    assert all(same_bits(x, y) for x, y in zip(outputs[:half], outputs[half:], strict=True))
    epochs = Counter(r.owner for r in trace.records if r.kind == "commit")
    assert {3} == set(epochs.values())


def test_an_idle_expert_gets_no_tokens_in_odd_steps_and_its_state_stands_still() -> None:
    case = case_with(Feature.IDLE_EXPERT, steps=3)
    empty = {
        (e.key.logical_step, e.key.layer_id, e.key.role_id == TensorRole.WEIGHT)
        for e in case.schedule
        if isinstance(e, Load) and e.content
    }
    assert {(1, 1, False)} == empty
    trace = run(case, env_of(case))
    scales = [
        trace.casts[r.seq].snapshot.scale
        for r in trace.records
        if r.kind == "quantize" and r.phase == "f" and r.op[2:5] == (1, 0, 0)
    ]
    assert same_bits(scales[1], scales[2])
    assert not same_bits(scales[0], scales[1])


def test_an_overflow_puts_one_inf_into_the_first_input_once() -> None:
    case = case_with(Feature.OVERFLOW, steps=2)
    loads = {e.key for e in case.schedule if isinstance(e, Load) and e.content}
    assert {OpId(0)} == loads
    trace = run(case, env_of(case))
    bad = [seq for seq, x in trace.inputs.items() if not np.isfinite(x).all()]
    assert 2 == len(bad)  # forward and recompute
    assert {1} == {int((~np.isfinite(trace.inputs[seq])).sum()) // 2 for seq in bad}  # one a replica


@pytest.mark.parametrize("feature", [Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL])
def test_ranks_reduce_before_they_commit_and_have_equal_scales_ever_after(feature: Feature) -> None:
    case = case_with(feature, steps=3, microbatches=2, workers=2)
    trace = run(case, env_of(case))
    kinds = [type(e) for e in case.schedule if isinstance(e, (Reduce, Wait, Commit)) and e.phase is Phase.FORWARD]
    first = kinds[: kinds.index(Commit)]
    assert first == [Reduce] * (len(first) // 2) + [Wait] * (len(first) // 2)
    scales: dict[tuple[int, ...], set[bytes]] = {}
    for r in trace.records:
        if r.kind == "quantize" and r.phase == "f":
            at = r.op[0], *r.op[2:5], *(r.op[1:2] if feature is Feature.TENSOR_PARALLEL else ())
            scales.setdefault(at, set()).add(trace.casts[r.seq].snapshot.scale.tobytes())
    assert {1} == {len(found) for found in scales.values()}
    assert len({bytes for found in scales.values() for bytes in found}) > 10


def test_mixed_formats_cast_the_last_gemm_of_a_layer_to_the_other_format_in_both_passes() -> None:
    case = case_with(Feature.MIXED_FORMATS)
    trace = run(case, env_of(case))
    made = {(r.op[3], r.phase): trace.casts[r.seq].snapshot.fmt.name for r in trace.records if r.kind == "quantize"}
    assert {"float8_e4m3fn"} == {made[site, p] for site in (0, 1) for p in "fr"}
    assert {"float8_e5m2"} == {made[2, p] for p in "fr"}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("feature", [None, *Feature])
def test_in_every_family_recompute_gives_forward_bit_for_bit(order: Order, feature: Feature | None) -> None:
    features = frozenset() if feature is None else frozenset({feature})
    workers = 2 if feature in (Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL) else 1
    case = build_case(
        ScheduleSpec(steps=2, microbatches=2 * workers, layers=4, workers=workers, order=order, features=features),
        body=BODY,
        preset=PRESETS["seed_correct"],
        recipe=DELAYED,
    )
    mismatch = replay_mismatch(run(case, env_of(case)))
    assert not mismatch.any()
    assert (feature is Feature.NO_CHECKPOINT) == (len(mismatch) == 0)


@pytest.mark.parametrize("order", Order)
def test_an_order_of_passes_changes_no_number_where_every_state_is_committed_once_a_step(order: Order) -> None:
    from qsim.sim import Cadence

    def outputs(how: Order) -> dict[object, bytes]:
        spec = ScheduleSpec(steps=3, microbatches=2, layers=4, order=how)
        case = build_case(spec, body=BODY, preset=PRESETS["seed_correct"], recipe=DELAYED, cadence=Cadence.STEP)
        trace = run(case, env_of(case))
        return {(r.op, r.gemm, r.phase): trace.outputs[r.seq].tobytes() for r in trace.records if r.kind == "consume"}

    assert outputs(Order.ALTERNATE) == outputs(order)


@pytest.mark.parametrize(
    ("features", "sizes", "message"),
    [
        ((Feature.NESTED, Feature.EARLY_STOP), {}, "nested and early_stop are all of group checkpoint"),
        ((Feature.SAVE_RESTORE,), {"steps": 1}, "save_restore needs schedule.steps >= 2; it is 1"),
        ((Feature.IDLE_EXPERT,), {"steps": 1}, "idle_expert needs schedule.steps >= 2"),
        ((Feature.DATA_PARALLEL,), {}, "parallel ranks need schedule.workers >= 2; it is 1"),
    ],
)
def test_features_that_do_not_fit_are_refused(features, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScheduleSpec(**{"steps": 2, "features": frozenset(features), **sizes})


def test_an_unknown_feature_is_refused_with_the_known_ones() -> None:
    assert frozenset({Feature.TWICE}) == features_of(["twice"])
    with pytest.raises(UsageError, match='"twise" is unknown; known: no_checkpoint, selective'):
        features_of(["twise"])


def test_a_body_that_names_a_site_twice_or_has_none_is_refused() -> None:
    for body in ((), (Linear(0), Scores(0))):
        with pytest.raises(UsageError, match="each a site of its own"):
            build_case(ScheduleSpec(), body=body, preset=PRESETS["seed_correct"], recipe=DELAYED)
