"""The fast scaled casts against the oracle: every recipe, every field, bit by bit; threads change nothing."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from qsim.codec.packing import unpack
from qsim.codec.scaled import (
    SCALE_RECIPES,
    Block,
    BlockError,
    Float32Scale,
    ScaleOrder,
    ScaleRecipe,
    TwoLevelScale,
    dequantize_oracle,
    quantize_oracle,
)
from qsim.codec.scaled.blocks import _odd_quotient
from qsim.codec.scaled.fast import amax_of, dequantize_matrix, quantize_matrix
from qsim.codec.tables import decode_table
from qsim.codec.threads import threads
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import FormatError
from qsim.formats import E2M1FN, E4M3FN, POLICIES
from qsim.philox import RandomStream

OCP = POLICIES["ocp"]
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)
EVERY = pytest.mark.parametrize("recipe", SCALE_RECIPES.values(), ids=SCALE_RECIPES)
FEW = ("float8_e4m3fn", "float8_e5m2_col", "float8_e4m3fnuz_row", "float4_e2m1fn_128x128", "mxfp4_even", "mxfp8_rceil",
       "nvfp4_exact", "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6", "nvfp4_exact_16x16")  # fmt: skip
SOME = pytest.mark.parametrize("recipe", [SCALE_RECIPES[name] for name in FEW], ids=FEW)

BLOCKS_OF_COLUMNS = {name: recipe for name, recipe in SCALE_RECIPES.items() if recipe.block.cols}
BY_COLUMNS = pytest.mark.parametrize("recipe", BLOCKS_OF_COLUMNS.values(), ids=BLOCKS_OF_COLUMNS)


def spread(shape, seed=1):
    """Numbers over many binades."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))).astype(np.float32)


def hostile():
    """NaN, Inf, zeros of both signs, subnormals and huge numbers; a row of zeros; odd tails."""
    x = spread((3, 50))
    x[0, :20] = 0
    x[1, :12] = [np.nan, 0, -0.0, 1e-45, -3e38, 1, 2, 3, 4, 5, 6, 7]
    x[2, 33:37] = [NEGATIVE_NAN, -np.inf, np.inf, 1e-40]
    x[2, -1] = -np.inf
    return x


def tiny():
    """Down to the subnormals, where 1 / scale and 1 / pt are Inf or subnormal too."""
    return (spread((2, 40)) * np.float32(1e-43)).astype(np.float32)


def zeros():
    x = np.where(spread((2, 33)) > 0, np.float32(0), np.float32(-0.0)).astype(np.float32)
    return x


def one_huge():
    x = zeros()
    x[-1, -1], x[0, 0], x[0, 5] = 3e38, 1, 1e-44
    return x


MATRICES = {
    "ordinary": lambda: spread((18, 18)),
    "hostile": hostile,
    "tiny": tiny,
    "zeros": zeros,
    "one huge": one_huge,
    "all NaN": lambda: np.full((2, 17), NEGATIVE_NAN),
    "no columns": lambda: np.zeros((3, 0), np.float32),
    "no rows": lambda: np.zeros((0, 4), np.float32),
}


def assert_same(expected, actual):
    for field in dataclasses.fields(expected):
        a, b = getattr(expected, field.name), getattr(actual, field.name)
        if field.name == "counts":
            assert a == b
        elif a is None:
            assert b is None
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert a.tobytes() == np.ascontiguousarray(b).tobytes(), field.name


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
@SOME
def test_codes_scales_counts_and_decode_equal_the_oracle(recipe, matrix):
    x = matrix()
    expected = quantize_oracle(x, recipe)
    assert_same(expected, quantize_matrix(x, recipe, policy=OCP))
    assert_bits_equal(dequantize_oracle(expected, recipe), dequantize_matrix(expected, recipe))


@EVERY
def test_every_recipe_equals_the_oracle_on_a_hostile_matrix(recipe):
    x = hostile()
    expected = quantize_oracle(x, recipe)
    assert_same(expected, quantize_matrix(x, recipe, policy=OCP))
    assert_bits_equal(dequantize_oracle(expected, recipe), dequantize_matrix(expected, recipe))


