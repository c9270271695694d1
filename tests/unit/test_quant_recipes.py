"""Scales and centres worked out by hand, commit by commit, and Transformer Engine's rules at the edges."""

import math
from fractions import Fraction

import numpy as np
import pytest

from qsim.arrays import FLT_MAX, same_bits
from qsim.backends.numba_backend import NumbaBackend
from qsim.errors import StudyError, UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2
from qsim.quant import (
    RECIPES,
    AmaxChoice,
    CenterAxis,
    CentredDelayedScaling,
    CurrentScaling,
    DelayedScaling,
    NonFiniteRule,
    ObserveMode,
    OpId,
    QuantObservation,
    StateKey,
    TensorRole,
    ZeroRule,
    begin_logical_quantization,
    commit_quant_observation,
    descale_of,
    make_recipe,
    observe_for_future_state,
    scale_from_amax,
)

BACKEND = NumbaBackend()
OWNER = StateKey(0, 0, 0)
NAN, INF = float("nan"), float("inf")


def f32(*values):
    return np.array(values, np.float32)


def seen(step, amax, *, op=None, mean=None, lead=True):
    """What a tensor with this amax says; NaN or Inf: one such element beside finite ones of amax 2."""
    values = np.atleast_1d(np.asarray(amax, np.float32))
    finite = np.where(np.isfinite(values), values, np.float32(2))
    parts = [finite, np.full(len(values), 8), np.isnan(values).astype(np.int64), np.isinf(values).astype(np.int64)]
    amax, count, nan, inf = parts if lead else [p[0] for p in parts]
    return QuantObservation(
        op=op or OpId(step), amax=amax, mean=mean, count=count, nan_count=nan, inf_count=inf
    )  # fmt: skip


def scales(recipe, amaxes):
    """The scale after each commit."""
    live, out = recipe.initial(OWNER, (1,)), []
    for step, amax in enumerate(amaxes):
        live = commit_quant_observation(live, seen(step, amax), recipe=recipe)
        assert same_bits(np.float32(1) / live.scale, live.descale)
        assert (step + 1, OpId(step)) == (live.epoch, live.last_commit)
        out.append(live.scale[0])
    return out


# ---- windows --------------------------------------------------------------------------------------------

AMAXES = [1.0, 4.0, 2.0, 2.0, 2.0, 7.0, 1.0]


@pytest.mark.parametrize(
    ("window", "choice", "spoken"),
    [
        (1, AmaxChoice.MAX, AMAXES),
        (1, AmaxChoice.MOST_RECENT, AMAXES),
        (2, AmaxChoice.MAX, [1, 4, 4, 2, 2, 7, 7]),
        (4, AmaxChoice.MAX, [1, 4, 4, 4, 4, 7, 7]),
        (4, AmaxChoice.MOST_RECENT, AMAXES),
    ],
)
@pytest.mark.parametrize("margin", [0, 1, 3, -2])
def test_scale_is_the_format_max_over_the_amax_that_speaks(window, choice, spoken, margin):
    recipe = DelayedScaling(fmt=E4M3FN, window=window, choice=choice, margin=margin)
    assert [np.float32(448 * 2.0**-margin) / np.float32(a) for a in spoken] == scales(recipe, AMAXES)


def test_window_4_lets_a_peak_go_at_the_fourth_commit_after_it():
    assert [56.0] * 4 + [448.0] == scales(DelayedScaling(fmt=E4M3FN, window=4), [8, 1, 1, 1, 1])


def test_history_keeps_the_newest_last_and_starts_empty():
    recipe = DelayedScaling(fmt=E4M3FN, window=3)
    live = recipe.initial(OWNER, (1,))
    assert [[0, 0, 0]] == live.amax_history.tolist()
    for step, amax in enumerate([5, 6]):
        live = commit_quant_observation(live, seen(step, amax), recipe=recipe)
    assert [[0, 5, 6]] == live.amax_history.tolist()


