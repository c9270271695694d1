"""The codec under the policy "torch" against the casts of PyTorch on a CPU."""

from __future__ import annotations

import itertools
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from qsim import decode, encode
from qsim.arrays import F32, F64, U8, U32, AnyArray
from qsim.conformance.codec import critical_values
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import FORMATS, POLICIES, CastPolicy, FloatFormat, Overflow
from tests.oracles import need_torch

# torch turns the overflow of a FNUZ format into its NaN, while it saturates E4M3FN.
TORCH = POLICIES["torch"]
CASTS = [
    (FORMATS["float8_e4m3fn"], TORCH),
    (FORMATS["float8_e5m2"], TORCH),
    (FORMATS["float8_e4m3fnuz"], TORCH),
    (FORMATS["float8_e5m2fnuz"], TORCH),
]
E8M0 = FORMATS["float8_e8m0fnu"]

every_cast = pytest.mark.parametrize(("fmt", "policy"), CASTS, ids=lambda p: getattr(p, "name", p))


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    return need_torch()


@pytest.fixture(scope="module")
def random_words() -> U32:
    """2 Mi bit patterns: half anywhere, half with exponents of -24..23, where codes differ."""
    rng = np.random.default_rng(20260117)
    words = rng.integers(0, 1 << 32, 1 << 21, dtype=np.uint32)
    fields = rng.integers(127 - 24, 127 + 24, 1 << 20, dtype=np.uint32)
    words[::2] = words[::2] & np.uint32(0x807FFFFF) | fields << np.uint32(23)
    return words


def cast(torch: ModuleType, x: AnyArray, fmt: FloatFormat) -> U8:
    """Codes of ``x`` by ``Tensor.to``; bfloat16 travels as its bits, for torch takes no ml_dtypes array."""
    if x.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(x)
    return tensor.to(getattr(torch, fmt.name)).view(torch.uint8).numpy()


def ties_of(fmt: FloatFormat) -> F64:
    """Midpoints of neighbouring values, both signs."""
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    ties = np.array([(a + b) / 2 for a, b in itertools.pairwise(values)])
    return np.concatenate([ties, -ties])


@every_cast
def test_float32_encodes_as_torch_does(
    torch: ModuleType, random_words: U32, fmt: FloatFormat, policy: CastPolicy
) -> None:
    x = np.concatenate([critical_values(fmt), random_words.view(np.float32)])
    assert_codes_equal(cast(torch, x, fmt), encode(x, fmt, policy=policy), fmt, inputs=x)


@every_cast
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_every_16_bit_float_encodes_as_torch_does(
    torch: ModuleType, fmt: FloatFormat, policy: CastPolicy, dtype: np.dtype
) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    assert_codes_equal(cast(torch, x, fmt), encode(x, fmt, policy=policy), fmt, inputs=x)


@every_cast
def test_the_lengths_and_strides_that_torch_does_not_vectorize_change_nothing(
    torch: ModuleType, fmt: FloatFormat, policy: CastPolicy
) -> None:
    whole = critical_values(fmt)
    for x in (*(whole[-length:] for length in range(1, 36)), whole[1:][::3]):
        assert_codes_equal(cast(torch, x, fmt), encode(x, fmt, policy=policy), fmt, inputs=x)


@every_cast
def test_torch_rounds_float64_twice_and_qsim_once(torch: ModuleType, fmt: FloatFormat, policy: CastPolicy) -> None:
    """So torch is no oracle for float64: it goes by way of float32, and beside a tie that is another code."""
    ties = ties_of(fmt)
    beside = np.concatenate([ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)])  # nearer than a float32 can tell
    theirs = cast(torch, beside, fmt)
    assert_codes_equal(np.tile(encode(ties, fmt, policy=policy), 2), theirs, fmt, inputs=beside)
    # One of the two sides of every tie belongs to the odd code.
    assert ties.size == int((theirs != encode(beside, fmt, policy=policy)).sum())


