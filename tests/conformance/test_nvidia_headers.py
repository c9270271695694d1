"""The codec under the policies "cuda" and "cuda_nosat" against NVIDIA's own conversions, compiled for the CPU."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from qsim import decode, encode
from qsim.arrays import F32, F64
from qsim.conformance.codec import CodecSubject, check_codec, critical_values
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import FORMATS, POLICIES, FloatFormat
from tests.conformance.nvidia_headers import KINDS, NvidiaHeaders, Rounding, need_nvidia_headers

ELEMENTS = [FORMATS[name] for name in KINDS if FORMATS[name].signed]
E8M0 = FORMATS["float8_e8m0fnu"]
SATURATE = {"cuda": True, "cuda_nosat": False}
SIXTEEN_BITS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]

every_element = pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
both_policies = pytest.mark.parametrize("policy", SATURATE)


@pytest.fixture(scope="session")
def nvidia() -> NvidiaHeaders:
    return need_nvidia_headers()


@pytest.fixture(scope="module")
def random_float32() -> F32:
    """2 Mi bit patterns: half anywhere, half with exponents of -24..23, where codes differ."""
    words = np.random.default_rng(20260115).integers(0, 1 << 32, 1 << 21, dtype=np.uint32)
    fields = np.random.default_rng(20260116).integers(127 - 24, 127 + 24, 1 << 20, dtype=np.uint32)
    words[::2] = words[::2] & np.uint32(0x807FFFFF) | fields << np.uint32(23)
    return words.view(np.float32)


def float64_around(fmt: FloatFormat) -> F64:
    """Every value and midpoint, the overflow threshold, and what a float32 cannot tell from them; both signs."""
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    values.append(2 * values[-1] - values[-2])  # the next value if the exponent were unbounded
    points = np.array([*values, *((a + b) / 2 for a, b in itertools.pairwise(values))])
    near = [points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)]
    for relative in (2.0**-50, 2.0**-40, 2.0**-30, 2.0**-24, 2.0**-10):
        near += [points * (1 + relative), points * (1 - relative)]
    x = np.concatenate([*near, [5e-324, 1e-300, 1e-46, 3.5e38, 1e300, np.inf]])
    return np.concatenate([x, -x])


@every_element
@both_policies
def test_the_headers_conform_to_the_oracle(nvidia: NvidiaHeaders, fmt: FloatFormat, policy: str) -> None:
    subject = CodecSubject(
        name="cuda_fp8.h",
        fmt=fmt,
        policy=POLICIES[policy],
        encode=lambda x: nvidia.encode(x, fmt.name, saturate=SATURATE[policy]),
        decode=lambda codes: nvidia.decode(codes, fmt.name),
    )
    assert critical_values(fmt).size + fmt.code_count == check_codec(subject)


@every_element
@both_policies
def test_float32_encodes_as_the_headers_do(
    nvidia: NvidiaHeaders, random_float32: F32, fmt: FloatFormat, policy: str
) -> None:
    x = np.concatenate([critical_values(fmt), random_float32])
    expected = nvidia.encode(x, fmt.name, saturate=SATURATE[policy])
    assert_codes_equal(expected, encode(x, fmt, policy=policy), fmt, inputs=x)


@every_element
@both_policies
def test_float64_is_rounded_once_as_by_the_headers(nvidia: NvidiaHeaders, fmt: FloatFormat, policy: str) -> None:
    x = float64_around(fmt)
    expected = nvidia.encode(x, fmt.name, saturate=SATURATE[policy])
    assert_codes_equal(expected, encode(x, fmt, policy=policy), fmt, inputs=x)
    with np.errstate(over="ignore"):
        by_way_of_float32 = nvidia.encode(x.astype(np.float32), fmt.name, saturate=SATURATE[policy])
    assert (expected != by_way_of_float32).any()  # these inputs do tell one rounding from two


@every_element
@both_policies
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_every_16_bit_float_encodes_as_by_the_headers(
    nvidia: NvidiaHeaders, fmt: FloatFormat, policy: str, dtype: np.dtype
) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    expected = nvidia.encode(x, fmt.name, saturate=SATURATE[policy])
    assert_codes_equal(expected, encode(x, fmt, policy=policy), fmt, inputs=x)


@pytest.mark.parametrize("name", KINDS)
def test_every_code_decodes_as_by_the_headers(nvidia: NvidiaHeaders, name: str) -> None:
    codes = np.arange(FORMATS[name].code_count, dtype=np.uint8)
    theirs, ours = nvidia.decode(codes, name), decode(codes, name)
    numbers = ~np.isnan(theirs)
    assert_bits_equal(theirs[numbers], ours[numbers])
    assert FORMATS[name].nan_codes == tuple(codes[~numbers].tolist())
    assert np.isnan(ours[~numbers]).all()


# A NaN of float64 is the one place where the headers contradict themselves: they make a float32 NaN positive and
# all ones first, but not a float64 NaN, which keeps its sign and, in E5M2, its two top mantissa bits. qsim's "cuda"
# follows float32 for every input.
NAN_OF_FLOAT64 = [
    ("float8_e4m3fn", 0x7FF8000000000000, 0x7F),
    ("float8_e4m3fn", 0xFFF8000000000000, 0xFF),
    ("float8_e5m2", 0x7FF8000000000000, 0x7E),
    ("float8_e5m2", 0x7FFC000000000000, 0x7F),
    ("float8_e5m2", 0x7FF4000000000000, 0x7F),
    ("float8_e5m2", 0xFFF8000000000000, 0xFE),
    ("float4_e2m1fn", 0xFFF8000000000000, 0x7),
]


@pytest.mark.parametrize(("name", "bits", "theirs"), NAN_OF_FLOAT64)
def test_a_nan_of_float64_keeps_in_the_headers_what_a_nan_of_float32_loses(
    nvidia: NvidiaHeaders, name: str, bits: int, theirs: int
) -> None:
    x = np.array([bits], np.uint64).view(np.float64)
    assert [theirs] == nvidia.encode(x, name).tolist()
    assert [0x7 if name == "float4_e2m1fn" else 0x7F] == encode(x, name, policy="cuda").tolist()


def test_packed_e2m1_has_the_first_element_in_the_low_nibble_as_the_x2_and_x4_types(nvidia: NvidiaHeaders) -> None:
    assert [0xF2] == nvidia.encode_vectors(np.array([1, -6], np.float32), "float4_e2m1fn", 2).tolist()
    codes = np.array([(a, b) for a in range(16) for b in range(16)], np.uint8).reshape(-1)
    x = decode(codes, "float4_e2m1fn")
    packed = encode(x, "float4_e2m1fn", packed=True)
    for width in (2, 4):
        assert packed.tolist() == nvidia.encode_vectors(x, "float4_e2m1fn", width).tolist()
    assert_bits_equal(nvidia.decode_fp4x2(packed), decode(packed, "float4_e2m1fn", packed=True))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn"])
@pytest.mark.parametrize("width", [2, 4])
def test_wider_types_hold_one_code_a_byte_in_the_order_of_elements(
    nvidia: NvidiaHeaders, name: str, width: int
) -> None:
    x = np.array([1, -2, 0.5, 1e9, -0.0, 3, 1.5, -7], np.float32)
    assert_codes_equal(nvidia.encode_vectors(x, name, width), encode(x, name, policy="cuda"), FORMATS[name], inputs=x)


# float32 bits: codes of the headers for rounding to zero and up, saturating, then both without saturation.
# The sign is dropped, so rounding up is away from zero; 0 and all below 2^-127 give 00; only Inf and NaN reach FF
# without saturation when rounding to zero.
E8M0_CODES = [
    (0x00000000, 0x00, 0x00, 0x00, 0x00),  # 0
    (0x80000000, 0x00, 0x00, 0x00, 0x00),  # -0
    (0x00000001, 0x00, 0x00, 0x00, 0x00),  # 2^-149
    (0x003FFFFF, 0x00, 0x00, 0x00, 0x00),  # just below 2^-127
    (0x00400000, 0x00, 0x00, 0x00, 0x00),  # 2^-127
    (0x00400001, 0x00, 0x01, 0x00, 0x01),  # 2^-127 * (1 + ulp)
    (0x00600000, 0x00, 0x01, 0x00, 0x01),  # 1.5 * 2^-127
    (0x00800000, 0x01, 0x01, 0x01, 0x01),  # 2^-126
    (0x00800001, 0x01, 0x02, 0x01, 0x02),
    (0x3F400000, 0x7E, 0x7F, 0x7E, 0x7F),  # 0.75
    (0x3F7FFFFF, 0x7E, 0x7F, 0x7E, 0x7F),  # just below 1
    (0x3F800000, 0x7F, 0x7F, 0x7F, 0x7F),  # 1
    (0x3F800001, 0x7F, 0x80, 0x7F, 0x80),  # just above 1
    (0x3FC00000, 0x7F, 0x80, 0x7F, 0x80),  # 1.5
    (0x40400000, 0x80, 0x81, 0x80, 0x81),  # 3
    (0xBF800000, 0x7F, 0x7F, 0x7F, 0x7F),  # -1
    (0xC0400000, 0x80, 0x81, 0x80, 0x81),  # -3
    (0x7F000000, 0xFE, 0xFE, 0xFE, 0xFE),  # 2^127
    (0x7F000001, 0xFE, 0xFE, 0xFE, 0xFF),  # just above 2^127
    (0x7F7FFFFF, 0xFE, 0xFE, 0xFE, 0xFF),  # the largest float32
    (0x7F800000, 0xFE, 0xFE, 0xFF, 0xFF),  # Inf
    (0xFF800000, 0xFE, 0xFE, 0xFF, 0xFF),  # -Inf
    (0x7FC00000, 0xFF, 0xFF, 0xFF, 0xFF),  # NaN
    (0xFF800001, 0xFF, 0xFF, 0xFF, 0xFF),  # -NaN
]
E8M0_MODES = list(itertools.product((True, False), (Rounding.ZERO, Rounding.UP)))


@pytest.mark.parametrize("mode", range(4), ids=[f"{r.name.lower()}-{s}" for s, r in E8M0_MODES])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_headers_round_a_scale_to_zero_or_up_as_the_table_says(
    nvidia: NvidiaHeaders, dtype: type, mode: int
) -> None:
    saturate, rounding = E8M0_MODES[mode]
    with np.errstate(invalid="ignore"):  # a signalling NaN is widened
        x = np.array([row[0] for row in E8M0_CODES], np.uint32).view(np.float32).astype(dtype)
    expected = np.array([row[1 + mode] for row in E8M0_CODES], np.uint8)
    assert_codes_equal(expected, nvidia.encode(x, E8M0.name, saturate=saturate, rounding=rounding), E8M0, inputs=x)


@pytest.mark.parametrize("rounding", [Rounding.ZERO, Rounding.UP])
def test_a_scale_in_bfloat16_is_rounded_by_the_headers_as_its_float32(
    nvidia: NvidiaHeaders, rounding: Rounding
) -> None:
    x = np.arange(1 << 15, dtype=np.uint16).view(ml_dtypes.bfloat16)  # no sign: see the table
    exact = (np.arange(1 << 15, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    expected = nvidia.encode(exact, E8M0.name, rounding=rounding)
    assert_codes_equal(expected, nvidia.encode(x, E8M0.name, rounding=rounding), E8M0, inputs=x)


@both_policies
def test_a_scale_is_rounded_to_the_nearer_of_the_two_codes_of_the_headers(
    nvidia: NvidiaHeaders, random_float32: F32, policy: str
) -> None:
    """The headers round scales to zero or up only; qsim's nearest is decided between those two, exactly."""
    edges = [b + d for b in range(0, 0x7F800000, 1 << 22) for d in (-1, 0, 1) if 0 <= b + d < 0x7F800000]
    magnitudes = np.abs(random_float32[np.isfinite(random_float32)])
    x = np.concatenate([np.array(edges, np.uint32).view(np.float32), magnitudes])
    low = nvidia.encode(x, E8M0.name, saturate=True, rounding=Rounding.ZERO)
    above = 2.0 ** (low.astype(np.float64) - 126)
    middle = 0.75 * above
    wide = x.astype(np.float64)
    up = (wide > middle) | ((wide == middle) & (low % 2 == 1))
    stepped = nvidia.encode(x, E8M0.name, saturate=SATURATE[policy], rounding=Rounding.UP)
    assert_codes_equal(np.where(up, stepped, low), encode(x, E8M0, policy=policy), E8M0, inputs=x)


