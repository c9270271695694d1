"""Properties that every codec has, on generated arrays."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qsim.codec import decode, encode, pack, unpack
from qsim.conformance.compare import assert_codes_equal
from qsim.formats import FORMATS

modest = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ELEMENTS = [fmt for fmt in FORMATS.values() if fmt.signed]
element_formats = st.sampled_from(ELEMENTS)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
near_one = st.floats(min_value=-600, max_value=600, width=32)
tensors = st.lists(st.one_of(float32, near_one), min_size=1, max_size=40).map(lambda v: np.array(v, np.float32))


@modest
@given(tensors, element_formats)
def test_the_code_is_a_nearest_value(x, fmt):
    grid = [Fraction(fmt.magnitude(code)) for code in range(fmt.max_code + 1)]
    for value, code in zip(x.tolist(), encode(x, fmt).tolist(), strict=True):
        magnitude = abs(Fraction(value))
        best = min(abs(v - magnitude) for v in grid)
        assert best == abs(Fraction(fmt.magnitude(code)) - magnitude)
        assert (value < 0) == bool(code & fmt.sign_bit) or fmt.magnitude(code) == 0


@modest
@given(tensors, element_formats, st.sampled_from([np.float32, np.float64]))
def test_encoding_is_monotone(x, fmt, dtype):
    values = decode(encode(np.sort(x).astype(dtype), fmt), fmt)
    assert (np.diff(values) >= 0).all()


@modest
@given(tensors, element_formats)
def test_a_decoded_code_encodes_to_itself(x, fmt):
    codes = encode(x, fmt)
    assert_codes_equal(codes, encode(decode(codes, fmt), fmt), fmt)


@modest
@given(tensors, element_formats)
def test_negation_changes_only_the_sign_bit(x, fmt):
    codes, negated = encode(x, fmt), encode(-x, fmt)
    zero = (codes & ~np.uint8(fmt.sign_bit)) == 0
    flips = np.where(zero & (not fmt.has_negative_zero), 0, fmt.sign_bit)
    assert_codes_equal((codes ^ flips).astype(np.uint8), negated, fmt)


@modest
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(-3, 3).filter(bool), st.integers(-3, 3).filter(bool),
    st.booleans(), element_formats, st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_the_layout_never_changes_a_bit(rows, columns, row_step, column_step, transpose, fmt, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, columns)) * 3)).astype(np.float32)
    view = x[::row_step, ::column_step]
    view = view.T if transpose else view
    out = np.zeros(tuple(2 * n for n in view.shape), np.uint8)[::2, ::-2]
    expected = encode(np.array(view, order="C"), fmt)
    assert_codes_equal(expected, encode(view, fmt), fmt)
    assert_codes_equal(expected, np.array(encode(view, fmt, out=out)), fmt)
    one_by_one = np.array([encode(v, fmt) for v in view.flat], np.uint8).reshape(view.shape)
    assert_codes_equal(expected, one_by_one, fmt)


@modest
@given(st.lists(st.integers(0, 15), max_size=40))
def test_unpack_inverts_pack(codes):
    array = np.array(codes, np.uint8)
    assert codes == unpack(pack(array), len(codes)).tolist()