def test_gradients_take_their_own_format_and_the_rest_the_other():
    recipe = DelayedScaling(fmt=E4M3FN, grad_fmt=E5M2)
    got = {}
    for role in TensorRole:
        op = OpId(0, role_id=int(role))
        live = recipe.initial(StateKey(role_id=int(role)), (1,))
        got[role] = (
            begin_logical_quantization(live, op=op, recipe=recipe).fmt.name,
            float(commit_quant_observation(live, seen(0, 2, op=op), recipe=recipe).scale[0]),
        )
    expected = dict.fromkeys(TensorRole, ("float8_e4m3fn", 224.0))
    expected[TensorRole.GRAD_OUTPUT] = ("float8_e5m2", 28672.0)
    assert expected == got
    assert DelayedScaling(fmt=E4M3FN).fmt_of(OpId(0, role_id=int(TensorRole.GRAD_OUTPUT))) is E4M3FN


# ---- zero, Inf, NaN, overflow ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected", "history"),
    [
        (ZeroRule.SKIP, [56, 56, 56, 56, 112, 112], [4, 2]),  # (0 8), kept, kept, (8 1), (1 4), (4 2)
        (ZeroRule.ROLL, [56, 56, 56, 448, 112, 112], [4, 2]),  # (0 8), (8 0), (0 0): kept; (0 1), (1 4), (4 2)
    ],
)
def test_zero_amax_moves_the_window_or_not_as_the_rule_says(rule, expected, history):
    recipe = DelayedScaling(fmt=E4M3FN, window=2, zero_rule=rule)
    live, got = recipe.initial(OWNER, (1,)), []
    for step, amax in enumerate([8, 0, 0, 1, 4, 2]):
        live = commit_quant_observation(live, seen(step, amax), recipe=recipe)
        got.append(float(live.scale[0]))
    assert expected == got
    assert [history] == live.amax_history.tolist()


@pytest.mark.parametrize("rule", [ZeroRule.SKIP, ZeroRule.ROLL])
def test_zeros_alone_keep_the_initial_scale(rule):
    recipe = DelayedScaling(fmt=E4M3FN, window=2, zero_rule=rule, initial_scale=16.0)
    assert [16.0] * 3 == scales(recipe, [0, 0, 0])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # window 3: 448 / max of the last three; the bad tensor's finite part has amax 2
        (NonFiniteRule.LATCH, [448, 448, 448, 448, 56, 56]),  # (bad 4 8) still holds it; then (4 8 1)
        (NonFiniteRule.SKIP, [448, 448, 112, 56, 56, 56]),
        (NonFiniteRule.FINITE, [448, 224, 112, 56, 56, 56]),
    ],
)
def test_one_bad_tensor_does_to_a_window_of_three_what_the_rule_says(bad, rule, expected):
    """LATCH freezes for as long as the entry is in the window: its own commit and two more."""
    recipe = DelayedScaling(fmt=E4M3FN, window=3, nonfinite_rule=rule)
    assert expected == scales(recipe, [1, bad, 4, 8, 1, 1])


def test_a_skipped_commit_changes_nothing_even_where_the_bad_tensor_has_another_format():
    recipe = DelayedScaling(fmt=E4M3FN, grad_fmt=E5M2, nonfinite_rule=NonFiniteRule.SKIP)
    live = commit_quant_observation(recipe.initial(StateKey(), (1,)), seen(0, 2), recipe=recipe)
    grad = seen(0, NAN, op=OpId(0, role_id=int(TensorRole.GRAD_OUTPUT)))
    after = commit_quant_observation(live, grad, recipe=recipe)
    assert [224.0] == live.scale.tolist() == after.scale.tolist()
    assert [[2.0]] == after.amax_history.tolist()


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_latch_freezes_the_scale_for_exactly_window_commits(window):
    recipe = DelayedScaling(fmt=E4M3FN, window=window)
    got = scales(recipe, [1.0, INF] + [2.0] * (window + 1))
    assert [448.0] * (1 + window) + [224.0] * 2 == got


def test_latch_with_most_recent_freezes_for_one_commit_only():
    recipe = DelayedScaling(fmt=E4M3FN, window=8, choice=AmaxChoice.MOST_RECENT)
    assert [448, 448, 224] == scales(recipe, [1, NAN, 2])


