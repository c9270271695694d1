"""The Numba kernels over several spans of ordinary numbers, where their plain loops work, against the oracle."""

import dataclasses

import numpy as np
import pytest

from qsim.backends import CastSpec
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.oracle import OracleBackend
from qsim.codec.rows_kernels import SPAN
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import FormatError
from qsim.formats import E2M1FN, E2M3FN, E4M3FN, E5M2, FORMATS, POLICIES, FloatFormat, NanEncoding

ORACLE, NUMBA = OracleBackend(), NumbaBackend()
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)
ELEMENTS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}
EXTREME = {
    "subnormal in float32": FloatFormat(
        name="e4m3_b127", exponent_bits=4, mantissa_bits=3, bias=127, has_inf=False, nan=NanEncoding.ALL_ONES
    ),
    "large in float32": FloatFormat(
        name="e5m2_b0", exponent_bits=5, mantissa_bits=2, bias=0, has_inf=True, nan=NanEncoding.IEEE
    ),
    "one mantissa bit": FloatFormat(
        name="e3m1_b3", exponent_bits=3, mantissa_bits=1, bias=3, has_inf=False, nan=NanEncoding.NONE
    ),
}

# One long row that ends within a span; short rows, several to a span, and a last one alone; rows longer than half of
# one, and than a whole one.
SHAPES = [(1, 2 * SPAN + 5), (2, 70, 33), (1, 3, 700), (2, 2, SPAN + 3)]
CENTERS = ["none", "one", "replica", "channel", "own channel", "token", "element"]


def center_of(kind, shape, rng):
    r, *rest = shape
    ones = (1,) * (len(rest) - 1)
    sizes = {
        "one": (1,) * len(shape),
        "replica": (r, *ones, 1),
        "channel": (1, *ones, rest[-1]),
        "own channel": (r, *ones, rest[-1]),
        "token": (*shape[:-1], 1),
        "element": shape,
    }
    return None if kind == "none" else rng.standard_normal(sizes[kind]).astype(np.float32)


def same(expected, actual):
    """Every count, amax and sum of two results, bit by bit."""
    for field in dataclasses.fields(expected):
        a, b = getattr(expected, field.name), getattr(actual, field.name)
        if dataclasses.is_dataclass(a):
            same(a, b)
        elif a is not None:
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), field.name


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("poison", "place"), [(None, 0), (np.nan, 0), (np.inf, -1)])
def test_spans_and_short_rows_equal_the_oracle(shape, center, poison, place):
    """With one NaN or Inf in the first or the last element, one span takes the long way and the others do not."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(shape).astype(np.float32)
    if poison is not None:
        x.reshape(-1)[place] = poison
    c = center_of(center, shape, rng)
    scale = (rng.random(shape[0]) * 50 + 200).astype(np.float32)
    spec = CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"])
    expected, actual = ORACLE.quantize(x, scale, c, spec), NUMBA.quantize(x, scale, c, spec)
    assert int(expected.counts.saturated.sum()) > 0
    same(expected, actual)
    assert_bits_equal(ORACLE.decode(expected.codes, scale, c, spec), NUMBA.decode(expected.codes, scale, c, spec))
    rest = tuple(range(1, len(shape)))
    for axes in (None, rest, rest[:-1], rest[-1:]):
        same(ORACLE.observe(x, c, lead=1, mean_axes=axes), NUMBA.observe(x, c, lead=1, mean_axes=axes))


@pytest.mark.parametrize("center", [None, -0.0, 0.3, 3e38, -np.inf, NEGATIVE_NAN])
@pytest.mark.parametrize("descale", [1.0, 0.3, -2.0, 2.0**-149, 2.0**-126, 3e38, 0.0, np.inf, NEGATIVE_NAN])
@pytest.mark.parametrize("fmt", [*ELEMENTS.values(), *EXTREME.values()], ids=[*ELEMENTS, *EXTREME])
def test_every_finite_code_decodes_by_arithmetic_as_by_the_oracle(fmt, descale, center):
    """No NaN or Inf among the codes, so that no span falls back on the table; then each of those with one neighbour."""
    special = {*fmt.nan_codes, *fmt.inf_codes}
    finite = np.array([code for code in range(fmt.code_count) if code not in special], np.uint8)
    spec, c = CastSpec(fmt=fmt, policy=POLICIES["ocp"]), None if center is None else np.array([center], np.float32)
    spread = None if c is None else np.full(finite.size, center, np.float32)
    scale = np.asarray(np.float32(descale))
    expected = ORACLE.decode(finite, scale, c, spec)
    assert_bits_equal(expected, NUMBA.decode(finite, scale, c, spec))
    assert_bits_equal(expected, NUMBA.decode(finite, scale, spread, spec))
    for code in special:
        pair = np.array([code, 1], np.uint8)
        assert_bits_equal(ORACLE.decode(pair, scale, c, spec), NUMBA.decode(pair, scale, c, spec))


@pytest.mark.parametrize("fmt", [E2M1FN, E2M3FN], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("descale", [1.0, np.nan])
@pytest.mark.parametrize("center", [None, 0.5, np.inf])
def test_a_code_outside_the_format_is_found_in_any_span(fmt, descale, center):
    codes = np.zeros(3 * SPAN, np.uint8)
    spec, c = CastSpec(fmt=fmt, policy=POLICIES["ocp"]), None if center is None else np.array([center], np.float32)
    assert NUMBA.decode(codes, np.asarray(np.float32(descale)), c, spec).size == codes.size
    for place in (0, SPAN, 3 * SPAN - 1):
        codes[:] = 0
        codes[place], codes[SPAN + 5] = 200, fmt.code_count
        with pytest.raises(FormatError, match=rf"code 200 is outside 0\.\.{fmt.code_count - 1} of {fmt.name}"):
            NUMBA.decode(codes, np.asarray(np.float32(descale)), c, spec)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN], ids=lambda fmt: fmt.name)
def test_flushed_and_saturated_elements_are_counted_in_plain_spans(fmt):
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((2, 3 * SPAN)) * 10.0 ** rng.integers(-9, 9, (2, 3 * SPAN))).astype(np.float32)
    scale, spec = np.array([1, 3], np.float32), CastSpec(fmt=fmt, policy=POLICIES["ocp"])
    expected, actual = ORACLE.quantize(x, scale, None, spec), NUMBA.quantize(x, scale, None, spec)
    assert min(*expected.counts.saturated, *expected.counts.flushed) > 100
    assert_codes_equal(expected.codes, actual.codes, fmt)
    same(expected, actual)
