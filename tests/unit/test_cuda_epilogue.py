"""The CUDA epilogue: emulated, equal to the CPU's in every order and output, and what public mistakes would show."""

import numpy as np
import pytest

import qsim
from cuda_kernels._place import HOST, Host
from cuda_kernels.epilogue import EPILOGUE, EPILOGUE_CODES, ORDERS, OUTPUTS, epilogue
from qsim.codec.general import rule_words
from qsim.errors import FormatError
from qsim.formats import FORMATS, POLICIES
from qsim.gemm import epilogue as cpu
from qsim.gemm.epilogue import Epilogue, amax_of, finished, fma32, output
from qsim.gemm.exact import matmul
from qsim.gemm.products import QUIET_NAN, accumulate, canonical
from qsim.quant.products import _correction, _factors, _side
from tests.mutants import mutant
from tests.places import launch, launch_at, played_device

pytestmark = pytest.mark.usefixtures("gpp")

F = np.float32
CODES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
SPECIAL = np.uint32(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0xFFC00001, 0x7F800001, 0x3F800000, 0xBF800000]
).view(F)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    """NaN, Inf and signalling NaN are wanted here."""
    with np.errstate(all="ignore"):
        yield


def rules(name, overflow="saturate"):
    policy = POLICIES["ocp"].with_choices(overflow=overflow)
    return rule_words(FORMATS[name], policy)


