"""Scaled products: exact ones against rationals, models against dot products, epilogues by hand, public mistakes."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import qsim
from qsim import Epilogue, scaled_gemm, scaled_gemm_with_report
from qsim.codec.scaled import Block, Float32Scale, ScaleRecipe
from qsim.codec.threads import threads
from qsim.errors import FormatError, QsimError
from qsim.formats import E4M3FN
from qsim.gemm import block_dot, exact_scaled, int8, matmul
from qsim.gemm.centred import centred_matmul
from qsim.gemm.epilogue import fma32
from qsim.gemm.exact import _round_oracle
from qsim.gemm.exact_scaled import exact_oracle, exact_product, narrow_depth, wide_depth
from qsim.quant.products import _side

ALL = pytest.mark.parametrize("name", list(qsim.SCALE_RECIPES))


def normal(shape, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


def sides(a, b):
    return _side(a, "a", -1).operand, _side(b, "b", 0).operand


def quantized(codes, fmt="e4m3", scale=1.0):
    """Codes [rows, K] under one scale of 1 (or another), as a tensor."""
    q = qsim.quantize(np.zeros(np.shape(codes), np.float32), fmt)
    return replace(q, codes=np.asarray(codes, np.uint8), scales=np.float32(scale))


def ones(rows, columns, fmt="e4m3", value=1.0, scale=1.0):
    return quantized(np.full((rows, columns), int(qsim.encode(np.float32(value), fmt)), np.uint8), fmt, scale)


# ---- the exact product ------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("depth", [1, 33, 150])
def test_the_exact_product_is_the_rational_sum_rounded_once(name, depth):
    x, w = normal((4, depth), depth, 2.0), normal((depth, 3), depth + 1)
    for kind in ("plain", "special", "tiny"):
        if kind == "special":
            x[0, 0], w[-1, -1] = np.nan, np.inf
        if kind == "tiny":
            x, w = normal((4, depth), 5) * np.float32(1e-30), normal((depth, 3), 6) * np.float32(1e-12)
            x[0] = 0
        a, b = qsim.quantize(x, name), qsim.quantize(w, name, axis=0)
        expected = exact_oracle(*sides(a, b))
        assert expected.tobytes() == exact_product(*sides(a, b))[0].tobytes()
        assert expected.tobytes() == scaled_gemm(a, b).tobytes()


MIXED = [("nvfp4_te", "mxfp8_rceil"), ("nvfp4_exact", "e5m2_row"), ("e4m3_1x128", "e4m3_128x128"), ("e5m2", "e4m3_col"),
         ("nvfp4_4over6", "nvfp4_torchao"), ("e2m1", "float8_e4m3fnuz"), ("mxfp4_even", "e3m2")]  # fmt: skip


@pytest.mark.parametrize("names", MIXED)
def test_two_recipes_in_one_product(names):
    a, b = qsim.quantize(normal((3, 200), 1), names[0]), qsim.quantize(normal((200, 4), 2), names[1], axis=0)
    assert exact_oracle(*sides(a, b)).tobytes() == scaled_gemm(a, b).tobytes()


@pytest.mark.parametrize("block", [(1, 2**62), (2**62, 16), (0, 2**40), (2**40, 0)])
def test_blocks_beyond_the_matrix_multiply_as_its_own(block):
    recipe = ScaleRecipe(name="mine", fmt=E4M3FN, block=Block(*block), scale=Float32Scale())
    a, b = qsim.quantize(normal((3, 40), 1), recipe), qsim.quantize(normal((40, 2), 2), recipe, axis=0)
    assert exact_oracle(*sides(a, b)).tobytes() == scaled_gemm(a, b).tobytes()
    assert (3, 2) == scaled_gemm(a, b, accumulate="exact_per_block").shape


def test_the_proven_depths_are_those_of_the_facts():
    fp4, fp8 = ones(1, 4, "e2m1"), ones(1, 4, "e4m3")
    assert 116_508 == narrow_depth(*sides(fp4, replace(fp4, axis=0, shape=(4, 1), codes=fp4.codes.T)))
    assert 171_196 == wide_depth(*sides(fp8, replace(fp8, axis=0, shape=(4, 1), codes=fp8.codes.T)))
    assert 0 == narrow_depth(*sides(fp8, replace(fp8, axis=0, shape=(4, 1), codes=fp8.codes.T)))


def long_sum(fmt, big, small, depth):
    """depth - 1 products of the largest number and one of the least; then what is left when the large ones are gone."""
    codes = np.full((1, 2 * depth - 1), int(qsim.encode(np.float32(big), fmt)), np.uint8)
    codes[0, depth - 1] = qsim.encode(np.float32(small), fmt)
    other = codes.copy()
    other[0, depth:] |= 0x8 if fmt == "e2m1" else 0x80
    return codes, other


@pytest.mark.parametrize(("fmt", "big", "small", "depth", "path"), [
    ("e2m1", 6.0, 0.5, 116_508, "float32 BLAS"), ("e2m1", 6.0, 0.5, 116_510, "float64 BLAS"),
    ("e4m3", 448.0, 2.0**-9, 171_196, "by formats"), ("e4m3", 448.0, 2.0**-9, 171_198, "one by one"),
])  # fmt: skip
def test_at_the_edge_of_a_proof(monkeypatch, fmt, big, small, depth, path):
    """The last proven K goes by BLAS; beyond it another way is taken, and the sum is right where BLAS alone fails."""
    monkeypatch.setattr(exact_scaled, "serves", lambda *_: False)
    codes, other = long_sum(fmt, big, small, depth)
    a, b = quantized(codes[:, :depth], fmt), quantized(other[:, :depth], fmt)
    result = scaled_gemm_with_report(a, b, transpose_b=True)
    exact = (depth - 1) * Fraction(big) ** 2 + Fraction(small) ** 2
    assert path in result.report.path
    assert _round_oracle(exact) == result.d[0, 0]
    left = scaled_gemm(quantized(codes, fmt), quantized(other, fmt), transpose_b=True)[0, 0]
    assert np.float32(small**2) == left
    dtype = np.float32 if fmt == "e2m1" else np.float64
    values = [qsim.decode(x, fmt).astype(dtype) for x in (codes, other)]
    running = np.cumsum(values[0] * values[1], axis=1, dtype=dtype)[0]
    if depth in (116_510, 171_198):
        assert float(running[-1]) != small**2  # what one sum after another makes of it


def test_e5m2_fails_at_two_products_and_is_exact_all_the_same():
    codes = qsim.encode(np.float32([[57344, 2.0**-16, -57344]]), "e5m2")
    other = qsim.encode(np.float32([[57344, 2.0**-16, 57344]]), "e5m2")
    assert np.float32(2.0**-32) == scaled_gemm(quantized(codes, "e5m2"), quantized(other, "e5m2"), transpose_b=True)


def wild(rows, depth, seed, fmt="e5m2"):
    """Every code but NaN and Inf, equally likely: more binades than float64 has bits for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7C if fmt == "e5m2" else 0x7F, (rows, depth)).astype(np.uint8)
    return codes | (rng.integers(0, 2, codes.shape) << 7).astype(np.uint8)


