"""The centred product and its gradients: the stated order against rational numbers, bit for bit, and what it is for."""

from dataclasses import replace

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.codec.means import mean_of
from qsim.errors import UsageError
from qsim.formats import E2M1FN
from qsim.gemm import (
    WeightGradientTerms,
    centred_input_gradient,
    centred_matmul,
    centred_matmul_oracle,
    centred_weight_gradient,
    centred_weight_gradient_oracle,
    matmul,
    matmul_oracle,
    weight_gradient_terms,
)
from qsim.gemm.centred import AXES
from qsim.quant import CenterAxis, CenterSource, CentredDelayedScaling, OpId, ScaleSource, decode_for_consumer
from tests.unit.centred_cases import NUMBA, OWNER, step

U = 2.0**-24
T, K, N = 3, 5, 2
BLOCK = {"block": 2}


def f32(*values):
    return np.array(values, np.float32)


def shape_of(axis, tokens=T, columns=K):
    return {
        "tensor": (1, 1),
        "channel": (1, columns),
        "token": (tokens, 1),
        "block": (tokens, -(-columns // 2)),
    }[axis]


def normal(rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def wide(rng, shape):
    """From subnormal products to large ones, with both zeros."""
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-80, 60, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.1, np.copysign(np.float32(0), x), x).astype(np.float32)


def ties(rng, shape):
    """Small integers and halves of the last place: sums that end on ties."""
    return (rng.integers(-4, 5, shape) * np.ldexp(1.0, rng.integers(0, 2, shape) * -24)).astype(np.float32)


def bad(rng, shape):
    """Normal numbers with NaN of both signs and Inf."""
    x = normal(rng, shape)
    x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, -np.nan, np.inf, -np.inf])
    return x


KINDS = {"normal": normal, "wide": wide, "ties": ties, "bad": bad}


# ---- the order, against rational numbers ----------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_centred_product_is_its_oracle_to_the_bit(axis, kind):
    rng = np.random.default_rng(1)
    for _ in range(8):
        r, w, c = (KINDS[kind](rng, shape) for shape in ((T, K), (K, N), shape_of(axis)))
        where = {"center": c, "axis": axis, "block": BLOCK.get(axis, 0)}
        assert same_bits(centred_matmul_oracle(r, w, **where), centred_matmul(r, w, **where))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True], ids=["x centred", "x and dy centred"])
def test_a_weight_gradient_is_its_oracle_to_the_bit(axis, kind, both):
    rng = np.random.default_rng(2)
    for _ in range(8):
        r, e, c, d = (KINDS[kind](rng, shape) for shape in ((T, K), (T, N), shape_of(axis), (1, N)))
        where = {"center": c, "axis": axis, "block": BLOCK.get(axis, 0), "grad_center": d if both else None}
        assert same_bits(centred_weight_gradient_oracle(r, e, **where), centred_weight_gradient(r, e, **where))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_gradient_is_its_oracle_to_the_bit(kind):
    rng = np.random.default_rng(3)
    e, w, d = (KINDS[kind](rng, shape) for shape in ((T, N), (K, N), (1, N)))
    turned = np.ascontiguousarray(w.T)
    assert same_bits(matmul_oracle(e, turned), centred_input_gradient(e, w))
    expected = centred_matmul_oracle(e, turned, center=d, axis="channel")
    assert same_bits(expected, centred_input_gradient(e, w, grad_center=d))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("tokens", "columns"), [(0, 3), (1, 1), (2, 0), (2, 2), (1, 4)])
def test_empty_and_whole_blocks_keep_to_the_order(axis, tokens, columns):
    rng = np.random.default_rng(4)
    shape = shape_of(axis, tokens, columns)
    r, w, e, c = (normal(rng, s) for s in ((tokens, columns), (columns, N), (tokens, N), shape))
    where = {"center": c, "axis": axis, "block": BLOCK.get(axis, 0)}
    assert same_bits(centred_matmul_oracle(r, w, **where), centred_matmul(r, w, **where))
    where["grad_center"] = normal(rng, (1, N))
    assert same_bits(centred_weight_gradient_oracle(r, e, **where), centred_weight_gradient(r, e, **where))


