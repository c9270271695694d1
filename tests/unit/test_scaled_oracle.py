"""Every scale recipe as its oracle does it: right values, degenerate input, order of operations, counts."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from qsim.arrays import FLT_MAX
from qsim.codec.oracle import encode_scalar
from qsim.codec.scaled import (
    SCALE_RECIPES,
    Block,
    BlockCounts,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    TwoLevelScale,
    dequantize_oracle,
    get_scale_recipe,
    quantize_oracle,
)
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import FormatError, UsageError
from qsim.formats import get_policy
from qsim.philox import RandomStream

F = np.float32
NAN, INF = math.nan, math.inf
TWO_LEVEL = [name for name, recipe in SCALE_RECIPES.items() if isinstance(recipe.scale, TwoLevelScale)]
WHOLE_EXTENTS = [n for n, r in SCALE_RECIPES.items() if isinstance(r.scale, Float32Scale) and r.block.cols != 128]
WITHOUT_SIGN = [n for n in TWO_LEVEL if SCALE_RECIPES[n].scale.order is not ScaleOrder.TORCHAO]  # a scale can be 0


def cast(x, name):
    """The cast of ``x`` (a row where it is a list) and the matrix that it stands for."""
    scaled = quantize_oracle(np.atleast_2d(np.asarray(x, F)), name)
    return scaled, dequantize_oracle(scaled, name)


def blocks_of_16(*starts):
    """One row of blocks that begin as given and go on with zeros."""
    x = np.zeros((1, 16 * len(starts)), F)
    for block, values in enumerate(starts):
        x[0, 16 * block : 16 * block + len(values)] = values
    return x


# ---- float32 scales --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE_EXTENTS)
def test_float32_scales_equal_whole_array_arithmetic(name):
    """The same chain by numpy and ml_dtypes, per tensor, row and column."""
    x = np.random.default_rng(5).standard_normal((4, 9)).astype(F)
    axis = 1 if name.endswith("_row") else 0 if name.endswith("_col") else (0, 1)
    fmt = get_scale_recipe(name).fmt
    scale = F(fmt.max) / np.abs(x).max(axis=axis, keepdims=True)
    codes = (x * scale).astype(getattr(ml_dtypes, fmt.name))
    scaled, values = cast(x, name)
    assert_bits_equal(scale, scaled.scales)
    assert_codes_equal(codes.view(np.uint8), scaled.codes, fmt, inputs=x)
    assert_bits_equal(codes.astype(F) * (F(1) / scale), values)


@pytest.mark.parametrize("name", ["e4m3_128x128", "nvfp4_exact_16x16"])
def test_blocks_tile_the_matrix_from_the_top_left(name):
    """Blocks of 4 x 3 on 5 x 7: 448 in the tile of 1, and so on, whatever else is in a tile."""
    recipe = replace(get_scale_recipe(name), block=Block(4, 3))
    x = np.full((5, 7), 0.5, F)
    x[3, 2], x[0, 3], x[3, 6], x[4, 0], x[4, 5], x[4, 6] = 1, -2, 4, 8, -16, 32
    scales = quantize_oracle(x, recipe).scales
    if scales.dtype == F:
        assert [[448.0, 224.0, 112.0], [56.0, 28.0, 14.0]] == scales.tolist()
    else:
        assert [[0x56, 0x5E, 0x66], [0x6E, 0x76, 0x7E]] == scales.tolist()  # 14, 28, 56 ... 448


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_a_tiny_amax_gets_the_largest_float32_as_its_scale(fmt):
    scaled, values = cast([1e-38, 0.0], fmt)
    code, value = {"e4m3": (0x46, 3.5), "e5m2": (0x43, 3.5), "e2m1": (5, 3.0)}[fmt]
    assert ([[float(FLT_MAX)]], [[code, 0]]) == (scaled.scales.tolist(), scaled.codes.tolist())
    assert [[value * 2.0**-128, 0.0]] == values.tolist()
    assert float(FLT_MAX) == float(quantize_oracle(np.array([[1.3165538e-36]], F), "e4m3").scales[0, 0])
    assert float(FLT_MAX) > float(quantize_oracle(np.array([[1.3165544e-36]], F), "e4m3").scales[0, 0])


def test_nan_and_inf_set_a_float32_scale_to_1_and_go_by_the_policy():
    x = [[NAN, 5.0], [-INF, 5.0], [INF, 1000.0], [np.copysign(NAN, -1), 1.0]]
    scaled, values = cast(x, "e4m3_row")
    assert [[1.0]] * 4 == scaled.scales.tolist()
    assert [[0x7F, 0x4A], [0xFE, 0x4A], [0x7E, 0x7E], [0xFF, 0x38]] == scaled.codes.tolist()
    assert [5.0, 5.0, 448.0, 1.0] == values[:, 1].tolist()
    assert [0x7FC00000] * 2 == values[[0, 3], 0].view(np.uint32).tolist()
    assert BlockCounts(saturated=1, flushed=0, nan=2, inf=2, zero_scale=0) == scaled.counts
    codes = quantize_oracle(np.array(x, F), "e4m3_row", policy="cuda_nosat").codes.tolist()
    assert [[0x7F, 0x4A], [0xFF, 0x4A], [0x7F, 0x7F], [0x7F, 0x38]] == codes
    assert (1000.0, 5.0) == (float(scaled.amax), float(quantize_oracle(np.array(x[:2], F), "e5m2").amax))


def test_the_decode_of_the_largest_inputs_stays_finite():
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "float6_e2m3fn"):
        for k in range(8):
            x = np.array([[0x7F7FFFFF - k]], np.uint32).view(F)
            assert abs(float(cast(x, name)[1][0, 0]) / float(x[0, 0]) - 1) < 2.0**-22


# ---- two-level scales ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "amax", "x", "expected"),
    [  # (scale code, element code) under exact, te, torchao
        (140.0, 3.28125, 0.0, ((0x52, 0), (0x53, 0), (0x52, 0))),  # 10.5: a tie that two chains break
        (140.0, 125.0, 0.0, ((0x7C, 0), (0x7D, 0), (0x7D, 0))),  # 400
        (154.0, 13.0625, 0.0, ((0x62, 0), (0x62, 0), (0x61, 0))),  # 38
        (290.7014465332031, 9.40886402130127, 0.0, ((0x57, 0), (0x57, 0), (0x56, 0))),  # just above 14.5
        (172.0, 75.0, 21.5, ((0x74, 4), (0x74, 3), (0x74, 4))),  # y = 1.75
        (57.0, 57.0, 47.5, ((0x7E, 6), (0x7E, 6), (0x7E, 7))),  # y = 5
        (76.0, 76.0, 9.5, ((0x7E, 2), (0x7E, 1), (0x7E, 2))),  # y = 0.75
        (510.0, 38.0, -21.25, ((0x60, 14), (0x60, 14), (0x60, 13))),  # y = -3.5
        (45.0, 45.0, 18.75, ((0x7E, 4), (0x7E, 5), (0x7E, 5))),  # y = 2.5
    ],
)
def test_the_order_of_operations_decides_ties(g, amax, x, expected):
    matrix = blocks_of_16([g], [amax, x])
    for order, codes in zip(("exact", "te", "torchao"), expected, strict=True):
        scaled = quantize_oracle(matrix, f"nvfp4_{order}")
        assert codes == (int(scaled.scales[0, 1]), int(scaled.codes[0, 17])), order


@pytest.mark.parametrize(
    ("g", "amax", "code", "expected"),
    [  # float32 bits under exact, te, torchao, 4over6_448
        (12.0, 12.0, 7, (0x41400000, 0x41400001, 0x41400000, 0x41400000)),
        (240.0, 86.5, 6, (0x42649249, 0x4264924A, 0x4264924A, 0x42649249)),
        (412.0, 5.5, 7, (0x40B09249, 0x40B09249, 0x40B09248, 0x40B09249)),
        (1.756298303604126, 1.756298303604126 * 13 / 448, 7, (0x3D50BFA4, None, None, 0x3D50BFA5)),
        ((6 * 2**22 + 4) * 2.0**-149, (6 * 2**22 + 4) * 2.0**-149, 2, (0x00400001, None, None, None)),  # subnormal
    ],
)
def test_the_order_of_operations_decides_the_last_bit_of_a_decode(g, amax, code, expected):
    cast_of_g = quantize_oracle(blocks_of_16([g], [amax]), "nvfp4_exact")
    codes = np.full((1, 32), code, np.uint8)
    for order, bits in zip(("exact", "te", "torchao", "4over6_448"), expected, strict=True):
        if bits is not None:
            values = dequantize_oracle(replace(cast_of_g, codes=codes), f"nvfp4_{order}")
            assert bits == int(values[0, 16:17].view(np.uint32)[0]), order


@pytest.mark.parametrize("order", ["exact", "te"])
def test_a_block_scale_underflows_where_it_should(order):
    """In units of amax_t: 2.1798e-6 is half the least scale and goes to 0; 3.2697e-5 is the last subnormal's edge."""
    blocks = [[448.0 * 1024], [1.0], [1.0 + 2.0**-23], [15.0 - 2.0**-19], [15.0]]
    scaled, values = cast(blocks_of_16(*blocks), f"nvfp4_{order}")
    assert [[0x7E, 0, 1, 7, 8]] == scaled.scales.tolist()
    assert [0, 5, 7, 7] == scaled.codes[0, 16::16].tolist()
    assert [0.0, 1.0, 14.0, 16.0] == values[0, 16::16].tolist()
    assert BlockCounts(saturated=0, flushed=1, nan=0, inf=0, zero_scale=1) == scaled.counts


