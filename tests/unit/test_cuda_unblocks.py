"""Codes and scales of blocks back to float32 by the CUDA kernel: every recipe, emulated equal to the CPU backend."""

import dataclasses

import numpy as np
import pytest

import cuda_kernels._kernel as kernels
from cuda_kernels import host, source, unblocks
from cuda_kernels._place import HOST, Host
from cuda_kernels.footprint import compiled
from cuda_kernels.unblocks import UNBLOCKS, dequantize_blocks
from qsim.codec.scaled import SCALE_RECIPES, ScaledCodes, ScaleOrder
from qsim.codec.scaled.rules import device_numbers
from qsim.codec.tables import decode_table
from qsim.conformance.compare import assert_bits_equal
from tests.places import Given, launch, launch_at, played_device
from tests.unit.block_cases import FLT_MAX, MATRICES, NUMBA, OCP, matrix, mine, spread

pytestmark = pytest.mark.usefixtures("gpp")

EVERY = pytest.mark.parametrize("recipe", SCALE_RECIPES.values(), ids=SCALE_RECIPES)
FEW = ("float8_e4m3fn", "float8_e5m2_row", "float4_e2m1fn_col", "float6_e2m3fn_128x128", "mxfp4_even", "nvfp4_exact",
       "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6", "nvfp4_exact_16x16")  # fmt: skip
SOME = pytest.mark.parametrize("recipe", [SCALE_RECIPES[name] for name in FEW], ids=FEW)


def run(scaled, recipe, place=HOST, codes=None):
    """The launcher, with what the backend takes; codes: the same ones in another layout."""
    tensor = None if scaled.tensor_scale is None else scaled.tensor_scale.reshape(1)
    table = decode_table(recipe.fmt)[: recipe.fmt.code_count]
    given = scaled.codes if codes is None else codes
    return launch_at(place, dequantize_blocks, given, scaled.scales, table, device_numbers(recipe), tensor=tensor)


def any_codes(recipe, shape=(130, 150), g=3.7):
    """Every code of the format, every scale there is: codes of both signs and NaN, or any float32."""
    rng, grid = np.random.default_rng(3), recipe.block.grid(shape)
    codes = rng.integers(0, recipe.fmt.code_count, shape).astype(np.uint8)
    if device_numbers(recipe).rule == 0:
        scales = np.abs(spread(grid, seed=4, width=20))
        scales.reshape(-1)[:9] = np.resize(np.float32([1e-45, 1e-39, FLT_MAX, 1, 0, np.inf, np.nan]), scales.size)[:9]
    else:
        scales = np.resize(rng.permutation(256).astype(np.uint8), grid)
    tensor = np.asarray(g, np.float32) if device_numbers(recipe).two_level else None
    made = NUMBA.quantize_blocks(np.zeros((1, 1), np.float32), recipe, OCP)
    return dataclasses.replace(made, codes=codes, scales=scales.astype(scales.dtype), tensor_scale=tensor)


@EVERY
def test_every_recipe_decodes_as_the_cpu_backend(recipe):
    for name in MATRICES:
        scaled = NUMBA.quantize_blocks(matrix(name), recipe, OCP)
        assert_bits_equal(NUMBA.dequantize_blocks(scaled, recipe), run(scaled, recipe), what=name)


@SOME
def test_every_code_under_every_scale_decodes_as_the_cpu_backends(recipe):
    for shape in ((130, 150), (20, 160), (3, 4096)):
        for g in (3.7, 0, 1e-45, 1e-37, FLT_MAX, 1000):
            scaled = any_codes(recipe, shape, g)
            with np.errstate(all="ignore"):
                expected = NUMBA.dequantize_blocks(scaled, recipe)
            assert_bits_equal(expected, run(scaled, recipe), what=f"{shape} {g}")


@pytest.mark.parametrize("order", [None, *ScaleOrder], ids=str)
@pytest.mark.parametrize("block", [(3, 7), (2, 1), (5, 0), (0, 16), (1, 5), (1, 300), (2**70, 2**70)])
def test_blocks_of_any_shape_decode_too(order, block):
    recipe = mine(block, order=order)
    scaled = NUMBA.quantize_blocks(spread((9, 77)), recipe, OCP)
    assert_bits_equal(NUMBA.dequantize_blocks(scaled, recipe), run(scaled, recipe))