def test_the_order_by_hand():
    """1 + 2^-24 is a tie that goes to 1, in whichever sum it is first rounded."""
    tiny = 2.0**-24
    r, w = f32([0, 0]), f32([1], [tiny])
    product = {"axis": "channel", "center": f32([1, 1])}
    assert [[1.0]] == centred_matmul(r, w, **product).tolist()
    # a token: 3 RN(1 + tiny) = 3, where a sum of 3 and 3 tiny, once rounded, is the next float32
    assert [[3.0]] == centred_matmul(r, w, center=f32([3]), axis="token").tolist()
    assert [[3 + 2.0**-22]] == centred_matmul(r, w, center=f32([3]), axis="tensor").tolist()
    # blocks of one column: RN(3*1 + 3*tiny), the sums of W being exact
    assert [[3 + 2.0**-22]] == centred_matmul(r, w, center=f32([3, 3]), axis="block", block=1).tolist()
    # R W is rounded before the row is added: RN(1 + tiny) - 1 = 0, not tiny
    assert [[0.0]] == centred_matmul(f32([1, 1]), w, center=f32([-1, 0]), axis="channel").tolist()


def test_the_terms_of_a_weight_gradient_are_added_in_their_order():
    one, half = np.ones((1, 1), np.float32), np.full((1, 1), 2.0**-24, np.float32)
    terms = WeightGradientTerms(one, half, half, -one)
    assert [[0.0]] == terms.sum().tolist()  # 1 + tie, 1 + tie, 1 - 1
    assert [[2.0**-23]] == WeightGradientTerms(half, half, one, -one).sum().tolist()


# ---- what it is for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_integers_give_the_dense_product_to_the_bit(axis):
    """Nothing is rounded, so the order cannot matter: Y and dW are those of C + R, by 64-bit integers."""
    rng = np.random.default_rng(5)
    r, w, e, c, d = (rng.integers(-9, 10, s) for s in ((T, K), (K, N), (T, N), shape_of(axis), (1, N)))
    spread = np.repeat(c, 2, axis=1)[:, :K] if axis == "block" else c
    x, dy = spread + r, d + e
    where = {"center": c.astype(np.float32), "axis": axis, "block": BLOCK.get(axis, 0)}
    r, w, e, d = (v.astype(np.float32) for v in (r, w, e, d))
    assert (x @ w).tolist() == centred_matmul(r, w, **where).tolist()
    assert (x.T @ e).tolist() == centred_weight_gradient(r, e, **where).tolist()
    assert (x.T @ dy).tolist() == centred_weight_gradient(r, e, grad_center=d, **where).tolist()
    assert (dy @ w.T).tolist() == centred_input_gradient(e, w, grad_center=d).tolist()


def test_a_centre_far_above_the_residual_costs_the_product_nothing():
    """2^26 + 1 is no float32: the dense product of decoded operands loses the residual, this one keeps it."""
    r, w, mu = f32([1, -1], [3, 1]), f32([1], [-1]), f32([2.0**26, 2.0**26])
    assert [[2.0], [2.0]] == centred_matmul(r, w, center=mu, axis="channel").tolist()
    assert [[0.0], [0.0]] == matmul(mu + r, w).tolist()


def test_a_recipes_axis_is_an_axis_of_the_product():
    assert AXES == tuple(axis.value for axis in CenterAxis)
    r, w = np.ones((T, K), np.float32), np.ones((K, N), np.float32)
    recipe = CentredDelayedScaling(fmt=E2M1FN, axis=CenterAxis.BLOCK, block=2)
    got = centred_matmul(r, w, center=np.ones((T, 3), np.float32), axis=recipe.axis, block=recipe.center_block)
    assert np.full((T, N), 2 * K).tolist() == got.tolist()


@pytest.mark.parametrize("axis", AXES)
def test_replicas_are_products_of_their_own(axis):
    rng = np.random.default_rng(6)
    r, w, e, c, d = (normal(rng, (4, *s)) for s in ((T, K), (K, N), (T, N), shape_of(axis), (1, N)))
    where = {"axis": axis, "block": BLOCK.get(axis, 0)}
    products = centred_matmul(r, w, center=c, **where)
    shared = centred_matmul(r, w[0], center=c[:1], **where)
    gradients = centred_weight_gradient(r, e, center=c, grad_center=d, **where)
    for i in range(4):
        assert same_bits(centred_matmul(r[i], w[i], center=c[i], **where), products[i])
        assert same_bits(centred_matmul(r[i], w[0], center=c[0], **where), shared[i])
        assert same_bits(centred_weight_gradient(r[i], e[i], center=c[i], grad_center=d[i], **where), gradients[i])


