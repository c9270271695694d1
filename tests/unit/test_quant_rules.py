"""Merge rules of a unit, first scales from the data, powers of two at their edges: by hand, bit for bit."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from qsim.arrays import FLT_MAX, same_bits
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.oracle import OracleBackend
from qsim.errors import UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2
from qsim.quant import (
    CenterSource,
    CentredDelayedScaling,
    CurrentScaling,
    DelayedScaling,
    Fallback,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    ObserveMode,
    OpId,
    ScaleGrid,
    ZeroRule,
    begin_logical_quantization,
    commit_quant_observation,
    decode_for_consumer,
    descale_of,
    merge_observations,
    observe_for_future_state,
    quantize_with_snapshot,
    scale_from_amax,
)
from qsim.quant.operations import freeze
from tests.unit.axis_cases import INF, NAN, OWNER, floor_log2, seen

BACKENDS = {"numba": NumbaBackend(), "oracle": OracleBackend()}
BOUNDS = {MergeRule.CLIP: {"amax_bound": 10.0}, MergeRule.DECAY: {"decay": 0.5}}


def f32(*values):
    return np.array(values, np.float32)


# ---- merging ------------------------------------------------------------------------------------------------


def entries(rule, unit, *, bad=NonFiniteRule.LATCH, before=40.0):
    """What a commit of ``unit``, one list of amaxes (one a replica) for each microbatch, puts into a window of one.

    The commit before it put 40 there: DECAY (one half) sees 20 of it.
    """
    recipe = DelayedScaling(fmt=E4M3FN, merge_rule=rule, nonfinite_rule=bad, **BOUNDS.get(rule, {}))
    live = recipe.initial(OWNER, (len(unit[0]),))
    live = commit_quant_observation(live, seen(OpId(0), *[before] * len(unit[0])), recipe=recipe)
    merged = recipe.merge([seen(OpId(1, m), *amaxes) for m, amaxes in enumerate(unit)], owner=OWNER)
    return commit_quant_observation(live, merged, recipe=recipe).amax_history[:, -1]


UNIT = [[3.0, 24.0], [12.0, 0.0], [6.0, 0.0]]
# replica 0 holds 3, 12, 6; replica 1 holds 24, 0, 0: LAST makes a 0, and the zero rule SKIP keeps the 40
MERGED = {
    MergeRule.MAX: [12.0, 24.0],
    MergeRule.LAST: [6.0, 40.0],
    MergeRule.SUM: [21.0, 24.0],
    MergeRule.MEAN: [7.0, 8.0],
    MergeRule.CLIP: [10.0, 10.0],
    MergeRule.DECAY: [20.0, 24.0],
}


def test_every_merge_rule_has_a_row():
    assert set(MergeRule) == set(MERGED)


@pytest.mark.parametrize("rule", list(MergeRule), ids=lambda r: r.name)
def test_what_enters_the_window_is_what_the_merge_rule_says(rule):
    assert same_bits(f32(*MERGED[rule]), entries(rule, UNIT))
    for replica in range(2):
        alone = entries(rule, [[amaxes[replica]] for amaxes in UNIT])
        assert same_bits(f32(MERGED[rule][replica]), alone)


@pytest.mark.parametrize(
    ("rule", "latched", "finite"),
    [
        # replicas: (Inf 12 6), (3 NaN 6), (3 12 Inf), (Inf NaN 6); the finite part of a bad tensor is 2
        (MergeRule.MAX, [INF, NAN, INF, NAN], [12, 6, 12, 6]),
        (MergeRule.LAST, [6, 6, INF, 6], [6, 6, 2, 6]),
        (MergeRule.SUM, [INF, NAN, INF, NAN], [20, 11, 17, 10]),
        (MergeRule.MEAN, [INF, NAN, INF, NAN], [20 / 3, 11 / 3, 17 / 3, 10 / 3]),
        (MergeRule.CLIP, [10, NAN, 10, NAN], [10, 6, 10, 6]),
        (MergeRule.DECAY, [INF, NAN, INF, NAN], [20, 20, 20, 20]),
    ],
    ids=lambda v: v.name if isinstance(v, MergeRule) else "",
)
def test_an_inf_or_nan_of_one_microbatch_goes_where_the_rule_takes_it(rule, latched, finite):
    unit = [[INF, 3, 3, INF], [12, NAN, 12, NAN], [6, 6, INF, 6]]
    assert same_bits(f32(*latched), entries(rule, unit))
    assert same_bits(f32(*finite), entries(rule, unit, bad=NonFiniteRule.FINITE))


def test_a_sum_is_added_in_the_order_given_and_may_overflow():
    big, one = seen(OpId(0), 2.0**24), [seen(OpId(0, m), 1.0) for m in (1, 2)]
    assert [2.0**24] == merge_observations([big, *one], rule=MergeRule.SUM).amax.tolist()
    assert [2.0**24 + 2] == merge_observations([*one, big], rule=MergeRule.SUM).amax.tolist()
    top = [seen(OpId(0, m), FLT_MAX) for m in (0, 1)]
    merged = merge_observations(top, rule=MergeRule.SUM)
    assert ([float(FLT_MAX)], [INF], [0]) == (merged.amax.tolist(), merged.written.tolist(), merged.inf_count.tolist())
    assert [INF] == entries(MergeRule.SUM, [[FLT_MAX], [FLT_MAX]]).tolist()


@pytest.mark.parametrize("rule", list(MergeRule), ids=lambda r: r.name)
def test_means_counts_and_op_merge_alike_under_every_rule(rule):
    recipe = CentredDelayedScaling(fmt=E4M3FN)
    parts = [
        observe_for_future_state(
            f32(*values).reshape(1, 1, -1), snapshot=None, recipe=recipe, backend=BACKENDS["numba"],
            op=OpId(0, m), lead=1,
        )
        for m, values in enumerate([(1, 2, NAN), (9, 9, 9, INF), (4,)])
    ]  # fmt: skip
    merged = merge_observations(parts, rule=rule)
    assert [[8], [1], [1]] == [getattr(merged, f).tolist() for f in ("count", "nan_count", "inf_count")]
    assert (OpId(0, 2), 6) == (merged.op, merged.mean.count.item())
    assert 34 == np.ldexp(merged.mean.total, merged.mean.exponent - 40).item()  # 1 + 2 + 27 + 4
    assert merge_observations(parts[:1], rule=rule) is parts[0]


def test_a_merge_of_merges_keeps_what_the_first_one_wrote():
    parts = [seen(OpId(0, m), amax) for m, amax in enumerate((INF, 6.0, 2.0))]
    inner = merge_observations(parts[:2], rule=MergeRule.LAST)
    assert [6.0] == inner.written.tolist()
    assert [6.0] == merge_observations([inner, parts[2]]).written.tolist()
    assert None is merge_observations(parts).written


# ---- the first scale ----------------------------------------------------------------------------------------


def from_data(rule=InitialScale.FROM_DATA, **options):
    return DelayedScaling(fmt=E4M3FN, initial_rule=rule, **options)


@pytest.mark.parametrize(("rule", "epochs"), [(InitialScale.FROM_DATA, 1), (InitialScale.WARM_UP, 3)])
def test_begin_needs_the_tensor_in_hand_for_as_long_as_the_first_scale_is_of_it(rule, epochs):
    recipe = from_data(rule, window=3)
    live = recipe.initial(OWNER, (1,))
    # windows (0 0 4) (0 4 2) (4 2 8) (2 8 1) (8 1 1)
    used, amaxes = [], [4, 2, 8, 1, 1]
    for step, amax in enumerate(amaxes):
        op, observation = OpId(step), seen(OpId(step), amax)
        early, other = (observation, None) if step < epochs else (None, observation)
        message = "needs the observation" if step < epochs else "takes no observation"
        with pytest.raises(UsageError, match=rf"{message}.* epoch {step} \(initial_rule {rule.name}\)"):
            begin_logical_quantization(live, op=op, recipe=recipe, observation=other)
        used.append(float(begin_logical_quantization(live, op=op, recipe=recipe, observation=early).scale[0]))
        live = commit_quant_observation(live, observation, recipe=recipe)
    by_hand = {InitialScale.FROM_DATA: [112, 112, 112, 56, 56], InitialScale.WARM_UP: [112, 224, 56, 56, 56]}
    assert by_hand[rule] == used


def test_each_operation_of_the_first_unit_takes_its_own_tensor_and_an_unguarded_freeze_needs_one_too():
    recipe = from_data()
    live = recipe.initial(OWNER, (2,))
    ops = [OpId(0, m) for m in (0, 1)]
    first, second = (
        begin_logical_quantization(live, op=op, recipe=recipe, observation=seen(op, *amaxes))
        for op, amaxes in zip(ops, ((4, 2), (8, 448)), strict=True)
    )
    assert [[112, 224], [56, 1]] == [first.scale.tolist(), second.scale.tolist()]
    assert [1, 1] == live.scale.tolist()
    with pytest.raises(UsageError, match=r"takes the scale of epoch 0 from the tensor in hand.* begin with its observ"):
        freeze(live, op=ops[0], recipe=recipe, observation=None)


@pytest.mark.parametrize(
    ("options", "amax", "used"),
    [
        ({}, 0, 16),
        ({"zero_rule": ZeroRule.CLAMP, "eps": 0.5}, 0, 896),
        ({}, INF, 16),
        ({"nonfinite_rule": NonFiniteRule.SKIP}, NAN, 16),
        ({"nonfinite_rule": NonFiniteRule.FINITE}, NAN, 224),
        ({"nonfinite_rule": NonFiniteRule.PROPAGATE}, INF, 0),
        ({"nonfinite_rule": NonFiniteRule.PROPAGATE}, NAN, NAN),
        ({"nonfinite_rule": NonFiniteRule.INVERT}, NAN, 1 / 16),
    ],
)
@pytest.mark.parametrize("lead", [True, False], ids=["replicas", "single"])
def test_a_first_tensor_that_says_nothing_has_the_given_scale_or_what_its_rule_makes_of_it(options, amax, used, lead):
    recipe, observation = from_data(initial_scale=16.0, **options), seen(OpId(0), amax)
    if not lead:
        single = {f: getattr(observation, f)[0] for f in ("amax", "count", "nan_count", "inf_count")}
        observation = dataclasses.replace(observation, **{f: np.asarray(v) for f, v in single.items()})
    live = recipe.initial(OWNER, (1,) if lead else ())
    snapshot = begin_logical_quantization(live, op=OpId(0), recipe=recipe, observation=observation)
    expected = np.full((1,) if lead else (), used, np.float32)
    assert same_bits(expected, snapshot.scale)
    after = commit_quant_observation(live, recipe.merge([observation]), recipe=recipe)
    assert (expected.shape, (*expected.shape, 1)) == (after.scale.shape, after.amax_history.shape)


def test_a_centred_first_scale_is_of_the_residual_about_the_centre_in_force():
    recipe = CentredDelayedScaling(fmt=E4M3FN, initial_rule=InitialScale.FROM_DATA)
    x, live = f32(10, 14).reshape(1, 1, 2), recipe.initial(OWNER, (1,))
    early = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=BACKENDS["numba"], op=OpId(0), lead=1)
    snapshot = begin_logical_quantization(live, op=OpId(0), recipe=recipe, observation=early)
    assert ([32.0], [0.0]) == (snapshot.scale.tolist(), snapshot.center.ravel().tolist())  # 448 / 14
    after = commit_quant_observation(live, early, recipe=recipe)
    assert ([32.0], [12.0]) == (after.scale.tolist(), after.center.ravel().tolist())
    for source in (CenterSource.LAST, CenterSource.EMA):
        with pytest.raises(UsageError, match="observe NEXT with initial_rule FROM_DATA"):
            dataclasses.replace(recipe, observe=ObserveMode.NEXT, source=source)
    assert dataclasses.replace(recipe, observe=ObserveMode.NEXT, source=CenterSource.CURRENT).needs_observation(live)


@pytest.mark.parametrize(
    ("fallback", "used"), [(Fallback.ONE, [112, 1, 1, 224]), (Fallback.LIVE, [112, 112, 112, 224])]
)
def test_current_scaling_falls_back_on_1_or_on_the_scale_of_the_last_commit(fallback, used):
    recipe = CurrentScaling(fmt=E4M3FN, fallback=fallback)
    live, got = recipe.initial(OWNER, (1,)), []
    for step, amax in enumerate((4, 0, INF, 2)):
        observation = seen(OpId(step), amax)
        got += begin_logical_quantization(live, op=OpId(step), recipe=recipe, observation=observation).scale.tolist()
        live = commit_quant_observation(live, observation, recipe=recipe)
    assert used == got


@pytest.mark.parametrize(
    ("rule", "used"), [(NonFiniteRule.PROPAGATE, [128, 0, NAN]), (NonFiniteRule.INVERT, [128, 1 / 128, 128])]
)
def test_current_scaling_takes_inf_and_nan_as_its_rule_says(rule, used):
    recipe = CurrentScaling(fmt=E4M3FN, fallback=Fallback.LIVE, nonfinite_rule=rule)
    live, got = recipe.initial(OWNER, (1,)), []
    for step, amax in enumerate((3.5, INF, NAN)):
        observation = seen(OpId(step), amax)
        got.append(begin_logical_quantization(live, op=OpId(step), recipe=recipe, observation=observation).scale)
        live = commit_quant_observation(live, observation, recipe=recipe)
        assert same_bits(got[-1], live.scale)
    assert same_bits(f32(*used), np.concatenate(got))


def test_codes_of_a_scale_of_0_or_nan_decode_to_nan_alike_on_both_backends():
    recipe = from_data(nonfinite_rule=NonFiniteRule.PROPAGATE)
    x = f32(1, INF, 3, NAN).reshape(2, 1, 2)
    codes = {}
    for name, backend in BACKENDS.items():
        early = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=backend, op=OpId(0), lead=1)
        live = recipe.initial(OWNER, (2,))
        snapshot = begin_logical_quantization(live, op=OpId(0), recipe=recipe, observation=early)
        assert same_bits(f32(0, NAN), snapshot.scale)
        assert same_bits(f32(INF, NAN), snapshot.descale)
        tensor = quantize_with_snapshot(x, snapshot, backend=backend)
        assert np.isnan(decode_for_consumer(tensor, op=OpId(0), backend=backend)).all()
        codes[name] = tensor.codes
    assert same_bits(codes["oracle"], codes["numba"])
    assert 0 == codes["oracle"][0, 0, 0]


# ---- powers of two ------------------------------------------------------------------------------------------


def power_of_two(amax, fmt=E4M3FN, margin=0):
    with np.errstate(all="raise", under="ignore"):
        return scale_from_amax(amax, otherwise=amax, fmt=fmt, margin=margin, grid=ScaleGrid.POWER_OF_TWO)


def test_a_power_of_two_scale_is_the_one_below_as_in_ms_amps_own_test():
    assert [32.0, 1 / 32] == power_of_two(f32(10, 10000)).tolist()  # test_meta.py of MS-AMP has these two
    assert [2.0**127] * 2 == power_of_two(f32(2.0**-149, 2.0**-126)).tolist()  # the quotient is beyond FLT_MAX


def test_a_quotient_below_every_float32_is_0_on_either_grid():
    """448 * 2^-133 / FLT_MAX is about 2^-252."""
    for grid in ScaleGrid:
        got = scale_from_amax(f32(FLT_MAX), otherwise=f32(1), fmt=E4M3FN, margin=133, grid=grid)
        assert ([0.0], [INF]) == (got.tolist(), descale_of(got).tolist())


@pytest.mark.parametrize("margin", [0, 1, -3])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN], ids=lambda f: f.name)
def test_at_the_edge_of_a_power_of_two_the_floor_is_that_of_the_exact_quotient(fmt, margin):
    edges = [np.float32(np.ldexp(fmt.max, -k)) for k in range(-100, 110)]
    amax = np.array([np.nextafter(e, toward, dtype=np.float32) for e in edges for toward in (e, 0, INF)])
    got = power_of_two(amax, fmt, margin)
    for a, scale in zip(amax, got, strict=True):
        exact = Fraction(fmt.max) / Fraction(2) ** margin / Fraction(float(a))
        assert Fraction(2) ** floor_log2(exact) == Fraction(float(scale)), a
    assert same_bits(np.ldexp(np.float32(1), 1 - np.frexp(got)[1]), descale_of(got))
