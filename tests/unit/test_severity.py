"""Prices against closed forms: real replays of tensors chosen so that every code, scale and sum is exact."""

import dataclasses

import numpy as np
import pytest

from qsim.backends.numba_backend import NumbaBackend
from qsim.errors import UsageError
from qsim.formats import E4M3FN, POLICIES
from qsim.quant import CentredDelayedScaling, DelayedScaling, OpId, Site, TensorRole
from qsim.severity import measure_severity, relative_error, replay_mismatch, ulp_distance
from qsim.sim import PRESETS, Env, Linear, ScheduleSpec, build_case, get_defect, run

NAN, INF = np.nan, np.inf
MAX = np.float32(448)
SHAPE = np.array([[1, -0.5, 0.25], [0.5, 1, -1]], np.float32)  # tokens x channels, times an amax
WEIGHT = MAX * np.array([[1, -0.5, 0.5, 0], [0.25, 1, -1, 0.5], [0.5, 0.5, 0.125, -1]], np.float32)
BALANCED = MAX * np.array([[1, -1, 0.5], [1, -1, -0.5], [0.5, -0.5, 0.5], [-0.5, 0.5, -0.5]], np.float32)  # mean 0


def f32(*values):
    return np.array(values, np.float32)


# ---- distances ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([3, 4], [3, 4], 0.0),
        ([0, 0], [3, 4], 1.0),
        ([6, 8], [3, 4], 1.0),
        ([3, 5], [3, 4], 0.2),
        ([0, 0], [0, -0.0], 0.0),
        ([0, 1e-45], [0, 0], INF),
        ([3, NAN], [3, 4], INF),
        ([3, -INF], [3, 4], INF),
        ([INF, 4], [INF, 4], INF),
        ([3, 4], [3, NAN], INF),
        ([3, 4], [INF, 4], INF),
        ([3e38, 0], [-3e38, 0], 2.0),  # squares in float64 neither overflow
        ([2.8e-45, 0], [1.4e-45, 0], 1.0),  # nor vanish
    ],
)
def test_relative_error_of_one_replica(got, want, expected):
    assert [expected] == relative_error(f32(got), f32(want)).tolist()


def test_relative_error_keeps_replicas_apart():
    got, want = f32([[1, 2], [3, 4]], [[NAN, 2], [3, 4]], [[2, 4], [6, 8]]), f32(*[[[1, 2], [3, 4]]] * 3)
    assert [0.0, INF, 1.0] == relative_error(got, want).tolist()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1, 1, 0),
        (1, np.nextafter(f32(1), f32(2))[0], 1),
        (1, np.nextafter(f32(1), f32(0))[0], 1),
        (0.0, -0.0, 0),
        (1e-45, -1e-45, 2),
        (-1e-45, 0.0, 1),
        (1, 2, 2**23),
        (1, -1, 2 * 0x3F800000),
        (np.finfo(np.float32).max, -np.finfo(np.float32).max, 2 * 0x7F7FFFFF),
        (NAN, 1, 0),
        (1, INF, 0),
    ],
)
def test_ulp_distance_counts_float32_steps(a, b, expected):
    assert [expected] == ulp_distance(f32([a]), f32([b])).tolist() == ulp_distance(f32([b]), f32([a])).tolist()


def test_ulp_distance_is_the_largest_over_finite_pairs_of_each_replica():
    a, b = f32([[1, NAN, -0.0]], [[1, 2, 3]]), f32([[1, 5, 1e-45]], [[1, 4, 3]])
    assert [1, 2**23] == ulp_distance(a, b).tolist()


# ---- an unpaired descale is a pure gain -----------------------------------------------------------------

EXPONENTS = np.array([[0, 0], [1, 0], [-1, 0], [-1, 0], [2, 0]])  # [step, replica]: amax is 448 * 2^e
GAINS = 2.0 ** np.diff(EXPONENTS, axis=0, prepend=0)  # encode: amax of the step before; live: of this step


def gained(op):
    """448 * 2^e in each step; layer 1 never moves. Weights keep their amax, so their descale is right."""
    if op.role_id == TensorRole.WEIGHT:
        return np.stack([WEIGHT, WEIGHT])
    e = EXPONENTS[op.logical_step] * (op.layer_id == 0)
    return np.stack([np.ldexp(MAX * SHAPE, int(k)) for k in e])


