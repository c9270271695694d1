"""Tensor-core dot products: worked vectors, hardware rows, and the kernels against the definition in integers."""

from dataclasses import replace

import numpy as np
import pytest

import qsim
from qsim.codec.threads import threads
from qsim.errors import FormatError, QsimError, UsageError
from qsim.gemm import MODELS, block_dot
from qsim.gemm.block_dot import chain_product, cuts, finished, side, transposed
from qsim.gemm.block_fma import dot_oracle
from qsim.gemm.operands import operand_format
from tests.golden_rows import need_rows

K = 64


def row(values, depth=K):
    """Values at given k, zero elsewhere."""
    x = np.zeros(depth, np.float32)
    for k, value in values.items() if isinstance(values, dict) else enumerate(values):
        x[k] = value
    return x


# a, b, c, then the result of hopper_wgmma, ada_mma_sync, hopper_mma_sync as float32 bits (facts of the models' sources)
WORKED = {
    "two terms": ((1, 2.0**-6), (1, 2.0**-7), 0, 0x3F800400, 0x3F800400, 0x3F800400),
    "below F": ((1, 2.0**-7), (1, 2.0**-7), 0, 0x3F800000, 0x3F800000, 0x3F800200),
    "cut one by one": ((1, 2.0**-7, 2.0**-7), (1, 2.0**-7, 2.0**-7), 0, 0x3F800000, 0x3F800000, 0x3F800400),
    "cancelled": ((448, -448, 2.0**-6), (448, 448, 2.0**-6), 0, 0, 0, 0x39800000),
    "next half": ({0: 448, 1: -448, 16: 1}, {0: 448, 1: 448, 16: 1}, 0, 0, 0x3F800000, 0x3F800000),
    "large": ((448, 3, 3), (448, 3, 2), 0, 0x48440000, 0x48440000, 0x484403C0),
    "c alone": ((), (), 16385, 0x46800000, 0x46800000, 0x46800200),
    "c and one": ((1,), (1,), 16384, 0x46800000, 0x46800000, 0x46800200),
    "negative c": ((), (), -16384.5, 0xC6800000, 0xC6800000, 0xC6800100),
    "not a power": ((1.875, 2.0**-7), (1.875, 2.0**-6), 0, 0x40610000, 0x40610000, 0x40610200),
    "next instruction": ({0: 448, 16: 1, 32: -448}, {0: 448, 16: 1, 32: 448}, 0, 0, 0, 0x3F800000),
    "same half": ({0: 448, 1: 2.0**-6, 2: -448}, {0: 448, 1: 2.0**-6, 2: 448}, 0, 0, 0, 0),
    "-0": ((-1, -1), (0, 0), 0, 0, 0, 0),
}


@pytest.mark.parametrize("case", WORKED.values(), ids=WORKED)
def test_worked_vectors(case):
    a, b, c, *expected = case
    codes = [qsim.encode(row(x), "e4m3")[None] for x in (a, b)]
    for model, bits in zip(("hopper_wgmma", "ada_mma_sync", "hopper_mma_sync"), expected, strict=True):
        out = block_dot(*codes, np.float32([c]), fmt_a="e4m3", fmt_b="e4m3", model=model)
        assert hex(bits) == hex(int(out.view(np.uint32)[0])), model
        assert (
            out.tobytes()
            == dot_oracle(codes[0][0], codes[1][0], c, fmt_a="e4m3", fmt_b="e4m3", model=MODELS[model]).tobytes()
        )


