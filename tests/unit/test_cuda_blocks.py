"""Scaled casts by the CUDA kernels: every recipe, emulated equal to the CPU backend in codes, scales and counts."""

import numpy as np
import pytest

from cuda_kernels import blocks
from cuda_kernels._place import HOST, Host
from cuda_kernels.blocks import BLOCKS_FUSED, BlockRecipe, quantize_blocks
from cuda_kernels.footprint import compiled
from qsim.codec.scaled import (
    SCALE_RECIPES,
    Block,
    ExponentRule,
    PowerOfTwoScale,
    ScaleOrder,
    ScaleRecipe,
)
from qsim.codec.scaled.refusals import RefusedError
from qsim.codec.scaled.rules import device_numbers
from qsim.codec.tables import decode_table
from qsim.formats import E2M1FN, E4M3FN, POLICIES, RoundMode
from qsim.philox import RandomStream
from tests.places import played_device
from tests.unit.block_cases import (
    FLT_MAX,
    MATRICES,
    NEGATIVE_NAN,
    NUMBA,
    OCP,
    assert_same,
    close_calls,
    difference,
    hostile,
    just_below,
    matrix,
    mine,
    rules,
    run,
    spread,
)

pytestmark = pytest.mark.usefixtures("gpp")

EVERY = pytest.mark.parametrize("recipe", SCALE_RECIPES.values(), ids=SCALE_RECIPES)
FEW = ("float8_e5m2", "float8_e4m3fnuz_row", "float4_e2m1fn_col", "float8_e4m3fn_1x128", "float4_e2m1fn_128x128",
       "mxfp4_even", "mxfp8_rceil", "nvfp4_exact", "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6", "nvfp4_4over6_mae",
       "nvfp4_exact_16x16")  # fmt: skip
SOME = pytest.mark.parametrize("recipe", [SCALE_RECIPES[name] for name in FEW], ids=FEW)
CENTERS = {"one": (1, 1), "channel": (1, 150), "token": (19, 1), "element": (19, 150)}
DRAWN = OCP.with_choices(rounding="stochastic", random_bits=32)
STREAM = RandomStream(seed=2**40 + 9, step=3, layer=1, worker=2)


@EVERY
def test_every_recipe_equals_the_cpu_backend_on_every_matrix(recipe):
    assert len(SCALE_RECIPES) == 73
    for name in MATRICES:
        x = matrix(name)
        assert_same(x, recipe)
        if recipe.fmt == E2M1FN:
            assert_same(x, recipe, packed=True)


@EVERY
@pytest.mark.parametrize("shape", CENTERS.values(), ids=CENTERS)
def test_a_centre_is_subtracted_first(recipe, shape):
    x, center = hostile(), spread(shape, seed=8)
    x[-1] = np.broadcast_to(center, x.shape)[-1]  # blocks of zeros
    assert_same(x, recipe, center=center, packed=recipe.fmt.bits == 4)


def test_a_nan_that_the_centre_makes_is_positive_and_one_of_x_has_its_sign():
    x, center = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    x[0, :4], center[0, :4] = [np.inf, NEGATIVE_NAN, 1, NEGATIVE_NAN], [np.inf, 1, np.nan, np.nan]
    for name in ("float8_e5m2", "float8_e5m2_1x128", "mxfp8_e5m2_rceil"):
        got = run(x, SCALE_RECIPES[name], center=center)
        assert [0x7F, 0xFF, 0x7F, 0xFF] == got.codes[0, :4].tolist()
        assert [0, 0, 4, 0] == got.counts[:4].tolist()


@SOME
def test_rows_of_whole_words_have_centres_too(recipe):
    for shape in ((1, 1), (1, 64), (40, 1), (40, 64)):
        assert_same(matrix("ordinary"), recipe, center=spread(shape, seed=8))


