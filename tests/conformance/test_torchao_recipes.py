"""MX and NVFP4 recipes against torchao: equal bit by bit, and each place where the library is wrong, by input."""

import numpy as np
import pytest

from qsim.codec.scaled import dequantize_oracle, get_scale_recipe, quantize_oracle
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import E4M3FN, E8M0FNU
from tests.oracles import need, need_torch

torch = need_torch()
mx = need("torchao.prototype.mx_formats.mx_tensor", "0.18")
nvfp4 = need("torchao.prototype.mx_formats.nvfp4_tensor", "0.18")
kernels = need("torchao.prototype.mx_formats.kernels", "0.18")

F = np.float32
ELEMENTS = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
}
MODES = ("floor", "ceil", "even", "rceil")  # the library has no "nearest"
LOG2_IS_WRONG = 64  # float32 steps above a power of two that a float32 log2 may take for it (43 seen)


def floats(bits):
    return np.asarray(bits, np.uint32).view(F)


def mx_by_torchao(x, stem, mode):
    """Scale codes, element codes and values of a matrix [M, 32 * n] by the library."""
    element = ELEMENTS[stem]
    scales, packed = mx.to_mx(torch.from_numpy(x), element, 32, mx.ScaleCalculationMode[mode.upper()])
    values = mx.to_dtype(packed, scales, element, 32, torch.float32).numpy()
    codes = kernels.unpack_uint4(packed) if stem == "mxfp4" else packed.view(torch.uint8)
    return scales.view(torch.uint8).numpy(), codes.numpy().reshape(x.shape), values


def nvfp4_by_torchao(x):
    """The same of the library's NVFP4 with a tensor scale; x is [M, 16 * n]."""
    pt = nvfp4.per_tensor_amax_to_scale(torch.from_numpy(x).abs().max())
    cast = nvfp4.NVFP4Tensor.to_nvfp4(torch.from_numpy(x), 16, pt)
    values = cast.dequantize(torch.float32).numpy()
    return cast.scale.view(torch.uint8).numpy(), kernels.unpack_uint4(cast.qdata).numpy(), values


def rows_of(amax):
    """One block a row: amax, -amax / 3, amax / 64, -0, and zeros."""
    x = np.zeros((amax.size, 32), F)
    x[:, 1], x[:, 2], x[:, 3], x[:, 4] = amax, -amax / F(3), amax / F(64), -0.0
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stem", ELEMENTS)
def test_mx_equals_torchao_where_it_follows_the_rules(stem, mode):
    """Every kind of mantissa in binades from the first scale above 2^-127 to the last; then random rows."""
    recipe = get_scale_recipe(f"{stem}_{mode}")
    top = int(np.asarray(recipe.fmt.max, F).view(np.uint32)) & 0x7FFFFF
    half_ulp = 1 << (22 - recipe.fmt.mantissa_bits)
    last = (1 << 23) - 1
    mantissas = {0, 1, half_ulp, top - 1, top, top + 1, top + LOG2_IS_WRONG, last - half_ulp, last + 1 - half_ulp, last}
    if mode == "rceil":
        mantissas.discard(top + 1)
    fields = (17, 64, 126, 127, 128, 200, 254)  # 17: E5M2 takes the amax down by 2^15, RCEIL by 2^16
    amax = floats([field << 23 | mantissa for field in fields for mantissa in sorted(mantissas)])
    rng = np.random.default_rng(3)
    dense = (rng.standard_normal((8, 32)) * np.exp2(rng.integers(-90, 90, (8, 1)))).astype(F)
    x = np.concatenate([rows_of(amax), dense])
    scaled = quantize_oracle(x, recipe)
    scales, codes, values = mx_by_torchao(x, stem, mode)
    assert int(scaled.scales.min()) > 0
    assert_codes_equal(scales, scaled.scales, E8M0FNU, inputs=np.abs(x).max(axis=1, keepdims=True))
    assert_codes_equal(codes, scaled.codes, recipe.fmt, inputs=x)
    assert_bits_equal(values, dequantize_oracle(scaled, recipe))


