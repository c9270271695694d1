"""The fast encoder against the oracle code by code, and against ml_dtypes on many bit patterns."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from qsim.codec import decode, encode
from qsim.codec.oracle import decode_scalar, encode_by_codes
from qsim.conformance.codec import critical_values
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import FORMATS, POLICIES

ELEMENTS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}


def with_ml_dtypes(x, name):
    with np.errstate(all="ignore"):
        return x.astype(getattr(ml_dtypes, name)).view(np.uint8)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("fmt", ELEMENTS.values(), ids=ELEMENTS)
def test_fast_equals_oracle_at_every_value_midpoint_and_neighbour(fmt, policy):
    x = critical_values(fmt)
    resolved = policy.codes(fmt)
    expected = np.array([encode_by_codes(v, fmt, resolved) for v in x], np.uint8)
    assert_codes_equal(expected, encode(x, fmt, policy=policy), fmt, inputs=x)


@pytest.mark.parametrize("name", ELEMENTS)
def test_fast_equals_ml_dtypes_at_every_value_midpoint_and_neighbour(name):
    x = critical_values(FORMATS[name])
    assert_codes_equal(with_ml_dtypes(x, name), encode(x, name, policy="ml_dtypes"), FORMATS[name], inputs=x)


@pytest.mark.parametrize("name", ELEMENTS)
def test_fast_equals_ml_dtypes_on_random_bit_patterns(name):
    rng = np.random.default_rng(20240607)
    anywhere = rng.integers(0, 2**32, 1 << 20, dtype=np.uint32)
    exponents = rng.integers(127 - 20, 127 + 20, 1 << 20, dtype=np.uint32)  # where the codes differ
    x = np.concatenate([anywhere, anywhere & np.uint32(0x807FFFFF) | exponents << np.uint32(23)]).view(np.float32)
    assert_codes_equal(with_ml_dtypes(x, name), encode(x, name, policy="ml_dtypes"), FORMATS[name], inputs=x)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("wide", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_every_16_bit_float_encodes_as_its_exact_float32(name, wide):
    x = np.arange(1 << 16, dtype=np.uint16).view(wide)
    with np.errstate(all="ignore"):
        exact = x.astype(np.float32)
    assert_codes_equal(with_ml_dtypes(exact, name), encode(x, name, policy="ml_dtypes"), FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_decode_equals_the_oracle_and_ml_dtypes_on_every_code(name):
    fmt = FORMATS[name]
    codes = np.arange(fmt.code_count, dtype=np.uint8)
    expected = np.array([decode_scalar(int(code), fmt) for code in codes], np.float32)
    assert_bits_equal(expected, decode(codes, fmt))
    theirs = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    numbers = ~np.isnan(theirs)
    assert_bits_equal(theirs[numbers], decode(codes, fmt)[numbers])
    assert np.array_equal(np.isnan(theirs), np.isnan(decode(codes, fmt)))


@pytest.mark.parametrize("policy", ["ocp", "cuda_nosat"])
def test_the_vector_path_of_scales_equals_the_oracle(policy):
    fmt = FORMATS["float8_e8m0fnu"]
    values = np.array([fmt.magnitude(code) for code in range(255)])
    points = np.concatenate([values, values * 1.5, values * 1.5 * (1 + 2**-22), values * 1.5 * (1 - 2**-22)])
    x = np.concatenate([points, -points, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-50, 1e39]])
    resolved = POLICIES[policy].codes(fmt)
    expected = np.array([encode_by_codes(float(v), fmt, resolved) for v in x], np.uint8)
    assert_codes_equal(expected, encode(x, fmt, policy=policy), fmt, inputs=x)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_float64_is_rounded_once_around_every_value_and_midpoint(fmt):
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    points = np.array([*values, *((a + b) / 2 for a, b in itertools.pairwise(values)), 2 * fmt.max])
    x = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    x = np.concatenate([x, -x, [1e-300, -1e-300, 1e300, -1e300, 5e-324, np.inf, np.nan, -np.nan, 2.0**128]])
    resolved = POLICIES["ocp"].codes(fmt)
    expected = np.array([encode_by_codes(float(v), fmt, resolved) for v in x], np.uint8)
    assert_codes_equal(expected, encode(x, fmt), fmt, inputs=x)
