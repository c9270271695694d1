"""Exact products of scaled operands on a device: every recipe, one rounding of the whole, equal to the CPU's bits."""

from fractions import Fraction

import numpy as np
import pytest

import qsim
from cuda_kernels._place import HOST, Host
from cuda_kernels.exact import EXACT, SETTLE, Operand, exact_product, exact_product_summed
from qsim.gemm.exact import _round_oracle
from qsim.gemm.exact_scaled import exact_oracle, factors_of
from qsim.gemm.exact_scaled import exact_product as on_cpu
from qsim.gemm.products import accumulate
from qsim.gemm.scaled import element_values
from qsim.quant.products import _side
from tests.places import changed, launch, launch_at
from tests.unit.test_cuda_exact import NO_PROOF

pytestmark = pytest.mark.usefixtures("gpp")
E4M3, E5M2 = (element_values(qsim.FORMATS[name]).astype(np.float32) for name in ("float8_e4m3fn", "float8_e5m2"))
MIXED = [("e4m3", "nvfp4_te"), ("nvfp4_te", "mxfp8_rceil"), ("nvfp4_exact", "e5m2_row"), ("e4m3_1x128", "e4m3_128x128"),
         ("e5m2", "e4m3_col"), ("nvfp4_4over6", "nvfp4_torchao"), ("e2m1", "float8_e4m3fnuz"), ("mxfp4_even", "e3m2"),
         ("nvfp4_exact", "nvfp4_exact_16x16"), ("mxfp8_floor", "nvfp4_4over6")]  # fmt: skip


