"""Scale recipes as data: names, blocks, exponent rules as two integers; and MX casts, which are little else."""

import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest

from qsim.arrays import FLT_MAX
from qsim.codec.oracle import encode_scalar
from qsim.codec.scaled import (
    SCALE_RECIPES,
    Block,
    BlockCounts,
    BlockError,
    ExponentRule,
    ExponentSteps,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    TwoLevelScale,
    dequantize_oracle,
    exponent_rule,
    get_scale_recipe,
    quantize_oracle,
)
from qsim.codec.scaled.recipes import RECIPES, SCALE_RECIPE_ALIASES
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import FormatError
from qsim.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, FORMATS, FloatFormat, NanEncoding

F = np.float32
NAN, INF = math.nan, math.inf
ELEMENTS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}
ONE = 1 << 23  # the mantissa of 1.0 with its hidden bit, in units of float32's last place
MX_NAMES = [name for name, recipe in SCALE_RECIPES.items() if isinstance(recipe.scale, PowerOfTwoScale)]


def above(v):
    return np.nextafter(F(v), F(INF))


def below(v):
    return np.nextafter(F(v), F(0))


def cast(x, name):
    """The cast of ``x`` (a row where it is a list) and the matrix that it stands for."""
    scaled = quantize_oracle(np.atleast_2d(np.asarray(x, F)), name)
    return scaled, dequantize_oracle(scaled, name)


def test_every_name_is_given_once():
    assert 73 == len(RECIPES) == len(SCALE_RECIPES)
    assert set() == set(SCALE_RECIPES) & set(SCALE_RECIPE_ALIASES)
    assert len(RECIPES) == len({(r.fmt, r.block, r.scale) for r in RECIPES})  # and no recipe is there twice


def test_names_are_those_of_the_documentation():
    suffixes = ("", "_row", "_col", "_1x128", "_128x128")
    rules = ("floor", "ceil", "even", "rceil", "nearest")
    stems = ("mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2")
    two_level = ("exact", "te", "torchao", "4over6", "4over6_mae", "4over6_448", "exact_16x16", "te_16x16")
    expected = {name + suffix for name in ELEMENTS for suffix in suffixes}
    expected |= {f"{stem}_{rule}" for stem in stems for rule in rules}
    expected |= {f"nvfp4_{order}" for order in two_level}
    assert expected == set(SCALE_RECIPES)


@pytest.mark.parametrize(
    ("name", "fmt", "block", "scale"),
    [
        ("float8_e4m3fn", E4M3FN, (0, 0), Float32Scale()),
        ("float8_e5m2_row", E5M2, (1, 0), Float32Scale()),
        ("float4_e2m1fn_col", E2M1FN, (0, 1), Float32Scale()),
        ("float8_e4m3fn_1x128", E4M3FN, (1, 128), Float32Scale()),
        ("float8_e5m2_128x128", E5M2, (128, 128), Float32Scale()),
        ("mxfp4_floor", E2M1FN, (1, 32), PowerOfTwoScale(rule=ExponentRule.FLOOR)),
        ("mxfp8_rceil", E4M3FN, (1, 32), PowerOfTwoScale(rule=ExponentRule.RCEIL)),
        ("mxfp8_e5m2_even", E5M2, (1, 32), PowerOfTwoScale(rule=ExponentRule.EVEN)),
        ("nvfp4_te", E2M1FN, (1, 16), TwoLevelScale(order=ScaleOrder.TE)),
        ("nvfp4_exact_16x16", E2M1FN, (16, 16), TwoLevelScale(order=ScaleOrder.EXACT)),
        (
            "nvfp4_4over6_mae",
            E2M1FN,
            (1, 16),
            TwoLevelScale(order=ScaleOrder.FOUR_OVER_SIX, scale_max=256, error=BlockError.ABSOLUTE),
        ),
    ],
)
def test_a_recipe_is_what_its_name_says(name, fmt, block, scale):
    recipe = get_scale_recipe(name)
    assert (name, fmt, Block(*block), scale) == (recipe.name, recipe.fmt, recipe.block, recipe.scale)


