"""Centres of every axis and source, commit by commit: worked out by hand or in rationals, and compared bit by bit."""

from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends.oracle import OracleBackend
from qsim.codec.means import mean_of
from qsim.codec.scaled import get_scale_recipe
from qsim.errors import ProtocolViolation, UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2
from qsim.quant import (
    CenterAxis,
    CenterSource,
    CentredDelayedScaling,
    NonFiniteRule,
    ObserveMode,
    OpId,
    ScaleSource,
    StateKey,
    Timing,
    begin_logical_quantization,
    commit_quant_observation,
    decode_for_consumer,
    observe_for_future_state,
    quantize_with_snapshot,
)
from tests.unit.centred_cases import NUMBA, OWNER, centers, ema, f32, observed, recipe_of, step

ORACLE = OracleBackend()
NAN, INF = np.float32("nan"), np.float32("inf")
AXES, SOURCES = list(CenterAxis), list(CenterSource)


# ---- what a centre serves -------------------------------------------------------------------------------

X = f32([1, 3, 10, 20, 7], [5, 7, -10, 40, -1])


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (CenterAxis.TENSOR, [[8.2]]),  # 82 / 10
        (CenterAxis.CHANNEL, [[3, 5, 0, 30, 3]]),
        (CenterAxis.TOKEN, [[8.2], [8.2]]),  # 41 / 5 each
        (CenterAxis.BLOCK, [[2, 15, 7], [6, 15, -1]]),  # the tail is the mean of one column
    ],
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_a_centre_is_the_mean_of_what_it_serves(axis, expected, source):
    assert [np.array(expected, np.float32).tolist()] == centers(recipe_of(axis=axis, source=source), [X])


@pytest.mark.parametrize("axis", AXES)
def test_a_centre_is_taken_off_what_it_serves_and_put_back(axis):
    """The second tensor is the first: its residuals are small integers, exact in E4M3 at the scale of amax 32 or so."""
    x = f32([1, 3, 10, 20, 7], [5, 7, -10, 40, -12])
    recipe = recipe_of(axis=axis, source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT)
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    spread = {
        CenterAxis.TENSOR: np.full((2, 5), 7.1),
        CenterAxis.CHANNEL: np.array([[3, 5, 0, 30, -2.5]] * 2),
        CenterAxis.TOKEN: np.array([[8.2] * 5, [6] * 5]),
        CenterAxis.BLOCK: np.array([[2, 2, 15, 15, 7], [6, 6, 15, 15, -12]]),
    }[axis].astype(np.float32)
    r = x - spread
    assert np.abs(r).max() == codes.amax
    assert same_bits(np.float32(448) / np.abs(r).max(), snapshot.scale[()])
    plain = quantize_with_snapshot(r, without_center(snapshot), backend=NUMBA)
    assert same_bits(plain.codes, codes.codes)
    residual = decode_for_consumer(plain, op=OpId(0), backend=NUMBA)
    assert same_bits(residual + spread, decoded)


def without_center(snapshot):
    return replace(snapshot, center=None)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_both_backends_live_the_same_life_to_the_bit(axis, source):
    rng = np.random.default_rng(0)
    recipe = recipe_of(axis=axis, source=source, block=4, nonfinite_rule=NonFiniteRule.FINITE)
    lives = [recipe.initial(OWNER, (2,)) for _ in range(2)]
    for n in range(3):
        x = (rng.standard_normal((2, 3, 6)) * 3**n + n).astype(np.float32)
        x[0, 0, n], x[1, :, 5] = (NAN, INF, 1)[n], (1, NAN, 1)[n]
        mine, theirs = (step(recipe, live, x, n, backend) for live, backend in zip(lives, (NUMBA, ORACLE), strict=True))
        lives = [mine[3], theirs[3]]
        assert same_bits(theirs[1].codes, mine[1].codes)
        assert same_bits(theirs[2], mine[2])
        for name in ("center", "scale", "amax_history"):
            assert same_bits(getattr(theirs[3], name), getattr(mine[3], name)), name