def normal(shape, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


def sides(names, a, b):
    """The operands of a [M, K] and b [K, N] as the CPU takes them."""
    left, right = qsim.quantize(a, names[0]), qsim.quantize(b, names[1], axis=0)
    return _side(left, "a", -1).operand, _side(right, "b", 0).operand


def taken(a, b, *, factors=True):
    """The same operands as the kernel takes them, and the divisor."""
    row, column, divisor = factors_of(a, b) if factors else (a.row, b.row, 1.0)
    made = []
    for x, own in ((a, row), (b, column)):
        block = None if x.block is None else x.block.astype(np.float32)
        assert block is None or np.array_equal(block, x.block, equal_nan=True)
        values = element_values(x.fmt).astype(np.float32)
        made.append(Operand(x.codes, values, block, x.extent, own if factors else None))
    return (*made, divisor)


def product(place, a, b):
    left, right, divisor = taken(a, b)
    return launch_at(place, exact_product, left, right, divisor=divisor)


def per_block(place, a, b, width):
    return launch_at(place, exact_product, *taken(a, b, factors=False)[:2], per_block=width)


def assert_same(expected, *results):
    for result in results:
        assert expected.shape == result.shape
        assert [hex(v) for v in expected.view(np.uint32).flat] == [hex(v) for v in result.view(np.uint32).flat]


@pytest.fixture(scope="module")
def settling():
    """Where no output has a proof: all are summed again."""
    return changed((EXACT, SETTLE), *NO_PROOF)


# ---- recipes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(qsim.SCALE_RECIPES))
def test_every_recipe_has_the_bits_of_the_cpu(settling, name):
    x, w = normal((3, 40), 1, 2.0), normal((40, 5), 2)
    with_special = x.copy()
    with_special[0, 0], with_special[1, 33], with_special[2] = np.nan, np.inf, 0
    tiny = normal((3, 40), 5) * np.float32(1e-30), normal((40, 5), 6) * np.float32(1e-12)
    for a, b in ((x, w), (with_special, w), tiny):
        operands = sides((name, name), a, b)
        expected = on_cpu(*operands)[0]
        assert_same(expected, exact_oracle(*operands), product(None, *operands), product(settling, *operands))
        blocks = accumulate(*operands, "exact_per_block").acc
        width = 40 if operands[0].block is None else operands[0].extent[1]
        assert_same(blocks, per_block(None, *operands, width), per_block(settling, *operands, width))


def test_there_are_73_recipes():
    assert 73 == len(qsim.SCALE_RECIPES)


@pytest.mark.parametrize("names", MIXED)
def test_two_recipes_in_one_product(settling, names):
    operands = sides(names, normal((19, 150), 1), normal((150, 18), 2))  # tails of blocks of 16, 32, 128 k and 16 rows
    expected = on_cpu(*operands)[0]
    assert_same(expected, product(None, *operands), product(settling, *operands))
    corner = (slice(0, 3), slice(15, 18))
    assert_same(exact_oracle(*operands)[corner], product(None, *operands)[corner])


@pytest.mark.parametrize(("names", "width", "matters"), [
    (("nvfp4_te", "nvfp4_te"), 16, False), (("mxfp4_rceil", "mxfp8_floor"), 32, False), (("e5m2", "e5m2"), 300, False),
    (("e4m3_1x128", "e4m3_128x128"), 128, True), (("nvfp4_exact", "mxfp8_floor"), 16, True),
    (("e5m2", "nvfp4_te"), 16, True),
])  # fmt: skip
def test_partials_of_blocks_are_added_in_ascending_k(settling, names, width, matters):
    operands = sides(names, normal((5, 300), 1, 2.0), normal((300, 3), 2, 2.0))
    expected = accumulate(*operands, "exact_per_block").acc
    assert_same(expected, per_block(None, *operands, width), per_block(settling, *operands, width))
    assert (expected != on_cpu(*operands, factors=False)[0]).any() == matters


def test_an_infinite_partial_and_its_opposite_are_nan(settling):
    codes = qsim.encode(np.float32([[np.inf, 1, -np.inf, 2], [1, 2, 3, 4], [1, 2, np.inf, 0]]), "e5m2", overflow="ieee")
    ones = np.full((1, 4), 0x3C, np.uint8)
    left, right = Operand(codes, E5M2), Operand(ones, E5M2)
    for place in (None, settling):
        got = launch_at(place, exact_product, left, right, per_block=2)
        assert [0x7FC00000, 0x41200000, 0x7F800000] == got.view(np.uint32)[:, 0].tolist()


# ---- numbers of the test's own, against rationals ------------------------------------------------------------------


def rational(a, b, divisor):
    """The definition."""
    rows = []
    for x in (a, b):
        v = x.values.astype(np.float64)[x.codes]
        if x.block is not None:
            scales = np.repeat(np.repeat(x.block.astype(np.float64), x.extent[0], axis=0), x.extent[1], axis=1)
            v = v * scales[: v.shape[0], : v.shape[1]]
        factors = np.ones(v.shape[0]) if x.row is None else x.row
        pairs = zip(v.tolist(), factors.tolist(), strict=True)
        rows.append([([Fraction(e) for e in own], Fraction(factor)) for own, factor in pairs])
    out = np.empty((len(rows[0]), len(rows[1])), np.float32)
    for (i, (x, f)), (j, (y, g)) in ((m, n) for m in enumerate(rows[0]) for n in enumerate(rows[1])):
        total = sum((p * q for p, q in zip(x, y, strict=True)), Fraction(0))
        out[i, j] = _round_oracle(total * f * g / Fraction(divisor))
    return out


def anything(rng, shape):
    x = rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(0))


