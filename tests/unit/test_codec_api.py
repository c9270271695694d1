"""encode and decode on arrays: layouts, dtypes, out, errors. Values are checked elsewhere code by code."""

import math
import re

import ml_dtypes
import numpy as np
import pytest

import qsim
from qsim.codec import DEFAULT_POLICY, decode, encode, encode_scalar, encode_with_counts
from qsim.codec.api import narrow_to_odd
from qsim.codec.threads import set_threads
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import FormatError, QsimError
from qsim.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, POLICIES, NanPolicy, Overflow, RoundMode


def by_oracle(x, fmt):
    x = np.asarray(x)
    return np.array([encode_scalar(v, fmt) for v in x.flat], np.uint8).reshape(x.shape)


def test_the_default_policy_saturates_and_keeps_the_sign_of_nan():
    assert DEFAULT_POLICY == "ocp"
    assert encode(np.array([1e30, -np.inf, 464, np.nan, math.copysign(np.nan, -1)]), "e4m3").tolist() == [
        0x7E,
        0xFE,
        0x7E,
        0x7F,
        0xFF,
    ]


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN])
def test_codes_and_values_do_not_depend_on_the_layout(fmt):
    x = np.arange(64, dtype=np.float32).reshape(4, 16) / 8 - 3
    for view in (
        x[:, ::2],
        x.T,
        x[::-1],
        x[::-1, ::-3],
        x[1:3, 5:9],
        np.broadcast_to(x[0], (3, 16)),
        x[:, None, ::5],
    ):
        assert_codes_equal(by_oracle(np.array(view, order="C"), fmt), encode(view, fmt), fmt)
    codes = encode(x, fmt)
    for view in (codes[:, ::2], codes.T, codes[::-1, ::-3], codes[:0]):
        assert_bits_equal(decode(np.array(view, order="C"), fmt), decode(view, fmt))


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
def test_strided_arrays_of_every_float_dtype(dtype):
    x = (np.arange(60).reshape(5, 12) / 8 - 3).astype(dtype)
    assert_codes_equal(by_oracle(x[::-2, ::5].astype(float), E4M3FN), encode(x[::-2, ::5], E4M3FN), E4M3FN)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 33, 528])
def test_odd_lengths_and_empty(length):
    x = np.linspace(-7, 7, length, dtype=np.float32)
    assert_codes_equal(by_oracle(x, E2M1FN), encode(x, E2M1FN), E2M1FN)
    packed = encode(x, E2M1FN, packed=True)
    assert packed.shape == ((length + 1) // 2,)
    assert_bits_equal(decode(encode(x, E2M1FN), E2M1FN), decode(packed, E2M1FN, packed=True, length=length))
    assert decode(packed, E2M1FN, packed=True).shape == (2 * ((length + 1) // 2),)


def test_zero_dimensions_stay_zero_dimensional():
    for x in (np.array(1.5, np.float32), np.float64(1.5), 1.5, np.int64(-2), np.array(-(2**63))):
        codes = encode(x, E4M3FN)
        assert (codes.shape, codes.dtype, int(codes)) == ((), np.uint8, encode_scalar(float(x), E4M3FN))
        values = decode(codes, E4M3FN)
        assert (values.shape, values.dtype) == ((), np.float32)
    assert decode(encode(1.5, E4M3FN), E4M3FN) == np.float32(1.5)


def test_empty_shapes_are_kept():
    assert encode(np.zeros((3, 0, 2), np.float32), E5M2).shape == (3, 0, 2)
    assert encode([], E5M2).shape == (0,)
    assert decode(np.zeros((3, 0), np.uint8), E5M2).shape == (3, 0)
    assert encode(np.zeros((3, 0), np.float32), E2M1FN, packed=True).shape == (3, 0)


def test_read_only_input_is_neither_written_nor_refused():
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    before = x.copy()
    x.setflags(write=False)
    codes = encode(x, E4M3FN)
    codes.setflags(write=False)
    assert_codes_equal(by_oracle(before, E4M3FN), codes, E4M3FN)
    assert_bits_equal(decode(codes.copy(), E4M3FN), decode(codes, E4M3FN))
    assert_bits_equal(before, x)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, np.bool_])
def test_integers_are_exact_or_rounded_once(dtype):
    if dtype is np.bool_:
        x = np.array([False, True])
    else:
        info = np.iinfo(dtype)
        around = [17, 19, 27, 100, 127, 60000, 61439, 61440, 61441, 2**53 + 1]
        x = np.array([v for w in around for v in (w, -w) if info.min <= v <= info.max] + [info.min, info.max], dtype)
    for fmt in (E4M3FN, E5M2, E8M0FNU):
        assert_codes_equal(by_oracle(x, fmt), encode(x, fmt), fmt, inputs=x)


def test_a_long_integer_tie_is_decided_by_its_last_bit():
    tie = 3 << 61  # 1.5 * 2^62: the even code is above; one less goes down
    x = np.array([tie - 1, tie, tie + 1, (3 << 60) - 1, 3 << 60, (3 << 60) + 1], np.int64)
    assert encode(x, E8M0FNU).tolist() == [189, 190, 190, 188, 188, 189]


def test_narrow_floats_of_ml_dtypes_are_widened_exactly():
    x = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2)
    assert_codes_equal(by_oracle(x.astype(np.float32), E4M3FN), encode(x, E4M3FN), E4M3FN)
    assert_bits_equal(x.astype(np.float32)[:124], decode(x[:124], E5M2))