@pytest.mark.parametrize("name", ["nvfp4_exact", "nvfp4_te", "nvfp4_exact_16x16", "nvfp4_te_16x16"])
def test_a_scale_rounded_down_never_makes_the_largest_element_vanish(name):
    """amax is 8.4 in units of its subnormal scale: it saturates to 6."""
    x = blocks_of_16([448.0 * 512], [-1.4, 1.4, 0.7])
    scaled = quantize_oracle(x, name)
    assert (1, [0xF, 7, 6]) == (int(scaled.scales[0, 1]), scaled.codes[0, 16:19].tolist())
    assert 2 == scaled.counts.saturated


def test_a_block_scale_of_256_is_an_ordinary_value_and_2_to_the_minus_6_the_least_of_torchao():
    scaled, values = cast(blocks_of_16([448.0 * 6], [256.0 * 6]), "nvfp4_exact")
    assert ([[0x7E, 0x78]], 1536.0) == (scaled.scales.tolist(), float(values[0, 16]))
    # The torchao order holds a scale at the least normal number.
    scaled = quantize_oracle(blocks_of_16([448.0 * 1024], [1.0], []), "nvfp4_torchao")
    assert ([[0x7E, 0x08, 0x08]], 1) == (scaled.scales.tolist(), int(scaled.codes[0, 16]))  # y = 0.375


