"""The comparisons that other tests rest on must fail, and say where."""

import numpy as np
import pytest

from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import E2M1FN, E4M3FN


def test_the_first_differing_code_is_named_with_both_values():
    expected = np.array([[0, 1, 0x7E], [3, 4, 5]], np.uint8)
    actual = np.array([[0, 1, 0x7F], [3, 4, 6]], np.uint8)
    message = (
        r"float8_e4m3fn differ at 2 of 6 places, first at \(0, 2\) of .*448.0.*: "
        r"expected 0x7e \(448.0\), actual 0x7f \(nan\)"
    )
    with pytest.raises(AssertionError, match=message):
        assert_codes_equal(expected, actual, E4M3FN, inputs=np.full((2, 3), 448.0))
    with pytest.raises(AssertionError, match=r"actual 0x7f \(no code of it\)"):
        assert_codes_equal(expected[0, :1], actual[0, 2:], E2M1FN)
    assert_codes_equal(expected, expected.copy(), E4M3FN)


def test_shape_and_dtype_must_agree():
    with pytest.raises(AssertionError, match=r"expected uint8 of shape \(2,\), actual uint8 of shape \(2, 1\)"):
        assert_codes_equal(np.zeros(2, np.uint8), np.zeros((2, 1), np.uint8), E4M3FN)
    with pytest.raises(AssertionError, match="actual int64"):
        assert_codes_equal(np.zeros(2, np.uint8), np.zeros(2, np.int64), E4M3FN)
    with pytest.raises(AssertionError, match="bits are compared in float32"):
        assert_bits_equal(np.zeros(2), np.zeros(2))


def test_bits_tell_the_zeros_and_the_nans_apart():
    zero = np.array([1.0, 0.0], np.float32)
    with pytest.raises(AssertionError, match=r"first at \(1,\): .*0x00000000.*0x80000000"):
        assert_bits_equal(zero, zero * np.float32([1, -1]))
    nan = np.array(0x7FC00000, np.uint32).view(np.float32)
    other = np.array(0x7FC00001, np.uint32).view(np.float32)
    assert_bits_equal(nan, nan.copy())
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_bits_equal(nan, other)
