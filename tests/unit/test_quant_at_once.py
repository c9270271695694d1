"""Steps of a commit by one kernel against the same steps by masks, and a cast's observation against the observer's."""

import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import FLT_MAX, same_bits
from qsim.backends import get_backend
from qsim.backends.numba_backend import NumbaBackend
from qsim.codec.means import Sums, mean_of, merge_sums
from qsim.codec.scaled import SCALE_RECIPES
from qsim.errors import UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2, POLICIES
from qsim.quant import (
    RECIPES,
    AmaxChoice,
    CenterAxis,
    CenterSource,
    InitialScale,
    MergeRule,
    NonFiniteRule,
    OpId,
    QuantObservation,
    ScaleGrid,
    ScaleSource,
    StateKey,
    TensorRole,
    WindowRule,
    ZeroRule,
    make_recipe,
    observation_of_cast,
    observe_for_future_state,
    quantize_with_snapshot,
)
from qsim.quant.at_once import mean_at_once, merge_at_once, roll_at_once, scale_at_once
from qsim.quant.merging import written_amax
from qsim.quant.operations import freeze

OWNER = StateKey(0, 0, 0)
NUMBA = NumbaBackend()
AMAXES = np.array([0, 1e-45, 2.0**-126, 1e-20, 1e-12, 1.5e-12, 0.3, 1, 3, 448, 1e30, FLT_MAX], np.float32)


def observations(rng, lead, count):
    """Amaxes of every size; now and then NaN or Inf beside them, or both."""
    for step in range(count):
        kind = rng.integers(0, 5, lead)
        yield QuantObservation(
            op=OpId(step, role_id=TensorRole.GRAD_OUTPUT if step % 3 == 0 else TensorRole.INPUT),
            amax=np.asarray(rng.choice(AMAXES, lead), np.float32),
            mean=None,
            count=np.full(lead, 8),
            nan_count=np.asarray((kind == 3) | (kind == 4), np.int64),
            inf_count=np.asarray(kind >= 2, np.int64) * (kind != 3),
        )


@pytest.mark.parametrize("lead", [(), (1,), (5,)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 16])
@pytest.mark.parametrize("nonfinite", [r for r in NonFiniteRule if r is not NonFiniteRule.INVERT])
def test_a_commit_by_the_kernel_has_the_bits_of_one_by_masks(nonfinite, window, lead):
    rng = np.random.default_rng(window)
    for zero, choice in itertools.product(ZeroRule, AmaxChoice):
        recipe = make_recipe(
            "delayed", fmt=E4M3FN, grad_fmt=E5M2, window=window, margin=1, zero_rule=zero, choice=choice,
            nonfinite_rule=nonfinite, initial_scale=3.0,
        )  # fmt: skip
        live = recipe.initial(OWNER, lead)
        for seen in observations(rng, lead, 40):
            expected, actual = recipe._roll_by_masks(live, seen), roll_at_once(recipe, live, seen)
            assert actual is not None
            for e, a in zip(expected, actual, strict=True):
                assert same_bits(np.asarray(e), a), (seen, live)
            live = recipe.advance(live, seen)
            assert same_bits(actual[1], live.scale)


def test_a_state_of_strided_arrays_rolls_alike():
    recipe = make_recipe("delayed", fmt=E4M3FN, window=3)
    (seen,) = observations(np.random.default_rng(0), (3,), 1)
    live = recipe.initial(OWNER, (3,))
    history = np.asfortranarray(np.arange(9, dtype=np.float32).reshape(3, 3))
    strided = replace(live, amax_history=history, scale=np.full(6, 2, np.float32)[::2])
    for e, a in zip(recipe._roll_by_masks(strided, seen), roll_at_once(recipe, strided, seen), strict=True):
        assert same_bits(e, a)


@pytest.mark.parametrize(
    "rules",
    [
        {"nonfinite_rule": NonFiniteRule.INVERT},
        {"grid": ScaleGrid.POWER_OF_TWO},
        {"window_rule": WindowRule.EXCLUDED},
        {"initial_rule": InitialScale.FROM_DATA},
        {"initial_rule": InitialScale.WARM_UP},
        {"merge_rule": MergeRule.CLIP, "amax_bound": 2.0},
        {"merge_rule": MergeRule.DECAY, "decay": 0.5},
    ],
    ids=str,
)
def test_rules_that_the_kernel_does_not_have_are_left_to_the_masks(rules):
    recipe = make_recipe("delayed", fmt=E4M3FN, window=2, **rules)
    (seen,) = observations(np.random.default_rng(0), (1,), 1)
    assert roll_at_once(recipe, recipe.initial(OWNER, (1,)), seen) is None


def test_what_a_merge_wrote_and_shapes_that_differ_are_left_to_the_masks():
    recipe = make_recipe("delayed", fmt=E4M3FN, window=2)
    live = recipe.initial(OWNER, (3,))
    (seen,) = observations(np.random.default_rng(0), (3,), 1)
    assert roll_at_once(recipe, live, seen) is not None
    assert roll_at_once(recipe, live, replace(seen, written=np.ones(3, np.float32))) is None
    assert roll_at_once(recipe, live, replace(seen, amax=np.ones(1, np.float32))) is None
    assert roll_at_once(recipe, live, replace(seen, inf_count=np.ones(1, np.int64))) is None