def test_a_centre_that_says_nothing_yet_is_a_plain_product():
    """The +0 [1, 1] of a state before its first commit, whatever the axis."""
    rng = np.random.default_rng(7)
    r, w, e = normal(rng, (T, K)), normal(rng, (K, N)), normal(rng, (T, N))
    for axis in AXES:
        where = {"center": np.zeros((1, 1), np.float32), "axis": axis, "block": BLOCK.get(axis, 0)}
        assert same_bits(matmul(r, w), centred_matmul(r, w, **where))
        assert same_bits(matmul(np.ascontiguousarray(r.T), e), centred_weight_gradient(r, e, **where))


def test_a_bad_block_of_weights_reaches_the_tokens_through_its_own_mean_alone():
    """Inf in the rows of block 0: block 1 must not become NaN by 0 * Inf."""
    w = f32([np.inf], [1], [1], [1])
    got = centred_matmul(np.ones((1, 4), np.float32), w, center=f32([1, 2]), axis="block", block=2)
    assert [[np.inf]] == got.tolist()


# ---- the cross terms ------------------------------------------------------------------------------------


def bound(terms, x, dy):
    """|dW - RN(X^T dY)| for decoded X = RN(C + R), dY = RN(1 d^T + E).

    u = 2^-24. Each of the four terms is rounded once or twice (u or 2u of it), each of three sums once (u of at most
    the sum of magnitudes): 5u (|A| + |B| + |C| + |D|). A decoded operand is within u of c + r: 2u |X|^T |dY|. The
    dense product is rounded once: u |X^T dY|. The factor 1.01 holds all second-order terms.
    """
    magnitudes = sum(np.abs(term).astype(np.float64) for term in terms if term is not None)
    dense = np.abs(x).T.astype(np.float64) @ np.abs(dy).astype(np.float64)
    return 1.01 * U * (5 * magnitudes + 3 * dense)


def centred_pair(source, elements=None, steps=3):
    """X and dY [256, .] after two steps of drift, each as residual and centre by the recipe's centre in force."""
    rng, found = np.random.default_rng(8), []
    for columns in (6, 4):
        options = {"axis": CenterAxis.CHANNEL, "source": source, "elements": elements}
        if source is CenterSource.CURRENT:
            options["scale_source"] = ScaleSource.CURRENT
        recipe = CentredDelayedScaling(fmt=E2M1FN, **options)
        live = recipe.initial(OWNER)
        for n in range(steps):
            x = (rng.standard_normal((256, columns)) + 4 + n).astype(np.float32)
            snapshot, codes, _, live = step(recipe, live, x, n)
        found.append((x, snapshot, codes))
    return found


@pytest.mark.parametrize("source", [CenterSource.LAST, CenterSource.EMA], ids=lambda s: s.name)
def test_with_a_stale_or_running_mean_the_cross_terms_are_part_of_the_gradient(source):
    (x, at_x, _), (dy, at_dy, _) = centred_pair(source)
    r, e = x - at_x.center, dy - at_dy.center
    where = {"center": at_x.center, "axis": "channel", "grad_center": at_dy.center}
    terms = weight_gradient_terms(r, e, **where)
    decoded = at_x.center + r, at_dy.center + e
    dense = matmul(np.ascontiguousarray(decoded[0].T), decoded[1]).astype(np.float64)
    held = bound(terms, *decoded)
    assert (np.abs(centred_weight_gradient(r, e, **where) - dense) <= held).all()
    # without them dW is wrong by N (mean - c) d^T + N c (mean of dY - d)^T, and that is no rounding
    left_out = terms._replace(residual_sums=None, center_products=np.zeros_like(terms.center_products)).sum()
    drift_x = x.astype(np.float64).mean(axis=0) - at_x.center[0]
    drift_dy = dy.astype(np.float64).mean(axis=0) - at_dy.center[0]
    missing = 256 * (np.outer(drift_x, at_dy.center[0]) + np.outer(at_x.center[0], drift_dy))
    assert (np.abs(dense - left_out - missing) <= 2 * held).all()
    assert (np.abs(missing) > 1000 * held).all()