def test_the_caps_of_the_te_order_bind_in_tiny_tensors():
    """g below 2688 / FLT_MAX: s_enc is FLT_MAX, and so is the element's multiplier; the decode is too small."""
    scaled, values = cast([1e-38], "nvfp4_te")
    assert ([[0x31]], [[5]]) == (scaled.scales.tolist(), scaled.codes.tolist())  # 0.5625 and 3.4 -> 3
    assert 3 * 0.5625 * 2.0**-128 == float(values[0, 0])


def test_tiny_tensors_of_the_torchao_order():
    """1 / pt is Inf: elements saturate, zeros stay zeros. pt is 0: all of it decodes to 0."""
    scaled, values = cast([1e-39, -0.0, -1e-42, 0.0], "nvfp4_torchao")
    assert ([[0x7E]], [[7, 8, 15, 0]], 2) == (scaled.scales.tolist(), scaled.codes.tolist(), scaled.counts.saturated)
    assert values[0].tolist()[0] == -values[0].tolist()[2] > 9e-40
    scaled, values = cast([2.0**-149, -0.0], "nvfp4_torchao")
    assert ([[0x08]], [[7, 8]], [[0.0, 0.0]]) == (scaled.scales.tolist(), scaled.codes.tolist(), values.tolist())


@pytest.mark.parametrize("name", TWO_LEVEL)
def test_a_two_level_block_with_nan_or_inf_is_nan_and_the_others_do_not_notice(name):
    x = np.zeros((1, 64), F)
    x[0, 0], x[0, 1], x[0, 16], x[0, 17], x[0, 33], x[0, 48] = 6.0, NAN, INF, 3.0, 6.0, 1.0
    scaled, values = cast(x, name)
    clean = x.copy()
    clean[0, [0, 1, 16, 17]] = 0
    beside, expected = cast(clean, name)
    assert [[0x7F, 0x7F]] == scaled.scales[:, :2].tolist()
    assert beside.scales[:, 2:].tolist() == scaled.scales[:, 2:].tolist()
    assert [7] * 32 == scaled.codes[0, :32].tolist()
    assert_bits_equal(np.full((1, 32), np.uint32(0x7FC00000).view(F)), values[:, :32])
    assert_bits_equal(expected[:, 32:], values[:, 32:])
    assert (6.0, 6.0) == (float(scaled.tensor_scale), float(scaled.amax))
    assert BlockCounts(saturated=0, flushed=0, nan=1, inf=1, zero_scale=0) == scaled.counts
    # A finite element beside a NaN still counts for the tensor scale.
    scaled = quantize_oracle(blocks_of_16([96.0, NAN], [48.0]), "nvfp4_exact")
    assert (96.0, [[0x7F, 0x76]]) == (float(scaled.tensor_scale), scaled.scales.tolist())  # 224 of 448


