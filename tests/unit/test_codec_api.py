"""encode and decode on arrays: layouts, dtypes, out, errors. Values are checked elsewhere code by code."""

import math

import ml_dtypes
import numpy as np
import pytest

from qsim.codec import DEFAULT_POLICY, decode, encode, encode_scalar
from qsim.codec.api import narrow_to_odd
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import FormatError
from qsim.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, NanPolicy, Overflow, get_policy


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


def test_a_refused_nan_is_an_error():
    policy = get_policy("ocp")
    refusing = type(policy)(
        name="refusing",
        rounding=policy.rounding,
        overflow_with_inf=policy.overflow_with_inf,
        overflow_nan_only=policy.overflow_nan_only,
        nan=NanPolicy.RAISE,
    )
    with pytest.raises(FormatError, match="NaN has no code in float4_e2m1fn"):
        encode(np.array([1, np.nan], np.float32), E2M1FN, policy=refusing)
    assert encode(np.array([1, np.inf], np.float32), E2M1FN, policy=refusing).tolist() == [2, 7]
    assert encode(np.array([np.nan], np.float32), E4M3FN, policy=refusing).tolist() == [0x7F]