def replay(load, defect=None, *, recipe=None, steps=5, layers=2, lead=2, preset="seed_correct"):
    recipe = recipe or DelayedScaling(fmt=E4M3FN)
    spec = ScheduleSpec(steps=steps, layers=layers)
    case = build_case(spec, body=(Linear(int(Site.QKV)),), preset=PRESETS[preset], recipe=recipe)
    if defect is not None:
        case = get_defect(defect).rewrite(case)
    return run(case, Env(load=load, backend=NumbaBackend(), recipe=recipe, policy=POLICIES["ocp"], lead=(lead,)))


@pytest.fixture(scope="module")
def correct():
    return replay(gained)


@pytest.fixture(scope="module")
def high():
    return replay(gained, preset="none")


@pytest.fixture(scope="module")
def d01(correct, high):
    return measure_severity(replay(gained, "D01"), correct, high)


@pytest.mark.parametrize("phase", ["f", "r"])
def test_an_unpaired_descale_of_one_operand_is_the_gain_minus_one(d01, phase):
    gain = np.ones((5, 2, 2))
    gain[:, 0] = GAINS
    assert gain.tolist() == d01.by_step_and_layer(phase, "gain").tolist()
    np.testing.assert_allclose(d01.by_step_and_layer(phase, "rel_error"), np.abs(gain - 1), rtol=1e-14)
    assert [1.0, 0.75, 0.0, 7.0] == d01.by_step_and_layer(phase, "rel_error")[1:, 0, 0].round(12).tolist()


def test_a_saturated_encode_is_as_wrong_as_the_correct_twin_and_the_gain_comes_on_top(d01):
    """High precision sees both: after a rise by 2^e the correct twin clips to 2^-e, and the gain undoes it."""
    of = {f: d01.by_step_and_layer("f", f)[:, 0, 0] for f in ("reference_error", "reference_error_correct")}
    assert of["reference_error_correct"][1] > 0.1  # clipped
    assert [0.0, 0.0] == of["reference_error_correct"][[0, 3]].tolist()  # exact codes, exact scales
    # a fall by 4: codes exact, so the reference is the correct twin itself and the error the gain's
    assert of["reference_error_correct"][2] == 0.0
    assert of["reference_error"][2] == pytest.approx(0.75, rel=1e-14)


def test_without_a_reference_its_columns_are_nan(correct):
    got = measure_severity(correct, correct).gemms["f"]
    assert np.isnan(got.reference_error).all()
    assert np.isnan(got.reference_error_correct).all()


def test_largest_difference_and_ulps_are_those_of_the_outputs(d01, correct):
    outputs = [correct.outputs[r.seq] for r in correct.records if r.kind == "consume" and r.phase == "f"]
    at = next(i for i, key in enumerate(d01.gemms["f"].keys) if key.op[:3] == (1, 0, 0))
    assert [float(np.abs(outputs[at][0]).max()), 0.0] == d01.gemms["f"].max_abs[at].tolist()  # 2y - y
    assert [2**23, 0] == d01.gemms["f"].ulp[at].tolist()
    assert d01.gemms["f"].elements == 5 * 2 * 8


def test_worst_error_takes_the_worse_phase_and_skips_the_first_steps(d01):
    forward, again = d01.gemms["f"], d01.gemms["r"]
    row = next(i for i, key in enumerate(again.keys) if key.op[:3] == (3, 0, 1))
    worse = again.rel_error.copy()
    worse[row] = 0.5, INF  # recompute runs the layers in reverse, so the row is another one than in forward
    cost = dataclasses.replace(d01, gemms={"f": forward, "r": dataclasses.replace(again, rel_error=worse)})
    expected = forward.rel_error.copy()
    expected[[key.op[:3] for key in forward.keys].index((3, 0, 1))] = 0.5, INF
    assert expected.tolist() == cost.worst("rel_error").tolist()
    late = [i for i, key in enumerate(forward.keys) if key.op.logical_step >= 2]
    assert expected[late].tolist() == cost.worst("rel_error", skip_steps=2).tolist()
    with_backward = dataclasses.replace(cost, gemms={**cost.gemms, "b": forward})
    assert [*expected[late].tolist(), *forward.rel_error[late].tolist()] == with_backward.worst(
        "rel_error", skip_steps=2
    ).tolist()


def test_both_operands_multiply_their_gains():
    def both(op):
        return np.stack([np.ldexp(MAX * np.eye(3, dtype=np.float32), int(EXPONENTS[op.logical_step][0]))])

    got = measure_severity(replay(both, "D01", layers=1, lead=1), replay(both, layers=1, lead=1))
    assert (GAINS[:, 0] ** 2).tolist() == got.gemms["f"].gain[:, 0].tolist()
    np.testing.assert_allclose(got.gemms["f"].rel_error[:, 0], np.abs(GAINS[:, 0] ** 2 - 1), rtol=1e-14)


