"""Two codes a byte, against bytes worked out by hand."""

import numpy as np
import pytest

from qsim.codec import encode, pack, unpack
from qsim.errors import FormatError


def test_the_even_element_is_in_the_low_nibble():
    assert encode(np.array([1.0, -6.0], np.float32), "e2m1", packed=True).tolist() == [0xF2]
    assert pack(np.array([2, 15, 3], np.uint8)).tolist() == [0xF2, 0x03]


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 33, 528])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_unpack_inverts_pack_at_every_length(rows, length):
    codes = np.random.default_rng(length).integers(0, 16, (*rows, length), dtype=np.uint8)
    packed = pack(codes)
    assert packed.shape == (*rows, (length + 1) // 2)
    low, high = packed & 15, packed >> 4
    assert np.array_equal(codes[..., 0::2], low)
    assert np.array_equal(codes[..., 1::2], high[..., : length // 2])
    if length % 2:
        assert not high[..., -1].any()
    assert np.array_equal(codes, unpack(packed, length))


def test_the_padding_is_not_read():
    assert unpack(np.array([0xF2, 0xA3], np.uint8), 3).tolist() == [2, 15, 3]


def test_any_strides_give_the_codes_of_the_copy():
    codes = np.arange(60, dtype=np.uint8).reshape(6, 10) % 16
    for view in (codes[:, ::2], codes.T, codes[::-1, ::-1], codes[1:5, 3:8]):
        assert np.array_equal(pack(np.array(view, order="C")), pack(view))
        assert np.array_equal(view, unpack(pack(view), view.shape[-1]))
    packed = pack(codes)
    assert np.array_equal(codes[::-2], unpack(packed[::-2], 10))


@pytest.mark.parametrize("length", [-1, 2, 5])
def test_a_length_that_does_not_fit_is_refused(length):
    with pytest.raises(FormatError, match=f"length {length} does not fit a last axis of 2 bytes, which holds 3 or 4"):
        unpack(np.zeros(2, np.uint8), length)


def test_wrong_codes_are_refused():
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15"):
        pack(np.array([1, 16], np.uint8))
    with pytest.raises(FormatError, match="int64"):
        pack(np.array([1, 2], np.int64))
    with pytest.raises(FormatError, match="needs uint8 with an axis"):
        pack(np.uint8(3))
