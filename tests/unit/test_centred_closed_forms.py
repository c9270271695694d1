"""What a stale or unpaired scale or centre does to a decoded tensor, in closed form, on the stateful recipes.

Exact arithmetic is compared by ==; where float32 rounds, the bound is stated and derived.
"""

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends import CastSpec
from qsim.codec.scaled import get_scale_recipe
from qsim.formats import E2M1FN, E4M3FN, E5M2, POLICIES
from qsim.quant import (
    CenterAxis,
    CenterSource,
    CentredDelayedScaling,
    DelayedScaling,
    NonFiniteRule,
    OpId,
    ScaleSource,
    ZeroRule,
    begin_logical_quantization,
    commit_quant_observation,
    merge_observations,
    observe_for_future_state,
    quantize_with_snapshot,
)
from tests.unit.centred_cases import NUMBA, OWNER, step

U = 2.0**-24
AXES, SOURCES = list(CenterAxis), list(CenterSource)


def recipe_of(**options):
    return CentredDelayedScaling(**({"fmt": E4M3FN, "axis": CenterAxis.CHANNEL, "block": 4} | options))


def decoded_with(codes, *, descale, center):
    """The codes by metadata that need not be theirs: an unpaired decode."""
    spec = CastSpec(fmt=codes.snapshot.fmt, policy=POLICIES["ocp"])
    return NUMBA.decode(codes.codes, descale, center, spec)


def norm(x):
    return float(np.sqrt((x.astype(np.float64) ** 2).sum()))


# ---- an unpaired scale ----------------------------------------------------------------------------------

RECIPES = [
    DelayedScaling(fmt=E4M3FN),
    DelayedScaling(fmt=E2M1FN),
    *[recipe_of(fmt=fmt, axis=axis, source=CenterSource.EMA) for fmt in (E2M1FN, E4M3FN) for axis in AXES],
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name} {r.fmt.name} {getattr(r, 'axis', '')}")
@pytest.mark.parametrize("growth", [0.25, 2.0, 1.3, 0.7])
def test_an_unpaired_scale_is_a_gain_on_the_residual(recipe, growth):
    """Codes made with s_enc, decoded with RN(1 / s_dec): g = s_enc / s_dec, and the error is |g - 1| of the residual.

    Per element four roundings: two reciprocals, two products, 4u of the gained residual (1.01 for second order; all
    residuals here are far above the subnormals). Where the scales are powers of two apart it is exact.
    """
    rng = np.random.default_rng(0)
    live = recipe.initial(OWNER)
    x = rng.standard_normal((16, 12)).astype(np.float32)
    live = step(recipe, live, x, 0)[3]
    snapshot, codes, _, after = step(recipe, live, (x * np.float32(growth)).astype(np.float32), 1)
    gain = snapshot.scale.astype(np.float64) / after.scale.astype(np.float64)
    paired = decoded_with(codes, descale=snapshot.descale, center=None)
    unpaired = decoded_with(codes, descale=after.descale, center=None)
    assert (np.abs(unpaired - gain * paired) <= 1.01 * 4 * U * np.abs(gain * paired)).all()
    assert abs(norm(unpaired - paired) / norm(paired) - abs(gain - 1)) <= 1.01 * 4 * U * gain
    assert gain != 1
    if not recipe.centred and growth in (0.25, 2.0):
        assert gain == growth
        assert same_bits(np.float32(growth) * paired, unpaired)


def test_a_centre_is_not_gained_by_an_unpaired_scale():
    """Residuals +-2 about 64, decoded at half the scale: 64 +-4, not 128 +-4. All of it exact."""
    recipe = recipe_of()
    live = step(recipe, recipe.initial(OWNER), np.array([[62], [66]], np.float32), 0)[3]
    live = step(recipe, live, np.array([[60], [68]], np.float32), 1)[3]  # residuals +-4: scale 112
    snapshot, codes, decoded, after = step(recipe, live, np.array([[56], [72]], np.float32), 2)
    assert (112.0, 56.0) == (float(snapshot.scale), float(after.scale))
    assert [[60.0], [68.0]] == decoded.tolist()  # 8 saturates to 448 / 112 = 4
    assert [[56.0], [72.0]] == decoded_with(codes, descale=after.descale, center=snapshot.center).tolist()


# ---- an unpaired centre ---------------------------------------------------------------------------------