def hostile(shape, seed):
    """Numbers of any size, and every special one."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(8 * rng.standard_normal(shape))).astype(F)
    flat = x.reshape(-1)
    at = rng.random(x.size) < 0.3
    flat[at] = rng.choice(SPECIAL, int(at.sum()))
    return x


def normal(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def patterns(shape, seed):
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32).view(F)


def on_cpu(acc, given, nan=QUIET_NAN):
    """y with one NaN, as scaled_gemm makes it."""
    rows, columns = acc.shape
    factors = [
        np.ones(size) if given.get(name) is None else given[name].astype(np.float64)
        for name, size in (("row", rows), ("column", columns))
    ]
    own = Epilogue(alpha=given.get("alpha", 1.0), beta=given.get("beta", 0.0), c=given.get("c"), bias=given.get("bias"))
    full = None if given.get("correction") is None else np.broadcast_to(given["correction"], acc.shape)
    return canonical(
        finished(acc, *factors, own, order=given["order"], shape=acc.shape, correction=full), np.uint32(nan).view(F)
    )


def agree(acc, given, place=None, outputs=("float32",), nan=0x7FC00000, scale=1.0):
    """Whether D and amax are those of the CPU in every one of ``outputs``."""
    y = on_cpu(acc, given, nan)
    same = []
    for name in outputs:
        codes = {} if name in OUTPUTS else {"rules": rules(name), "scale_d": scale}
        got = launch_at(place, epilogue, acc, out="codes" if codes else name, nan=nan, **given, **codes)
        expected = output(y, name, Epilogue(scale_d=scale if codes else 1.0))
        assert got.out.dtype == (np.uint16 if name == "float16" else expected.dtype)
        same += [expected.tobytes() == got.out.tobytes(), got.top == amax_of(y).view(np.uint32), got.refused == 0]
    return all(same)


SHAPES = [(1, 1), (3, 5), (17, 64), (9, 131)]
GIVEN = {
    "plain": {},
    "alpha": {"alpha": F(1.7)},
    "beta": {"beta": F(-0.3), "c": True},
    "all": {"alpha": F(0.37), "beta": F(2.5), "c": True, "correction": True, "bias": True},
    "correction": {"correction": True},
    "minus one": {"alpha": F(-1), "bias": True, "correction": True},
    "nan": {"alpha": F(np.nan)},
    "inf": {"alpha": F(np.inf), "beta": F(np.inf), "c": True},
    "zero": {"alpha": F(0), "beta": F(1), "c": True},
}


def filled(given, shape, seed):
    """The arrays that ``given`` asks for."""
    return {
        name: hostile(shape, seed + at) if value is True else value for at, (name, value) in enumerate(given.items())
    }


# ---- equal to the CPU -----------------------------------------------------------------------------------------------


def test_the_orders_are_those_of_the_cpu():
    assert cpu.ORDERS == ORDERS
    assert cpu.WIDE_OUTPUTS == tuple(OUTPUTS)


@pytest.mark.parametrize("case", GIVEN)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_and_output_has_the_bits_of_the_cpu(order, case):
    for seed, shape in enumerate(SHAPES):
        acc, given = hostile(shape, seed), filled(GIVEN[case], shape, 10 * seed)
        row, column = hostile(shape[0], seed + 5), hostile(shape[1], seed + 6)
        for factors in ({}, {"row": row}, {"row": row, "column": column}):
            assert agree(acc, {"order": order, **given, **factors}, outputs=(*OUTPUTS, CODES[seed % 3]), scale=0.75)


@pytest.mark.parametrize("order", ["product", "exact", "rows_first"])
def test_random_patterns_and_sums_that_nearly_cancel(order):
    """One rounding of acc m + z: where z = -RN(acc m) all that is left is what the product lost."""
    acc, row, column = patterns((96, 128), 1), patterns(96, 2), patterns(128, 3)
    small = np.random.default_rng(4).standard_normal((96, 128)).astype(F) * F(2.0**-60)
    for own in (acc, small, np.abs(small)):
        for pair in ((row, column), (np.abs(row) % F(3), np.float32(2.0**-70) * np.ones(128, F)), (None, None)):
            given = {"order": order, "row": pair[0], "column": pair[1], "alpha": F(1.1)}
            y = on_cpu(own, given)
            for c in (patterns((96, 128), 5), -y, np.nextafter(-y, F(0)), SPECIAL[:8].repeat(16)[None]):
                assert agree(own, {**given, "beta": F(1), "c": c})
            assert agree(own, given)


def test_the_cpus_fma_is_one_rounding_of_the_device_word():
    """fma32 and fmaf, on patterns whose products and sums are subnormal, cancel or leave float32."""
    for scale in (0, 2.0**-126, 2.0**-149, 2.0**100):
        a, b, c = patterns((64, 64), 7), patterns((64, 64), 8), patterns((64, 64), 9)
        if scale:
            a, b = np.abs(a) % F(2), np.abs(b) % F(2) * F(scale)
            c = c % F(scale)
        expected = canonical(fma32(a, b, c), QUIET_NAN)
        for i in range(64):  # a row at a time the columns' factors are b: acc m + z element by element
            got = launch(epilogue, a[i : i + 1], column=b[i], order="product", beta=1, c=c[i : i + 1]).out
            assert expected[i].tobytes() == got.tobytes()


def test_float16_and_bfloat16_of_every_leading_pattern_and_midpoint():
    high = np.arange(2**16, dtype=np.uint32) << 16
    lows = np.uint32([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
    bits = (high[:, None] | lows).reshape(512, -1)
    bits[((bits & 0x7FFFFFFF) > 0x7F800000)] = 0x7FC00000
    x = np.ascontiguousarray(bits).view(F)
    expected = x.astype(np.float16).view(np.uint16)
    assert expected.tobytes() == launch(epilogue, x, order="exact", out="float16").out.tobytes()
    assert (
        output(x, "bfloat16", Epilogue()).tobytes() == launch(epilogue, x, order="exact", out="bfloat16").out.tobytes()
    )


@pytest.mark.parametrize("nan", [0x7FC00000, 0x7FFFFFFF])
def test_nan_is_what_the_accumulator_of_the_caller_has(nan):
    """7fc00000 of the exact ways, 7fffffff of a model; float16 keeps its top bits, bfloat16 has one NaN."""
    acc = np.repeat(SPECIAL, 3)[None]
    for order in ORDERS:
        given = {"order": order, "row": F([np.inf]), "column": np.tile(SPECIAL, 3)}
        assert agree(acc, given, outputs=(*OUTPUTS, *CODES), nan=nan, scale=F(0))
    got = launch(epilogue, F([[np.nan]]), order="exact", out="float16", nan=nan).out
    assert got[0, 0] == {0x7FC00000: 0x7E00, 0x7FFFFFFF: 0x7FFF}[nan]


@pytest.mark.parametrize("name", ["e4m3_row", "e5m2", "nvfp4_te", "mxfp4_floor", "e4m3_col"])
@pytest.mark.parametrize("center", [None, "channel", "token"])
def test_what_scaled_gemm_passes_gives_its_result(name, center):
    """Factors, correction and accumulator of the public door; its factors are float32 numbers."""
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((7, 48)).astype(F) + F(0.5), rng.standard_normal((48, 10)).astype(F)
    a, b = qsim.quantize(x, name, center=center), qsim.quantize(w, name, axis=0)
    left, right = _side(a, "a", -1), _side(b, "b", 0)
    factors = _factors(left.operand, right.operand)
    row, column = (factor.astype(F) for factor in factors)
    assert all((own == factor).all() for own, factor in zip((row, column), factors, strict=True))
    bias, c = rng.standard_normal(10).astype(F), rng.standard_normal((7, 10)).astype(F)
    for how, order in (("exact", "exact"), ("exact_per_block", "product"), ("exact_per_block", "rows_first")):
        own = Epilogue(alpha=0.6, beta=0.25, c=c, bias=bias, order=order)
        acc = accumulate(left.operand, right.operand, how, factors=order == "exact").acc
        got = launch(epilogue, acc, row=row, column=column, order=order, alpha=0.6, beta=0.25, c=c, bias=bias,
            correction=_correction(left, right, matmul),
        )  # fmt: skip
        result = qsim.scaled_gemm_with_report(a, b, accumulate=how, epilogue=own)
        assert result.d.tobytes() == got.out.tobytes()
        assert got.top == result.amax.view(np.uint32)


@pytest.mark.parametrize("order", ORDERS)
def test_strides_broadcasts_addresses_and_the_grid_do_not_matter(order):
    acc, c, bias = hostile((37, 68), 1), hostile((37, 68), 2), hostile((37, 68), 3)
    given = {"order": order, "row": hostile(37, 4), "column": hostile(68, 5), "alpha": F(0.9), "beta": F(3)}
    for place in (Host(), Host(blocks=(1, 1)), Host(blocks=(7, 40), threads=32)):
        assert agree(acc, {**given, "c": c, "bias": bias}, place, outputs=(*OUTPUTS, CODES[0]))
    shifted = np.zeros(acc.size + 1, F)[1:].reshape(acc.shape)
    shifted[...] = acc
    planes = (c[:1], c[:, :1], c[0], c[:1, :1], np.asfortranarray(c), c[::-1], c[:, ::-1])
    for own in (shifted, np.asfortranarray(acc), acc[::-1], acc[:, 1:66]):
        for plane, other in zip(planes, reversed(planes), strict=True):
            cut = [p[..., 1:66] if p.ndim and p.shape[-1] == 68 and own.shape[1] == 65 else p for p in (plane, other)]
            names = {"row": given["row"], "column": given["column"][: own.shape[1]], "correction": cut[1]}
            assert agree(own, {**given, **names, "c": cut[0], "bias": cut[1]})


def test_the_device_launcher_passes_the_right_arguments(monkeypatch):
    place = played_device(monkeypatch)
    acc, c = hostile((33, 70), 1), hostile((33, 70), 2)
    given = {"order": "product", "row": hostile(33, 3), "column": hostile(70, 4), "alpha": F(2), "beta": F(0.5)}
    assert agree(acc, {**given, "c": c, "bias": c[0]}, place, outputs=(*OUTPUTS, CODES[0]), scale=0.5)


# ---- public mistakes, by hand ---------------------------------------------------------------------------------------


def test_public_mistakes():
    one = F([[1.25]])
    alpha = float.fromhex("0x1.9b3334p-1")
    got = launch(epilogue, one, order="product", alpha=alpha, out="bfloat16").out
    assert got.view(np.uint32)[0, 0] == 0x3F800000  # two roundings; one would give 3f81
    assert launch(epilogue, F([[64]]), order="exact", alpha=1 / 64, bias=F([64])).out[0, 0] == 65
    codes = launch(epilogue, F([[16, 464, 465]]), order="exact", out="codes", rules=rules("float8_e4m3fn"), scale_d=0.5)
    assert codes.out[0, 0] == 0x50
    for overflow, expected, refused in (("saturate", 0x7E, 0), ("ieee", 0x7F, 0), ("raise", None, 1)):
        own = rules("float8_e4m3fn", overflow)
        got = launch(epilogue, F([[464, 465, 448]]), order="exact", out="codes", rules=own)
        assert got.out[0, [0, 2]].tolist() == [0x7E, 0x7E]
        assert expected in (None, got.out[0, 1])
        assert (int(got.refused), got.top.view(F)) == (refused, 465)
    with pytest.raises(FormatError, match="465"):
        output(F([[465]]), "float8_e4m3fn", Epilogue(overflow="raise"))


def test_the_orders_differ_where_two_roundings_do():
    acc, row, column = patterns((32, 32), 1) % F(4), patterns(32, 2) % F(4), patterns(32, 3) % F(4)
    bits = {
        order: launch(epilogue, acc, row=row, column=column, order=order).out.view(np.uint32).tobytes()
        for order in ORDERS
    }
    assert len(set(bits.values())) == 4


def test_amax_is_of_y_before_its_format_and_of_what_is_finite():
    acc = np.zeros((40, 90), F)
    acc[39, 89], acc[3, 2], acc[5, 5] = -448.5, np.inf, np.nan
    for threads, blocks in ((32, (1, 1)), (128, (2, 2))):
        got = epilogue(
            Host(threads=threads, blocks=blocks), acc, order="exact", out="codes", rules=rules("float8_e4m3fn")
        )
        assert got.top.view(F) == 448.5
    assert launch(epilogue, F([[np.inf, np.nan]]), order="exact").top == 0


@pytest.mark.parametrize(
    ("old", "new"), [("warp < blockDim.x / 32", "warp < 1"), ("other = 16; other > 0", "other = 16; other > 1")]
)
def test_an_amax_of_some_threads_alone_is_seen(monkeypatch, old, new):
    acc = np.zeros((1, 256), F)
    acc[0, 4 * 35] = 2  # the second warp, its fourth thread
    assert launch(epilogue, acc, order="exact").top.view(F) == 2
    assert epilogue(mutant(monkeypatch, EPILOGUE, "epilogue.cu", old, new), acc, order="exact").top.view(F) == 0


# ---- what would be seen ---------------------------------------------------------------------------------------------

SOME = {"order": "product", "alpha": F(0.37), "beta": F(2.5), "c": True, "correction": True, "bias": True}


@pytest.mark.parametrize(
    ("given", "out", "old", "new"),
    [
        (SOME, "float32", "__fmaf_rn(acc, scales ? __fmul_rn(m, steps.alpha) : m, z)",
         "__fadd_rn(__fmul_rn(acc, scales ? __fmul_rn(m, steps.alpha) : m), z)"),  # two roundings
        (SOME, "float32", "__fmaf_rn(acc, scales ? __fmul_rn(m, steps.alpha) : m, z)",
         "__fmaf_rn(__fmul_rn(acc, m), steps.alpha, z)"),
        ({"order": "exact"}, "float32", "return scales || has_c ?", "return true ?"),  # -0 becomes +0
        ({**SOME, "order": "rows_first"}, "float32", "__fmul_rn(__fmul_rn(y, row), column)",
         "__fmul_rn(y, __fmul_rn(row, column))"),
        ({**SOME, "order": "columns_first"}, "float32", "__fmul_rn(__fmul_rn(y, column), row)",
         "__fmul_rn(__fmul_rn(y, row), column)"),
        (SOME, "float32", "__fmul_rn(corrections[i], steps.alpha) : corrections[i]", "corrections[i] : 0.0f"),
        (SOME, "float32", "__fadd_rn(y, biases[i])", "__fmaf_rn(biases[i], steps.alpha, y)"),  # a bias times alpha
        (SOME, "float32", "y == y ? __float_as_uint(y) : steps.nan", "__float_as_uint(y)"),
        (SOME, "float32", "magnitude < 0x7F800000u) best", "magnitude <= 0x7F800000u) best"),  # amax of Inf
        (SOME, "float16", "magnitude < 0x38800000u", "magnitude < 0x33000000u"),  # subnormals
        (SOME, "float16", "0xFFFu + (magnitude >> 13 & 1u)", "0x1000u"),  # ties away
        (SOME, "bfloat16", "0x7FFFu + (bits >> 16 & 1u)", "0x8000u"),
        (SOME, "bfloat16", "return 0x7FC00000u;", "return bits;"),
        (SOME, "float8_e4m3fn", "__fmul_rn(__uint_as_float(bits[i]), scale)", "__uint_as_float(bits[i])"),
        (SOME, "float8_e4m3fn", "y == y ? __float_as_uint(y) : 0x7FC00000u", "__float_as_uint(y)"),  # Inf * 0
    ],
)  # fmt: skip
def test_a_wrong_text_is_seen(monkeypatch, given, out, old, new):
    acc, shape = hostile((20, 160), 1), (20, 160)
    acc[:, 1::2] = np.random.default_rng(2).standard_normal((20, 80)).astype(F)
    acc[:, 3::8] = (np.arange(400, dtype=np.uint32).reshape(20, 20) * 0x800 + 0x3F800000).view(F)  # ties
    acc[:, 5::8] *= F(2.0**-20)
    row, column = np.abs(hostile(20, 6)), np.abs(hostile(160, 7))
    row[::2], column[::3] = 1, 1
    arrays = {name: np.where(np.arange(160) % 2, normal(shape, len(name)), 0).astype(F) if value is True else value
              for name, value in given.items()}  # fmt: skip
    cases = ({**arrays, "row": row, "column": column}, {"order": "exact"})
    kernel = EPILOGUE if out in OUTPUTS else EPILOGUE_CODES
    wrong = mutant(monkeypatch, kernel, "epilogue.cu", old, new)
    scales = (F(0.75), F(0)) if out in CODES else (F(1),)
    how = [(case, {"outputs": (out,), "nan": 0x7FFFFFFF, "scale": scale}) for case in cases for scale in scales]
    assert all(agree(acc, case, **more) for case, more in how)
    assert not all(agree(acc, case, wrong, **more) for case, more in how)


def test_nothing_is_nothing():
    for shape in ((0, 4), (3, 0)):
        got = launch(epilogue, np.zeros(shape, F), order="exact")
        assert (got.out.shape, int(got.top), int(got.refused)) == (shape, 0, 0)


WRONG = {
    "dtype": ({"acc": np.zeros((2, 3))}, TypeError, "acc is numpy.ndarray of float64"),
    "axes": ({"acc": np.zeros(3, F)}, ValueError, r"acc of shape \(3,\)"),
    "order": ({"order": "best"}, ValueError, "order 'best'; known: exact, product"),
    "row": ({"row": np.ones(3, F)}, ValueError, r"row of shape \(3,\); acc \(2, 3\) has 2"),
    "column": ({"column": np.ones(2, F)}, ValueError, r"column of shape \(2,\)"),
    "beta": ({"beta": 0.5}, ValueError, "beta 0.5 has nothing to scale"),
    "bias": ({"bias": np.ones(2, F)}, ValueError, r"bias of shape \(2,\) does not broadcast to \(2, 3\)"),
    "deep": ({"correction": np.ones((1, 2, 3), F)}, ValueError, "correction of shape"),
    "out": ({"out": "fp8"}, ValueError, "out 'fp8'; known: float32, float16, bfloat16, codes"),
    "scale": ({"scale_d": 2.0}, ValueError, "rules and scale_d belong to codes"),
    "no rules": ({"out": "codes"}, TypeError, "rules is"),
    "rules": ({"out": "codes", "rules": np.zeros(4, np.uint32)}, ValueError, "rules take 21"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    more, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        epilogue(HOST, **{"acc": np.zeros((2, 3), F), "order": "exact", **more})