@pytest.mark.parametrize(
    ("stem", "bits", "ours", "theirs"),
    [
        ("mxfp4", 0x7F400001, 253, 252),
        ("mxfp8", 0x7F600001, 247, 246),
        ("mxfp8_e5m2", 0x7F600001, 240, 239),
        ("mxfp6_e2m3", 0x7F700001, 253, 252),
        ("mxfp6_e3m2", 0x7F600001, 251, 250),
        ("mxfp4", 0x40C00001, 128, 128),  # 6 + ulp: near 1 the logarithm is fine enough
    ],
)
def test_torchao_takes_rceil_exponents_from_a_float32_logarithm(stem, bits, ours, theirs):
    """amax is one step above fmt.max * 2^e, so it needs the next scale; theirs clips."""
    x = rows_of(floats([bits]))
    assert (ours, theirs) == (
        int(quantize_oracle(x, f"{stem}_rceil").scales[0, 0]),
        int(mx_by_torchao(x, stem, "rceil")[0][0, 0]),
    )


@pytest.mark.parametrize(
    ("stem", "mode", "amax", "ours", "theirs"),
    [
        ("mxfp4", "floor", 2.0**-126, 4, 2),
        ("mxfp4", "ceil", 2.0**-126, 4, 2),
        ("mxfp4", "even", 2.0**-126, 4, 2),
        ("mxfp4", "rceil", 2.0**-126, 4, 0),
        ("mxfp8", "floor", 2.0**-120, 0x70, 0x68),
        ("mxfp8", "rceil", 2.0**-120, 0x70, 0),
        ("mxfp8_e5m2", "even", 2.0**-127, 0x3C, 0x38),
        ("mxfp8_e5m2", "rceil", 2.0**-127, 0x3C, 0),
        ("mxfp6_e2m3", "floor", 2.0**-126, 16, 8),
        ("mxfp6_e3m2", "rceil", 2.0**-126, 16, 0),
    ],
)
def test_torchao_divides_by_another_scale_than_it_stores_at_code_0(stem, mode, amax, ours, theirs):
    """The stored scale is 2^-127: the library divides by 2^-126, or by 1 under RCEIL, and decodes half or nothing."""
    x = rows_of(floats([0]) + F(amax))
    name = f"{stem}_{mode}"
    scaled = quantize_oracle(x, name)
    scales, codes, values = mx_by_torchao(x, stem, mode)
    assert (0, 0, ours, theirs) == (int(scaled.scales[0, 0]), int(scales[0, 0]), int(scaled.codes[0, 1]), codes[0, 1])
    assert (amax, 0 if theirs == 0 else amax / 2) == (float(dequantize_oracle(scaled, name)[0, 1]), values[0, 1])


@pytest.mark.parametrize(
    ("stem", "mode", "ours", "theirs"),
    [  # codes of 1, NaN, -2; by the library the first is 1 / Inf, or what its bits give
        ("mxfp4", "floor", [7, 7, 7], [0, 3, 8]),
        ("mxfp4", "rceil", [7, 7, 7], [3, 3, 3]),
        ("mxfp8", "even", [0x7F] * 3, [0, 0x7F, 0x80]),
        ("mxfp8", "rceil", [0x7F] * 3, [0x7F] * 3),
        ("mxfp6_e2m3", "ceil", [31] * 3, [0, 12, 32]),
        ("mxfp6_e3m2", "rceil", [31] * 3, [14] * 3),
    ],
)
def test_a_block_with_nan_decodes_to_nan_in_both_whatever_its_codes(stem, mode, ours, theirs):
    x = np.zeros((1, 32), F)
    x[0, :3] = 1, np.nan, -2
    scaled = quantize_oracle(x, f"{stem}_{mode}")
    scales, codes, values = mx_by_torchao(x, stem, mode)
    assert (255, 255) == (int(scaled.scales[0, 0]), int(scales[0, 0]))
    assert (ours, theirs) == (scaled.codes[0, :3].tolist(), codes[0, :3].tolist())
    assert bool(np.isnan(values).all())
    assert bool(np.isnan(dequantize_oracle(scaled, f"{stem}_{mode}")).all())


INF_SCALES = {
    "mxfp4_floor": 253,
    "mxfp8_ceil": 247,
    "mxfp8_e5m2_even": 240,
    "mxfp6_e3m2_floor": 251,
    "mxfp8_rceil": 254,
}