@pytest.mark.parametrize(("fmt", "documented"), [(E4M3FN, 1.3166e-36), (E5M2, 1.685e-34)])
def test_scale_overflows_to_flt_max_below_the_documented_amax(fmt, documented):
    """The threshold is fmt.max / FLT_MAX; two floats on either side of it the rounding of the quotient is out."""
    edge = np.float32(fmt.max / float(FLT_MAX))
    assert math.isclose(documented, edge, rel_tol=1e-3)
    below = edge - 2 * np.spacing(edge)
    above = edge + 2 * np.spacing(edge)
    assert Fraction(fmt.max) / Fraction(float(below)) > Fraction(float(FLT_MAX))
    assert [FLT_MAX] * 3 == scales(DelayedScaling(fmt=fmt), [1e-38, 1e-45, below])
    (over,) = scales(DelayedScaling(fmt=fmt), [above])
    assert np.float32(fmt.max) / above == over < FLT_MAX


def test_descale_is_the_rounded_reciprocal_and_may_be_subnormal():
    values = f32(3, 7, 448, 1e-30, 2.0**126, 2.0**127, 1.5 * 2.0**127, FLT_MAX)
    exact = [1 / Fraction(float(v)) for v in values]
    for scale, want, got in zip(values, exact, descale_of(values), strict=True):
        unit = Fraction(2) ** max(math.floor(math.log2(want)) - 23, -149)
        assert abs(Fraction(float(got)) - want) <= unit / 2, scale
    assert [0x00400000, 0x002AAAAB, 0x00200000] == descale_of(values)[5:].view(np.uint32).tolist()


def test_scale_from_amax_divides_once_and_falls_back_where_amax_says_nothing():
    got = scale_from_amax(f32(3, 0, INF, NAN), otherwise=f32(1, 2, 3, 4), fmt=E2M1FN, margin=1)
    assert [1.0, 2.0, 3.0, 4.0] == got.tolist()
    amax = np.random.default_rng(0).uniform(1, 2, 200).astype(np.float32)
    exact = (6.0 / amax.astype(np.float64)).astype(np.float32)  # 53 bits are enough to round a quotient twice
    assert same_bits(exact, scale_from_amax(amax, otherwise=amax, fmt=E2M1FN, margin=0))
    assert not same_bits(exact, f32(6) * (f32(1) / amax))


# ---- current scaling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amax", "scale"), [(2, 224), (0, 1), (INF, 1), (NAN, 1), (1e-40, FLT_MAX)])
def test_current_scaling_takes_the_tensor_in_hand_and_1_where_it_says_nothing(amax, scale):
    recipe = CurrentScaling(fmt=E4M3FN, initial_scale=7.0)
    live = recipe.initial(OWNER, (1,))
    snapshot = begin_logical_quantization(live, op=OpId(0), recipe=recipe, observation=seen(0, amax))
    after = commit_quant_observation(live, seen(0, amax), recipe=recipe)
    assert [scale] == snapshot.scale.tolist() == after.scale.tolist()
    assert same_bits(np.float32(1) / snapshot.scale, snapshot.descale)
    assert [7.0] == live.scale.tolist()


# ---- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window 0 is too short"),
        *[({"initial_scale": v}, "initial_scale .* is not a positive") for v in (0, -1, NAN, INF, 1e-60, 1e300)],
        ({"margin": 200}, "margin 200 takes float8_e4m3fn"),
        ({"margin": -120}, "margin -120"),
        ({"margin": -113, "grad_fmt": E5M2}, "margin -113 takes float8_e5m2"),
    ],
)
def test_a_recipe_that_float32_cannot_hold_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DelayedScaling(fmt=E4M3FN, **options)


def test_recipes_are_found_by_name_and_an_unknown_one_lists_them():
    assert ["delayed", "centred", "current"] == list(RECIPES)
    assert CentredDelayedScaling(fmt=E2M1FN, window=3) == make_recipe("centred", fmt=E2M1FN, window=3)
    with pytest.raises(StudyError, match=r'"delay" is unknown; known: delayed, centred, current'):
        make_recipe("delay", fmt=E2M1FN)