@pytest.mark.parametrize("name", [*(fmt.name for fmt, _ in CASTS), E8M0.name])
def test_every_code_decodes_as_by_torch(torch: ModuleType, name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float32).numpy()
    ours = decode(codes, name)
    numbers = ~np.isnan(theirs)
    assert_bits_equal(theirs[numbers], ours[numbers])
    assert FORMATS[name].nan_codes == tuple(codes[~numbers].tolist())  # its bits differ: torch's may be signalling
    assert np.isnan(ours[~numbers]).all()


# torch's cast to E8M0 is no nearest-even: it adds the top mantissa bit to the exponent field. A tie goes up, also
# where the code below is even; between 2^-127 and 2^-126 everything goes up; the sign is dropped; what rounds above
# 2^127, and Inf, is NaN (FF). qsim rounds to the nearest, a tie to the even code.
# float32 bits, torch, qsim (ocp)
E8M0_DIFFERS = [
    (0x40400000, 0x81, 0x80),  # 3
    (0x3F400000, 0x7F, 0x7E),  # 0.75
    (0x00400001, 0x01, 0x00),  # 2^-127 * (1 + ulp)
    (0x00600000, 0x01, 0x00),  # 1.5 * 2^-127
    (0xBF800000, 0x7F, 0xFF),  # -1
    (0x7F400000, 0xFF, 0xFE),  # 1.5 * 2^127
    (0x7F7FFFFF, 0xFF, 0xFE),  # the largest float32
    (0x7F800000, 0xFF, 0xFE),  # Inf
]
E8M0_AGREES = [
    (0x00000000, 0x00),  # 0
    (0x80000000, 0x00),  # -0
    (0x00400000, 0x00),  # 2^-127
    (0x00800000, 0x01),  # 2^-126
    (0x3F800000, 0x7F),  # 1
    (0x3FBFFFFF, 0x7F),  # just below 1.5
    (0x3FC00000, 0x80),  # 1.5, a tie whose even code is above
    (0x403FFFFF, 0x80),  # just below 3
    (0x40400001, 0x81),  # just above 3
    (0x7F000000, 0xFE),  # 2^127
    (0x7F3FFFFF, 0xFE),  # just below 1.5 * 2^127
    (0x7FC00000, 0xFF),  # NaN
]


def from_words(rows: list[tuple[int, ...]]) -> F32:
    return np.array([row[0] for row in rows], np.uint32).view(np.float32)


def test_torch_and_qsim_agree_on_a_scale_where_there_is_no_tie(torch: ModuleType) -> None:
    x, expected = from_words(E8M0_AGREES), np.array([row[1] for row in E8M0_AGREES], np.uint8)
    assert_codes_equal(expected, cast(torch, x, E8M0), E8M0, inputs=x)
    assert_codes_equal(expected, encode(x, E8M0), E8M0, inputs=x)


def test_torch_and_qsim_differ_on_a_scale_as_the_table_says(torch: ModuleType) -> None:
    x = from_words(E8M0_DIFFERS)
    assert_codes_equal(np.array([row[1] for row in E8M0_DIFFERS], np.uint8), cast(torch, x, E8M0), E8M0, inputs=x)
    assert_codes_equal(np.array([row[2] for row in E8M0_DIFFERS], np.uint8), encode(x, E8M0), E8M0, inputs=x)


def test_normal_scales_that_are_no_tie_encode_as_by_torch(torch: ModuleType, random_words: U32) -> None:
    tops = np.arange(256, dtype=np.uint32) << np.uint32(23)
    beside = np.array([0, 1, 0x3FFFFF, 0x400001, 0x7FFFFF], np.uint32)
    words = np.concatenate([random_words & np.uint32(0x7FFFFFFF), (tops[:, None] | beside).reshape(-1)])
    field, fraction = words >> np.uint32(23), words & np.uint32(0x7FFFFF)
    x = words[(field > 0) & (field < 255) & (fraction != 0x400000)].view(np.float32)
    assert x.size > 1 << 20
    assert_codes_equal(cast(torch, x, E8M0), encode(x, E8M0, overflow=Overflow.IEEE), E8M0, inputs=x)