def test_names_are_found_in_any_case_and_by_the_aliases_of_a_format():
    assert "float8_e4m3fn_1x128" == get_scale_recipe("e4m3_1x128").name
    assert "float8_e4m3fn" == get_scale_recipe("E4M3").name
    assert "float4_e2m1fn_row" == get_scale_recipe("fp4_row").name
    assert "float6_e3m2fn_128x128" == get_scale_recipe("e3m2fn_128x128").name
    assert "mxfp4_floor" == get_scale_recipe("MXFP4_Floor").name
    recipe = get_scale_recipe("nvfp4_te")
    assert recipe is get_scale_recipe(recipe)


def test_an_unknown_name_is_answered_with_the_nearest_one():
    message = r"unknown scale recipe 'mxfp4_flor': did you mean 'mxfp4_floor'\? `python -m qsim formats` lists all 73"
    with pytest.raises(FormatError, match=message):
        get_scale_recipe("mxfp4_flor")
    with pytest.raises(FormatError, match="unknown scale recipe 'e8m0_row'"):
        get_scale_recipe("e8m0_row")
    for name in ("e8m0", "Float8_E8M0FNU"):
        with pytest.raises(
            FormatError, match=f"'{name}' is no scale recipe: float8_e8m0fnu holds scales, not elements"
        ):
            get_scale_recipe(name)


def test_a_block_that_is_0_wide_or_high_spans_the_matrix():
    assert (5, 7) == Block(0, 0).extent((5, 7))
    assert [(1, 1), (5, 1), (1, 7), (5, 1), (1, 1)] == [
        get_scale_recipe(f"e4m3{suffix}").block.grid((5, 7)) for suffix in ("", "_row", "_col", "_1x128", "_128x128")
    ]
    assert (3, 2) == Block(1, 128).grid((3, 129))
    assert (2, 3) == Block(128, 128).grid((129, 257))
    assert (1, 2) == Block(16, 16).grid((16, 17))
    assert [(0, 0), (0, 1), (1, 0)] == [Block(0, 0).grid(shape) for shape in ((0, 0), (0, 7), (5, 0))]
    assert [(0, 0), (0, 2), (5, 0)] == [Block(1, 4).grid(shape) for shape in ((0, 0), (0, 7), (5, 0))]