def test_commits_are_counted_by_owner_and_step(d01, correct):
    twice = measure_severity(replay(gained, "D02"), correct)
    owners = {f"L{layer}/qkv/{role}" for layer in (0, 1) for role in ("input", "weight")}
    assert {(o, s): 1 for o in owners for s in range(5)} == dict(d01.commits)
    assert {(o, s): 2 for o in owners for s in range(5)} == dict(twice.commits)


# ---- an unpaired centre adds ----------------------------------------------------------------------------

SIDES = np.array([[1, -1, 1, -1], [-1, 1, 1, -1]], np.float32) * 384
MEANS = 64.0 * np.arange(1, 5)  # 64 a step: residuals about the mean before it reach 448, every scale is 1


def shifted(op):
    """Replica 0 drifts by 64 a step; replica 1 stays."""
    if op.role_id == TensorRole.WEIGHT:
        return np.stack([BALANCED, BALANCED])
    still = np.where(SIDES > 0, MAX, -MAX)
    return np.stack([SIDES + np.float32(MEANS[op.logical_step]), still])


def test_an_unpaired_centre_adds_its_drift_times_the_column_sums():
    options = {"recipe": CentredDelayedScaling(fmt=E4M3FN), "steps": len(MEANS), "layers": 1}
    twin, truth = replay(shifted, **options), replay(shifted, steps=len(MEANS), layers=1, preset="none")
    cost = measure_severity(replay(shifted, "D07", **options), twin, truth)
    wrong = 64.0 * np.linalg.norm(np.ones((2, 4)) @ BALANCED.astype(np.float64))
    for step, mean in enumerate(MEANS):
        x = SIDES.astype(np.float64) + mean
        got = {f: getattr(cost.gemms["f"], f)[step] for f in ("rel_error", "center_gap", "gain", "reference_error")}
        assert got["rel_error"].tolist() == pytest.approx([wrong / np.linalg.norm(x @ BALANCED), 0.0], rel=1e-14)
        assert got["reference_error"].tolist() == got["rel_error"].tolist()  # the codes are exact
        assert got["center_gap"].tolist() == pytest.approx([64 / np.sqrt(384**2 + mean**2), 0.0], rel=1e-14)
        assert [1.0, 1.0] == got["gain"].tolist()
        assert cost.casts["f"].k[step].tolist() == pytest.approx([mean / 384, 0.0], rel=1e-14)
        # d k / sqrt(1 + k^2), with d the drift over the mean
        k = cost.casts["f"].k[step, 0]
        assert got["center_gap"][0] == pytest.approx(64 / mean * k / np.sqrt(1 + k**2), rel=1e-12)


# ---- controls -------------------------------------------------------------------------------------------


def test_a_null_defect_costs_nothing_at_all(correct):
    null = measure_severity(replay(gained), correct)
    for phase in ("f", "r"):
        gemms, casts = null.gemms[phase], null.casts[phase]
        for field in ("rel_error", "max_abs", "ulp", "nonfinite", "center_gap"):
            assert not getattr(gemms, field).any(), field
        assert (gemms.gain == 1).all()
        assert (casts.code_match == 1).all()
    assert null.replay_mismatch.shape == (10, 2)
    assert not null.replay_mismatch.any()


def test_high_precision_has_no_cast_to_price(high):
    got = measure_severity(high, high, high)
    assert {} == got.casts
    assert (got.gemms["f"].gain == 1).all()
    assert not got.gemms["f"].reference_error.any()


def test_casts_are_counted_as_shares_of_elements(d01):
    casts = d01.casts["f"]
    rows = {op.logical_step: i for i, op in enumerate(casts.ops) if op.layer_id == 0}
    assert {int(TensorRole.INPUT)} == {op.role_id for op in casts.ops}
    # step 1 is 2x what its scale was made for: +-1 of SHAPE saturates (3 of 6), 0.5 and less does not
    assert [0.5, 0.0] == casts.saturated[rows[1]].tolist()
    assert [0.0, 0.0] == casts.flushed[rows[1]].tolist()
    assert not casts.saturated[rows[3]].any()


def test_a_recompute_that_advances_is_a_mismatch_where_the_scale_moved(correct):
    moved = replay_mismatch(replay(gained, "D02"))
    ops = [r.op[:3:2] for r in correct.records if r.kind == "consume" and r.phase == "r"]
    expected = {(step, 0) for step, gain in enumerate(GAINS[:, 0]) if gain > 1}  # a rise was clipped in forward
    assert expected == {op for op, row in zip(ops, moved, strict=True) if row[0]}
    assert not moved[:, 1].any()
    assert not replay_mismatch(replay(gained, "D01")).any()