def test_block_means_run_over_the_elements_that_are_there():
    """A tail block of 3, in each row: the mean of its slice alone, NaN and Inf left out."""
    x = np.random.default_rng(1).standard_normal((4, 11)).astype(np.float32)
    x[1, 9], x[2, 2], x[3, 8:] = NAN, -INF, NAN
    recipe = recipe_of(axis=CenterAxis.BLOCK, block=4, nonfinite_rule=NonFiniteRule.FINITE)
    seen = observed(recipe, recipe.initial(OWNER), x, OpId(0))
    assert [[4, 4, 3], [4, 4, 2], [3, 4, 3], [4, 4, 0]] == seen.mean.count.tolist()
    assert (4 * 11, 4, 1) == (int(seen.count), int(seen.nan_count), int(seen.inf_count))
    for j, columns in enumerate((slice(0, 4), slice(4, 8), slice(8, 11))):
        sums = NUMBA.observe(np.ascontiguousarray(x[:, columns]), None, lead=0, mean_axes=(1,)).sums
        assert same_bits(mean_of(sums)[:, 0], np.ascontiguousarray(mean_of(seen.mean)[:, j]))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (2, 3, 5), (7,)])
@pytest.mark.parametrize("axis", AXES)
def test_every_shape_has_its_centres(axis, shape):
    recipe = recipe_of(axis=axis, source=CenterSource.CURRENT, block=4)
    live = recipe.initial(OWNER, (), len(shape))
    x = np.full(shape, 2.5, np.float32)
    snapshot, codes, decoded, _ = step(recipe, live, x, 0)
    assert same_bits(x, decoded)
    assert not codes.codes.any()
    blocks = -(-shape[-1] // 4)
    ends = {CenterAxis.TENSOR: 1, CenterAxis.CHANNEL: shape[-1], CenterAxis.TOKEN: 1, CenterAxis.BLOCK: blocks}
    rows = shape[:-1] if axis in (CenterAxis.TOKEN, CenterAxis.BLOCK) else (1,) * (len(shape) - 1)
    assert (*rows, ends[axis]) == snapshot.center.shape


# ---- sources of centre and scale ------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
@pytest.mark.parametrize("scale_source", list(ScaleSource), ids=lambda s: s.name)
def test_begin_uses_the_centre_and_the_scale_that_their_sources_name(source, scale_source):
    first, second = f32([2, 20], [4, 40]), f32([10, 6], [30, 2])
    recipe = recipe_of(source=source, scale_source=scale_source, beta=0.5)
    live = step(recipe, recipe.initial(OWNER), first, 0)[3]
    snapshot, codes, _, after = step(recipe, live, second, 1)
    center = {CenterSource.CURRENT: [20, 4], CenterSource.LAST: [3, 30], CenterSource.EMA: [3, 30]}[source]
    residual = {CenterSource.CURRENT: 10, CenterSource.LAST: 28, CenterSource.EMA: 28}[source]
    # the first residuals were about +0, but for a CURRENT centre about 3 and 30
    before = 10 if source is CenterSource.CURRENT else 40
    amax = residual if scale_source is ScaleSource.CURRENT else before
    assert [center] == snapshot.center.tolist()
    assert residual == codes.amax
    assert same_bits(f32(448) / f32(amax), snapshot.scale.reshape(1))
    assert same_bits(np.float32(1) / snapshot.scale, snapshot.descale)
    moved = {CenterSource.CURRENT: [20, 4], CenterSource.LAST: [20, 4], CenterSource.EMA: [11.5, 17]}[source]
    assert [moved] == after.center.tolist()
    assert [residual] == after.amax_history.tolist()
    assert same_bits(f32(448) / f32(residual), after.scale.reshape(1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
@pytest.mark.parametrize("scale_source", list(ScaleSource), ids=lambda s: s.name)
def test_timing_follows_from_the_sources(source, scale_source):
    recipe = recipe_of(source=source, scale_source=scale_source)
    in_hand = source is CenterSource.CURRENT or scale_source is ScaleSource.CURRENT
    assert (Timing.CURRENT if in_hand else Timing.DELAYED) is recipe.timing
    live, seen = recipe.initial(OWNER), None
    if not in_hand:
        seen = observed(recipe, live, X, OpId(0))
    with pytest.raises(UsageError, match=r"needs the observation" if in_hand else r"takes no observation"):
        begin_logical_quantization(live, op=OpId(0), recipe=recipe, observation=seen)


@pytest.mark.parametrize("rule", [rule for rule in NonFiniteRule if rule is not NonFiniteRule.PROPAGATE])
def test_a_bad_tensor_in_hand_has_its_finite_mean_and_scale_1_unless_the_rule_is_finite(rule):
    recipe = recipe_of(
        source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT, nonfinite_rule=rule, initial_scale=7.0
    )
    x = f32([2, NAN, NAN], [6, 8, NAN])
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    assert [[4.0, 8.0, 0.0]] == snapshot.center.tolist()
    assert (224.0 if rule is NonFiniteRule.FINITE else 1.0) == snapshot.scale
    assert 2 == codes.amax
    assert [[2.0, 6.0], [8.0]] == [decoded[:, 0].tolist(), decoded[1:, 1].tolist()]
    assert [[False, True, True], [False, False, True]] == np.isnan(decoded).tolist()
    assert 3 == codes.counts.nan


def test_a_constant_tensor_in_hand_has_scale_1_and_codes_0():
    recipe = recipe_of(source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT, initial_scale=7.0)
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), np.full((3, 2), 0.1, np.float32), 0)
    assert 1.0 == snapshot.scale
    assert not codes.codes.any()
    assert same_bits(np.full((3, 2), 0.1, np.float32), decoded)


def test_a_scale_of_the_residual_in_hand_needs_the_live_centre():
    recipe = recipe_of(scale_source=ScaleSource.CURRENT)
    live = step(recipe, recipe.initial(OWNER), X, 0)[3]
    here = {"recipe": recipe, "backend": NUMBA, "snapshot": None, "op": OpId(1)}
    with pytest.raises(UsageError, match=r"residual about a centre of earlier tensors.*step 1 .*pass live="):
        observe_for_future_state(X, **here)
    stale = observe_for_future_state(X, live=recipe.initial(OWNER), **here)
    with pytest.raises(ProtocolViolation, match=r"about the centre of epoch 0: owner L0/qkv/input, step 1 .*epoch 1;"):
        begin_logical_quantization(live, op=OpId(1), recipe=recipe, observation=stale)
    with pytest.raises(ProtocolViolation, match="observe about another owner's centre: owner L1/qkv/input"):
        observe_for_future_state(X, live=recipe.initial(StateKey(1, 0, 0)), **here)
    fresh = observe_for_future_state(X, live=live, **here)
    assert 1 == fresh.about == begin_logical_quantization(live, op=OpId(1), recipe=recipe, observation=fresh).epoch


@pytest.mark.parametrize(("source", "center"), [(CenterSource.LAST, 6.0), (CenterSource.EMA, 4.5)])
def test_next_observes_about_the_centre_that_the_commit_makes(source, center):
    """3, then 6: the running mean with b = 1/2 goes to 4.5, and 8 is 3.5 from it (2 from the tensor's mean)."""
    recipe = recipe_of(source=source, observe=ObserveMode.NEXT, beta=0.5)
    live = step(recipe, recipe.initial(OWNER), f32([3], [3]), 0)[3]
    x = f32([8], [4])
    seen = observed(recipe, live, x, OpId(1))
    assert [[center]] == commit_quant_observation(live, seen, recipe=recipe).center.tolist()
    assert 8 - center == seen.amax
    assert seen.about is None


def test_a_running_mean_in_mode_next_has_to_be_handed_over():
    recipe = ema(observe=ObserveMode.NEXT, beta=0.5)
    here = {"recipe": recipe, "backend": NUMBA, "snapshot": None, "op": OpId(1)}
    with pytest.raises(UsageError, match="source EMA continues a running mean; pass its state or snapshot"):
        observe_for_future_state(X, **here)
    live = step(recipe, recipe.initial(OWNER), f32([3], [3]), 0)[3]
    assert 3.5 == observe_for_future_state(f32([8], [4]), live=live, **here).amax


# ---- shapes that change ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_a_centre_in_hand_takes_any_number_of_tokens(axis):
    recipe = recipe_of(axis=axis, source=CenterSource.CURRENT, scale_source=ScaleSource.CURRENT)
    live = recipe.initial(OWNER)
    for n, rows in enumerate((2, 5, 3)):
        x = np.tile(X[:1], (rows, 1))
        early = observed(recipe, live, x, OpId(n))
        here = {"snapshot": None, "recipe": recipe, "backend": NUMBA, "op": OpId(n)}
        assert same_bits(early.amax, observe_for_future_state(x, live=live, **here).amax)  # a state says nothing here
        live = step(recipe, live, x, n)[3]
        assert (rows if axis in (CenterAxis.TOKEN, CenterAxis.BLOCK) else 1) == live.center.shape[0]


@pytest.mark.parametrize(
    ("axis", "x", "message"),
    [
        (CenterAxis.TOKEN, np.ones((3, 5)), r"centre \[2, 1\] .* does not fit tensor \[3, 5\]"),
        (CenterAxis.BLOCK, np.ones((3, 5)), r"centre \[2, 5\] .* does not fit tensor \[3, 5\]"),
        (CenterAxis.BLOCK, np.ones((2, 7)), r"centre \[2, 3\] of owner L0/qkv/input has 3 blocks of 2 columns and"),
        (CenterAxis.BLOCK, np.ones((2, 3)), r"centre \[2, 3\] of owner L0/qkv/input has 3 blocks of 2 columns and"),
    ],
)
def test_a_remembered_centre_refuses_other_tokens_and_columns(axis, x, message):
    recipe = recipe_of(axis=axis)
    live = step(recipe, recipe.initial(OWNER), X, 0)[3]
    snapshot = begin_logical_quantization(live, op=OpId(1), recipe=recipe)
    x = x.astype(np.float32)
    with pytest.raises(UsageError, match=message):
        quantize_with_snapshot(x, snapshot, backend=NUMBA)
    with pytest.raises(UsageError, match=message):
        observe_for_future_state(x, snapshot=snapshot, recipe=recipe, backend=NUMBA)
    unseen = observe_for_future_state(x, snapshot=None, recipe=recipe, backend=NUMBA, op=OpId(1))
    with pytest.raises(UsageError, match=r"means \[.*\] do not fit the centre \[.*\] of owner L0/qkv/input"):
        commit_quant_observation(live, unseen, recipe=recipe)


def test_a_block_centre_needs_columns():
    recipe = recipe_of(axis=CenterAxis.BLOCK)
    with pytest.raises(UsageError, match="it has no columns"):
        observe_for_future_state(f32(1), snapshot=None, recipe=recipe, backend=NUMBA, op=OpId(0), lead=1)


# ---- configuration --------------------------------------------------------------------------------------

NVFP4 = get_scale_recipe("nvfp4_te")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block 0 of a block centre"),
        *[({"beta": beta}, f"beta {beta} of a running mean") for beta in (-0.1, 1.0, 0.99999999, float("nan"))],
        (
            {"observe": ObserveMode.NEXT, "scale_source": ScaleSource.CURRENT},
            "observe NEXT with scale_source CURRENT and source LAST",
        ),
        ({"elements": NVFP4}, "fmt float8_e4m3fn with elements nvfp4_te, which encodes float4_e2m1fn"),
        ({"elements": NVFP4, "fmt": E2M1FN, "grad_fmt": E5M2}, "fmt float8_e5m2 with elements nvfp4_te"),
        ({"window": 0}, "window 0 is too short"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        recipe_of(**options)


def test_the_defaults_are_the_delayed_mean_of_a_tensor():
    recipe = CentredDelayedScaling(fmt=E4M3FN)
    options = (recipe.axis, recipe.source, recipe.scale_source, recipe.observe, recipe.elements, recipe.center_block)
    assert (
        CenterAxis.TENSOR, CenterSource.LAST, ScaleSource.DELAYED, ObserveMode.IN_FORCE, None, 0,
    ) == options  # fmt: skip
    assert recipe.initial(OWNER).center_seen is None
    assert (16, 0.9) == (CentredDelayedScaling(fmt=E4M3FN, axis=CenterAxis.BLOCK).center_block, recipe.beta)