@pytest.mark.parametrize("policy", ["cuda", "ml_dtypes", "torch"])
@pytest.mark.parametrize("name", ["float8_e5m2", "mxfp8_floor", "nvfp4_te"])
def test_the_policy_of_the_elements_is_the_oracles(name, policy):
    expected = quantize_oracle(hostile(), name, policy=policy)
    assert_same(expected, quantize_matrix(hostile(), SCALE_RECIPES[name], policy=POLICIES[policy]))


@pytest.mark.parametrize("rounding", ["nearest_away", "toward_zero", "up", "down", "odd"])
@SOME
def test_every_rounding_equals_the_oracle(recipe, rounding):
    policy = OCP.with_choices(rounding=rounding)
    x = spread((3, 35))
    assert_same(quantize_oracle(x, recipe, policy=policy), quantize_matrix(x, recipe, policy=policy))


@SOME
def test_stochastic_rounding_equals_the_oracle_word_by_word(recipe):
    policy, stream = OCP.with_choices(rounding="stochastic"), RandomStream(seed=9, step=3, layer=1)
    for x in (hostile(), spread((3, 35))):
        expected = quantize_oracle(x, recipe, policy=policy, stream=stream)
        assert_same(expected, quantize_matrix(x, recipe, policy=policy, stream=stream))
    other = quantize_matrix(x, recipe, policy=policy, stream=RandomStream(seed=9, step=4, layer=1))
    assert not np.array_equal(expected.codes, other.codes)


@SOME
def test_threads_and_the_length_of_a_row_change_no_bit(recipe):
    """Large enough for several threads; one long row is cut along its columns, several are cut between."""
    for shape in ((1, 1 << 20), (260, 4099)):
        x = spread(shape, seed=4)
        with threads(1):
            alone = quantize_matrix(x, recipe, policy=OCP)
            back = dequantize_matrix(alone, recipe)
        for count in (2, 3):
            with threads(count):
                assert_same(alone, quantize_matrix(x, recipe, policy=OCP))
                assert_bits_equal(back, dequantize_matrix(alone, recipe))


@BY_COLUMNS
@pytest.mark.parametrize("width", [4096, 6160])
def test_a_row_is_as_its_blocks_are_alone(recipe, width):
    """Rows of more than one part, a NaN, an Inf and a zero block in one of them: each column range is its own."""
    x = spread((2, width), seed=6)
    x[0, 2100], x[1, 4000], x[1, 512:640] = np.nan, -np.inf, 0
    step = 128  # a multiple of every recipe's block
    whole = quantize_matrix(x, recipe, policy=OCP, tensor_amax=amax_of(x))
    counts = np.zeros(5, np.int64)
    for at in range(0, width, step):
        part = quantize_matrix(np.ascontiguousarray(x[:, at : at + step]), recipe, policy=OCP, tensor_amax=amax_of(x))
        assert part.codes.tobytes() == whole.codes[:, at : at + step].tobytes()
        counts += np.array(part.counts)
    assert counts.tolist() == list(whole.counts)