# ---- centred --------------------------------------------------------------------------------------------


def observed(recipe, live, x, step=0):
    snapshot = begin_logical_quantization(live, op=OpId(step), recipe=recipe)
    return observe_for_future_state(x, snapshot=snapshot, recipe=recipe, backend=BACKEND)


def test_centre_is_plus_0_until_the_first_commit_and_then_the_mean():
    recipe = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL)
    live = recipe.initial(OWNER, (1,))
    assert same_bits(np.zeros((1, 1, 1), np.float32), live.center)
    x = f32(1, 10, 3, -4).reshape(1, 2, 2)
    live = commit_quant_observation(live, observed(recipe, live, x), recipe=recipe)
    assert [[[2.0, 3.0]]] == live.center.tolist()
    assert [44.8] == pytest.approx(live.scale.tolist())  # amax 10 about the centre in force, 0
    live = commit_quant_observation(live, observed(recipe, live, x, 1), recipe=recipe)
    assert same_bits(f32(448) / f32(7), live.scale)  # residuals -1 7 1 -7
    assert live.epoch == 2


def test_one_centre_of_a_tensor_is_the_mean_of_all_of_it():
    recipe = CentredDelayedScaling(fmt=E4M3FN)
    live = recipe.initial(OWNER, (1,))
    live = commit_quant_observation(live, observed(recipe, live, f32(1, 10, 3, -4).reshape(1, 2, 2)), recipe=recipe)
    assert [[[2.5]]] == live.center.tolist()


def test_next_mode_observes_the_residual_about_the_tensors_own_mean():
    x = f32(1, 10, 3, -4).reshape(1, 2, 2)
    amax = {}
    for mode in ObserveMode:
        recipe = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL, observe=mode)
        live = recipe.initial(OWNER, (1,))
        obs = observed(recipe, live, x)
        amax[mode] = obs.amax.tolist()
        assert [[[2.0, 3.0]]] == commit_quant_observation(live, obs, recipe=recipe).center.tolist()
    assert {ObserveMode.IN_FORCE: [10.0], ObserveMode.NEXT: [7.0]} == amax


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("rule", list(NonFiniteRule))
def test_a_bad_tensor_keeps_the_centre_unless_the_rule_is_finite(bad, rule):
    recipe = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL, nonfinite_rule=rule)
    live = recipe.initial(OWNER, (1,))
    live = commit_quant_observation(live, observed(recipe, live, f32(1, 2, 3, 4).reshape(1, 2, 2)), recipe=recipe)
    x = f32(bad, 8, 5, 8).reshape(1, 2, 2)
    after = commit_quant_observation(live, observed(recipe, live, x, 1), recipe=recipe)
    expected = [[[5.0, 8.0]]] if rule is NonFiniteRule.FINITE else [[[2.0, 3.0]]]
    assert expected == after.center.tolist()
    assert after.epoch == 2


def test_a_channel_without_a_finite_element_keeps_its_centre():
    recipe = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL, nonfinite_rule=NonFiniteRule.FINITE)
    live = recipe.initial(OWNER, (1,))
    live = commit_quant_observation(live, observed(recipe, live, f32(1, 2, 3, 4).reshape(1, 2, 2)), recipe=recipe)
    x = f32(NAN, 8, NAN, 8).reshape(1, 2, 2)
    after = commit_quant_observation(live, observed(recipe, live, x, 1), recipe=recipe)
    assert [[[2.0, 8.0]]] == after.center.tolist()


def test_a_centre_is_never_minus_0():
    recipe = CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.CHANNEL)
    live = recipe.initial(OWNER, (1,))
    tiny = np.float32(1e-45)  # (-tiny - 0 - 0) / 3 rounds to -0 in float32
    x = np.array([[[-0.0, -tiny], [-0.0, 0], [-0.0, 0]]], np.float32)
    after = commit_quant_observation(live, observed(recipe, live, x), recipe=recipe)
    assert same_bits(np.zeros((1, 1, 2), np.float32), after.center)