@SOME
@pytest.mark.parametrize("mode", [m for m in RoundMode if m is not RoundMode.STOCHASTIC], ids=lambda m: m.value)
def test_every_rounding_and_policy_is_the_cpu_backends(recipe, mode):
    for name, policy in POLICIES.items():
        for x in (hostile(), matrix("huge"), matrix("ties")):
            assert_same(x, recipe, policy.with_choices(rounding=mode)), name


@SOME
@pytest.mark.parametrize("bits", [1, 7, 24, 32])
def test_stochastic_rounding_draws_the_same_words(recipe, bits):
    policy = OCP.with_choices(rounding="stochastic", random_bits=bits)
    for x in (hostile(), matrix("ordinary"), matrix("one row"), matrix("tiny"), spread((3, 35))):
        assert_same(x, recipe, policy, stream=STREAM, packed=recipe.fmt.bits == 4)
    other = run(x, recipe, policy, stream=RandomStream(seed=1))
    assert bits == 1 or other.codes.tobytes() != run(x, recipe, policy, stream=STREAM).codes.tobytes()
    assert_same(hostile(), recipe, policy, stream=STREAM, center=spread((1, 150), seed=8))


@pytest.mark.parametrize("name", ["nvfp4_exact", "nvfp4_exact_16x16"])
def test_a_drawn_quotient_is_exact_to_the_last_bit_of_a_word(name):
    """Fractions of 2^-32 of the distance of two numbers, and less, just above and below a word of the stream."""
    recipe = SCALE_RECIPES[name]
    low = np.float64([0, 0.5, 1, 1.5, 2, 3, 4])[np.arange(2048) % 7]
    width = np.where(low < 2, 0.5, np.where(low < 4, 1, 2))
    x = (low + width * (STREAM.words(2048).astype(np.float64) / 2**32)).astype(np.float32).reshape(32, 64)
    x[:, ::16] = 6  # the scale of a block is 448, and g 6: y = x, but for its rounding to float32
    for given in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(9)), x * np.float32(1 / 3)):
        assert_same(given, recipe, DRAWN, stream=STREAM)


@pytest.mark.parametrize("name", ["nvfp4_exact", "nvfp4_exact_16x16"])
def test_a_quotient_that_float64_cannot_tell_from_a_number_is_still_below_it(name):
    cases = just_below(STREAM)
    assert 5 < len(cases)
    for x, amax in cases:
        assert_same(x, SCALE_RECIPES[name], DRAWN, stream=STREAM, tensor_amax=amax)


@SOME
def test_a_given_tensor_amax_takes_the_place_of_the_matrixs_own(recipe):
    if not device_numbers(recipe).two_level:
        with pytest.raises(ValueError, match="of a two-level scale"):
            run(hostile(), recipe, tensor_amax=1)
        return
    for amax in (0, 1e-45, 3e-38, 1, 1000, FLT_MAX):
        for name in ("hostile", "huge", "ordinary"):
            assert_same(matrix(name), recipe, tensor_amax=np.float32(amax))
            assert_same(matrix(name), recipe, OCP.with_choices(rounding="up"), tensor_amax=np.float32(amax))


@pytest.mark.parametrize("name", ["nvfp4_exact", "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6", "nvfp4_exact_16x16"])
def test_block_scales_are_rounded_as_the_cpu_backends(name):
    """Every E4M3 number, every midpoint and their neighbours, as the quotient of a block's amax; and any amax."""
    values = np.unique(decode_table(E4M3FN)[:127].astype(np.float64))
    near = np.concatenate([values, (values[1:] + values[:-1]) / 2, [460, 464, 470]]) * 6
    near = near.astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(9999))])
    drawn = np.exp(np.random.default_rng(0).uniform(-12, 9, 2000)).astype(np.float32)
    x = np.zeros((1, 16 * (near.size + drawn.size)), np.float32)
    x[0, ::16] = np.concatenate([near, drawn])
    for amax in (2688, 1536, 3.7, 1e-30):
        assert_same(x, SCALE_RECIPES[name], tensor_amax=np.float32(amax))