@pytest.mark.parametrize("other", ["e5m2", "e4m3"])
def test_splitting_equals_integers_and_rationals(monkeypatch, other):
    a, b = quantized(wild(6, 800, 1), "e5m2", 3.0), quantized(wild(6, 800, 2, other), other, 1.7)
    cancelling = np.concatenate([a.codes, a.codes ^ 0x80, np.full((6, 1), 0x01, np.uint8)], axis=1)
    double = np.concatenate([b.codes, b.codes, np.full((6, 1), 0x01, np.uint8)], axis=1)
    a, b = replace(a, codes=cancelling, shape=(6, 1601)), replace(b, codes=double, shape=(6, 1601))
    operands = _side(a, "a", -1).operand, _side(b, "b", 1).operand
    expected = exact_oracle(*operands)
    results = {}
    for many in (1, 10**9):
        monkeypatch.setattr(exact_scaled, "MANY", 0 if many == 1 else many)
        out, results[many] = exact_product(*operands)
        assert expected.tobytes() == out.tobytes()
    assert results[10**9].split > 0
    assert results[1].in_integers > 0
    assert 0 == results[1].split


def test_a_certificate_of_the_operands_serves_narrow_data():
    x = np.random.default_rng(0).integers(1, 8, (20, 300)).astype(np.float32)
    a, b = (quantized(qsim.encode(v, "e5m2"), "e5m2") for v in (x, x[::-1]))
    result = scaled_gemm_with_report(a, b, transpose_b=True)
    assert "certificate" in result.report.path
    assert (qsim.decode(a.codes, "e5m2") @ qsim.decode(b.codes, "e5m2").T == result.d).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "nvfp4_te", "nvfp4_exact", "e4m3_1x128", "mxfp8_floor", "e2m1"])
def test_rows_threads_and_layouts_change_no_bit(name):
    x, w = normal((40, 160), 3), normal((160, 70), 4)
    a, b = qsim.quantize(x, name), qsim.quantize(w, name, axis=0)
    whole = scaled_gemm(a, b)
    for count in (1, 3):
        with threads(count):
            assert whole.tobytes() == scaled_gemm(a, b).tobytes()
    assert whole.tobytes() == scaled_gemm(a, qsim.quantize(np.ascontiguousarray(w.T), name), transpose_b=True).tobytes()
    if a.recipe.fmt.bits == 4:
        for order in ("low_first", "high_first", "ggml_split"):
            packed = [qsim.quantize(v, name, axis=k, packed=True, order=order) for v, k in ((x, -1), (w, 0))]
            assert whole.tobytes() == scaled_gemm(*packed).tobytes()
    three = qsim.quantize(x.reshape(4, 10, 160), name)
    assert (4, 10, 70) == scaled_gemm(three, b).shape
    assert whole.tobytes() == scaled_gemm(three, b).tobytes()


def test_a_row_subset_has_the_bits_of_the_whole():
    codes = wild(30, 500, 5)
    b = quantized(wild(9, 500, 6), "e5m2")
    whole = scaled_gemm(quantized(codes, "e5m2"), b, transpose_b=True)
    for rows in (slice(0, 1), slice(7, 20)):
        assert whole[rows].tobytes() == scaled_gemm(quantized(codes[rows], "e5m2"), b, transpose_b=True).tobytes()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (6, 64, 4), (7, 65, 5), (13, 130, 259), (12, 1, 1000)])