def test_the_headers_drop_the_sign_of_a_scale_and_qsim_gives_nan(nvidia: NvidiaHeaders) -> None:
    x = np.array([-1.0, -4.0], np.float32)
    assert [0x7F, 0x81] == nvidia.encode(x, E8M0.name, rounding=Rounding.UP).tolist()
    assert [0xFF, 0xFF] == encode(x, E8M0, policy="cuda").tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "rounding"),
    [
        ("float8_e4m3fn", np.float32, Rounding.ZERO),
        ("float4_e2m1fn", np.float32, Rounding.UP),
        ("float8_e8m0fnu", np.float32, Rounding.NEAREST),
        ("float8_e8m0fnu", np.float16, Rounding.UP),
    ],
)
def test_a_conversion_that_the_headers_lack_is_refused(
    nvidia: NvidiaHeaders, name: str, dtype: type, rounding: Rounding
) -> None:
    with pytest.raises(ValueError, match=f"no conversion of {np.dtype(dtype)} to {name} with {rounding.name}"):
        nvidia.encode(np.ones(3, dtype), name, rounding=rounding)


@both_policies
@pytest.mark.parametrize(("mode", "theirs"), [("up", Rounding.UP), ("toward_zero", Rounding.ZERO)])
def test_a_scale_rounds_up_or_to_zero_as_by_the_headers(nvidia, random_float32, policy, mode, theirs):
    x = np.concatenate([critical_values(E8M0), random_float32])
    x = x[~np.signbit(x) | (x == 0)]  # the headers drop the sign
    expected = nvidia.encode(x, E8M0.name, saturate=SATURATE[policy], rounding=theirs)
    assert_codes_equal(expected, encode(x, E8M0, policy=policy, rounding=mode), E8M0, inputs=x)