def test_errors_are_added_in_ascending_order():
    """One thread over blocks of any shape, row by row, or four lanes one after another."""
    x, amax = close_calls(), np.float32(1536)
    for block in ((1, 16), (2, 8), (4, 4), (16, 1)):
        recipe = mine(block, order=ScaleOrder.FOUR_OVER_SIX, scale_max=256)
        across = 16 // block[1]
        side = x[: len(x) // across * across]
        # Blocks stand side by side, each with its numbers row by row.
        laid = side.reshape(-1, across, *block).transpose(0, 2, 1, 3).reshape(-1, 16)
        backwards = side[:, ::-1].reshape(-1, across, *block).transpose(0, 2, 1, 3).reshape(-1, 16)
        scales = [NUMBA.quantize_blocks(np.ascontiguousarray(y), recipe, OCP, tensor_amax=amax).scales
                  for y in (laid, backwards)]  # fmt: skip
        assert 10 < np.count_nonzero(scales[0] != scales[1])
        for y in (laid, backwards):
            assert_same(y, recipe, tensor_amax=amax)


@pytest.mark.parametrize("rule", ExponentRule)
def test_exponents_step_where_the_cpu_backends_do(rule):
    rng = np.random.default_rng(1)
    near = np.float64([1, 1.0625, 1.25, 1.5, 1.75, 1.875, 2**0.5, 7 / 4 * 2**0.5, 1.5 / 2**0.5]).astype(np.float32)
    near = np.concatenate([np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(9))])
    bits = np.concatenate([near.view(np.uint32), rng.integers(1, 0x7F800000, 900), [1, 0x7FFFFF, 0x7F7FFFFF]])
    for fmt in ("mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2"):
        x = np.zeros((3, 32 * 310), np.float32)
        x.reshape(-1, 32)[: bits.size, 7] = bits.astype(np.uint32).view(np.float32)
        assert_same(x, SCALE_RECIPES[f"{fmt}_{rule.value}"])


@pytest.mark.parametrize("order", [None, *ScaleOrder], ids=str)
@pytest.mark.parametrize(
    "block", [(3, 7), (2, 1), (5, 0), (0, 16), (1, 5), (1, 48), (1, 64), (1, 300), (16, 16), (0, 0), (2**70, 2**70)]
)
def test_blocks_of_any_shape_equal_the_cpu_backend(order, block):
    recipe = mine(block, order=order)
    for x in (hostile(), spread((7, 310)), matrix("one column")):
        for center in (None, spread((1, x.shape[1]), seed=8)):
            assert_same(x, recipe, center=center, packed=True)


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (1, 24), (4, 32)])
def test_mx_blocks_of_other_shapes_equal_the_cpu_backend(block):
    scale = PowerOfTwoScale(rule=ExponentRule.RCEIL)
    recipe = ScaleRecipe(name="mine", fmt=E4M3FN, block=Block(*block), scale=scale)
    for x in (hostile(), matrix("ordinary")):
        assert_same(x, recipe)


@SOME
def test_what_a_policy_refuses_is_counted_element_by_element(recipe):
    x = hostile()
    for choices in ({"overflow": "raise"}, {"nan": "raise", "missing_nan": "raise"},
                    {"overflow": "raise", "nan": "raise", "missing_nan": "raise"}):  # fmt: skip
        for rounding in ("nearest_even", "up"):
            policy = OCP.with_choices(rounding=rounding, **choices)
            with pytest.raises(RefusedError) as caught:
                NUMBA.quantize_blocks(x, recipe, policy)
            assert int(caught.value.refused.elements.sum()) == int(run(x, recipe, policy).counts[5])
            assert_same(spread((3, 40), width=0.1), recipe, POLICIES["cuda"].with_choices(nan="raise"))