def test_a_non_finite_output_is_an_infinite_error_and_is_counted(correct):
    first = next(r.seq for r in correct.records if r.kind == "consume")
    bad = correct.outputs[first].copy()
    bad[1, 0, :2] = NAN, INF
    broken = dataclasses.replace(correct, outputs={**correct.outputs, first: bad})
    for mine, twin, count in ((broken, correct, 2), (correct, broken, 0)):
        got = measure_severity(mine, twin).gemms["f"]
        assert [0.0, INF] == got.rel_error[0].tolist() == got.max_abs[0].tolist()
        assert [0, count] == got.nonfinite[0].tolist()
        assert not got.rel_error[1:].any()


@pytest.mark.parametrize("other", [{"steps": 4}, {"layers": 1}], ids=["steps", "layers"])
def test_traces_of_other_schedules_are_refused(correct, high, other):
    with pytest.raises(UsageError, match="different GEMMs in phase f"):
        measure_severity(correct, replay(gained, **other))
    with pytest.raises(UsageError, match="different GEMMs in phase f"):
        measure_severity(correct, correct, replay(gained, preset="none", **other))


def test_a_trace_without_recompute_is_no_twin_in_either_place(correct):
    forward = dataclasses.replace(correct, records=tuple(r for r in correct.records if r.phase != "r"))
    for mine, twin in ((forward, correct), (correct, forward)):
        with pytest.raises(UsageError, match="different GEMMs in phase r"):
            measure_severity(mine, twin)


def test_traces_of_other_replicas_are_refused(correct, high):
    one = replay(lambda op: gained(op)[:1], lead=1)
    for traces in ((one, correct), (correct, one), (one, one, high)):
        with pytest.raises(UsageError, match=r"another shape in the twin; replay both with the same seeds"):
            measure_severity(*traces)


def test_by_step_and_layer_takes_the_largest_over_microbatches_and_sites(d01):
    assert (5, 2, 2) == d01.by_step_and_layer("f", "rel_error").shape
    part = d01.gemms["f"]
    again = dataclasses.replace(
        part,
        keys=tuple(k._replace(op=OpId(k.op.logical_step // 2, layer_id=k.op.layer_id)) for k in part.keys),
    )
    merged = dataclasses.replace(d01, gemms={"f": again}).by_step_and_layer("f", "rel_error")
    whole = d01.by_step_and_layer("f", "rel_error")
    assert np.array([whole[:2].max(axis=0), whole[2:4].max(axis=0), whole[4]]).tolist() == merged.tolist()


def test_the_worse_of_forward_and_recompute_is_taken_gemm_by_gemm_though_their_orders_differ() -> None:
    from dataclasses import replace as changed

    from qsim.quant import OpId
    from qsim.severity.measure import GemmKey, GemmSeverity, Severity

    up, down = [GemmKey(OpId(0, 0, layer), "linear") for layer in (0, 1, 2)], [2, 1, 0]
    ones = np.ones((3, 1))
    forward = GemmSeverity(
        keys=tuple(up),
        rel_error=np.array([[1.0], [2.0], [3.0]]),
        max_abs=ones,
        reference_error=np.array([[0.1], [0.2], [0.3]]),
        reference_error_correct=ones,
        ulp=np.ones((3, 1), np.int64),
        nonfinite=np.zeros((3, 1), np.int64),
        elements=3,
        gain=np.array([[0.5], [1.0], [4.0]]),
        center_gap=ones,
    )
    again = changed(
        forward,
        keys=tuple(up[i] for i in down),
        rel_error=np.array([[9.0], [1.0], [0.0]]),
        reference_error=np.array([[0.0], [0.7], [0.0]]),
        gain=np.array([[1.0], [8.0], [1.0]]),
    )
    both = Severity(gemms={"f": forward, "r": again}, casts={}, replay_mismatch=np.zeros((3, 1), np.bool_), commits={})
    assert [[1.0], [2.0], [9.0]] == both.worst("rel_error").tolist()
    assert [[0.1], [0.7], [0.3]] == both.worst("reference_error").tolist()
    assert [[2.0], [8.0], [4.0]] == both.worst("gain_factor").tolist()
    assert 8.0 == both.farthest_gain()
    assert 1.0 == both.farthest_gain(skip_steps=1)