def test_round_to_odd_is_exact_or_the_odd_neighbour():
    x = np.array([1.0, 1 + 2**-24, 1 - 2**-30, -1 - 2**-24, 1e-50, -1e-50, 1e300, -np.inf, 0.0, -0.0, -np.nan])
    assert narrow_to_odd(x).tolist() == [
        0x3F800000, 0x3F800001, 0x3F7FFFFF, 0xBF800001, 0x00000001, 0x80000001,
        0x7F7FFFFF, 0xFF800000, 0x00000000, 0x80000000, 0xFFC00000,
    ]  # fmt: skip


def test_out_is_filled_and_returned():
    x = np.linspace(-9, 9, 30, dtype=np.float32).reshape(5, 6)
    expected = by_oracle(x, E2M1FN)
    whole, big = np.full((5, 6), 99, np.uint8), np.full((10, 12), 99, np.uint8)
    assert encode(x, E2M1FN, out=whole) is whole
    assert_codes_equal(expected, whole, E2M1FN)
    encode(x, E2M1FN, out=big[::2, ::-2])
    assert_codes_equal(expected, big[::2, ::-2].copy(), E2M1FN)
    assert (big[1::2] == 99).all()
    fortran = np.zeros((5, 6), np.uint8, order="F")
    assert_codes_equal(expected, encode(x, E2M1FN, out=fortran), E2M1FN)
    packed = np.full((5, 3), 99, np.uint8)
    assert encode(x, E2M1FN, out=packed, packed=True) is packed
    assert np.array_equal(expected[:, 0::2] | expected[:, 1::2] << 4, packed)
    values = np.full((5, 12), 99, np.float32)
    decode(expected, E2M1FN, out=values[:, ::2])
    assert_bits_equal(decode(expected, E2M1FN), values[:, ::2].copy())
    assert (values[:, 1::2] == 99).all()