@SOME
def test_strides_and_addresses_do_not_matter(recipe):
    x = np.ascontiguousarray(spread((30, 130))[:, 1:129])
    room = np.zeros(x.size + 1, np.float32)
    shifted = room[1:].reshape(x.shape)  # contiguous, from an address that 16-byte loads do not take
    shifted[...] = x
    expected = NUMBA.quantize_blocks(x, recipe, OCP)
    for same in (shifted, np.asfortranarray(x), x[::-1, ::-1][::-1, ::-1], np.repeat(x, 2, axis=1)[:, ::2]):
        assert not difference(expected, run(same, recipe))
    center = np.asfortranarray(spread((15, 64), seed=8))
    assert_same(x[::2, ::2], recipe, center=center)


@SOME
def test_no_grid_changes_a_bit(monkeypatch, recipe):
    x, expected = spread((70, 260)), NUMBA.quantize_blocks(spread((70, 260)), recipe, OCP)
    for grid, threads in ((1, 128), (2, 32), (7, 64), (50, 128), (5, 256)):
        monkeypatch.setattr(blocks, "THREADS", threads)
        assert not difference(expected, run(x, recipe, place=Host(blocks=(grid, 1)))), (grid, threads)


@SOME
def test_a_device_is_launched_with_the_same_arguments(monkeypatch, recipe):
    place = played_device(monkeypatch)
    for x in (hostile(), matrix("no rows")):
        assert_same(x, recipe, place=place)
    assert_same(hostile(), recipe, place=place, center=spread((1, 150), seed=8))


@pytest.mark.usefixtures("nvrtc")
def test_a_warp_reads_sixteen_bytes_a_lane():
    ptx = compiled(BLOCKS_FUSED.text, BLOCKS_FUSED.file, "sm_90a").ptx
    for entry in ptx.split(".visible .entry ")[1:]:
        name = entry.partition("(")[0]
        assert ("ld.global.v4" in entry or "ld.global.nc.v4" in entry) == (name != "qsim_blocks_scale"), name


def test_wrong_arguments_are_named():
    x, recipe = np.zeros((2, 3), np.float32), SCALE_RECIPES["nvfp4_te"]
    own, numbers = rules(recipe, OCP), device_numbers(recipe)
    for call, message in (
        (lambda: quantize_blocks(HOST, x.astype(np.float64), own, numbers), "x is numpy.ndarray of float64"),
        (lambda: quantize_blocks(HOST, x, own.astype(np.int64), numbers), "rules is numpy.ndarray of int64"),
        (lambda: quantize_blocks(HOST, x, own, numbers, tensor_amax=3), "tensor_amax is builtins.int"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for call, message in (
        (lambda: quantize_blocks(HOST, x[0], own, numbers), r"x of shape \(3,\)"),
        (lambda: quantize_blocks(HOST, x, own[:5], numbers), "21 numbers"),
        (lambda: quantize_blocks(HOST, x, own, numbers, stream=np.zeros(4, np.uint32)), "a stream 5"),
        (lambda: quantize_blocks(HOST, x, own, numbers, center=np.zeros((2, 2), np.float32)), "does not broadcast"),
        (lambda: quantize_blocks(HOST, x, own, numbers, center=np.zeros(3, np.float32)), "does not broadcast"),
        (lambda: quantize_blocks(HOST, x, own, numbers, tensor_amax=np.zeros(2, np.float32)), "one number"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_recipe_is_plain_numbers():
    got = device_numbers(SCALE_RECIPES["nvfp4_4over6_mae"])
    assert got == BlockRecipe(1, 16, 5, 0, 0, 1, 6.0, 256, 1536)
    assert [type(v) for v in device_numbers(SCALE_RECIPES["mxfp8_floor"])] == [int] * 6 + [float, int, int]
    assert device_numbers(SCALE_RECIPES["mxfp8_floor"]).offset == -8
