"""Nodes at their edges: masked places, overflow, NaN, large arguments, layouts, sizes that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qsim.arrays import F32, AnyArray, same_bits
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.attention import join3, merge_heads, probabilities, softmax, softmax_backward, split3, split_heads
from qsim.nn.dims import Dims
from qsim.nn.embedding import embed, embed_backward
from qsim.nn.feed_forward import gelu, gelu_backward, swiglu, swiglu_backward
from qsim.nn.loss import cross_entropy, scale_gradient
from qsim.nn.norm import rmsnorm, rmsnorm_backward
from tests.unit.nn_cases import EXACT, FAST

D = Dims(batch=2, context=6, heads=2, width=8, vocabulary=5)
MASKED = np.triu(np.ones((6, 6), bool), 1)
BOTH = pytest.mark.parametrize("A", [EXACT, FAST], ids=["exact", "fast"])
BAD = [np.nan, np.inf, -np.inf]


def scores() -> F32:
    return np.random.default_rng(2).normal(size=(3, 2, 2, 6, 6)).astype(np.float32) * np.float32(4)


def gradients() -> tuple[F32, F32, F32]:
    """dp, do and o."""
    rng = np.random.default_rng(3)
    dp, do, o = (rng.normal(size=shape) for shape in ((3, 2, 2, 6, 6), (3, 12, 8), (3, 12, 8)))
    return dp.astype(np.float32), do.astype(np.float32), o.astype(np.float32)


def bits(x: AnyArray) -> AnyArray:
    return np.ascontiguousarray(x).view(np.uint32)


@BOTH
def test_softmax_is_this_of_three_keys(A: Arithmetic) -> None:
    dims = Dims(batch=1, context=3, heads=1, width=4)
    s = np.zeros((1, 1, 1, 3, 3), np.float32)
    s[..., 2, :] = 2 * np.log(np.array([1.0, 2.0, 5.0]))  # head width 4: the scale is 1/2
    p, lse = softmax(A, dims, s)
    expected = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.125, 0.25, 0.625]])
    assert np.allclose(p[0, 0, 0], expected, rtol=3e-7, atol=0)
    assert np.allclose(lse[0, 0, 0], [0, math.log(2), math.log(8)], rtol=3e-7, atol=0)


@BOTH
@pytest.mark.parametrize("bad", BAD)
def test_what_stands_at_masked_places_changes_nothing(A: Arithmetic, bad: float) -> None:
    s, (dp, do, o) = scores(), gradients()
    p, lse = softmax(A, D, s)
    assert (bits(p)[..., MASKED] == 0).all()
    assert np.allclose(p.sum(-1), 1, rtol=1e-6)
    dirty_s, dirty_p, dirty_dp = s.copy(), p.copy(), dp.copy()
    for array in (dirty_s, dirty_p, dirty_dp):
        array[..., MASKED] = bad
    p2, lse2 = softmax(A, D, dirty_s)
    assert_bits_equal(p, p2)
    assert_bits_equal(lse, lse2)
    assert_bits_equal(probabilities(A, D, s, lse), probabilities(A, D, dirty_s, lse))
    ds = softmax_backward(A, D, p, dp, do, o)
    assert (bits(ds)[..., MASKED] == 0).all()
    assert_bits_equal(ds, softmax_backward(A, D, dirty_p, dirty_dp, do, o))


@BOTH
@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_is_not_finite_stays_by_itself_and_its_masked_places_are_zero(A: Arithmetic, bad: float) -> None:
    s = scores()
    clean, clean_lse = softmax(A, D, s)
    s[1, 0, 1, 3, 2] = bad
    p, lse = softmax(A, D, s)
    if bad == -np.inf:
        assert p[1, 0, 1, 3, 2] == 0
        assert np.isfinite(lse).all()
    else:
        assert np.isnan(p[1, 0, 1, 3, :4]).all()
        assert np.isnan(lse[1, 0, 1, 3])
    assert (bits(p)[..., MASKED] == 0).all()
    p[1, 0, 1, 3], lse[1, 0, 1, 3] = clean[1, 0, 1, 3], clean_lse[1, 0, 1, 3]
    assert_bits_equal(clean, p)
    assert_bits_equal(clean_lse, lse)


@BOTH
def test_probabilities_of_other_scores_than_the_lse_was_made_of_may_overflow(A: Arithmetic) -> None:
    s = scores()
    _, lse = softmax(A, D, s)
    s[0, 0, 0, 4, 1] += np.float32(1000)
    p = probabilities(A, D, s, lse)
    assert np.isinf(p[0, 0, 0, 4, 1])
    assert 1 == np.isinf(p).sum()
    assert (bits(p)[..., MASKED] == 0).all()
    dp, do, o = gradients()
    ds = softmax_backward(A, D, p, dp, do, o)
    assert np.isinf(ds[0, 0, 0, 4, 1])
    assert 1 == (~np.isfinite(ds)).sum()


@pytest.mark.parametrize("r", range(3))
def test_softmax_and_probabilities_of_a_replica_are_those_it_has_alone(r: int) -> None:
    s, (dp, do, o) = scores(), gradients()
    p, lse = softmax(EXACT, D, s)
    one = slice(r, r + 1)
    alone, lse_alone = softmax(EXACT, D, s[one])
    assert_bits_equal(p[one], alone)
    assert_bits_equal(lse[one], lse_alone)
    assert_bits_equal(probabilities(EXACT, D, s, lse)[one], probabilities(EXACT, D, s[one], lse[one]))
    ds = softmax_backward(EXACT, D, p, dp, do, o)
    assert_bits_equal(ds[one], softmax_backward(EXACT, D, p[one], dp[one], do[one], o[one]))
    by_key = np.ascontiguousarray(s.swapaxes(-1, -2)).swapaxes(-1, -2)  # scores that lie transposed in memory
    assert_bits_equal(p, softmax(EXACT, D, by_key)[0])
    assert_bits_equal(probabilities(EXACT, D, s, lse), probabilities(EXACT, D, by_key, lse))


def test_a_nan_from_the_nodes_own_exp_has_one_pattern() -> None:
    s = scores()
    s[0, 0, 0, 5, 0] = np.nan
    _, lse = softmax(FAST, D, scores())
    assert 0x7FC00000 == bits(probabilities(EXACT, D, s, lse))[0, 0, 0, 5, 0]


def test_heads_and_thirds_are_views_and_come_back() -> None:
    x = np.arange(3 * 12 * 24, dtype=np.float32).reshape(3, 12, 24)
    parts = split3(x)
    heads = [split_heads(D, part) for part in parts]
    assert all(np.shares_memory(x, head) for head in heads)
    assert x[1, 1 * 6 + 3, 8 + 4 + 2] == heads[1][1, 1, 1, 3, 2]  # replica 1, sequence 1, head 1, token 3, element 2
    assert same_bits(x, join3(*(merge_heads(D, head) for head in heads)))


def test_an_embedding_is_a_row_of_each_table_and_its_gradient_a_sum_over_equal_tokens() -> None:
    dims = Dims(batch=2, context=2, heads=1, width=1, vocabulary=3)
    tokens = np.array([[[2, 0], [2, 2]], [[1, 1], [0, 1]]])
    table = np.array([[[10], [20], [30]], [[1], [2], [3]]], np.float32)
    positions = np.array([[[0.5], [0.25]], [[0.125], [0.0]]], np.float32)
    h = embed(EXACT, dims, tokens, table, positions)
    assert [[30.5, 10.25, 30.5, 30.25], [2.125, 2, 1.125, 2]] == h[..., 0].tolist()
    dh = np.array([[[1], [2], [4], [8]], [[1], [2], [4], [8]]], np.float32)
    dtable, dpositions = embed_backward(EXACT, dims, tokens, dh)
    assert [[2, 0, 13], [4, 11, 0]] == dtable[..., 0].tolist()
    assert [[5, 10], [5, 10]] == dpositions[..., 0].tolist()


@BOTH
def test_a_loss_is_these_nats_and_its_gradient_sums_to_zero(A: Arithmetic) -> None:
    dims = Dims(batch=1, context=2, heads=1, width=1, vocabulary=4)
    logits = np.log(np.array([[[1, 2, 4, 1], [3, 3, 1, 1]]], np.float32))
    loss, gradient = cross_entropy(A, dims, logits, np.array([[[2, 0]]]))
    assert np.allclose(loss, [(math.log(2) + math.log(8 / 3)) / 2], rtol=3e-7)
    assert np.allclose(gradient[0], [[0.0625, 0.125, -0.25, 0.0625], [-0.3125, 0.1875, 0.0625, 0.0625]], rtol=1e-6)
    scaled = scale_gradient(gradient, np.array([1024], np.float32))
    assert_bits_equal(gradient * np.float32(1024), scaled)


@BOTH
def test_a_bad_logit_spoils_its_own_replica_alone(A: Arithmetic) -> None:
    logits = np.random.default_rng(4).normal(size=(3, 12, 5)).astype(np.float32)
    targets = np.zeros((3, 2, 6), np.int64)
    clean = cross_entropy(A, D, logits, targets)
    logits[1, 4, 2] = np.inf
    loss, gradient = cross_entropy(A, D, logits, targets)
    assert np.isnan(loss[1])
    assert np.isnan(gradient[1, 4]).any()
    keep = [0, 2]
    assert_bits_equal(clean[0][keep], loss[keep])
    assert_bits_equal(clean[1][keep], gradient[keep])
    # A difference of 1000 nats is a finite loss.
    logits[1, 4, 2] = 1000
    assert np.allclose(cross_entropy(A, D, logits, targets)[0][1], 1000 / 12, rtol=0.05)


@BOTH
@pytest.mark.parametrize("size", [20.0, 90.0, 1e4, 1e30])
def test_far_out_gelu_and_silu_are_0_or_the_identity(A: Arithmetic, size: float) -> None:
    u = np.array([[[size, -size]]], np.float32)
    assert_bits_equal(np.array([[[size, -0.0]]], np.float32), gelu(A, u))
    assert [[[1.0, 0.0]]] == gelu_backward(A, u, np.ones_like(u)).tolist()
    pair = np.array([[[size, -size, 1, 1]]], np.float32)
    made = swiglu(A, pair)
    assert size == pytest.approx(float(made[0, 0, 0]), rel=1e-7)
    assert -1e-6 < made[0, 0, 1] <= 0
    du = swiglu_backward(A, pair, np.ones_like(made))
    assert np.allclose(du, [[[1, 0, size, 0]]], atol=1e-6)


@BOTH
def test_norm_is_this_of_two_tokens_and_zeros_stay_zero(A: Arithmetic) -> None:
    dims = Dims(batch=1, context=3, heads=1, width=2, eps=1.0)
    x = np.array([[[1, 7], [0, 0], [1, -1]]], np.float32)
    g = np.array([[2, 10]], np.float32)
    y = rmsnorm(A, dims, x, g)
    roots = [1 / math.sqrt(26), 1, 1 / math.sqrt(2)]
    expected = np.array([[2 * roots[0], 70 * roots[0]], [0, 0], [2 * roots[2], -10 * roots[2]]])
    assert np.allclose(y[0], expected, rtol=3e-7)
    dx, dg = rmsnorm_backward(A, dims, x, g, np.ones_like(x))
    assert np.allclose(dx[0, 1], [2, 10])  # at 0 the slope is g / sqrt(eps)
    assert np.allclose(dg[0], [roots[0] + roots[2], 7 * roots[0] - roots[2]], rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"width": 9}, "width 9 does not divide into 2 heads"),
        ({"heads": 0}, "heads 0 is too small"),
        ({"context": 2.5}, "context 2.5 is no integer"),
        ({"eps": 0.0}, "eps 0.0 is not positive"),
        ({"eps": math.nan}, "eps nan is not positive"),
    ],
)
def test_sizes_that_fit_nothing_are_refused(changed: dict[str, int], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        Dims(**{"batch": 2, "context": 6, "heads": 2, "width": 8} | changed)
    assert (4, 12) == (D.head_width, D.tokens)