@pytest.mark.parametrize("divisor", [1, 3, 21, 441, 2**51 + 1, 2**53 - 1])
def test_any_finite_numbers_have_their_rational_result(settling, divisor):
    """Values, scales and pairs of row factors over all of float32: sums of 1,100 bits, results beyond either end."""
    rng = np.random.default_rng(divisor % 1000)
    for round_ in range(4):
        draw = anything if round_ % 2 else lambda g, shape: normal(shape, g.integers(99), 5.0)
        operands = [
            Operand(rng.integers(0, 256, (rows, 11), dtype=np.uint8), draw(rng, 256), draw(rng, (-(-rows // 2), 3)),
                    (2, 4), None if round_ == 2 else draw(rng, rows).astype(np.float64) * draw(rng, rows))
            for rows in (7, 6)
        ]  # fmt: skip
        expected = rational(*operands, divisor)
        got = [launch_at(place, exact_product, *operands, divisor=divisor) for place in (None, settling)]
        assert_same(expected, *got)


def values_of(*rows):
    """float32 numbers as codes with their own table: up to 256 of them."""
    table = np.zeros(256, np.float32)
    numbers = np.unique(np.float32(rows))
    table[: numbers.size] = numbers
    return np.searchsorted(numbers, np.float32(rows)).astype(np.uint8), table


def of(rows, row=None):
    return Operand(*values_of(*rows), row=None if row is None else np.float64(row))


def test_ties_that_factors_make(settling):
    tie = 2.0**24 + 1  # of float32
    beside = 2.0**-60
    a = of([[2.0**24, 1, 0], [2.0**24, 3, 0], [2.0**24, 1, beside], [2.0**24, 1, -beside]], [1, 1, 1, 1])
    ones = of([[1.0, 1.0, 1.0]], [1])
    for factor, divisor in ((1.0, 1), (2.0**-30, 1), (3.0, 3), (21.0, 21), (441.0, 441), (-7.0, 7), (2.0**-160, 1)):
        b = ones._replace(row=np.float64([factor]))
        expected = rational(a, b, divisor)
        for place in (None, settling):
            assert_same(expected, launch_at(place, exact_product, a, b, divisor=divisor))
    assert [2.0**24, 2.0**24 + 4, 2.0**24 + 2, 2.0**24] == launch(exact_product, a, ones)[:, 0].tolist()
    assert (2.0**24 + 1) % 97 == 0
    b = of([[97.0]], [1])
    for place in (None, settling):
        assert 2.0**24 == launch_at(place, exact_product, of([[1.0]], [tie / 97]), b)[0, 0]
        assert 2.0**24 == launch_at(place, exact_product, of([[441.0]], [tie]), of([[1.0]]), divisor=441)[0, 0]


@pytest.mark.parametrize("divisor", [21, 441])
@pytest.mark.parametrize(("ties", "power"), [((2**24 + 1, 2**24 + 3, 2**25 - 1), 0), ((1, 3, 5, 2**22 + 1), -150)])
def test_a_quotient_on_or_beside_a_tie(settling, divisor, ties, power):
    """m * divisor / divisor is the tie m; one unit of the last product beside it is none. Subnormal ties too."""
    near = np.concatenate([np.float64(ties) * divisor + step for step in (-1, 0, 1)])
    high = np.float32(near // 4096 * 4096)
    low = np.float32(near - high)
    assert (high.astype(np.float64) + low == near).all()
    a, b = of(np.stack([high, low], axis=1), np.full(near.size, 2.0**power)), of([[1.0, 1.0]])
    expected = rational(a, b, divisor)
    below, at, above = expected.astype(np.float64).reshape(3, -1) / 2.0**power
    assert (below < at).any()
    assert (at < above).any()
    for place in (None, settling):
        assert_same(expected, launch_at(place, exact_product, a, b, divisor=divisor))


def test_halves_that_are_rounded_twice_are_wrong_and_here_right(settling):
    """HH = 2^24 + 1 and M = 2^-40: 16777218, where float64 keeps M out of sight of the tie."""
    a, b = of([[2.0**12, 1.0, 2.0**-20], [2.0**12, 1.0, -(2.0**-20)]]), of([[2.0**12, 1.0, 2.0**-20]])
    for place in (None, settling):
        assert [16777218.0, 16777216.0] == launch_at(place, exact_product, a, b)[:, 0].tolist()


def wild(rows, depth, seed):
    """Every finite E5M2 code, equally likely: more binades than float64 has bits for."""
    magnitude, sign = np.random.default_rng(seed).integers(0, [[[0x7C]], [[2]]], (2, rows, depth))
    return (magnitude | sign << 7).astype(np.uint8)


def test_sums_of_e5m2_that_no_float64_holds(settling):
    a, b = wild(6, 200, 1), wild(5, 200, 2)
    a = np.concatenate([a, a ^ 0x80, np.full((6, 1), 0x01, np.uint8)], axis=1)
    b = np.concatenate([b, b, np.full((5, 1), 0x01, np.uint8)], axis=1)
    left, right = Operand(a, E5M2), Operand(b, E5M2)
    summed = launch(exact_product_summed, left, right)
    assert summed.open.all()
    assert (np.float32(2.0**-32) == summed.out).all()
    assert_same(rational(left, right, 1), summed.out, exact_product(settling, left, right))
    a[:, 200:400] = np.roll(a[:, 200:400], 1, axis=1)
    assert_same(rational(left, right, 1), *(launch_at(place, exact_product, left, right) for place in (None, settling)))


def test_factors_that_are_zero_infinite_or_nan(settling):
    inf, nan = float("inf"), float("nan")
    rows = np.float64([1.0, 0.0, inf, nan, -2.0, -inf, 2.0**-140])
    table = np.float32([0, 1, -1, inf, nan] + [0] * 251)
    a = Operand(np.ones((7, 2), np.uint8), table, row=rows)
    b = Operand(np.uint8([[1, 1], [2, 2], [1, 2], [0, 0], [3, 1], [4, 1], [3, 0]]), table, row=np.ones(7))
    sums = np.float32([2, -2, 0, 0, inf, nan, inf])
    with np.errstate(all="ignore"):
        expected = (rows[:, None] * sums.astype(np.float64)).astype(np.float32)
    expected[:, 2:4] = 0  # an exact 0 is +0
    expected[1, :2] = 0
    expected = np.where(np.isnan(expected), np.float32(nan), expected)
    for place in (None, settling):
        assert_same(expected, launch_at(place, exact_product, a, b), launch_at(place, exact_product, b, a).T)


def test_an_infinite_descale_is_as_on_the_cpu(settling):
    """1e-45 is a scale whose descale is no float32: the CPU makes Inf of it, and +0 of an exact 0."""
    codes = np.uint8([[0x38, 0x38], [0x38, 0xB8], [0xB8, 0x00]])
    q = qsim.from_codes(codes, "e4m3_row", scales=np.float32([[1e-45]] * 3))
    w = qsim.quantize(np.ones((2, 2), np.float32), "e4m3", axis=0)
    operands = _side(q, "a", -1).operand, _side(w, "b", 0).operand
    assert np.isinf(operands[0].row).all()
    for place in (None, settling):
        assert_same(on_cpu(*operands)[0], product(place, *operands))


# ---- known public mistakes ------------------------------------------------------------------------------------------


def ones(rows, depth, block=None, extent=(1, 1), row=None):
    scales, factors = None if block is None else np.float32(block), None if row is None else np.float64(row)
    return Operand(np.full((rows, depth), 0x38, np.uint8), E4M3, scales, extent, factors)


def test_mistakes_2_3_and_12_each_block_has_its_own_scale():
    d = launch(exact_product, ones(256, 128, [[2], [4]], (128, 128)), ones(1, 128))
    assert (256.0, 512.0) == (d[0, 0], d[128, 0])
    scales = 2.0 ** np.arange(9)
    d = launch(exact_product, ones(1088, 128, scales[:, None], (128, 128)), ones(1, 128))
    assert (d[:, 0] == 128 * np.repeat(scales, 128)[:1088]).all()
    assert 384.0 == launch(exact_product, ones(1, 256, [[1, 2]], (1, 128)), ones(1, 256))[0, 0]
    assert 384.0 == launch(exact_product, ones(1, 256, [[1, 2]], (1, 128)), ones(1, 256), per_block=128)[0, 0]


def test_mistakes_4_and_5_strides_and_axes():
    room = qsim.encode(np.float32([[1, 2, 9, 9], [3, 4, 9, 9]]), "e4m3")
    assert [[3.0], [7.0]] == launch(exact_product, Operand(room[:, :2], E4M3), ones(1, 2)).tolist()
    assert [[7.0], [3.0]] == launch(exact_product, Operand(room[::-1, 1::-1], E4M3), ones(1, 2)).tolist()
    assert [[1.0, 3.0]] == launch(exact_product, ones(1, 1), Operand(room.T[:1].T, E4M3)).tolist()
    assert (2, 5) == launch(exact_product, ones(2, 7), ones(5, 7)).shape


def test_mistakes_6_to_10_scales_are_their_values():
    assert 32.0 == launch(exact_product, ones(1, 32, [[1]], (1, 32)), ones(1, 32, [[1]], (1, 32)))[0, 0]
    ends = ones(1, 32, [[2.0**-127]], (1, 32)), ones(1, 32, [[2.0**127]], (1, 32))
    assert 32.0 == launch(exact_product, *ends)[0, 0]
    a = ones(1, 33, [[1, 1]], (1, 32))
    room = np.full((1, 64), 0x7F, np.uint8)  # NaN behind the end
    room[:, :33] = 0x38
    assert 33.0 == launch(exact_product, a._replace(codes=room[:, :33]), ones(1, 33))[0, 0]
    point = float(np.float32(0.3))
    assert np.float32(128 * point) == launch(exact_product, ones(1, 128, [[0.3]], (1, 128)), ones(1, 128))[0, 0]


def test_mistakes_13_and_14_zeros_and_long_sums():
    zero = Operand(np.zeros((1, 40), np.uint8), E4M3, row=np.float64([3.4e38]))
    assert 0 == launch(exact_product, ones(2, 40, row=[1e-30, 3e38]), zero).view(np.uint32).any()
    a, b = (np.full((1, 8192), int(qsim.encode(np.float32(v), "e5m2")), np.uint8) for v in (1 / 32, 3))
    assert 768.0 == launch(exact_product, Operand(a, E5M2), Operand(b, E5M2))[0, 0]


# ---- grids, refusals -------------------------------------------------------------------------------------------------


def test_no_grid_changes_a_bit():
    operands = sides(("nvfp4_exact", "e4m3_1x128"), normal((70, 40), 1), normal((40, 130), 2))
    expected = on_cpu(*operands)[0]
    for place in (Host(blocks=(1, 1)), Host(blocks=(5, 3), threads=32)):
        assert_same(expected, product(place, *operands))


def test_wrong_arguments_are_named():
    a = ones(2, 4)
    with pytest.raises(TypeError, match=r"codes of b is numpy\.ndarray of int8"):
        exact_product(HOST, a, a._replace(codes=a.codes.astype(np.int8)))
    with pytest.raises(TypeError, match="row of a is"):
        exact_product(HOST, a._replace(row=np.ones(2, np.float32)), a)
    for wrong, words in (({"values": E4M3[:16]}, "values"), ({"extent": (0, 1)}, "at least one row"),
                         ({"block": np.ones((2, 3), np.float32), "extent": (1, 2)}, r"block \(2, 3\) of a"),
                         ({"row": np.ones(3)}, r"row \(3,\) of a"), ({"codes": a.codes[:, 1:]}, "in K")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            exact_product(HOST, a._replace(**wrong), a)
    for divisor in (0, 2, 1.5, -3, float("nan"), 2.0**53 + 2):
        with pytest.raises(ValueError, match="an odd integer"):
            exact_product(HOST, a, a, divisor=divisor)
    for options in ({"per_block": 0}, {"per_block": 2, "divisor": 3}):
        with pytest.raises(ValueError, match="per_block"):
            exact_product(HOST, a, a, **options)
    with pytest.raises(ValueError, match="per_block"):
        exact_product(HOST, a._replace(row=np.ones(2)), a, per_block=2)
    assert not exact_product(HOST, ones(2, 0), ones(3, 0), per_block=4).view(np.uint32).any()
    assert (0, 3) == exact_product(HOST, ones(0, 4), ones(3, 4)).shape