def test_int8_dot_products_equal_float64(monkeypatch, m, n, k):
    if not int8.kernels.has_instruction():
        pytest.skip("this processor has no 512-bit int8 dot product (AVX-512 VNNI)")
    monkeypatch.setattr(int8, "WORTH", 0)
    rng = np.random.default_rng(k)
    a, b = (quantized(rng.integers(0, 16, (r, k)), "e2m1", s) for r, s in ((m, 0.3), (n, 7.0)))
    result = scaled_gemm_with_report(a, b, transpose_b=True)
    assert "int8" in result.report.path
    monkeypatch.setattr(exact_scaled, "serves", lambda *_: False)
    assert scaled_gemm(a, b, transpose_b=True).tobytes() == result.d.tobytes()


# ---- exact per block --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [("nvfp4_te", 16), ("mxfp4_rceil", 32), ("e4m3_1x128", 128), ("e5m2", 300)])
def test_exact_per_block_adds_rounded_partials_in_ascending_k(name, width):
    a, b = qsim.quantize(normal((3, 300), 1), name), qsim.quantize(normal((300, 2), 2), name, axis=0)
    left, right = sides(a, b)
    x, y = left.values(), right.values()
    out = scaled_gemm(a, b, accumulate="exact_per_block")
    for i, j in np.ndindex(3, 2):
        acc = np.float32(0)
        for start in range(0, 300, width):
            part = sum(
                Fraction(p) * Fraction(q)
                for p, q in zip(x[i, start : start + width], y[j, start : start + width], strict=True)
            )
            acc = np.float32(acc + _round_oracle(part))
        factor = _round_oracle(left.tensor * right.tensor)
        if left.tensor == 1:
            factor = np.float32(np.float32(left.row[i]) * np.float32(right.row[j]))
        assert np.float32(acc * factor) == out[i, j]


# ---- tensor-core models -----------------------------------------------------------------------------------------


def by_dots(a, b, model, **options):
    """acc [M, N] by block_dot, one output a row."""
    m, n = a.shape[0], b.shape[0]
    left, right = np.repeat(a, n, axis=0), np.tile(b, (m, 1))
    return block_dot(left, right, model=model, **options).reshape(m, n)


@pytest.mark.parametrize("model", ["hopper_wgmma", "hopper_mma_sync", "ada_mma_sync", "blackwell_tcgen05"])
def test_a_model_makes_every_output_as_its_dot_product(model):
    a, b = quantized(wild(5, 300, 1), "e5m2", 0.5), quantized(wild(4, 300, 2, "e4m3"), "e4m3", 3.0)
    acc = by_dots(a.codes, b.codes, model, fmt_a="e5m2", fmt_b="e4m3")
    f = np.float32(1 / np.float32(0.5)) * (np.float32(1) / np.float32(3))
    assert (acc * f).astype(np.float32).tobytes() == scaled_gemm(a, b, accumulate=model, transpose_b=True).tobytes()


def test_promotion_and_split_k_add_chains_in_float32():
    x, w = normal((20, 512), 1, 2.0), normal((30, 512), 2, 2.0)
    x[:, 128:] *= np.float32(1 / 64)
    a, b = quantized(qsim.encode(x, "e4m3")), quantized(qsim.encode(w, "e4m3"))
    parts = [by_dots(a.codes[:, s : s + 128], b.codes[:, s : s + 128], "hopper_mma_sync", fmt_a="e4m3", fmt_b="e4m3")
             for s in range(0, 512, 128)]  # fmt: skip
    ascending = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    promoted = scaled_gemm(a, b, accumulate="hopper_mma_sync", promote_every=128, transpose_b=True)
    assert ascending.tobytes() == promoted.tobytes()
    halves = (parts[0] + parts[1]) + (parts[2] + parts[3])
    split = scaled_gemm(a, b, accumulate="hopper_mma_sync", promote_every=128, split_k=2, transpose_b=True)
    assert halves.tobytes() == split.tobytes()
    assert (halves != ascending).any()


def test_block_scales_of_float32_end_a_chain():
    x, w = normal((3, 300), 1), normal((4, 300), 2)
    a, b = qsim.quantize(x, "e4m3_1x128"), qsim.quantize(w, "e4m3_128x128")
    out = scaled_gemm(a, b, accumulate="hopper_wgmma", transpose_b=True)
    left, right = _side(a, "a", -1).operand, _side(b, "b", 1).operand
    acc = np.zeros((3, 4), np.float32)
    for block, start in enumerate(range(0, 300, 128)):
        part = by_dots(a.codes[:, start : start + 128], b.codes[:, start : start + 128], "hopper_wgmma", fmt_a="e4m3",
                       fmt_b="e4m3")  # fmt: skip
        scale = (left.block[:, block][:, None] * right.block[0, block]).astype(np.float32)
        acc = fma32(part, np.broadcast_to(scale, acc.shape), acc)
    assert acc.tobytes() == out.tobytes()
    shorter = scaled_gemm(a, b, accumulate="hopper_wgmma", promote_every=64, transpose_b=True)
    assert shorter.shape == out.shape