def test_a_chain_of_ones_stalls():
    ones = np.full((1, 32768), 0x38, np.uint8)
    assert 16384.0 == block_dot(ones, ones, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma")[0]
    assert 16384.0 == block_dot(ones, ones, fmt_a="e4m3", fmt_b="e4m3", model="ada_mma_sync")[0]
    assert 32768.0 == block_dot(ones, ones, fmt_a="e4m3", fmt_b="e4m3", model="hopper_mma_sync")[0]


def test_a_fast_chain_of_e5m2_is_low():
    a, b = (np.full((1, 8192), qsim.encode(np.float32(v), "e5m2"), np.uint8) for v in (1 / 32, 3))
    assert 683.0 == round(float(block_dot(a, b, fmt_a="e5m2", fmt_b="e5m2", model="hopper_wgmma")[0]))


@pytest.mark.parametrize("model", ["hopper_wgmma", "ada_mma_sync", "hopper_mma_sync", "blackwell_tcgen05"])
def test_what_is_not_finite_is_what_ieee_gives(model):
    inf, one, zero, nan = 0x7C, 0x3C, 0x00, 0x7F
    cases = [(inf, one, 0x7F800000), (0xFC, one, 0xFF800000), (inf, zero, 0x7FFFFFFF), (nan, one, 0x7FFFFFFF)]
    for x, y, bits in cases:
        a, b = np.zeros((1, 40), np.uint8), np.zeros((1, 40), np.uint8)
        a[0, 33], b[0, 33] = x, y
        out = block_dot(a, b, 3.0, fmt_a="e5m2", fmt_b="e5m2", model=model)
        assert hex(bits) == hex(int(out.view(np.uint32)[0]))
    opposite = np.array([[inf, 0xFC]], np.uint8), np.array([[one, one]], np.uint8)
    for half, bits in (("float32", 0x7FFFFFFF), ("float16", 0x7FFFE000)):
        out = block_dot(*opposite, fmt_a="e5m2", fmt_b="e5m2", model=model, out_dtype=half)
        assert bits == out.view(np.uint32)[0]
    assert np.isposinf(block_dot(*opposite, np.inf, fmt_a="e4m3", fmt_b="e4m3", model=model))


GOLDEN = [
    ("h200_e4m3", "hopper_wgmma", "float32", "d_f32_bits", False),
    ("h200_e4m3", "hopper_mma_sync", "float16", "d_f16_as_f32_bits", True),
    ("ada_e5m2", "ada_mma_sync", "float32", "d_f32_bits", True),
    ("ada_e5m2", "ada_mma_sync", "float16", "d_f16_as_f32_bits", True),
]


@pytest.mark.parametrize(("name", "model", "dtype", "key", "uses_c"), GOLDEN)
def test_every_hardware_row(name, model, dtype, key, uses_c):
    rows, fmt = need_rows(name), name[-4:]
    c = rows["c_bits"].view(np.float32) if uses_c else 0.0
    out = block_dot(rows["a_codes"], rows["b_codes"], c, fmt_a=fmt, fmt_b=fmt, model=model, out_dtype=dtype)
    assert 5000 == np.count_nonzero(out.view(np.uint32) == rows[key])
    for i in range(0, 5000, 25):
        own = dot_oracle(
            rows["a_codes"][i], rows["b_codes"][i], float(c[i]) if uses_c else 0.0, fmt_a=fmt, fmt_b=fmt,
            model=MODELS[model], half=dtype == "float16",
        )  # fmt: skip
        assert int(rows[key][i]) == int(own.view(np.uint32))


def operands(model, rng, rows, depth):
    """Random codes, specials included, close in size so that sums cancel; scale codes; accumulators."""
    names = model.formats if model.mixed else (rng.choice(model.formats),) * 2
    fmts = [str(rng.choice(names)) for _ in range(2)] if model.mixed else list(names)
    codes = []
    for name in fmts:
        fmt = operand_format(name)
        x = (rng.standard_normal((rows, depth)) * 2.0 ** rng.integers(-8, 8, (rows, depth))).astype(np.float32)
        if fmt.width <= 8:
            own = qsim.encode(x, name)
            own[rng.random(own.shape) < 0.2] = rng.integers(0, 1 << fmt.width)
        elif name == "float16":
            own = x.astype(np.float16).view(np.uint16)
        else:
            x[rng.random(x.shape) < 0.1] *= np.float32(2.0**-130)
            own = x.view(np.uint32) if name == "tf32" else (x.view(np.uint32) >> 16).astype(np.uint16)
        codes.append(own)
    scales = [None, None]
    if model.scale_block:
        blocks = -(-depth // model.scale_block)
        low, high = (118, 136) if model.scale_format == "float8_e8m0fnu" else (0x00, 0x7E)
        scales = [rng.integers(low, high, (rows, blocks)).astype(np.uint8) for _ in range(2)]
        if rng.random() < 0.3:
            scales[0][0, 0] = 0xFF
    c = (rng.standard_normal(rows) * 2.0 ** rng.integers(-20, 20, rows)).astype(np.float32)
    c[0] = rng.choice([0.0, -0.0, np.inf, 1e-40, 65519.0])
    return fmts, codes, scales, c


FLOATING = [name for name, model in MODELS.items() if not model.integer]


@pytest.mark.parametrize("name", FLOATING)
def test_the_kernels_equal_the_definition(name):
    model, rng = MODELS[name], np.random.default_rng(len(name))
    for trial in range(12):
        depth = int(rng.choice([1, 3, 16, 31, 64, 100, 160]))
        fmts, codes, scales, c = operands(model, rng, 5, depth)
        half = model.half_result and fmts[0] != "bfloat16" and trial % 2 == 1
        out = block_dot(*codes, c, fmt_a=fmts[0], fmt_b=fmts[1], model=name, scale_a=scales[0], scale_b=scales[1],
                        out_dtype="float16" if half else "float32")  # fmt: skip
        for r in range(5):
            own = [None if s is None else s[r] for s in scales]
            expected = dot_oracle(codes[0][r], codes[1][r], float(c[r]), fmt_a=fmts[0], fmt_b=fmts[1], model=model,
                                  half=half, scale_a=own[0], scale_b=own[1])  # fmt: skip
            if np.isnan(expected):
                assert np.isnan(out[r])
            else:
                assert hex(expected.view(np.uint32)) == hex(out[r].view(np.uint32)), (trial, r, fmts, depth)


@pytest.mark.parametrize("name", FLOATING)
def test_a_product_is_the_dot_products_of_its_rows(name):
    """The wide kernel, in float32 where it may be, against one row at a time; on one thread and on three."""
    model, rng = MODELS[name], np.random.default_rng(3)
    fmts, codes, scales, _ = operands(model, rng, 70, 96)
    half = model.half_result and fmts[0] != "bfloat16"
    a, b = (side(x, operand_format(f), model, s, "scale") for x, f, s in zip(codes, fmts, scales, strict=True))
    for count in (1, 3):
        c = np.full((70, 70), 0.5)
        with threads(count):
            chain_product(a, transposed(b), c, model, half=half, first=0, last=a.values.shape[1])
        out = finished(c, half)
        for i in (0, 7, 69):
            one = [None if s is None else np.broadcast_to(s[i], s.shape) for s in scales]
            expected = block_dot(
                np.broadcast_to(codes[0][i], codes[0].shape), codes[1], 0.5, fmt_a=fmts[0], fmt_b=fmts[1], model=name,
                scale_a=one[0], scale_b=scales[1], out_dtype="float16" if half else "float32",
            )  # fmt: skip
            assert expected.tobytes() == out[i].tobytes()


def test_int8_sums_are_exact_modulo_two_to_the_32():
    a, b = np.full((1, 200_000), -128, np.int8), np.full((1, 200_000), -128, np.int8)
    out = block_dot(a, b, 5, fmt_a="int8", fmt_b="int8", model="int8")
    assert np.int32 == out.dtype
    assert (128 * 128 * 200_000 + 5 + 2**31) % 2**32 - 2**31 == out[0]


def test_k_is_cut_into_parts_and_chains():
    assert [[(0, 128), (128, 224)], [(224, 352), (352, 416)]] == cuts(416, 32, promote_every=128, split_k=2)
    assert [[(0, 64)]] == cuts(50, 32, promote_every=None, split_k=1)
    assert [[(0, 32), (32, 64)], [(64, 96)]] == cuts(96, 32, promote_every=32, split_k=2)
    with pytest.raises(UsageError, match="multiple of 32"):
        cuts(96, 32, promote_every=48, split_k=1)


@pytest.mark.parametrize("changed", [
    {"products": 2}, {"products": 3}, {"products": 0}, {"products": -4}, {"result": 60}, {"result": -1},
    {"fraction": 60},
    {"group": 5, "scale_block": 32, "scale_format": "float8_e8m0fnu"}, {"scale_block": 32}, {"late": True},
    {"depth": 48}, {"order": ((0,), (1, 2, 3))},
])  # fmt: skip
def test_a_model_that_the_kernels_do_not_hold_is_refused(changed):
    with pytest.raises(UsageError, match="model own: "):
        replace(MODELS["hopper_wgmma"], name="own", **changed)


def test_a_half_result_that_rounds_to_zero_is_plus_zero():
    a, b = np.array([[0x81]], np.uint8), np.array([[1]], np.uint8)
    for model in ("hopper_wgmma", "ada_mma_sync", "hopper_mma_sync"):
        out = block_dot(a, b, fmt_a="e5m2", fmt_b="e5m2", model=model, out_dtype="float16")
        own = dot_oracle(a[0], b[0], 0.0, fmt_a="e5m2", fmt_b="e5m2", model=MODELS[model], half=True)
        assert 0 == out.view(np.uint32)[0] == own.view(np.uint32)


def test_the_byte_order_of_operands_does_not_matter():
    h = np.float16([[1.5, 2, 3, 4] * 4])
    for fmt, x in (("float16", h), ("tf32", h.astype(np.float32))):
        model = "hopper_hmma" if fmt == "float16" else "hopper_tf32"
        out = [block_dot(v, v, fmt_a=fmt, fmt_b=fmt, model=model) for v in (x, x.astype(x.dtype.newbyteorder(">")))]
        assert 125.0 == out[0][0] == out[1][0]


CODES = np.zeros((2, 32), np.uint8)
INTS = np.zeros((2, 32), np.int8)

MISTAKES = {
    "model": (lambda: block_dot(CODES, CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgma"), "did you mean"),
    "format": (lambda: block_dot(CODES, CODES, fmt_a="e2m1", fmt_b="e4m3", model="hopper_wgmma"), "not float4_e2m1fn"),
    "unknown": (lambda: block_dot(CODES, CODES, fmt_a="e9m9", fmt_b="e4m3", model="hopper_wgmma"), "unknown operand"),
    "shapes": (lambda: block_dot(CODES, CODES[:, :5], fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma"), "differ"),
    "dtype": (lambda: block_dot(CODES * 1.0, CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma"), "float64"),
    "axes": (lambda: block_dot(CODES[0], CODES[0], fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma"), "rows, K"),
    "c": (lambda: block_dot(CODES, CODES, [1, 2, 3.0], fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma"), "broadcast"),
    "no scales": (lambda: block_dot(CODES, CODES, fmt_a="e4m3", fmt_b="e4m3", model="blackwell_mxf8f6f4"), "scale_a"),
    "scales": (
        lambda: block_dot(CODES, CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma", scale_a=CODES, scale_b=CODES),
        "takes no scales",
    ),
    "half": (
        lambda: block_dot(CODES, CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma", out_dtype="bfloat16"),
        "'float32' or 'float16'",
    ),
    "no format": (lambda: block_dot(CODES, CODES, fmt_a=5, fmt_b="e4m3", model="hopper_wgmma"), "operand format 5"),
    "no dtype": (
        lambda: block_dot(CODES, CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma", out_dtype=5),
        "out_dtype 5",
    ),
    "ragged": (lambda: block_dot([[1], [1, 2]], CODES, fmt_a="e4m3", fmt_b="e4m3", model="hopper_wgmma"), "no array"),
    "int8 formats": (lambda: block_dot(INTS, INTS, fmt_a="e4m3", fmt_b="int8", model="int8"), "fmt_a='int8'"),
    "int8 c": (lambda: block_dot(INTS, INTS, 1.5, fmt_a="int8", fmt_b="int8", model="int8"), "integers"),
    "int8 c of another shape": (
        lambda: block_dot(INTS, INTS, np.zeros((2, 1), np.int32), fmt_a="int8", fmt_b="int8", model="int8"),
        "integers",
    ),
    "code": (lambda: block_dot(CODES + 16, CODES, fmt_a="e2m1", fmt_b="e2m1", model="blackwell_tcgen05"), "code 16"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(call, message):
    with pytest.raises(QsimError, match=message):
        call()


def test_an_array_of_the_formats_own_dtype_is_taken_by_its_bits():
    x = np.float16([[1.5, -2.0, 6e-8]])
    by_value = block_dot(x, x, fmt_a="float16", fmt_b="float16", model="ampere_hmma")
    assert (
        by_value.tobytes()
        == block_dot(
            x.view(np.uint16), x.view(np.uint16), fmt_a="float16", fmt_b="float16", model="ampere_hmma"
        ).tobytes()
    )
    with pytest.raises(FormatError):
        block_dot(x.view(np.int16), x.view(np.int16), fmt_a="float16", fmt_b="float16", model="ampere_hmma")


PUBLISHED = {  # products, fraction, result, late: MMA-Sim (arXiv 2511.10909), MATLAB-tensor-core (arXiv 2512.07004)
    "hopper_wgmma": (32, 13, 13, False),
    "ada_mma_sync": (16, 13, 13, False),
    "hopper_mma_sync": (16, 25, 23, True),
    "blackwell_mma_sync": (16, 25, 23, True),
    "blackwell_tcgen05": (32, 25, 23, False),
    "blackwell_mxf8f6f4": (32, 25, 23, False),
    "blackwell_mxf4": (64, 35, 23, False),
    "blackwell_nvfp4": (64, 35, 23, False),
    "volta_hmma": (4, 23, 23, False),
    "ampere_hmma": (8, 24, 23, False),
    "ampere_tf32": (4, 24, 23, False),
    "ada_hmma": (8, 24, 23, False),
    "ada_tf32": (4, 24, 23, False),
    "hopper_hmma": (16, 25, 23, False),
    "hopper_tf32": (8, 25, 23, False),
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_model_has_the_published_parameters(name, parameters):
    model = MODELS[name]
    assert parameters == (model.products, model.fraction, model.result, model.late)