def test_out_may_overlap_the_input():
    x = np.linspace(-9, 9, 64, dtype=np.float32)
    expected = by_oracle(x, E4M3FN)
    assert_codes_equal(expected, encode(x, E4M3FN, out=x.view(np.uint8)[64:128]).copy(), E4M3FN)
    buffer = np.zeros(64, np.float32)
    codes = buffer.view(np.uint8)[128:192]
    codes[:] = expected
    assert_bits_equal(decode(expected, E4M3FN), decode(codes, E4M3FN, out=buffer))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros(3, np.uint8), r"out is uint8 of shape \(3,\); it must be uint8 of shape \(4,\)"),
        (np.zeros(4, np.int8), "out is int8"),
        ([0, 0, 0, 0], "out is list"),
    ],
)
def test_a_wrong_out_is_refused(out, message):
    with pytest.raises(FormatError, match=message):
        encode(np.zeros(4, np.float32), E4M3FN, out=out)


def test_a_read_only_out_is_refused():
    out = np.zeros(4, np.uint8)
    out.setflags(write=False)
    with pytest.raises(FormatError, match="out is read-only"):
        encode(np.zeros(4, np.float32), E4M3FN, out=out)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(2, complex),
        np.array(["1"]),
        np.array([None]),
        np.zeros(2, np.longdouble),
        np.zeros(2, "M8[s]"),
    ],
)
def test_other_dtypes_are_one_clear_error(x):
    with pytest.raises(FormatError, match="cannot be encoded; pass float32, float16, bfloat16, float64 or integers"):
        encode(x, E4M3FN)


def test_codes_are_checked():
    with pytest.raises(FormatError, match=r"code 300 is outside 0\.\.255 of float8_e4m3fn"):
        decode([1, 300], E4M3FN)
    with pytest.raises(FormatError, match=r"code -1 is outside 0\.\.255"):
        decode([-1, 3], E4M3FN)
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15 of float4_e2m1fn"):
        decode(np.array([3, 16], np.uint8), E2M1FN)
    with pytest.raises(FormatError, match="codes of dtype float32"):
        decode(np.zeros(2, np.float32), E4M3FN)


def test_packed_and_length_are_checked():
    with pytest.raises(FormatError, match="packed=True needs a 4-bit format; float8_e4m3fn has 8 bits"):
        encode(np.zeros(4, np.float32), E4M3FN, packed=True)
    with pytest.raises(FormatError, match="needs an axis"):
        encode(np.float32(1), E2M1FN, packed=True)
    with pytest.raises(FormatError, match="length 3 has a meaning only with packed=True"):
        decode(np.zeros(4, np.uint8), E2M1FN, length=3)
    with pytest.raises(FormatError, match="length 9 does not fit"):
        decode(np.zeros(4, np.uint8), E2M1FN, packed=True, length=9)


def test_overflow_overrides_the_policy():
    x = np.array([1e30, -1e30], np.float32)
    assert encode(x, E4M3FN, overflow=Overflow.IEEE).tolist() == [0x7F, 0xFF]
    assert encode(x, E5M2, overflow=Overflow.IEEE).tolist() == [0x7C, 0xFC]
    assert encode(x, E5M2, policy="ml_dtypes", overflow=Overflow.SATURATE).tolist() == [0x7B, 0xFB]
    with pytest.raises(FormatError, match="always saturates"):
        encode(x, E2M1FN, overflow=Overflow.IEEE)
    assert encode(x, E2M1FN, policy="ml_dtypes").tolist() == [7, 15]


def test_a_refused_nan_is_named_with_its_index_and_leaves_out_as_it_was():
    x, out = np.array([[1, np.nan], [np.nan, 2]], np.float32), np.full((2, 2), 99, np.uint8)
    for fmt in (E2M1FN, E4M3FN, E8M0FNU):
        with pytest.raises(FormatError, match=rf"^x\[0, 1\] is NaN and the policy refuses it in {fmt.name}"):
            encode(x, fmt, nan=NanPolicy.RAISE, out=out)
    assert (out == 99).all()
    assert encode(np.array([1, np.inf], np.float32), E2M1FN, nan="raise").tolist() == [2, 7]
    with pytest.raises(FormatError, match=r"^x is NaN"):
        encode(np.float16(np.nan), E5M2, nan="raise")
    with pytest.raises(FormatError, match=r"^x\[1\] is -2: float8_e8m0fnu has no sign"):
        encode([4, -2], E8M0FNU, nan="raise")