@pytest.mark.parametrize(("name", "model"), [
    ("mxfp8_rceil", "blackwell_mxf8f6f4"), ("mxfp4_even", "blackwell_mxf4"), ("nvfp4_te", "blackwell_nvfp4"),
    ("nvfp4_exact_16x16", "blackwell_nvfp4"),
])  # fmt: skip
def test_scaled_models_read_the_scales_of_their_blocks(name, model):
    a, b = qsim.quantize(normal((5, 150), 1, 2.0), name), qsim.quantize(normal((3, 150), 2), name)
    left, right = _side(a, "a", -1).operand, _side(b, "b", 1).operand
    rows = [np.repeat(x.scale_codes, x.extent[0], axis=0)[: x.codes.shape[0]] for x in (left, right)]
    fmt = a.recipe.fmt
    acc = by_dots(a.codes, b.codes, model, fmt_a=fmt, fmt_b=fmt, scale_a=np.repeat(rows[0], 3, axis=0),
                  scale_b=np.tile(rows[1], (5, 1)))  # fmt: skip
    factor = _round_oracle(left.tensor * right.tensor)
    assert (acc * factor).tobytes() == scaled_gemm(a, b, accumulate=model, transpose_b=True).tobytes()


# ---- epilogues --------------------------------------------------------------------------------------------------


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 30, 4000) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    c = (-(a.astype(np.float64) * b) * (1 + rng.choice([0, 2.0**-24, 2.0**-30, 1], 4000))).astype(np.float32)
    got = fma32(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        assert _round_oracle(Fraction(x) * Fraction(y) + Fraction(z)) == r


def test_scales_one_after_the_other_differ_from_their_product():
    a, b = quantized(wild(40, 64, 1, "e4m3"), scale=3.0), quantized(wild(50, 64, 2, "e4m3"), scale=7.0)
    sa, sb = (np.float32(1) / np.float32(s) for s in (3.0, 7.0))
    acc = scaled_gemm(quantized(a.codes), quantized(b.codes), transpose_b=True)
    by = {order: scaled_gemm(a, b, transpose_b=True, epilogue=Epilogue(order=order))
          for order in ("exact", "product", "rows_first", "columns_first")}  # fmt: skip
    assert (acc * (sa * sb)).tobytes() == by["product"].tobytes()
    assert ((acc * sa) * sb).tobytes() == by["rows_first"].tobytes()
    assert ((acc * sb) * sa).tobytes() == by["columns_first"].tobytes()
    assert len({v.tobytes() for v in by.values()}) == 4


def test_alpha_beta_bias_and_amax_in_their_order():
    a, b = ones(2, 64), ones(3, 64)
    c, bias = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([10, 20, -30])
    result = scaled_gemm_with_report(a, b, transpose_b=True, epilogue=Epilogue(alpha=0.5, beta=2, c=c, bias=bias))
    assert (32 + 2 * c + bias == result.d).all()
    assert 62.0 == result.amax


def test_bfloat16_and_float16_round_the_float32():
    alpha = float.fromhex("0x1.9b3334p-1")
    a, b = quantized(qsim.encode(np.float32([[1.25]]), "e4m3")), ones(1, 1)
    d = scaled_gemm(a, b, transpose_b=True, epilogue=Epilogue(alpha=alpha), out_dtype="bfloat16")
    assert 0x3F800000 == d.view(np.uint32)[0, 0]
    exact = 1.25 * alpha
    assert exact > 1 + 2.0**-8  # one rounding would have gone up, to 3f81
    assert np.float16 == scaled_gemm(a, b, transpose_b=True, out_dtype="float16").dtype


def test_an_fp8_output_is_scaled_once_more_and_saturates():
    a, b = ones(1, 16), ones(1, 16)
    codes = scaled_gemm(a, b, transpose_b=True, out_dtype="e4m3", epilogue=Epilogue(scale_d=1 / 3))
    assert int(qsim.encode(np.float32(16) * np.float32(1 / 3), "e4m3")) == codes[0, 0]
    big = Epilogue(scale_d=1000)
    assert 0x7E == scaled_gemm(a, b, transpose_b=True, out_dtype="e4m3", epilogue=big)[0, 0]
    assert 0x7F == scaled_gemm(a, b, transpose_b=True, out_dtype="e4m3", epilogue=replace(big, overflow="ieee"))[0, 0]
    assert np.uint8 == codes.dtype


@pytest.mark.parametrize("scale", [0.0, np.inf, -np.inf])
def test_a_nan_that_the_scale_of_an_fp8_output_makes_is_positive(scale):
    """Inf * 0: the sign of that NaN differs between processors."""
    a, b = ones(1, 16), ones(1, 16)
    with_inf = Epilogue(alpha=np.inf if scale == 0 else 0.0, scale_d=scale)
    assert 0x7F == scaled_gemm(a, b, transpose_b=True, out_dtype="e4m3", epilogue=with_inf)[0, 0]


# ---- centres and rotations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", ["tensor", "channel", "token", "block"])
@pytest.mark.parametrize("accumulate", ["exact", "blackwell_nvfp4"])
def test_a_centre_is_a_correction_in_the_stated_order(center, accumulate):
    x, w = normal((6, 64), 1) + np.float32(3), normal((64, 5), 2)
    a, b = qsim.quantize(x, "nvfp4_te", center=center), qsim.quantize(w, "nvfp4_te", axis=0)
    plain = scaled_gemm(replace(a, center=None), b, accumulate=accumulate)
    block = 16 if center == "block" else 0
    c = a.center.reshape(1 if center in ("tensor", "channel") else 6, -1)
    right = _side(b, "b", 0).residual.T
    added = centred_matmul(np.zeros((6, 64), np.float32), right, center=c, axis=center, block=block)
    assert (plain + added).tobytes() == scaled_gemm(a, b, accumulate=accumulate).tobytes()


def test_two_centres_add_their_cross_terms():
    x, w = normal((6, 64), 1) + np.float32(3), normal((64, 5), 2) - np.float32(2)
    a = qsim.quantize(x, "mxfp8_rceil", center="channel")
    b = qsim.quantize(w, "mxfp8_rceil", axis=0, center="channel")
    out = scaled_gemm(a, b)
    want = qsim.dequantize(a).astype(np.float64) @ qsim.dequantize(b).astype(np.float64)
    assert np.abs(out - want).max() < 1e-4 * np.abs(want).max()
    left, right = _side(a, "a", -1).residual, _side(b, "b", 0).residual
    ca, cb = (np.broadcast_to(q.center.reshape(1, -1), r.shape) for q, r in ((a, left), (b, right)))
    terms = [matmul(left, np.ascontiguousarray(cb.T)), matmul(np.ascontiguousarray(ca), np.ascontiguousarray(right.T)),
             matmul(np.ascontiguousarray(ca), np.ascontiguousarray(cb.T))]  # fmt: skip
    plain = scaled_gemm(replace(a, center=None), replace(b, center=None))
    assert (plain + ((terms[0] + terms[1]) + terms[2])).tobytes() == out.tobytes()


def test_rotated_operands_need_one_rotation():
    signs = qsim.hadamard_signs(1)
    x, w = normal((3, 32), 1), normal((32, 4), 2)
    a = qsim.quantize(x, "nvfp4_te", hadamard=signs)
    b = qsim.quantize(w, "nvfp4_te", axis=0, hadamard=signs)
    assert np.linalg.norm(scaled_gemm(a, b) - x @ w) < 0.3 * np.linalg.norm(x @ w)
    for other in (qsim.quantize(w, "nvfp4_te", axis=0), qsim.quantize(w, "nvfp4_te", axis=0, hadamard=-signs)):
        with pytest.raises(QsimError, match="rotated differently"):
            scaled_gemm(a, other)


def test_a_rotated_and_centred_operand_takes_its_centre_in_its_own_space():
    signs, x, w = qsim.hadamard_signs(0), normal((4, 64), 1) + np.float32(3), normal((64, 3), 2) - np.float32(2)
    for centers in (("channel", None), ("token", None), (None, "channel"), ("tensor", "token")):
        a = qsim.quantize(x, "mxfp8_rceil", hadamard=signs, center=centers[0])
        b = qsim.quantize(w, "mxfp8_rceil", axis=0, hadamard=signs, center=centers[1])
        want = qsim.dequantize(a).astype(np.float64) @ qsim.dequantize(b)
        assert np.abs(scaled_gemm(a, b) - want).max() < 1e-4 * np.abs(want).max()


# ---- what is not finite, what underflows, what is empty -----------------------------------------------------------


@pytest.mark.parametrize("how", ["exact", "exact_per_block", "hopper_wgmma", "hopper_mma_sync", "blackwell_tcgen05"])
def test_an_empty_sum_is_plus_zero(how):
    a = qsim.quantize(np.zeros((300, 0), np.float32), "e4m3")
    b = qsim.quantize(np.zeros((0, 300), np.float32), "e4m3", axis=0)
    assert (scaled_gemm(a, b, accumulate=how).view(np.uint32) == 0).all()
    if how == "hopper_wgmma":
        assert (scaled_gemm(a, b, accumulate=how, split_k=3, promote_every=64).view(np.uint32) == 0).all()
    assert (3,) == block_dot(np.zeros((3, 0), np.uint8), np.zeros((3, 0), np.uint8), fmt_a="e4m3", fmt_b="e4m3",
                             model="hopper_wgmma").shape  # fmt: skip


def test_what_rounds_to_zero_keeps_its_sign_whatever_the_other_rows_are():
    a, w = np.float32([[2.0**-80] * 2]), np.float32([[-(2.0**-80)]] * 2)
    b = qsim.quantize(w, "mxfp8_floor", axis=0)
    for rows in (a, np.vstack([a, np.float32([[2.0**100, 1]])])):
        out = scaled_gemm(qsim.quantize(rows, "mxfp8_floor"), b)
        assert 0x80000000 == out.view(np.uint32)[0, 0]
        assert exact_oracle(*sides(qsim.quantize(rows, "mxfp8_floor"), b)).tobytes() == out.tobytes()


def test_every_nan_has_the_bits_of_its_way_to_accumulate():
    inf = np.ones((1, 64), np.float32)
    inf[0, 0] = np.inf
    a, b = qsim.quantize(inf, "e5m2", overflow="ieee"), qsim.quantize(np.ones((64, 1), np.float32), "e5m2", axis=0)
    payload = np.uint32([0xFFC12345]).view(np.float32)
    for how, bits in (("exact", 0x7FC00000), ("exact_per_block", 0x7FC00000), ("hopper_wgmma", 0x7FFFFFFF)):
        for own in (Epilogue(bias=np.float32([-np.inf])), Epilogue(alpha=0.0), Epilogue(beta=1, c=-np.inf),
                    Epilogue(bias=payload)):  # fmt: skip
            assert hex(bits) == hex(scaled_gemm(a, b, accumulate=how, epilogue=own).view(np.uint32)[0, 0])
    inf[0, 40] = -np.inf
    both = qsim.quantize(inf, "e5m2", overflow="ieee")
    for options in ({}, {"promote_every": 32}, {"split_k": 2}):
        out = scaled_gemm(both, b, accumulate="hopper_wgmma", **options)
        assert 0x7FFFFFFF == out.view(np.uint32)[0, 0]


@pytest.mark.parametrize("how", ["exact", "exact_per_block", "hopper_wgmma"])
def test_one_block_is_treated_as_several_are(how):
    x, w = normal((16, 128), 1), normal((16, 128), 2)
    out = [
        scaled_gemm(*(qsim.quantize(np.pad(v, ((0, 0), (0, more))), "e4m3_1x128") for v in (x, w)), accumulate=how,
                    transpose_b=True, epilogue=Epilogue(alpha=0.3))
        for more in (0, 128)
    ]  # fmt: skip
    assert out[0].tobytes() == out[1].tobytes()


# ---- codes that are there already ---------------------------------------------------------------------------------


def test_the_codes_of_a_product_are_an_operand_of_the_next():
    a, b = qsim.quantize(normal((4, 32), 1), "e4m3"), qsim.quantize(normal((32, 16), 2), "e4m3", axis=0)
    codes = scaled_gemm(a, b, out_dtype="e4m3", epilogue=Epilogue(scale_d=4))
    tensor = qsim.from_codes(codes, "e4m3", scales=4.0)
    assert (qsim.decode(codes, "e4m3") / 4 == qsim.dequantize(tensor)).all()
    other = qsim.quantize(normal((16, 3), 3), "e4m3", axis=0)
    assert exact_oracle(*sides(tensor, other)).tobytes() == scaled_gemm(tensor, other).tobytes()


@pytest.mark.parametrize("name", ["e4m3_row", "e4m3_128x128", "mxfp4_even", "nvfp4_te", "nvfp4_exact_16x16", "e5m2"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_codes_and_scales_make_the_tensor_that_was_quantized(name, axis):
    q = qsim.quantize(normal((40, 6, 50)), name, axis=axis)
    scale = None if q.tensor_scale is None else float(q.tensor_scale)
    again = qsim.from_codes(q.codes, name, scales=q.scales, axis=axis, tensor_scale=scale)
    assert q.same_bits(again)
    assert qsim.dequantize(q).tobytes() == qsim.dequantize(again).tobytes()


def test_c_and_bias_have_the_shape_of_d():
    x, w, c = normal((2, 3, 32), 1), normal((32, 5), 2), normal((2, 3, 5), 3)
    a, b = qsim.quantize(x, "e4m3"), qsim.quantize(w, "e4m3", axis=0)
    d = scaled_gemm(a, b)
    assert (fma32(d, np.ones_like(d), c) == scaled_gemm(a, b, epilogue=Epilogue(beta=1, c=c))).all()
    bias = normal((3, 1), 4)
    assert (d + bias == scaled_gemm(a, b, epilogue=Epilogue(bias=bias))).all()


# ---- known public mistakes (numbers as in the facts of the models' sources) ----------------------------------------


def test_mistake_1_the_scale_of_the_output_is_applied():
    d = scaled_gemm(ones(16, 16), ones(16, 16), transpose_b=True, epilogue=Epilogue(scale_d=0.5), out_dtype="e4m3")
    assert (d == 0x50).all()


def row_blocks(values, scales, rows):
    """E4M3 tensor with one float32 scale for a band of rows and 128 columns."""
    recipe = ScaleRecipe(name="bands", fmt=E4M3FN, block=Block(rows, 128), scale=Float32Scale())
    q = qsim.quantize(values, recipe)
    return replace(q, codes=qsim.encode(values, "e4m3"), scales=np.float32(1) / np.float32(scales))


def test_mistake_2_each_band_of_rows_has_its_own_scale():
    a = row_blocks(np.ones((256, 128), np.float32), [[2], [4]], 128)
    d = scaled_gemm(a, ones(1, 128), transpose_b=True)
    assert (256.0, 512.0) == (d[0, 0], d[128, 0])


def test_mistake_3_a_height_that_is_no_multiple_of_the_tile():
    scales = 2.0 ** np.arange(9).reshape(9, 1)
    d = scaled_gemm(row_blocks(np.ones((1088, 128), np.float32), scales, 128), ones(1, 128), transpose_b=True)
    assert (d[:, 0] == 128 * np.repeat(scales[:, 0], 128)[:1088]).all()


def test_mistakes_4_and_5_strides_and_axes_are_honoured():
    buf = np.float32([[1, 2, 9, 9], [3, 4, 9, 9]])
    d = scaled_gemm(quantized(qsim.encode(buf[:, :2], "e4m3")), ones(1, 2), transpose_b=True)
    assert [[3.0], [7.0]] == d.tolist()
    assert (2, 5) == scaled_gemm(ones(2, 7), ones(5, 7), transpose_b=True).shape


def test_mistakes_6_7_and_8_scale_bytes():
    one = np.full((1, 32), 0x02, np.uint8)
    kwargs = {"fmt_a": "e2m1", "fmt_b": "e2m1"}
    e8m0 = lambda byte: np.full((1, 1), byte, np.uint8)  # noqa: E731
    for model in ("blackwell_mxf8f6f4", "blackwell_mxf4"):
        assert 32.0 == block_dot(one, one, model=model, scale_a=e8m0(127), scale_b=e8m0(127), **kwargs)[0]
        assert 32.0 == block_dot(one, one, model=model, scale_a=e8m0(0), scale_b=e8m0(0xFE), **kwargs)[0]
    e4m3 = np.full((1, 2), 0x38, np.uint8)
    assert 32.0 == block_dot(one, one, model="blackwell_nvfp4", scale_a=e4m3, scale_b=e4m3, **kwargs)[0]


def test_mistake_9_padding_is_neutral():
    one = np.full((1, 33), 0x02, np.uint8)
    scales = np.full((1, 2), 127, np.uint8)
    d = block_dot(one, one, model="blackwell_mxf8f6f4", fmt_a="e2m1", fmt_b="e2m1", scale_a=scales, scale_b=scales)
    assert 33.0 == d[0]


def test_mistake_10_a_scale_that_is_no_power_of_two_is_kept_or_refused():
    a = row_blocks(np.ones((1, 128), np.float32), [[0.3]], 1)
    descale = np.float32(1) / (np.float32(1) / np.float32(0.3))
    assert np.float32(128 * float(descale)) == scaled_gemm(a, ones(1, 128), transpose_b=True)[0, 0]
    a = row_blocks(np.ones((1, 256), np.float32), [[0.3, 0.3]], 1)
    with pytest.raises(QsimError, match="a has blocks of 128 in float32"):
        scaled_gemm(a, ones(1, 256), transpose_b=True, accumulate="blackwell_mxf8f6f4")


def test_mistake_11_bias_comes_after_alpha():
    d = scaled_gemm(ones(1, 64), ones(1, 64), transpose_b=True, epilogue=Epilogue(alpha=1 / 64, bias=[64.0]))
    assert 65.0 == d[0, 0]


@pytest.mark.parametrize("accumulate", ["exact", "exact_per_block", "hopper_wgmma"])
def test_mistake_12_each_block_along_k_has_its_scale(accumulate):
    a = row_blocks(np.ones((1, 256), np.float32), [[1, 2]], 1)
    assert 384.0 == scaled_gemm(a, ones(1, 256), transpose_b=True, accumulate=accumulate)[0, 0]


@pytest.mark.parametrize("name", ["e4m3", "nvfp4_te", "nvfp4_exact", "mxfp4_rceil", "e4m3_1x128", "e4m3_col"])
def test_mistake_13_a_column_of_zeros_gives_zero(name):
    w = normal((32, 3), 1)
    w[:, 1] = 0
    d = scaled_gemm(qsim.quantize(normal((4, 32)), name), qsim.quantize(w, name, axis=0))
    assert (d[:, 1].view(np.uint32) == 0).all()


def test_mistake_14_a_fast_chain_is_not_the_sum():
    a, b = ones(1, 8192, "e5m2", 1 / 32), ones(1, 8192, "e5m2", 3)
    assert 768.0 == scaled_gemm(a, b, transpose_b=True)[0, 0]
    assert 683.0 == round(float(scaled_gemm(a, b, transpose_b=True, accumulate="hopper_wgmma")[0, 0]))


def test_mistakes_15_and_16_overflow_and_ties():
    assert [0x7E, 0x7E, 0x7F] == qsim.encode(np.float32([464, 465, np.nan]), "e4m3").tolist()
    assert [0x7E, 0x7F] == qsim.encode(np.float32([464, 465]), "e4m3", overflow="ieee").tolist()
    assert [0, 2, 4, 6, 8] == qsim.encode(np.float32([0.25, 0.75, 2.5, 5, -0.1]), "e2m1").tolist()


# ---- mistakes of a caller ------------------------------------------------------------------------------------------

A, B = ones(2, 32), ones(3, 32)

MISTAKES = {
    "array": (lambda: scaled_gemm(np.ones((2, 2)), B), "a is ndarray; pass what qsim.quantize returned"),
    "depth": (lambda: scaled_gemm(A, ones(3, 31), transpose_b=True), "K = 32 and b K = 31"),
    "axis": (lambda: scaled_gemm(A, qsim.quantize(np.ones((32, 4), np.float32), "nvfp4_te")), "K is axis 0"),
    "way": (lambda: scaled_gemm(A, B, transpose_b=True, accumulate="hopper"), "did you mean 'hopper_wgmma'"),
    "chains": (lambda: scaled_gemm(A, B, transpose_b=True, promote_every=128), "belong to a tensor-core model"),
    "promotion": (
        lambda: scaled_gemm(A, B, transpose_b=True, accumulate="hopper_wgmma", promote_every=40), "multiple of 32"
    ),
    "order": (
        lambda: scaled_gemm(A, B, transpose_b=True, accumulate="hopper_wgmma", epilogue=Epilogue(order="exact")),
        "needs accumulate='exact'",
    ),
    "output": (lambda: scaled_gemm(A, B, transpose_b=True, out_dtype="float8"), "known: float32, float16"),
    "scale": (
        lambda: scaled_gemm(A, B, transpose_b=True, epilogue=Epilogue(scale_d=2)), "belongs to an FP8 output"
    ),
    "bias": (lambda: scaled_gemm(A, B, transpose_b=True, epilogue=Epilogue(bias=np.ones(5))), r"bias of shape \(5,\)"),
    "beta": (lambda: Epilogue(beta=2), "pass c"),
    "alpha": (lambda: Epilogue(alpha="x"), "alpha 'x' is no single number"),
    "scaled model": (
        lambda: scaled_gemm(A, B, transpose_b=True, accumulate="blackwell_mxf8f6f4"), "needs blocks of 32"
    ),
    "batched c": (
        lambda: scaled_gemm(A, B, transpose_b=True, epilogue=Epilogue(beta=1, c=np.ones((5, 3)))),
        r"D of shape \(2, 3\)",
    ),
    "many alphas": (lambda: Epilogue(alpha=np.ones(4)), r"of shape \(4,\) is no single number"),
    "no alpha": (lambda: Epilogue(alpha=None), "alpha None is no single number"),
    "huge": (lambda: Epilogue(scale_d=1e300), "leaves float32"),
    "ragged": (lambda: scaled_gemm(A, B, transpose_b=True, epilogue=Epilogue(bias=[[1, 2], [3]])), "bias is no array"),
    "orders": (lambda: Epilogue(order=np.array(["exact"])), "of an epilogue is unknown"),
    "overflow": (lambda: Epilogue(overflow="foo"), "unknown overflow 'foo'"),
    "promote 0": (
        lambda: scaled_gemm(A, B, transpose_b=True, accumulate="hopper_wgmma", promote_every=0), "0 is too small"
    ),
    "promote text": (
        lambda: scaled_gemm(*[qsim.quantize(normal((2, 300)), "e4m3_1x128")] * 2, transpose_b=True,
                            accumulate="hopper_wgmma", promote_every="128"), "promote_every '128' is no integer"
    ),
    "accumulate": (lambda: scaled_gemm(A, B, transpose_b=True, accumulate=None), "accumulate is NoneType"),
    "small blocks": (
        lambda: scaled_gemm(*[qsim.quantize(normal((2, 64)), "nvfp4_te")] * 2, transpose_b=True,
                            accumulate="blackwell_tcgen05"), "models with such blocks: blackwell_nvfp4"
    ),
    "forgotten": (lambda: scaled_gemm(A, ones(5, 32)), "b's other axis is that long: transpose_b"),
    "16-bit model": (lambda: scaled_gemm(A, B, transpose_b=True, accumulate="hopper_hmma"), "block_dot takes such"),
    "refused": (
        lambda: scaled_gemm(A, B, transpose_b=True, out_dtype="e4m3", epilogue=Epilogue(scale_d=1e6, overflow="raise")),
        "D times scale_d",
    ),
    "scales": (lambda: qsim.from_codes(A.codes, "e4m3", scales=[1.0, 2.0]), "2 scales for 1 x 1 blocks"),
    "scale codes": (lambda: qsim.from_codes(A.codes & 15, "mxfp4_even", scales=1.0), "uint8 codes of its block scales"),
    "negative": (lambda: qsim.from_codes(A.codes, "e4m3", scales=-1.0), "positive and finite"),
    "amax": (
        lambda: qsim.from_codes(A.codes & 15, "nvfp4_te", scales=np.zeros((2, 2), np.uint8)), "needs its tensor_scale"
    ),
    "outside": (lambda: qsim.from_codes(A.codes, "e2m1"), "outside 0..15"),
    "lists": (lambda: matmul([[1.0]], [[1.0]]), "a is list"),
    "epilogue": (lambda: scaled_gemm(A, B, transpose_b=True, epilogue={}), "pass qsim.gemm.Epilogue"),
    "flag": (lambda: scaled_gemm(A, B, transpose_b="yes"), "neither True nor False"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(call, message):
    with pytest.raises(QsimError, match=message):
        call()


def test_the_dtype_of_an_output_is_named():
    with pytest.raises(FormatError, match="int32"):
        scaled_gemm(A, B, transpose_b=True, out_dtype=np.int32)