def test_a_block_within_a_matrix_is_no_larger_and_tiles_alike():
    assert [(3, 16), (1, 33), (2, 5), (1, 1)] == [
        Block(16, 16).within((3, 40)), Block(1, 2**70).within((3, 33)), Block(0, 5).within((2, 9)),
        Block(16, 16).within((0, 0)),
    ]  # fmt: skip
    for shape in ((0, 0), (0, 7), (5, 0), (3, 40), (17, 16)):
        for block in (Block(16, 16), Block(1, 32), Block(0, 0), Block(2**63, 2**63)):
            rows, cols = block.within(shape)
            assert block.grid(shape) == (-(-shape[0] // rows), -(-shape[1] // cols))


def test_a_block_is_a_pair_of_integers():
    recipe = get_scale_recipe("e4m3_row")
    for given in ((200, 0), (np.uint8(200), np.int64(0))):
        block = replace(recipe, block=given).block
        assert Block(200, 0) == block
        assert (Block, int, int) == (type(block), type(block.rows), type(block.cols))
    for wrong in ((1.0, 2), ("a", "b"), (1,), (1, 2, 3), [1, 2], "ab", None, 16, Block(1, None)):
        with pytest.raises(FormatError, match=f"float8_e4m3fn_row: block {re.escape(repr(wrong))} is no pair"):
            replace(recipe, block=wrong)


def test_literals_that_contradict_themselves_are_refused():
    recipe = get_scale_recipe("nvfp4_te")
    with pytest.raises(FormatError, match="scale_max 300 of a two-level scale: choose 256 or 448"):
        TwoLevelScale(order=ScaleOrder.EXACT, scale_max=300)
    with pytest.raises(FormatError, match="order 'te': a block error belongs to four over six"):
        TwoLevelScale(order=ScaleOrder.TE, error=BlockError.SQUARED)
    with pytest.raises(FormatError, match="order 'four_over_six': a block error"):
        TwoLevelScale(order=ScaleOrder.FOUR_OVER_SIX)
    with pytest.raises(FormatError, match="a two-level scale is defined for float4_e2m1fn, not float8_e4m3fn"):
        replace(recipe, fmt=E4M3FN)
    with pytest.raises(FormatError, match="has a negative side"):
        replace(recipe, block=Block(-1, 16))
    with pytest.raises(FormatError, match="holds scales, not elements"):
        replace(get_scale_recipe("e4m3"), fmt=E8M0FNU)
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"


def test_the_full_range_of_a_two_level_scale_is_six_times_its_largest_block_scale():
    assert 2688 == get_scale_recipe("nvfp4_exact").scale.full_range
    assert 1536 == get_scale_recipe("nvfp4_4over6").scale.full_range
    assert 2688 == get_scale_recipe("nvfp4_4over6_448").scale.full_range


# ---- exponent rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_steps_of_every_rule_are_right_at_every_mantissa(name):
    """One binade, all 2^23 mantissas f: the exponent above log2(amax's binade) - emax, by exact comparisons."""
    fmt = ELEMENTS[name]
    f = np.arange(ONE, 2 * ONE, dtype=np.int64)
    emax, top = 0, int(fmt.max * ONE)  # fmt.max is a small integer multiple of 2^-3
    while top >= 2 * ONE:
        emax, top = emax + 1, top // 2
    half_ulp = ONE >> (fmt.mantissa_bits + 1)
    expected = {
        ExponentRule.FLOOR: np.zeros_like(f),
        ExponentRule.CEIL: f > ONE,
        ExponentRule.EVEN: f + half_ulp >= 2 * ONE,
        ExponentRule.RCEIL: f > top,
        # log2(f / top) against -1/2 and 1/2, squared so that sqrt(2) is not needed
        ExponentRule.NEAREST: (f * f > 2 * top * top).astype(np.int64) - (2 * f * f < top * top),
    }
    bits = f - ONE + (127 << 23)
    for rule, steps in expected.items():
        carry, offset = exponent_rule(fmt, rule)
        wrong = np.flatnonzero(127 - emax + steps != ((bits + carry) >> 23) + offset)
        assert [] == wrong[:3].tolist(), rule


@pytest.mark.parametrize("name", MX_NAMES)
def test_codes_meet_the_definition_in_every_binade(name):
    """The exponent e of a code is the one the inequalities of its rule leave, or it is held at code 0."""
    recipe = get_scale_recipe(name)
    carry, offset = exponent_rule(recipe.fmt, recipe.scale.rule)
    top = Fraction(recipe.fmt.max)
    emax = 0
    while 2 ** (emax + 1) <= top:
        emax += 1
    turn = 2 * ONE - carry - ONE  # the mantissa where the code steps up
    for field in (*range(20), 126, 127, 128, 253, 254):  # 20: above emax of every format
        for mantissa in {0, 1, max(turn - 1, 0), min(turn, ONE - 1), ONE - 1}:
            bits = field << 23 | mantissa
            code = min(max(((bits + carry) >> 23) + offset, 0), 254)
            v = Fraction(float(np.uint32(bits).view(np.float32)))
            scale = Fraction(2) ** (code - 127)
            binade = Fraction(2) ** (max(field, 1) - 127)
            half_ulp = binade / 2 ** (recipe.fmt.mantissa_bits + 1)
            not_too_small, not_too_large = {
                ExponentRule.FLOOR: (v < scale * 2 ** (emax + 1), v >= scale * 2**emax),
                ExponentRule.CEIL: (v <= scale * 2**emax, v > scale * 2 ** (emax - 1)),
                ExponentRule.EVEN: (v + half_ulp < scale * 2 ** (emax + 1), v + half_ulp >= scale * 2**emax),
                ExponentRule.RCEIL: (v <= scale * top, v > scale * top / 2),
                ExponentRule.NEAREST: (v * v < 2 * (scale * top) ** 2, 2 * v * v > (scale * top) ** 2),
            }[recipe.scale.rule]
            assert (True, True) == (not_too_small, not_too_large or code == 0), (field, mantissa)
            assert code <= 253


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_subnormal_amax_gets_code_0_under_every_rule(name):
    for rule in ExponentRule:
        carry, offset = exponent_rule(ELEMENTS[name], rule)
        assert ((ONE - 1 + carry) >> 23) + offset < 0  # the largest subnormal: the code grows with the bits
        assert carry < ONE  # what the proof says


def test_the_nearest_rule_also_fits_a_maximum_below_the_square_root_of_two():
    fmt = FloatFormat(name="e3m1", exponent_bits=3, mantissa_bits=1, bias=3, has_inf=False, nan=NanEncoding.ALL_ONES)
    assert 16.0 == fmt.max
    f = np.arange(ONE, 2 * ONE, dtype=np.int64)
    carry, offset = exponent_rule(fmt, ExponentRule.NEAREST)
    expected = 127 - 4 + (f * f > 2 * ONE * ONE)  # no mantissa is below 1 / sqrt(2)
    assert [] == np.flatnonzero(expected != ((f - ONE + (127 << 23) + carry) >> 23) + offset)[:3].tolist()


def test_a_format_whose_maximum_is_below_4_has_no_exponent_rule():
    fmt = FloatFormat(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=0, has_inf=False, nan=NanEncoding.NONE)
    with pytest.raises(FormatError, match=r"proved for a maximum of 4 or more, not 3\.5"):
        exponent_rule(fmt, ExponentRule.FLOOR)


def test_steps_are_plain_integers():
    assert ExponentSteps(carry=0, offset=-2) == exponent_rule(E2M1FN, ExponentRule.FLOOR)
    assert ExponentSteps(carry=0x3FFFFF, offset=-2) == exponent_rule(E2M1FN, ExponentRule.RCEIL)
    assert ExponentSteps(carry=0x080000, offset=-8) == exponent_rule(E4M3FN, ExponentRule.EVEN)
    assert {int} == {type(n) for fmt in ELEMENTS.values() for rule in ExponentRule for n in exponent_rule(fmt, rule)}


# ---- power-of-two scales ---------------------------------------------------------------------------------------

MX_TABLE = {  # amax: the scale's code under floor, ceil, even, rceil, nearest
    "mxfp4": {
        4.0: (127, 127, 127, 127, 126),
        4.5: (127, 128, 127, 127, 127),
        6.0: (127, 128, 127, 127, 127),
        above(6): (127, 128, 127, 128, 127),
        7.0: (127, 128, 128, 128, 127),
        below(8): (127, 128, 128, 128, 127),
        8.0: (128, 128, 128, 128, 127),
    },
    "mxfp8": {
        256.0: (127, 127, 127, 127, 126),
        448.0: (127, 128, 127, 127, 127),
        above(448): (127, 128, 127, 128, 127),
        480.0: (127, 128, 127, 128, 127),
        496.0: (127, 128, 128, 128, 127),
        511.0: (127, 128, 128, 128, 127),
        512.0: (128, 128, 128, 128, 127),
    },
    "mxfp8_e5m2": {57344.0: (127, 128, 127, 127, 127), above(57344): (127, 128, 127, 128, 127)},
    "mxfp6_e2m3": {7.5: (127, 128, 127, 127, 127), 7.75: (127, 128, 128, 128, 127)},
    "mxfp6_e3m2": {28.0: (127, 128, 127, 127, 127), 30.0: (127, 128, 128, 128, 127), 16.0: (127, 127, 127, 127, 126)},
}


@pytest.mark.parametrize("stem", MX_TABLE)
def test_mx_scales_are_those_of_the_table(stem):
    x = np.zeros((len(MX_TABLE[stem]), 3), F)
    x[:, 1] = [-amax for amax in MX_TABLE[stem]]
    for column, rule in enumerate(("floor", "ceil", "even", "rceil", "nearest")):
        expected = [codes[column] for codes in MX_TABLE[stem].values()]
        assert expected == quantize_oracle(x, f"{stem}_{rule}").scales[:, 0].tolist(), rule


def test_floor_clips_what_rceil_keeps():
    floor, clipped = cast([957.0], "mxfp8_floor")
    rceil, kept = cast([957.0], "mxfp8_rceil")
    assert ([[128]], [[0x7E]], [[896.0]], 1) == (
        floor.scales.tolist(), floor.codes.tolist(), clipped.tolist(), floor.counts.saturated
    )  # fmt: skip
    assert ([[129]], [[0x77]], [[960.0]], 0) == (
        rceil.scales.tolist(), rceil.codes.tolist(), kept.tolist(), rceil.counts.saturated
    )  # fmt: skip


def test_an_exponent_is_taken_from_bits_not_from_a_logarithm():
    scaled, values = cast([0.0, 7.9999995], "mxfp4_floor")
    assert ([[127]], [[0, 7]], [[0.0, 6.0]]) == (scaled.scales.tolist(), scaled.codes.tolist(), values.tolist())


def test_256_57344_and_4_are_ordinary_values():
    assert [[256.0, 448.0]] == cast([256.0, 448.0], "mxfp8_floor")[1].tolist()
    scaled, values = cast([57344.0, -49152.0], "mxfp8_e5m2_floor")
    assert ([[0x7B, 0xFA]], [[57344.0, -49152.0]]) == (scaled.codes.tolist(), values.tolist())
    scaled, values = cast([4.0, 1.0], "mxfp4_rceil")
    assert ([[6, 2]], [[4.0, 1.0]]) == (scaled.codes.tolist(), values.tolist())


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "nearest"])
def test_a_tiny_amax_is_held_at_the_smallest_scale(rule):
    """Scale 2^-127: it divides exactly, subnormals included."""
    least, unit = 2.0**-149, 2.0**-127
    scaled, values = cast([[least, 0], [2 * unit, unit], [-6 * unit, 0]], f"mxfp4_{rule}")
    codes = [[0, 0], [4, 2], [15, 0]] if rule != "ceil" else [[0, 0], [4, 2], [13, 0]]
    assert ([[0], [0], [1 if rule == "ceil" else 0]], codes) == (scaled.scales.tolist(), scaled.codes.tolist())
    assert [[0.0, 0.0], [2 * unit, unit], [-6 * unit, 0.0]] == values.tolist()
    assert BlockCounts(saturated=0, flushed=1, nan=0, inf=0, zero_scale=0) == scaled.counts