@pytest.mark.parametrize(("name", "theirs"), INF_SCALES.items())
def test_only_rceil_of_torchao_gives_a_block_with_inf_the_largest_scale(name, theirs):
    stem, mode = name.rsplit("_", 1)
    x = np.zeros((1, 32), F)
    x[0, :3] = 1, -np.inf, 2.0**127
    scaled = quantize_oracle(x, name)
    scales, codes, values = mx_by_torchao(x, stem, mode)
    assert (254, theirs) == (int(scaled.scales[0, 0]), int(scales[0, 0]))
    assert codes[0, 1] == scaled.codes[0, 1]  # the largest negative element: a cast that saturates
    assert -np.inf == values[0, 1] == dequantize_oracle(scaled, name)[0, 1]
    assert 2.0**127 == dequantize_oracle(scaled, name)[0, 2]


# ---- NVFP4 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2.0**-100, 1.3e-20, 1.0, 448.0, 1e30, 3.4e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nvfp4_equals_torchao(size, dtype):
    """Blocks from amax_t down to 1e-7 of it, one of zeros, zeros of both signs."""
    rng = np.random.default_rng(7)
    spread = np.exp2(rng.integers(-23, 1, (6, 4, 1))) * rng.uniform(-1, 1, (6, 4, 16))
    x = (spread.reshape(6, 64) * size).astype(F)
    x[0, 0], x[1, 16:32], x[2, 3], x[3, 5] = size, 0, -0.0, 0
    if dtype == "bfloat16":
        x = floats(x.view(np.uint32) & 0xFFFF0000)
    scaled = quantize_oracle(x, "nvfp4_torchao")
    scales, codes, values = nvfp4_by_torchao(x)
    assert_codes_equal(scales, scaled.scales, E4M3FN)
    assert_codes_equal(codes, scaled.codes, get_scale_recipe("nvfp4_torchao").fmt, inputs=x)
    assert_bits_equal(values, dequantize_oracle(scaled, "nvfp4_torchao"))


@pytest.mark.parametrize(
    ("size", "theirs"), [(1e-35, 11), (7.9e-36, 11), (1e-38, 11), (1e-40, 11), (1e-42, 12), (1e-44, 12)]
)
def test_in_tiny_tensors_nvfp4_equals_torchao_but_for_zeros(size, theirs):
    """1 / pt is Inf, or nearly: the library multiplies 0 by Inf and encodes the NaN as 11 or 12."""
    x = (np.random.default_rng(9).uniform(-1, 1, (2, 32)) * size).astype(F)
    x[0, 0], x[1, 16:], x[0, 1] = size, 0, -0.0
    scaled = quantize_oracle(x, "nvfp4_torchao")
    scales, codes, values = nvfp4_by_torchao(x)
    other = x != 0
    assert_codes_equal(codes[other], scaled.codes[other], get_scale_recipe("nvfp4_torchao").fmt)
    assert_bits_equal(values[other], dequantize_oracle(scaled, "nvfp4_torchao")[other])
    assert scales[:, 0].tolist() == scaled.scales[:, 0].tolist()
    assert ([8, *[0] * 16], 0x08) == ([scaled.codes[0, 1], *scaled.codes[1, 16:]], scaled.scales[1, 1])
    assert {theirs} == set(codes[1, 16:].tolist())


def test_torchao_makes_nan_of_zeros():
    x = np.zeros((1, 32), F)
    scaled = quantize_oracle(x, "nvfp4_torchao")
    scales, codes, values = nvfp4_by_torchao(x)
    assert ([[255, 255]], {12}, True) == (scales.tolist(), set(codes.flat), bool(np.isnan(values).all()))
    assert ([[8, 8]], {0}) == (scaled.scales.tolist(), set(scaled.codes.flat))
    assert_bits_equal(x, dequantize_oracle(scaled, "nvfp4_torchao"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_nan_or_inf_spoils_the_whole_tensor_of_torchao_and_one_block_of_ours(bad):
    x = np.ones((1, 32), F)
    x[0, 3] = bad
    scaled = quantize_oracle(x, "nvfp4_torchao")
    assert bool(np.isnan(nvfp4_by_torchao(x)[2]).all())
    assert [[0x7F, 0x7E]] == scaled.scales.tolist()
    assert [1.0] * 16 == dequantize_oracle(scaled, "nvfp4_torchao")[0, 16:].tolist()