# ---- four over six ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "block", "expected"),
    [  # scale codes of 4over6, _mae, _448 where asked
        (1536.0, [10, 20, 30, 40], (0x52, 0x52)),  # 1, 2, 3, 4 times 10 exactly; 6.5 fits worse
        (1536.0, [6.5, -13, 39], (0x4D, 0x4D)),  # 1, 2, 6 times 6.5 exactly
        (1536.0, [48], (0x50, 0x50)),  # both maps are exact: a tie, and 6 wins
        (151.0, [40, -48, 0, 31, -36, 29], (0x6F, 0x6A)),
        (74.0, [21, -24, 48, -5, -2], (0x72, 0x78)),
        (61.0, [-23, 0, -12, -24, 48, -47], (0x79, None, 0x7B)),
        (95.0, [-30, 1, 43, 34, 20, 14], (0x73, None, 0x75)),
        (192.0, [13, -10, -6, -25, -1, 7], (0x64,)),  # (amax / 6) * s_enc, not amax * (s_enc / 6)
        (160.0, [28, 23, 19, -27, -35, -31], (0x6B,)),  # nor (amax * s_enc) / 6
        (128.0, [-2, 3, 23, -39, 37, -16], (0x6F,)),  # ascending order, not descending
        (172.0, [42, 18, 3, 7, 15, 42], (0x68,)),  # a float32 sum, not an exact one
        (181.0, [17, 8, 41, -47, -10, 43], (None, 0x68)),
        (73.0, [37, 10, -21, 20, -21, -16], (0x70,)),  # a tie of errors that are not 0
    ],
)
def test_four_over_six_takes_the_map_with_the_smaller_error(g, block, expected):
    for variant, code in zip(("", "_mae", "_448"), expected, strict=False):
        if code is not None:
            assert code == int(quantize_oracle(blocks_of_16([g], block), f"nvfp4_4over6{variant}").scales[0, 1])


def test_four_over_six_decodes_what_it_compared_up_to_inf():
    scaled, values = cast(blocks_of_16([1536.0], [10, 20, 30, 40]), "nvfp4_4over6")
    assert ([2, 4, 5, 6], [10.0, 20.0, 30.0, 40.0]) == (scaled.codes[0, 16:20].tolist(), values[0, 16:20].tolist())
    assert (0x78, 7, 1536.0) == (int(scaled.scales[0, 0]), int(scaled.codes[0, 0]), float(values[0, 0]))
    scaled, values = cast([FLT_MAX, -1.0], "nvfp4_4over6")  # (6 * 256) * g overflows: both errors Inf, 6 wins
    assert ([[0x78]], [[7, 8]], [[INF, 0.0]]) == (scaled.scales.tolist(), scaled.codes.tolist(), values.tolist())


# ---- all recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALE_RECIPES)
def test_a_matrix_of_zeros_is_zeros(name):
    x = np.zeros((2, 17), F)
    x[1, 16] = -0.0
    recipe = get_scale_recipe(name)
    scaled, values = cast(x, name)
    scale = {Float32Scale: 1.0, PowerOfTwoScale: 0, TwoLevelScale: 0x08 if "torchao" in name else 0}[type(recipe.scale)]
    assert np.full(recipe.block.grid((2, 17)), scale).tolist() == scaled.scales.tolist()
    keeps = recipe.fmt.has_negative_zero and name not in WITHOUT_SIGN
    assert [0] * 16 + [recipe.fmt.sign_bit if keeps else 0] == scaled.codes[1].tolist()
    assert_bits_equal(np.where(keeps, x, np.zeros_like(x)), values)
    assert ((0, 0, 0, 0, scaled.scales.size), 0.0) == (scaled.counts, float(scaled.amax))


