"""Running means, value by value and commit by commit, against rational numbers."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from qsim.arrays import FLT_MAX, same_bits
from qsim.gemm.exact import _round_oracle
from qsim.quant import (
    NonFiniteRule,
    OpId,
    commit_quant_observation,
    merge_observations,
)
from tests.unit.centred_cases import OWNER, centers, ema, f32, observed, recipe_of, step

NAN, INF = np.float32("nan"), np.float32("inf")


def rounded(value):
    """RN of a rational number, as one to go on with."""
    return Fraction(float(_round_oracle(Fraction(value))))


@pytest.mark.parametrize("beta", [0.9, 0.5, 0.999, 0.3, 1e-3])
def test_a_running_mean_rounds_after_each_of_its_four_operations(beta):
    rng = np.random.default_rng(2)
    tensors = [rng.standard_normal((3, 50)).astype(np.float32) * 2.0**n for n in range(6)]
    got = centers(ema(beta=beta), [x.astype(np.float32) for x in tensors])
    means = centers(recipe_of(), tensors)
    b = Fraction(float(np.float32(beta)))
    c = [Fraction(v) for v in means[0][0]]
    assert means[0] == got[0]
    for mean, running in zip(means[1:], got[1:], strict=True):
        c = [
            rounded(rounded(b * old) + rounded(rounded(1 - b) * Fraction(new)))
            for old, new in zip(c, mean[0], strict=True)
        ]
        assert [float(v) for v in c] == running[0]


def test_a_running_mean_is_not_the_shorter_formula():
    """c + (1 - b)(m - c) has other bits in a quarter of the channels (facts: 28%)."""
    rng = np.random.default_rng(3)
    tensors = [rng.standard_normal((2, 1000)).astype(np.float32) for _ in range(2)]
    c, m = (np.array(v[0], np.float32) for v in centers(recipe_of(), tensors))
    other = c + (np.float32(1) - np.float32(0.9)) * (m - c)
    differ = (np.array(centers(ema(), tensors)[1][0], np.float32) != other).mean()
    assert 0.2 < differ < 0.5


def test_beta_0_is_the_last_mean_to_the_bit():
    rng = np.random.default_rng(4)
    tensors = [rng.standard_normal((3, 8)).astype(np.float32) - n for n in range(4)]
    assert centers(recipe_of(), tensors) == centers(ema(beta=0.0), tensors)


def test_a_running_mean_begins_channel_by_channel_with_the_first_observation_that_counts():
    recipe = ema(beta=0.5, nonfinite_rule=NonFiniteRule.FINITE)
    live = recipe.initial(OWNER)
    assert [[False]] == live.center_seen.tolist()
    live = step(recipe, live, f32([NAN, 8], [NAN, 8]), 0)[3]
    assert ([[0.0, 8.0]], [[False, True]]) == (live.center.tolist(), live.center_seen.tolist())
    live = step(recipe, live, f32([4, 16], [4, 16]), 1)[3]
    assert ([[4.0, 12.0]], [[True, True]]) == (live.center.tolist(), live.center_seen.tolist())
    live = step(recipe, live, f32([NAN, 0], [INF, 0]), 2)[3]
    assert ([[4.0, 6.0]], [[True, True]]) == (live.center.tolist(), live.center_seen.tolist())
    live = step(recipe, live, f32([8, NAN], [NAN, 2]), 3)[3]
    assert [[6.0, 4.0]] == live.center.tolist()
    assert 4 == live.epoch


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("rule", [NonFiniteRule.LATCH, NonFiniteRule.SKIP])
def test_a_bad_tensor_neither_begins_nor_moves_a_running_mean(bad, rule):
    recipe = ema(beta=0.5, nonfinite_rule=rule)
    live = recipe.initial(OWNER, (2,))
    x = f32([[bad, 8], [4, 8]], [[2, 2], [2, 2]])  # replica 0 is bad, replica 1 counts
    live = step(recipe, live, x, 0)[3]
    assert [[[0.0, 0.0]], [[2.0, 2.0]]] == live.center.tolist()
    assert [[[False, False]], [[True, True]]] == live.center_seen.tolist()
    live = step(recipe, live, f32([[1, 1], [1, 1]], [[8, bad], [8, 8]]), 1)[3]
    assert [[[1.0, 1.0]], [[2.0, 2.0]]] == live.center.tolist()
    assert [[[True, True]], [[True, True]]] == live.center_seen.tolist()


def test_a_running_mean_is_never_minus_0():
    """Half of the least subnormal rounds to 0 with its sign: two of them add up to -0 in IEEE arithmetic."""
    recipe = ema(beta=0.5)
    tiny = np.float32(1e-45)
    live = recipe.initial(OWNER)
    live = step(recipe, live, f32([-tiny, -0.0, -tiny]), 0)[3]
    assert same_bits(f32([-tiny, 0, -tiny]), live.center)
    live = step(recipe, live, f32([-tiny, -0.0, 0]), 1)[3]
    assert same_bits(f32([0, 0, 0]), live.center)


@pytest.mark.parametrize("words", [(0, 1 << 16), (0x3E800000, 1 << 20), (0x3F000000, 1 << 20), (0x3F7F0000, 1 << 16)])
def test_a_running_mean_never_overflows(words):
    """Both means FLT_MAX is the worst case; all 2^30 weights were tried once, here are four ranges of them."""
    b = np.arange(words[0], words[0] + words[1], dtype=np.uint32).view(np.float32)
    assert np.isfinite(b * FLT_MAX + (np.float32(1) - b) * FLT_MAX).all()
    live = ema(beta=float(b[-1])).initial(OWNER)
    for n in range(3):
        live = step(ema(beta=float(b[-1])), live, f32([-FLT_MAX, 1], [-FLT_MAX, 1]), n)[3]
    assert -np.inf < live.center[0, 0] <= -np.float32(FLT_MAX * 0.9999)


def test_microbatches_move_a_running_mean_once_by_their_counts():
    """3 rows of 2 and 5 rows of 10: the mean is 56 / 8, whatever their order; and b * 16 + (1 - b) * 7."""
    recipe = ema(beta=0.5)
    live = step(recipe, recipe.initial(OWNER), np.full((4, 2), 16, np.float32), 0)[3]
    parts = [
        observed(recipe, live, np.full((rows, 2), value, np.float32), OpId(1, m))
        for m, (rows, value) in enumerate([(3, 2), (5, 10)])
    ]
    assert [1, 1] == [part.about for part in parts]
    for order in (parts, parts[::-1]):
        merged = merge_observations(order)
        assert 1 == merged.about
        after = commit_quant_observation(live, merged, recipe=recipe)
        assert ([[11.5, 11.5]], 2) == (after.center.tolist(), after.epoch)
    assert merge_observations([parts[0], replace(parts[1], about=0)]).about is None