def test_a_mean_by_the_kernel_has_the_bits_of_mean_of():
    rng = np.random.default_rng(3)
    total = rng.integers(-(2**62), 2**62, 4000) >> rng.integers(0, 63, 4000)
    total[:3] = [0, -(2**62), 2**62]
    count = rng.integers(0, 2**22 + 1, 4000) >> rng.integers(0, 23, 4000)
    exponent = rng.integers(-149, 128, 4000).astype(np.int32)
    assert {0, 1} <= set(count.tolist())
    for shape in ((4000,), (1, 40, 100), (20, 1, 200)):
        sums = Sums(total=total.reshape(shape), exponent=exponent.reshape(shape), count=count.reshape(shape))
        with np.errstate(over="ignore"):  # no real sum has so large a mean
            expected = mean_of(sums)
        assert same_bits(expected, mean_at_once(sums))


def test_sums_merged_by_the_kernel_have_the_bits_of_merge_sums():
    """Shifts from 0 to beyond 64 bits, ties to even among them, from one part to five."""
    rng = np.random.default_rng(4)
    for number in range(1, 6):
        parts = []
        for _ in range(number):
            total = (rng.integers(-(2**60), 2**60, 3000) >> rng.integers(0, 60, 3000)) << rng.integers(0, 3, 3000)
            exponent = rng.choice(np.array([-149, -80, -3, -2, -1, 0, 1, 60, 61, 127]), 3000).astype(np.int32)
            count = rng.integers(0, 2**19, 3000)
            fields = (a.reshape(3, 1, 1000) for a in (total, exponent, count))
            parts.append(Sums(**dict(zip(("total", "exponent", "count"), fields, strict=True))))
        equal(merge_sums(parts), merge_at_once(parts))
    largest = np.array([2**63 - 1, -(2**63), 2**62 + 1, 2**62, -(2**62), -(2**62) - 1], np.int64)
    for shift in (61, 62, 63, 64, 65, 200):
        low = Sums(total=largest, exponent=np.full(6, -149, np.int32), count=np.ones(6, np.int64))
        high = replace(low, total=np.zeros(6, np.int64), exponent=np.full(6, shift - 149, np.int32))
        equal(merge_sums([low, high]), merge_at_once([low, high]))
    with pytest.raises(UsageError, match="merge_sums of unequal shapes"):
        merge_at_once([parts[0], Sums(total=total, exponent=exponent, count=count)])
    many = replace(parts[0], count=np.full((3, 1, 1000), 9 << 18))
    with pytest.raises(UsageError, match="a mean over 4718592 elements"):
        merge_at_once([many, many])


@pytest.mark.parametrize("lead", [(), (5,)], ids=str)
@pytest.mark.parametrize("nonfinite", [r for r in NonFiniteRule if r is not NonFiniteRule.INVERT])
def test_a_scale_in_hand_by_the_kernel_has_the_bits_of_one_by_masks(nonfinite, lead):
    rng = np.random.default_rng(6)
    otherwise = np.asarray(rng.random(lead) + 0.5, np.float32)
    served = 0
    for zero, margin in itertools.product(ZeroRule, (0, 3)):
        rules = {"zero_rule": zero, "nonfinite_rule": nonfinite, "margin": margin}
        current = make_recipe("current", fmt=E4M3FN, grad_fmt=E5M2, **rules)
        centred = make_recipe("centred", fmt=E4M3FN, scale_source=ScaleSource.CURRENT, **rules)
        for seen in observations(rng, lead, 40):
            for recipe, bad in ((current, ~np.isfinite(written_amax(seen))), (centred, ~centred._counts(seen))):
                finite_counts = recipe is centred and nonfinite is NonFiniteRule.FINITE
                expected = recipe._in_hand(seen, bad=bad, otherwise=otherwise)
                actual = scale_at_once(recipe, seen, otherwise=otherwise, finite_counts=finite_counts)
                assert same_bits(np.asarray(expected[0]), actual[0]), seen
                assert same_bits(np.asarray(expected[1]), actual[1]), seen
                served += 1
    assert 6 * 40 * 2 == served


def test_scales_in_hand_that_the_kernel_does_not_have_are_left_to_the_masks():
    (seen,) = observations(np.random.default_rng(0), (1,), 1)
    one, plain = np.ones(1, np.float32), make_recipe("current", fmt=E4M3FN)
    assert scale_at_once(plain, seen, otherwise=one, finite_counts=False) is not None
    assert scale_at_once(plain, replace(seen, written=one), otherwise=one, finite_counts=False) is None
    assert scale_at_once(plain, seen, otherwise=np.ones(2, np.float32), finite_counts=False) is None
    for rules in ({"nonfinite_rule": NonFiniteRule.INVERT}, {"grid": ScaleGrid.POWER_OF_TWO}):
        assert scale_at_once(replace(plain, **rules), seen, otherwise=one, finite_counts=False) is None