def test_with_the_means_of_the_same_tensors_the_cross_terms_are_rounding():
    """|sum of x - c| <= N u (|c| + max |r|): the mean is rounded once, and so is every residual."""
    (x, at_x, _), (dy, at_dy, _) = centred_pair(CenterSource.CURRENT)
    assert same_bits(mean_of(NUMBA.observe(x, None, lead=0, mean_axes=(0,)).sums), at_x.center)
    r, e = x - at_x.center, dy - at_dy.center
    terms = weight_gradient_terms(r, e, center=at_x.center, axis="channel", grad_center=at_dy.center)
    magnitude = 1.01 * 256 * U
    held_x = magnitude * (np.abs(at_x.center[0]) + np.abs(r).max(axis=0))
    held_dy = magnitude * (np.abs(at_dy.center[0]) + np.abs(e).max(axis=0))
    assert (np.abs(terms.residual_sums) <= np.outer(held_x, np.abs(at_dy.center[0]))).all()
    assert (np.abs(terms.center_products) <= np.outer(np.abs(at_x.center[0]), held_dy)).all()


def test_a_quantised_residual_needs_the_cross_terms_even_about_the_current_mean():
    (_, at_x, x_codes), (_, at_dy, dy_codes) = centred_pair(CenterSource.CURRENT)
    decoded = [decode_for_consumer(codes, op=OpId(2), backend=NUMBA) for codes in (x_codes, dy_codes)]
    r, e = (decode_for_consumer(plain_of(codes), op=OpId(2), backend=NUMBA) for codes in (x_codes, dy_codes))
    terms = weight_gradient_terms(r, e, center=at_x.center, axis="channel", grad_center=at_dy.center)
    dense = matmul(np.ascontiguousarray(decoded[0].T), decoded[1]).astype(np.float64)
    held = bound(terms, *decoded)
    assert (np.abs(terms.sum() - dense) <= held).all()
    left_out = terms._replace(residual_sums=None, center_products=np.zeros_like(terms.center_products)).sum()
    assert (np.abs(left_out - dense) > 10 * held).any()


def plain_of(tensor):
    """The same codes without their centre: what decodes is the residual."""
    return replace(tensor, snapshot=replace(tensor.snapshot, center=None))


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": "row"}, "centre axis 'row' is unknown; known: tensor, channel, token, block"),
        ({"axis": "block"}, "centre axis 'block' with block 0"),
        ({"block": 2}, "centre axis 'channel' with block 2"),
        ({"center": np.zeros((1, K))}, "the centre is float64"),
        ({"center": np.zeros(K, np.float32)}, r"the centre is float32\[5\]"),
        (
            {"center": np.zeros((T, K), np.float32)},
            r"centre \[3, 5\] of a residual \[3, 5\]: a channel centre ends in ",
        ),
        ({"center": np.zeros((1, 4), np.float32)}, r"a channel centre ends in \[1, 5\]"),
        ({"axis": "token", "center": np.zeros((2, 1), np.float32)}, r"a token centre ends in \[3, 1\]"),
        ({"axis": "tensor", "center": np.zeros((1, 5), np.float32)}, r"a tensor centre ends in \[1, 1\]"),
        (
            {"axis": "block", "block": 2, "center": np.zeros((T, 2), np.float32)},
            r"a block centre ends in \[3, 3\]",
        ),
    ],
)
def test_a_centre_that_does_not_fit_is_refused(change, message):
    where = {"center": np.zeros((1, K), np.float32), "axis": "channel"} | change
    r = np.zeros((T, K), np.float32)
    for act in (centred_matmul, centred_matmul_oracle):
        with pytest.raises(UsageError, match=message):
            act(r, np.zeros((K, N), np.float32), **where)
    for act in (centred_weight_gradient, centred_weight_gradient_oracle):
        with pytest.raises(UsageError, match=message):
            act(r, np.zeros((T, N), np.float32), **where)


def test_a_gradient_centre_of_tokens_is_refused():
    r, e = np.zeros((T, K), np.float32), np.zeros((T, N), np.float32)
    with pytest.raises(UsageError, match=r"centre \[3, 1\] .*channel centre ends in \[1, 2\]"):
        centred_weight_gradient(
            r, e, center=np.zeros((1, K), np.float32), axis="channel", grad_center=np.zeros((T, 1), np.float32)
        )