def drifting(rng, rows):
    """Integers whose channel means are exactly the integers mu, then mu + drift: so every sum below is exact."""
    half = rng.integers(-3, 4, (rows // 2, 4))
    r = np.concatenate([half, -half])
    mu, drift = rng.integers(-40, 40, 4), rng.integers(1, 9, 4)
    return (mu + r).astype(np.float32), (mu + drift + r).astype(np.float32), drift


@pytest.mark.parametrize("rows", [2, 64, 512])
@pytest.mark.parametrize("scale_source", list(ScaleSource), ids=lambda s: s.name)
def test_an_unpaired_centre_adds_its_drift_to_every_token(rows, scale_source):
    """||x' - x^|| = sqrt(N) ||dmu||: sqrt(share) ||dmu|| / ||mu|| of ||x||, with share = N ||mu||^2 / ||x||^2."""
    recipe = recipe_of(scale_source=scale_source, initial_scale=1.0)
    first, second, drift = drifting(np.random.default_rng(1), rows)
    live = recipe.initial(OWNER)
    live = step(recipe, live, first, 0)[3]
    snapshot, codes, decoded, after = step(recipe, live, second, 1)
    unpaired = decoded_with(codes, descale=snapshot.descale, center=after.center)
    assert (snapshot.center[0] + drift).tolist() == after.center[0].tolist()
    residual = decoded_with(codes, descale=snapshot.descale, center=None)
    assert same_bits(residual + snapshot.center, decoded)
    assert same_bits(residual + after.center, unpaired)
    assert np.abs(unpaired - decoded - drift).max() <= np.spacing(np.abs(unpaired).max())
    mu = after.center.astype(np.float64)
    share = rows * norm(mu) ** 2 / norm(second) ** 2
    expected = np.sqrt(share) * norm(drift) / norm(mu)
    assert norm(unpaired - decoded) / norm(second) == pytest.approx(expected, rel=1e-5)
    assert norm(unpaired - decoded) == pytest.approx(np.sqrt(rows) * norm(drift), rel=1e-5)


def test_an_unpaired_centre_of_exact_numbers_adds_its_drift_to_the_bit():
    """Scale 1 throughout and small integers: nothing is rounded, so the squares are integers and equal."""
    recipe = recipe_of(zero_rule=ZeroRule.SKIP)
    live = recipe.initial(OWNER)
    first, second, drift = drifting(np.random.default_rng(2), 64)
    seen = observe_for_future_state(
        first, snapshot=begin_logical_quantization(live, op=OpId(0), recipe=recipe), recipe=recipe, backend=NUMBA
    )
    after = commit_quant_observation(live, seen, recipe=recipe)
    snapshot = begin_logical_quantization(live, op=OpId(0), recipe=recipe)  # centre +0, scale 1
    codes = quantize_with_snapshot(second - first, snapshot, backend=NUMBA)
    right = decoded_with(codes, descale=snapshot.descale, center=snapshot.center)
    wrong = decoded_with(codes, descale=snapshot.descale, center=after.center)
    assert (second - first).tolist() == right.tolist()
    added = (wrong - right).astype(np.int64)
    assert 64 * int((after.center.astype(np.int64) ** 2).sum()) == int((added**2).sum()) > 0
    assert np.broadcast_to(drift, right.shape).tolist() == right.tolist()


def test_a_stale_centre_that_is_paired_costs_no_drift():
    """Encoded and decoded with the same stale centre, the error is the cast's own: bounded by its own step."""
    recipe = recipe_of(fmt=E2M1FN, scale_source=ScaleSource.CURRENT)
    rng = np.random.default_rng(3)
    live = step(recipe, recipe.initial(OWNER), rng.standard_normal((64, 8)).astype(np.float32), 0)[3]
    x = (rng.standard_normal((64, 8)) + 5).astype(np.float32)
    snapshot, codes, decoded, after = step(recipe, live, x, 1)
    assert (np.abs(after.center - snapshot.center) > 4).all()
    assert (np.abs(decoded.astype(np.float64) - x) <= within(x, snapshot, codes, decoded)).all()
    unpaired = decoded_with(codes, descale=snapshot.descale, center=after.center)
    assert (np.abs(unpaired.astype(np.float64) - x) > 2).all()


# ---- corners --------------------------------------------------------------------------------------------


def within(x, snapshot, codes, decoded):
    """How far decode may be from x where nothing saturates: half a step, and the roundings of float32.

    h = half the largest element step (E2M1: 1; E4M3: 16). y = RN(RN(x - c) * s), |q - y| <= h, x^ = RN(RN(q / s) + c):
    h * descale; half an ulp of x^ for the last addition; for the other roundings (residual, product, reciprocal,
    product) 4u of the largest residual. For |c| >> |r| the difference x - c is exact and the last part vanishes
    against the ulp of x^.
    """
    half = {"float4_e2m1fn": 1.0, "float8_e4m3fn": 16.0}[snapshot.fmt.name]
    residual = 1.01 * 4 * U * float(codes.amax)
    return half * float(snapshot.descale) + np.spacing(np.abs(decoded)).astype(np.float64) / 2 + residual


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fmt", [E2M1FN, E4M3FN], ids=lambda f: f.name)
@pytest.mark.parametrize("far", [2.0**10, 2.0**20, -(2.0**22), 3e30])
def test_a_centre_far_above_the_residual_decodes_within_a_step_and_half_an_ulp(axis, fmt, far):
    recipe = recipe_of(fmt=fmt, axis=axis, source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT)
    rng = np.random.default_rng(4)
    spread = np.float32(abs(far) * 2.0**-18)
    x = (np.float32(far) + spread * rng.standard_normal((8, 10)).astype(np.float32)).astype(np.float32)
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    assert 0 == int(codes.counts.saturated)
    assert 1000 * codes.amax < abs(far)
    bound = within(x, snapshot, codes, decoded)
    assert (np.abs(decoded.astype(np.float64) - x) <= bound).all()
    # without a centre every code is the last one or its neighbour
    plain = DelayedScaling(fmt=fmt)
    lost = step(plain, step(plain, plain.initial(OWNER), x, 0).after, x, 1).decoded
    assert np.abs(lost.astype(np.float64) - x).max() > 4 * bound.max()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
@pytest.mark.parametrize("value", [0.1, -3e38, 1e-42, 0.0, -0.0])
def test_a_constant_tensor_has_no_residual_once_its_centre_is_known(axis, source, value):
    """Decode is exact, whatever the scale was: 0 times any descale is 0. An amax of 0 moves no window."""
    recipe = recipe_of(axis=axis, source=source, zero_rule=ZeroRule.SKIP, beta=0.5, window=2)
    x = np.full((1000, 6), value, np.float32)
    live = recipe.initial(OWNER)
    for n in range(3):
        before = live
        snapshot, codes, decoded, live = step(recipe, live, x, n)
        if n or source is CenterSource.CURRENT:
            assert same_bits(before.amax_history, live.amax_history)
            assert not (codes.codes & 0x7F).any()  # the residual of a -0 is -0
            assert 0 == codes.amax
            assert same_bits(x + np.float32(0), decoded)  # and comes back as +0: a centre is added
            assert same_bits(snapshot.scale, live.scale)
    assert np.float32(value) == live.center.flat[0]
    assert not np.signbit(live.center[live.center == 0]).any()


def test_a_constant_channel_beside_a_busy_one_has_codes_0():
    recipe = recipe_of(fmt=E2M1FN, source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT)
    x = np.random.default_rng(5).standard_normal((1000, 3)).astype(np.float32)
    x[:, 1] = 0.1
    _, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    assert not codes.codes[:, 1].any()
    assert same_bits(x[:, 1], decoded[:, 1])
    assert codes.codes[:, [0, 2]].any(axis=0).all()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_one_nan_stays_where_it_is(axis, source):
    """Under FINITE a NaN is left out of the mean and of the amax; it decodes to NaN, and nothing else does."""
    recipe = recipe_of(axis=axis, source=source, nonfinite_rule=NonFiniteRule.FINITE)
    x = np.random.default_rng(6).standard_normal((4, 8)).astype(np.float32)
    x[2, 3] = -np.float32("nan")
    live = recipe.initial(OWNER)
    for n in range(3):
        _, codes, decoded, live = step(recipe, live, x, n)
        assert np.isnan(x).tolist() == np.isnan(decoded).tolist()
        assert 0x7FC00000 == decoded.view(np.uint32)[2, 3]
        assert 0xFF == codes.codes[2, 3]  # its sign is its own
        assert np.isfinite(codes.amax)
    assert np.isfinite(live.center).all()
    assert np.isfinite(live.scale)


@pytest.mark.parametrize("rule", list(NonFiniteRule))
def test_a_channel_of_nan_keeps_its_centre_and_its_neighbours_move_as_the_rule_says(rule):
    recipe = recipe_of(source=CenterSource.EMA, beta=0.5, nonfinite_rule=rule)
    live = step(recipe, recipe.initial(OWNER), np.array([[2, 4], [6, 8]], np.float32), 0)[3]
    assert [[4.0, 6.0]] == live.center.tolist()
    live = step(recipe, live, np.array([[np.nan, 8], [np.nan, 12]], np.float32), 1)[3]
    assert [[4.0, 8.0 if rule is NonFiniteRule.FINITE else 6.0]] == live.center.tolist()
    assert 2 == live.epoch


@pytest.mark.parametrize("source", [CenterSource.LAST, CenterSource.EMA], ids=lambda s: s.name)
@pytest.mark.parametrize("axis", [CenterAxis.TENSOR, CenterAxis.CHANNEL])
def test_microbatches_merge_by_their_counts_into_the_mean_of_them_all(axis, source):
    """Integers: every sum is exact, so merged parts of 3, 1 and 12 rows equal one tensor of 16, to the bit.

    The mean of the three means would be another number.
    """
    recipe = recipe_of(axis=axis, source=source, nonfinite_rule=NonFiniteRule.FINITE)
    rng = np.random.default_rng(7)
    live = step(recipe, recipe.initial(OWNER), rng.integers(-9, 9, (16, 5)).astype(np.float32), 0)[3]
    x = rng.integers(-90, 90, (16, 5)).astype(np.float32)
    x[:3] += 1000
    x[4, 2] = np.nan
    snapshot = begin_logical_quantization(live, op=OpId(1), recipe=recipe)

    def seen(part, microbatch):
        return observe_for_future_state(
            np.ascontiguousarray(part), snapshot=snapshot, recipe=recipe, backend=NUMBA, op=OpId(1, microbatch)
        )

    parts = [seen(x[:3], 0), seen(x[3:4], 1), seen(x[4:], 2)]
    whole = commit_quant_observation(live, seen(x, 2), recipe=recipe)
    merged = commit_quant_observation(live, merge_observations(parts), recipe=recipe)
    assert same_bits(whole.center, merged.center)
    assert same_bits(whole.scale, merged.scale)
    lone = commit_quant_observation(live, parts[0], recipe=recipe)
    assert not same_bits(lone.center, merged.center)


@pytest.mark.parametrize("fmt", [E2M1FN, E4M3FN, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_scale_and_centre_are_one_version(fmt, source):
    """Every commit renews both under one epoch; a snapshot holds both of one epoch, whatever is committed after it."""
    recipe = recipe_of(fmt=fmt, source=source)
    rng = np.random.default_rng(8)
    live, kept = recipe.initial(OWNER), []
    for n in range(4):
        x = (rng.standard_normal((8, 4)) * 2.0**n + n).astype(np.float32)
        before = live
        snapshot, _, _, live = step(recipe, live, x, n)
        assert (n, n + 1) == (snapshot.epoch, live.epoch)
        assert same_bits(before.scale, snapshot.scale)
        if source is not CenterSource.CURRENT:
            assert same_bits(before.center, snapshot.center)
        assert not same_bits(before.scale, live.scale)
        assert not same_bits(before.center, live.center)
        kept.append((snapshot, snapshot.scale.copy(), snapshot.center.copy()))
    for snapshot, scale, center in kept:
        assert same_bits(scale, snapshot.scale)
        assert same_bits(center, snapshot.center)


def test_block_scales_follow_the_tensor_in_hand_about_a_stale_centre():
    """NVFP4 about the mean before last: the stale centre is paired, so decode stays within a step of the block."""
    elements = get_scale_recipe("nvfp4_exact")
    recipe = recipe_of(fmt=E2M1FN, elements=elements)
    rng = np.random.default_rng(9)
    live = step(recipe, recipe.initial(OWNER), rng.standard_normal((8, 32)).astype(np.float32), 0)[3]
    x = (rng.standard_normal((8, 32)) * 100 + 50).astype(np.float32)  # far outside what the state's scale covers
    snapshot, codes, decoded, _ = step(recipe, live, x, 1)
    r = np.abs((x - snapshot.center).astype(np.float64)).reshape(8, 2, 16)
    # a block's scale is its amax / 6 to 1 part in 16 (E4M3), half a step of E2M1 is 1: and 6 may clip by that 16th
    bound = np.repeat(r.max(axis=2) / 6 * (1 + 1 / 16) + r.max(axis=2) / 16, 16, axis=1)
    assert (np.abs(decoded.astype(np.float64) - x) <= bound).all()
    assert 0 == int(codes.counts.nan)
    assert float(snapshot.scale) * r.max() > 6  # the delayed scale would have clipped