@EVERY
def test_ties_go_to_the_even_code_and_half_a_unit_is_flushed(recipe):
    """Every scale is 1 (the largest number leads every 16), so that the midpoints of the format are met exactly."""
    values = np.unique(np.abs(decode_table(recipe.fmt)[: recipe.fmt.code_count]))
    values = values[np.isfinite(values)].astype(np.float64)
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    ties = np.concatenate([ties, -ties])
    ties = np.resize(ties, -(-ties.size // 15) * 15).reshape(-1, 15)
    x = np.concatenate([np.full((len(ties), 1), values[-1], np.float32), ties], axis=1).reshape(1, -1)
    x = np.repeat(x, 3, axis=0)
    x[1] *= -1
    x[2, ::16] += (values[-1] - values[-2]) / 2  # the tie beyond the largest number: saturated where a scale clips
    assert_same(quantize_oracle(x, recipe), quantize_matrix(x, recipe, policy=OCP))


CENTERS = {"one": (1, 1), "channel": (1, 450), "token": (5, 1), "element": (5, 450)}


@EVERY
@pytest.mark.parametrize("shape", CENTERS.values(), ids=CENTERS)
def test_a_centre_is_subtracted_first(recipe, shape):
    x = np.concatenate([hostile()] * 9, axis=1)
    x = np.concatenate([x, spread((2, 450))])
    x[4, 440] = -np.inf
    center = spread(shape, seed=8)
    expected = quantize_matrix((x - center).astype(np.float32), recipe, policy=OCP, packed=recipe.fmt.bits == 4)
    actual = quantize_matrix(x, recipe, policy=OCP, packed=recipe.fmt.bits == 4, center=center)
    assert_same(expected, actual)


@pytest.mark.parametrize("rounding", ["up", "odd"])
def test_a_centre_is_subtracted_in_every_rounding(rounding):
    x, center, policy = spread((5, 40)), spread((1, 40), seed=8), OCP.with_choices(rounding=rounding)
    expected = quantize_matrix((x - center).astype(np.float32), SCALE_RECIPES["nvfp4_te"], policy=policy)
    assert_same(expected, quantize_matrix(x, SCALE_RECIPES["nvfp4_te"], policy=policy, center=center))


@SOME
@pytest.mark.parametrize("shape", [(1, 1), (1, 4099), (260, 1)])
def test_threads_change_no_bit_of_a_centred_cast(recipe, shape):
    x, center = spread((260, 4099), seed=4), spread(shape, seed=8)
    with threads(1):
        alone = quantize_matrix(x, recipe, policy=OCP, center=center)
    with threads(3):
        assert_same(alone, quantize_matrix(x, recipe, policy=OCP, center=center))


@pytest.mark.parametrize("order", ScaleOrder)
@pytest.mark.parametrize("block", [(1, 16), (3, 7), (16, 16), (0, 1), (1, 40)])
def test_two_levels_on_blocks_of_any_shape_equal_the_oracle(order, block):
    error = BlockError.SQUARED if order is ScaleOrder.FOUR_OVER_SIX else None
    recipe = ScaleRecipe(name="mine", fmt=E2M1FN, block=Block(*block), scale=TwoLevelScale(order=order, error=error))
    for x in (spread((7, 53)), hostile()):
        assert_same(quantize_oracle(x, recipe), quantize_matrix(x, recipe, policy=OCP))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 127, 129, 528])