@SOME
def test_strides_grids_and_devices_change_no_bit(monkeypatch, recipe):
    x = spread((70, 260))
    scaled = NUMBA.quantize_blocks(x, recipe, OCP)
    expected = NUMBA.dequantize_blocks(scaled, recipe)
    shifted = np.zeros(x.size + 1, np.uint8)[1:].reshape(x.shape)
    shifted[...] = scaled.codes
    for codes in (shifted, np.asfortranarray(scaled.codes), scaled.codes[::-1][::-1]):
        assert_bits_equal(expected, run(scaled, recipe, codes=codes))
    for grid, threads in ((1, 128), (2, 32), (50, 64), (7, 256)):
        monkeypatch.setattr(unblocks, "THREADS", threads)
        assert_bits_equal(expected, run(scaled, recipe, place=Host(blocks=(grid, 1))))
    assert_bits_equal(expected, run(scaled, recipe, place=played_device(monkeypatch)))


def test_a_code_outside_the_table_is_nan():
    recipe = device_numbers(SCALE_RECIPES["float4_e2m1fn"])
    codes = np.uint8([[1, 16, 255]])
    got = launch(dequantize_blocks, codes, np.ones((1, 1), np.float32), np.arange(16, dtype=np.float32), recipe)
    assert [0x3F800000, 0x7FC00000, 0x7FC00000] == got.view(np.uint32).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("mxfp8_rceil", "scales.cuh", "code == 0u ? 0x00400000u :", "code == 0u ? 0u :"),
        ("nvfp4_te", "scales.cuh", "(code & 0x7Fu) == 0x7Fu", "code == 0x7Fu"),
        ("nvfp4_exact", "unblocks.cu", "__double2float_rn(__ddiv_rn(product, (double)full_range))",
         "__fdiv_rn(__double2float_rn(product), full_range)"),
        ("nvfp4_4over6", "unblocks.cu", "__fdiv_rn(__fmul_rn(y, l.g), full_range)",
         "__fmul_rn(y, __fdiv_rn(l.g, full_range))"),
        ("nvfp4_torchao", "unblocks.cu", "rule == QSIM_TORCHAO ? __fmul_rn(l.pt, d8) : d8;", "d8;"),
        ("float8_e4m3fn_128x128", "unblocks.cu", "walk.row / block_rows * across", "walk.row * across"),
        ("float8_e4m3fn_row", "unblocks.cu", "__uint_as_float(QSIM_NAN);\n}", "y;\n}"),
    ],
)  # fmt: skip
def test_a_wrong_step_is_seen(monkeypatch, name, file, old, new):
    plain, recipe = source(file), SCALE_RECIPES[name]
    assert plain.count(old) == 1
    monkeypatch.setattr(kernels, "source", lambda name: plain.replace(old, new) if name == file else source(name))
    place = Given(made=host.build(UNBLOCKS.text, UNBLOCKS.entry, options=("-O0",)))
    scaled = any_codes(recipe, (100, 260))
    with np.errstate(all="ignore"):
        expected = NUMBA.dequantize_blocks(scaled, recipe)
    assert expected.tobytes() != run(scaled, recipe, place=place).tobytes()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", UNBLOCKS.arches)
def test_a_lane_writes_sixteen_bytes_at_once(arch):
    assert "st.global.v4" in compiled(UNBLOCKS.text, UNBLOCKS.file, arch).ptx


def test_wrong_arguments_are_named():
    recipe, codes = device_numbers(SCALE_RECIPES["nvfp4_te"]), np.zeros((2, 17), np.uint8)
    scales, table, tensor = np.zeros((2, 2), np.uint8), np.zeros(16, np.float32), np.ones(1, np.float32)
    for args, message in (
        ((codes.astype(np.int8), scales, table), "codes is numpy.ndarray of int8"),
        ((codes, scales.astype(np.float32), table), "scales is numpy.ndarray of float32"),
        ((codes, scales, table.astype(np.float64)), "table is numpy.ndarray of float64"),
    ):
        with pytest.raises(TypeError, match=message):
            dequantize_blocks(HOST, *args, recipe, tensor=tensor)
    with pytest.raises(TypeError, match=r"tensor is builtins\.NoneType"):
        dequantize_blocks(HOST, codes, scales, table, recipe)
    for args, message in (
        ((codes[0], scales, table), r"codes of shape \(17,\)"),
        ((codes, scales[:, :1], table), r"have \(2, 2\) blocks"),
        ((codes, scales, table[:0]), "table of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantize_blocks(HOST, *args, recipe, tensor=tensor)
    with pytest.raises(ValueError, match="tensor is one number"):
        dequantize_blocks(HOST, codes, scales, table, recipe, tensor=np.ones(2, np.float32))


def test_nothing_to_decode_is_nothing():
    recipe = SCALE_RECIPES["float8_e5m2"]
    nothing = NUMBA.quantize_blocks(np.zeros((0, 5), np.float32), recipe, OCP)
    assert isinstance(nothing, ScaledCodes)
    assert (0, 5) == run(nothing, recipe).shape