# ---- what a cast has seen -------------------------------------------------------------------------------------


def cases():
    rules = [{}, {"zero_rule": ZeroRule.CLAMP}, {"merge_rule": MergeRule.SUM}, {"window_rule": WindowRule.EXCLUDED}]
    for name, fmt in itertools.product(("delayed", "current"), (E4M3FN, E5M2, E2M1FN)):
        yield from (make_recipe(name, fmt=fmt, window=2, **own) for own in rules)


def spoiled(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[:4] = [np.nan, np.inf, -np.inf, 0]
    return x


def equal(expected, actual):
    for field in dataclasses.fields(expected):
        a, b = getattr(expected, field.name), getattr(actual, field.name)
        if isinstance(a, np.ndarray):
            assert same_bits(a, b), field.name
            assert a.flags.writeable == b.flags.writeable, field.name
        else:
            assert a == b, field.name


@pytest.mark.parametrize("backend", ["numba", "oracle"])
@pytest.mark.parametrize("shape", [(1, 6, 7), (3, 4, 5), (2, 9)], ids=str)
@pytest.mark.parametrize("policy", [POLICIES["ocp"], POLICIES["ocp"].with_choices(rounding="up")], ids=["even", "up"])
def test_the_observation_of_a_cast_is_that_of_its_tensor(policy, shape, backend):
    backend = get_backend(backend)
    for seed, recipe in enumerate(cases()):
        live = recipe.initial(OWNER, shape[:1])
        first = observe_for_future_state(
            spoiled(shape, 50), snapshot=None, recipe=recipe, backend=backend, op=OpId(0), lead=1
        )
        seen = first if recipe.name == "current" else None
        snapshot = freeze(recipe.advance(live, first), op=OpId(1), recipe=recipe, observation=seen)
        x = spoiled(shape, seed)
        tensor = quantize_with_snapshot(x, snapshot, backend=backend, policy=policy)
        for op in (None, OpId(7)):
            expected = observe_for_future_state(x, snapshot=snapshot, recipe=recipe, backend=backend, op=op)
            equal(expected, observation_of_cast(tensor, recipe=recipe, op=op))


def test_the_observation_of_a_cast_about_a_centre_is_of_the_residual():
    """A plain recipe may observe a tensor that another recipe's snapshot has centred."""
    centred = make_recipe("centred", fmt=E4M3FN, axis=CenterAxis.CHANNEL)
    plain, x = make_recipe("delayed", fmt=E4M3FN), spoiled((1, 8, 6), 4)
    live = replace(centred.initial(OWNER, (1,)), center=np.full((1, 1, 6), 3, np.float32))
    snapshot = freeze(live, op=OpId(2), recipe=centred, observation=None)
    tensor = quantize_with_snapshot(x, snapshot, backend=NUMBA)
    expected = observe_for_future_state(x, snapshot=snapshot, recipe=plain, backend=NUMBA)
    assert float(expected.amax[0]) > 3
    equal(expected, observation_of_cast(tensor, recipe=plain))


def test_a_cast_has_not_seen_a_mean_or_a_next_centre():
    x = spoiled((1, 8, 16), 4)
    for axis, source in itertools.product(CenterAxis, CenterSource):
        recipe = make_recipe("centred", fmt=E4M3FN, axis=axis, source=source)
        first = observe_for_future_state(
            x, snapshot=None, recipe=recipe, backend=NUMBA, op=OpId(0), lead=1, live=recipe.initial(OWNER, (1,))
        )
        live = recipe.advance(recipe.initial(OWNER, (1,)), first)
        snapshot = freeze(live, op=OpId(2), recipe=recipe, observation=first)
        tensor = quantize_with_snapshot(x, snapshot, backend=NUMBA)
        assert observation_of_cast(tensor, recipe=recipe) is None


def test_a_cast_without_counts_or_snapshot_or_by_block_scales_is_no_observation():
    plain, x = make_recipe("delayed", fmt=E2M1FN), np.ones((1, 8, 32), np.float32)
    live = plain.initial(OWNER, (1,))
    tensor = quantize_with_snapshot(x, freeze(live, op=OpId(2), recipe=plain, observation=None), backend=NUMBA)
    assert observation_of_cast(tensor, recipe=plain) is not None
    assert observation_of_cast(replace(tensor, counts=None), recipe=plain) is None
    assert observation_of_cast(replace(tensor, snapshot=None), recipe=plain) is None
    by_blocks = make_recipe("centred", fmt=E2M1FN, elements=SCALE_RECIPES["mxfp4_rceil"])
    snapshot = freeze(by_blocks.initial(OWNER, (1,)), op=OpId(2), recipe=by_blocks, observation=None)
    assert observation_of_cast(quantize_with_snapshot(x, snapshot, backend=NUMBA), recipe=plain) is None
    assert set(RECIPES) == {"delayed", "centred", "current"}  # a new one: say above what its observations need