@pytest.mark.parametrize("name", ["float4_e2m1fn", "float4_e2m1fn_col", "mxfp4_rceil", "nvfp4_te", "nvfp4_exact"])
def test_packed_codes_are_the_codes_two_a_byte(name, length):
    x = spread((3, length))
    plain = quantize_matrix(x, SCALE_RECIPES[name], policy=OCP)
    packed = quantize_matrix(x, SCALE_RECIPES[name], policy=OCP, packed=True)
    assert (3, (length + 1) // 2) == packed.codes.shape
    assert plain.codes.tobytes() == unpack(packed.codes, length).tobytes()
    if length % 2:
        assert (packed.codes[:, -1] >> 4 == 0).all()


def test_blocks_of_an_odd_width_pack_too():
    recipe = ScaleRecipe(name="fives", fmt=E2M1FN, block=Block(1, 5), scale=Float32Scale())
    x = spread((4, 23))
    plain = quantize_matrix(x, recipe, policy=OCP)
    assert_same(quantize_oracle(x, recipe), plain)
    packed = quantize_matrix(x, recipe, policy=OCP, packed=True)
    assert plain.codes.tobytes() == unpack(packed.codes, 23).tobytes()


@pytest.mark.parametrize("block", [(1, 48), (1, 256), (1, 300), (3, 7), (2, 1), (5, 0), (0, 16)])
def test_blocks_of_any_shape_equal_the_oracle(block):
    recipe = ScaleRecipe(name="mine", fmt=E4M3FN, block=Block(*block), scale=Float32Scale())
    x = spread((7, 310))
    assert_same(quantize_oracle(x, recipe), quantize_matrix(x, recipe, policy=OCP))


@pytest.mark.parametrize("side", [2**40, 2**62, 2**63 - 1, 2**63, 2**200])
@pytest.mark.parametrize("scale", [Float32Scale(), TwoLevelScale(order=ScaleOrder.EXACT)], ids=["float32", "two-level"])
def test_a_block_beyond_the_matrix_is_the_matrix_and_takes_no_more_memory(side, scale):
    x, policy = spread((3, 33)), OCP.with_choices(rounding="up")  # what is not to nearest spreads the scales
    for block, whole in (((1, side), (1, 0)), ((side, 16), (0, 16)), ((side, side), (0, 0))):
        mine, known = (ScaleRecipe(name="mine", fmt=E2M1FN, block=Block(*b), scale=scale) for b in (block, whole))
        for chosen in (OCP, policy):
            expected = quantize_oracle(x, known, policy=chosen)
            assert_same(expected, quantize_oracle(x, mine, policy=chosen))
            assert_same(expected, quantize_matrix(x, mine, policy=chosen))
            assert_bits_equal(dequantize_oracle(expected, known), dequantize_matrix(expected, mine))
        packed = quantize_matrix(x, mine, policy=OCP, packed=True)
        assert unpack(packed.codes, 33).tobytes() == quantize_oracle(x, mine).codes.tobytes()


def test_without_counting_the_codes_are_the_same():
    for name in FEW:
        with_counts = quantize_matrix(hostile(), SCALE_RECIPES[name], policy=OCP)
        without = quantize_matrix(hostile(), SCALE_RECIPES[name], policy=OCP, counting=False)
        assert with_counts.codes.tobytes() == without.codes.tobytes()
        assert with_counts.scales.tobytes() == without.scales.tobytes()


def test_a_given_tensor_amax_takes_the_place_of_the_matrixs_own():
    x = spread((4, 32))
    own = quantize_matrix(x, SCALE_RECIPES["nvfp4_te"], policy=OCP)
    same = quantize_matrix(x, SCALE_RECIPES["nvfp4_te"], policy=OCP, tensor_amax=amax_of(x))
    assert_same(own, same)
    other = np.float32(2) * amax_of(x)
    actual = quantize_matrix(x, SCALE_RECIPES["nvfp4_te"], policy=OCP, tensor_amax=other)
    assert_same(quantize_oracle(x, "nvfp4_te", tensor_amax=other), actual)
    assert other == actual.tensor_scale


def test_an_exact_quotient_is_rounded_to_odd():
    """Exact, or the float64 with an odd last bit on the side of the quotient: held against fractions."""
    rng = np.random.default_rng(0)
    a = rng.integers(-(2**24), 2**24, 2000) * 2688.0 * 2.0 ** rng.integers(-140, 100, 2000)
    b = rng.integers(2**23, 2**24, 2000) * (rng.integers(1, 16, 2000) / 8) * 2.0 ** rng.integers(-100, 100, 2000)
    a[:300] = b[:300] * rng.integers(-7, 7, 300) / 4
    for x, y, q in zip(a, b, _odd_quotient(a, b), strict=True):
        exact = Fraction(float(x)) / Fraction(float(y))
        if Fraction(float(q)) != exact:
            assert 1 == int(q.view(np.int64)) & 1
            low, high = sorted(float(np.nextafter(q, end)) for end in (-np.inf, np.inf))
            assert Fraction(low) < exact < Fraction(high)


@pytest.mark.parametrize("rounding", ["nearest_even", "up"])
@pytest.mark.parametrize("name", ["nvfp4_exact", "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6"])
def test_a_tensor_amax_of_zero_is_the_oracles_too(name, rounding):
    policy, zero = OCP.with_choices(rounding=rounding), np.float32(0)
    expected = quantize_oracle(hostile(), name, policy=policy, tensor_amax=zero)
    actual = quantize_matrix(hostile(), SCALE_RECIPES[name], policy=policy, tensor_amax=zero)
    assert_same(expected, actual)


def test_amax_is_the_largest_finite_magnitude():
    assert 0.0 == amax_of(np.zeros((0, 3), np.float32))
    assert 3.0 == amax_of(np.array([[1, np.nan, -3, np.inf]], np.float32))


def test_a_refused_overflow_names_its_value_and_place():
    x = np.ones((2, 32), np.float32)
    x[1, 3] = np.inf
    policy = OCP.with_choices(overflow="raise")
    with pytest.raises(FormatError, match=r"\[1, 3\] is inf"):
        quantize_matrix(x, SCALE_RECIPES["mxfp8_rceil"], policy=policy)