@pytest.mark.parametrize("name", SCALE_RECIPES)
def test_one_row_of_zeros_among_others_is_the_only_one(name):
    x = np.full((3, 5), 3.0, F)
    x[1] = 0
    values = cast(x, name)[1]
    assert [False, True, False] == (values == 0).all(axis=1).tolist()
    assert (values[1] == 0).all()
    assert bool((np.abs(values[[0, 2]] / 3 - 1) < 0.34).all())  # mx nearest maps 3 to 4 of 2^-1 * 6, or less


@pytest.mark.parametrize("length", [1, 15, 17, 31, 33, 528])
@pytest.mark.parametrize("where", ["last", "odd"])
def test_the_amax_is_found_in_tails_and_at_odd_places(length, where):
    place = length - 1 if where == "last" else min(length - 1, 1)
    x = np.ones((1, length), F)
    x[0, place] = -96
    for name, size, with_it, without in (
        ("e4m3_1x128", 128, float(F(448) / F(96)), 448.0),
        ("mxfp4_rceil", 32, 131, 125),
        ("nvfp4_exact", 16, 0x7E, 0x49),
    ):
        scaled = quantize_oracle(x, name)
        expected = [[with_it if block == place // size else without for block in range(-(-length // size))]]
        assert expected == scaled.scales.tolist()
        assert abs(float(dequantize_oracle(scaled, name)[0, place]) / -96 - 1) < 2.0**-22


@pytest.mark.parametrize("name", SCALE_RECIPES)
def test_decode_is_within_half_a_step_of_x(name):
    """Half a step of the element, or of its subnormals, in units of the block's own scale; beyond that it clips."""
    fmt = get_scale_recipe(name).fmt
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((2, 33)) * np.exp2(rng.integers(-3, 4, (2, 33)))).astype(F)
    x[1, 1] = -0.0
    scaled, values = cast(x, name)
    assert fmt.sign_bit * fmt.has_negative_zero == scaled.codes[1, 1]
    ones = np.full(x.shape, encode_scalar(1.0, fmt), np.uint8)
    unit = dequantize_oracle(replace(scaled, codes=ones), name).astype(np.float64)
    magnitude = np.abs(x.astype(np.float64))
    step = np.maximum(magnitude * 2.0 ** -(fmt.mantissa_bits + 1), unit * fmt.smallest_subnormal / 2)
    clipped = magnitude > unit * fmt.max
    off = np.abs(values.astype(np.float64) - x)
    assert bool((off <= np.where(clipped, magnitude - unit * fmt.max, step) + 2.0**-21 * magnitude).all())
    assert bool(((np.signbit(values) == np.signbit(x)) | (values == 0)).all())
    assert scaled.counts.saturated <= int(clipped.sum())  # some round back to fmt.max


def test_the_layout_of_x_does_not_matter():
    x = np.arange(64, dtype=F).reshape(4, 16) - 20
    for view in (x[:, ::2], x.T, x[::-1], x[::-1, ::-3]):
        for name in ("e4m3_row", "mxfp8_even", "nvfp4_te"):
            expected, actual = quantize_oracle(np.array(view, order="C"), name), quantize_oracle(view, name)
            assert expected.codes.tolist() == actual.codes.tolist()
            assert expected.scales.tolist() == actual.scales.tolist()


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
@pytest.mark.parametrize("name", SCALE_RECIPES)
def test_a_matrix_without_elements_works(name, shape):
    scaled, values = cast(np.zeros(shape, F), name)
    grid = get_scale_recipe(name).block.grid(shape)
    assert (shape, shape, grid) == (scaled.codes.shape, values.shape, scaled.scales.shape)
    assert ((0, 0, 0, 0, 0), 0.0) == (scaled.counts, float(scaled.amax))


# ---- policies, counts, errors ------------------------------------------------------------------------------------


def test_the_policy_rounds_elements_and_never_scales():
    x = blocks_of_16([448.0 * 6], [3.3, -3.3, 5.9])
    down = get_policy("ocp").with_choices(rounding="toward_zero")
    up = get_policy("ocp").with_choices(rounding="up")
    for name in ("nvfp4_exact", "nvfp4_te", "nvfp4_4over6_448"):
        near, *others = (quantize_oracle(x, name, policy=policy).scales.tolist() for policy in ("ocp", down, up))
        assert [near, near] == others
    assert [5, 13, 7] == quantize_oracle(x, "nvfp4_exact").codes[0, 16:19].tolist()  # scale 1: 3, -3, 6
    assert [5, 13, 6] == quantize_oracle(x, "nvfp4_exact", policy=down).codes[0, 16:19].tolist()
    assert [6, 13, 7] == quantize_oracle(x, "nvfp4_exact", policy=up).codes[0, 16:19].tolist()
    stochastic = get_policy("ocp").with_choices(rounding="stochastic")
    for policy, stream, words in (
        (stochastic, None, "rounds stochastically and no stream was given"),
        ("ocp", RandomStream(seed=1), "a stream was given, but policy ocp rounds by 'nearest_even'"),
        (stochastic, 7, "stream is int; pass RandomStream"),
    ):
        with pytest.raises(UsageError, match=words):
            quantize_oracle(x, "nvfp4_te", policy=policy, stream=stream)


def test_a_policy_may_refuse_nan_and_overflow():
    refuses = get_policy("ocp").with_choices(missing_nan="raise")
    for x in (NAN, INF):
        with pytest.raises(FormatError, match="is NaN and the policy refuses it in float4_e2m1fn"):
            quantize_oracle(np.array([[1.0, x]], F), "nvfp4_te", policy=refuses)
    strict = get_policy("ocp").with_choices(overflow="raise")
    assert [[0x77]] == quantize_oracle(np.array([[960.0]], F), "mxfp8_ceil", policy=strict).codes.tolist()
    with pytest.raises(FormatError, match="beyond 448, the largest float8_e4m3fn"):
        quantize_oracle(np.array([[957.0]], F), "mxfp8_floor", policy=strict)


def test_counts_say_what_was_lost():
    scaled = quantize_oracle(np.array([[7.0, 6.99, 0.25, -0.25, 0.26, 0.0]], F), "mxfp4_floor")
    assert BlockCounts(saturated=1, flushed=2, nan=0, inf=0, zero_scale=0) == scaled.counts  # 7 is a tie to 8
    scaled = quantize_oracle(np.array([[0.0, 0.0], [1.0, 0.0], [NAN, 0.0]], F), "e4m3_row")
    assert BlockCounts(saturated=0, flushed=0, nan=1, inf=0, zero_scale=1) == scaled.counts
    # A NaN whose code is a zero, or -0 in other formats, was not flushed.
    scaled = quantize_oracle(np.array([[NAN, 1.0, 0.0]], F), "nvfp4_te", policy="ml_dtypes")
    assert ([[8, 8, 8]], 0) == (scaled.codes.tolist(), scaled.counts.flushed)
    for name in ("e4m3", "nvfp4_te"):
        counts = quantize_oracle(np.array([[1e-30, 0.0, 1.0]], F), name).counts
        assert (1, {int}) == (counts.flushed, {type(count) for count in counts})


def test_a_zero_scale_or_a_nan_scale_decodes_by_itself():
    scaled = quantize_oracle(blocks_of_16([6.0], [6.0], [6.0]), "nvfp4_te")
    codes = np.array([[9, 8] + [9] * 46], np.uint8)
    scaled = replace(scaled, codes=codes, scales=np.array([[0x7E, 0, 0x7F]], np.uint8))
    for name in TWO_LEVEL:
        values = dequantize_oracle(scaled, name)
        half = 0.5 * 448 * 6 / get_scale_recipe(name).scale.full_range
        assert_bits_equal(np.array([-half, -0.0, -0.0], F), np.round(values[0, [0, 1, 16]], 4))
        assert bool(np.isnan(values[0, 32:]).all())


def test_what_is_not_a_float32_matrix_is_refused():
    with pytest.raises(UsageError, match=r"x is float64 of shape \(2, 2\); pass a float32 matrix \[M, K\]"):
        quantize_oracle(np.zeros((2, 2)), "e4m3")
    with pytest.raises(UsageError, match="x is list"):
        quantize_oracle([[1.0]], "e4m3")


def test_scales_that_do_not_fit_the_codes_are_refused():
    good = quantize_oracle(np.ones((2, 17), F), "nvfp4_te")
    with pytest.raises(UsageError, match=r"scales of shape \(2, 2\) do not fit codes .* mxfp4_even needs \(2, 1\)"):
        dequantize_oracle(good, "mxfp4_even")
    with pytest.raises(UsageError, match=r"scales is uint8 of shape \(2, 2\); pass a float32 matrix"):
        dequantize_oracle(good, "fp4_row")
    with pytest.raises(UsageError, match="tensor_scale is None: nvfp4_te needs the amax"):
        dequantize_oracle(replace(good, tensor_scale=None), "nvfp4_te")
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15 of float4_e2m1fn"):
        dequantize_oracle(replace(good, codes=np.full((2, 17), 16, np.uint8)), "nvfp4_te")