def test_a_missing_nan_is_refused_only_where_it_is_missing():
    x = np.array([np.nan], np.float32)
    with pytest.raises(FormatError, match=r"^x\[0\] is NaN and the policy refuses it in float4_e2m1fn"):
        encode(x, E2M1FN, missing_nan="raise")
    assert encode(x, E4M3FN, missing_nan="raise").tolist() == [0x7F]
    assert [encode(x, E2M1FN, missing_nan=rule).tolist() for rule in ("max", "zero")] == [[7], [8]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_refused_overflow_is_named_with_its_index_in_every_format(dtype):
    for fmt in (E4M3FN, E5M2, E2M1FN, E8M0FNU):
        x = np.full((3, 100_000), fmt.max, dtype)  # longer than one call of a kernel
        assert (encode(x, fmt, overflow="raise") == fmt.max_code).all()
        x[2, 70_001:] = np.inf
        named = re.escape(f"x[2, 70001] is inf: it rounds beyond {fmt.max:g}, the largest")
        with pytest.raises(FormatError, match=named):
            encode(x, fmt, overflow="raise")
        x[1, 99_999] = 1.75 * fmt.max
        with pytest.raises(FormatError, match=r"^x\[1, 99999\] is [0-9.e+]+: it rounds beyond"):
            encode(x, fmt, overflow="raise")
        x[0, 3] = np.nan
        with pytest.raises(FormatError, match=r"^x\[0, 3\] is NaN"):
            encode(x, fmt, overflow="raise", nan="raise")


def test_a_value_just_above_max_that_rounds_to_it_is_not_refused():
    assert encode([464.0, -449.0], E4M3FN, overflow="raise").tolist() == [0x7E, 0xFE]
    with pytest.raises(FormatError, match=r"^x\[1\] is 464\.00001: it rounds beyond 448, the largest float8_e4m3fn"):
        encode([464.0, 464.00001], E4M3FN, overflow="raise")


def test_an_overflow_that_is_clipped_towards_zero_is_refused_all_the_same():
    assert encode([449.0, 1e30], E4M3FN, rounding="toward_zero").tolist() == [0x7E, 0x7E]
    assert encode([479.0], E4M3FN, rounding="toward_zero", overflow="raise").tolist() == [0x7E]
    with pytest.raises(FormatError, match=r"^x\[0\] is 480\.0: it rounds beyond 448"):
        encode([480.0], E4M3FN, rounding="toward_zero", overflow="raise")


def test_choices_are_given_by_name_or_by_enum():
    x = np.array([1e30, 1.0625, np.nan], np.float32)
    by_name = encode(x, "e4m3", policy="cuda", rounding="nearest_away", overflow="ieee", nan="signed")
    assert by_name.tolist() == [0x7F, 0x39, 0x7F]
    assert by_name.tolist() == encode(
        x, E4M3FN, policy="cuda", rounding=RoundMode.TIES_TO_AWAY, overflow=Overflow.IEEE, nan=NanPolicy.SIGNED
    ).tolist()  # fmt: skip
    with pytest.raises(FormatError, match=r"unknown rounding 'nearest_evn': did you mean 'nearest_even'\?"):
        encode(x, E4M3FN, rounding="nearest_evn")
    with pytest.raises(FormatError, match=r"unknown overflow 'saturated': did you mean 'saturate'\?"):
        encode(x, E4M3FN, overflow="saturated")


def test_the_call_of_the_issue_works():
    out = np.empty(3, np.uint8)
    x = np.array([1000, 4.25, -np.nan], np.float32)
    assert qsim.encode(x, "float8_e4m3fn", policy="cuda", rounding="nearest_even", out=out) is out
    assert out.tolist() == [0x7E, 0x48, 0x7F]


def test_counts_by_hand():
    x = [448, 464, 465, -1e30, np.inf, np.nan, 1e-3, -1e-4, 0, -0.0, 1e-300, 2.0**-9]
    codes, counts = encode_with_counts(x, E4M3FN)
    assert codes.tolist() == encode(x, E4M3FN).tolist()
    numbers = (counts.saturated, counts.flushed, counts.nan, counts.inf)
    assert [(2, np.int64, ()), (2, np.int64, ()), (1, np.int64, ()), (1, np.int64, ())] == [
        (int(n), n.dtype, n.shape) for n in numbers
    ]
    packed, counts = encode_with_counts([[7.1, 0.2, -1e9]], E2M1FN, packed=True, rounding="up")
    assert (packed.tolist(), int(counts.saturated), int(counts.flushed)) == ([[0x17, 0x0F]], 2, 0)
    scales, counts = encode_with_counts([3e38, 0, -1, -np.inf, 1e-40], E8M0FNU, rounding="up")
    assert scales.tolist() == [0xFE, 0x00, 0xFF, 0xFF, 0x00]
    assert (int(counts.saturated), int(counts.flushed), int(counts.nan), int(counts.inf)) == (1, 0, 0, 1)


X, CODES = np.linspace(-4, 4, 32, dtype=np.float32), np.zeros(16, np.uint8)
RAGGED = [[1], [1, 2]]

MISTAKES = {
    "length as text": (lambda: qsim.decode(CODES, "e2m1", packed=True, length="5"), "length '5' is no integer"),
    "unpack as text": (lambda: qsim.unpack(CODES, "7"), "length '7' is no integer"),
    "rows as text": (lambda: qsim.unswizzle_scales(CODES, "128", 4), "rows '128' is no integer"),
    "seed as text": (lambda: qsim.hadamard_signs("a"), "seed of a random stream: 'a' is no integer"),
    "bits as text": (lambda: POLICIES["ocp"].with_choices(random_bits="a"), "random_bits 'a' is no integer"),
    "half a bit": (lambda: POLICIES["ocp"].with_choices(random_bits=1.5), "random_bits 1.5 is no integer"),
    "policies": (lambda: qsim.encode(X, "e4m3", policy=[1]), r"unknown policy '\[1\]'"),
    "threads as text": (lambda: set_threads("a"), "number of threads 'a' is no integer"),
    "no threads": (lambda: set_threads(0), "number of threads 0 is too small"),
    "order alone": (lambda: qsim.quantize(X, "e2m1", order="high_first"), "only with packed=True"),
    "packed no": (lambda: qsim.encode(X, "e2m1", packed="no"), "packed 'no' is neither True nor False"),
    "quantize packed no": (lambda: qsim.quantize(X, "e2m1", packed="no"), "packed 'no' is neither"),
    "a recipe": (lambda: qsim.encode(X, "mxfp4"), r"scale recipes, not a format: qsim.quantize\(x, 'mxfp4_floor'\)"),
    "many recipes": (
        lambda: qsim.encode(X, "nvfp4"),
        "8 scale recipes, .* or another of them; `python -m qsim formats`",
    ),
    "one recipe": (
        lambda: qsim.encode(X, "nvfp4_te"),
        r"a scale recipe, not a format: qsim.quantize\(x, 'nvfp4_te'\)$",
    ),
    "a recipe's alias": (lambda: qsim.encode(X, "e4m3_row"), r"a scale recipe, .* qsim.quantize\(x, 'e4m3_row'\)$"),
    "aliases begun": (lambda: qsim.decode(CODES, "e4m3_"), r"4 scale recipes, .*\(x, 'e4m3_row'\) or another"),
    "a format begun": (lambda: qsim.encode(X, "e4m3f"), "unknown format 'e4m3f': did you mean 'e4m3fn'"),
    "state": (lambda: qsim.quantize(X, "Delayed"), r"is a stateful recipe, .*qsim.make_recipe\('delayed', fmt=...\)"),
    "scales": (
        lambda: qsim.quantize(X, "e8m0"),
        "'e8m0' is no scale recipe: float8_e8m0fnu holds scales, not elements",
    ),
    "a tensor": (lambda: qsim.decode(qsim.quantize(X, "e4m3"), "e4m3"), "QuantizedTensor is no array: qsim.dequantize"),
    "its scales": (lambda: qsim.swizzle_scales(qsim.quantize(X, "nvfp4_te")), r"swizzle its scales, q\.scales"),
    "ragged codes": (lambda: qsim.decode(RAGGED, "e4m3"), "codes is no array: .* pass numbers of one shape"),
    "ragged to pack": (lambda: qsim.pack(RAGGED), "codes is no array"),
    "ragged bytes": (lambda: qsim.unpack(RAGGED, 3), "packed codes is no array"),
    "ragged scales": (lambda: qsim.swizzle_scales(RAGGED), "scales is no array"),
    "ragged tiles": (lambda: qsim.unswizzle_scales(RAGGED, 1, 1), "swizzled scales is no array"),
    "two codes a byte": (lambda: qsim.decode(CODES + 255, "e2m1"), "need packed=True"),
    "an alias": (lambda: qsim.encode(X, "e4m3", nan="keep"), "did you mean 'signed'"),
    "overflow": (lambda: qsim.quantize(X, "e2m1", overflow="ieee"), "neither Inf nor NaN .* overflow='saturate'"),
    "overflow of E2M1": (lambda: qsim.encode(2 * X, "e2m1", overflow="raise"), "scale the input, or .* 'saturate'$"),
    "overflow of E4M3": (lambda: qsim.encode(999 * X, "e4m3", overflow="raise"), "scale .* 'saturate' or 'ieee'$"),
    "Inf": (
        lambda: qsim.encode(np.inf, "e4m3", overflow="raise"),
        "clean the input, or choose .* 'saturate' or 'ieee'$",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_the_value_and_the_next_step(call, message):
    with pytest.raises(QsimError, match=message):
        call()


def test_fewer_random_bits_are_a_choice_of_the_policy():
    """With one bit the fraction is cut to a half: 0.45 of the way up never goes up, 0.5 does by half of the words."""
    x, stream = np.repeat(np.array([2.45, 2.5], np.float32), 100), qsim.RandomStream(seed=1)
    policy = qsim.get_policy("ocp").with_choices(random_bits=1)
    values = qsim.decode(qsim.encode(x, "e2m1", policy=policy, rounding="stochastic", stream=stream), "e2m1")
    assert (values[:100] == 2).all()
    assert {2.0, 3.0} == set(values[100:].tolist())
    assert {2.0, 3.0} == set(qsim.decode(qsim.encode(x[:100], "e2m1", rounding="sr", stream=stream), "e2m1").tolist())


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("rne", "nearest_even"),
        ("rna", "nearest_away"),
        ("rz", "toward_zero"),
        ("rtz", "toward_zero"),
        ("ru", "up"),
        ("RD", "down"),
    ],
)
def test_a_rounding_has_its_usual_abbreviation(short, name):
    ties = np.array([1.0625, -1.0625, 1.1875, -1.1875, 1.01, -1.01], np.float32)
    assert encode(ties, "e4m3", rounding=name).tolist() == encode(ties, "e4m3", rounding=short).tolist()


def test_the_elements_of_a_recipe_take_every_choice_of_encode():
    x = np.array([np.nan, 1, 2, 3], np.float32)
    assert 0x7F == qsim.quantize(-x, "mxfp8_floor", nan="positive").codes[0]
    assert 0xFF == qsim.quantize(-x, "mxfp8_floor").codes[0]
    with pytest.raises(FormatError, match="is NaN and the policy refuses it"):
        qsim.quantize(x, "mxfp8_floor", nan="raise")