def test_a_value_next_to_2_to_the_128_may_decode_to_inf():
    found = {n: (s.scales.item(), float(v[0, 0])) for n in MX_NAMES[:10] for s, v in [cast([FLT_MAX], n)]}
    assert {
        "mxfp4_floor": (252, 6 * 2.0**125),
        "mxfp4_ceil": (253, INF),
        "mxfp4_even": (253, INF),
        "mxfp4_rceil": (253, INF),
        "mxfp4_nearest": (252, 6 * 2.0**125),
        "mxfp8_floor": (246, 448 * 2.0**119),
        "mxfp8_ceil": (247, INF),
        "mxfp8_even": (247, INF),
        "mxfp8_rceil": (247, INF),
        "mxfp8_nearest": (246, 448 * 2.0**119),
    } == found


@pytest.mark.parametrize("name", MX_NAMES)
def test_an_mx_block_with_nan_is_nan_and_one_with_inf_has_the_largest_scale(name):
    x = np.array([[1.0, NAN, -2.0], [2.0**127, -INF, -0.0], [-INF, NAN, 1.0], [3.0, 3.0, 3.0]], F)
    scaled, values = cast(x, name)
    fmt = get_scale_recipe(name).fmt
    top, nan = fmt.max_code, encode_scalar(NAN, fmt)
    assert [[255], [254], [255]] == scaled.scales[:3].tolist()
    assert [nan] * 3 == scaled.codes[0].tolist() == scaled.codes[2].tolist()
    one = encode_scalar(1.0, fmt)
    assert [one, top | fmt.sign_bit, fmt.sign_bit] == scaled.codes[1].tolist()
    assert [2.0**127, -INF, 0.0] == values[1].tolist()
    assert_bits_equal(np.full((2, 3), np.uint32(0x7FC00000).view(F)), values[[0, 2]])
    assert [3.0] * 3 == values[3].tolist()
    assert BlockCounts(saturated=0, flushed=0, nan=2, inf=2, zero_scale=0) == scaled.counts


def test_recipes_and_their_oracle_are_imported_without_numba():
    code = (
        "import sys, qsim.codec.scaled, qsim.codec.scaled.oracle; "
        "print(sorted(m for m in ('numba', 'torch') if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("[]\n", "", 0) == (run.stdout, run.stderr, run.returncode)
