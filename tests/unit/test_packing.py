"""Two codes a byte, against bytes worked out by hand."""

import numpy as np
import pytest

from qsim.codec import NibbleOrder, encode, pack, packed_length, packing_kernels, unpack
from qsim.errors import FormatError

ORDERS = list(NibbleOrder)
RAMP = np.arange(32, dtype=np.uint8) % 16


def first_and_second(packed, order, length):
    """Codes [..., length] by the definition of the order, with plain numpy."""
    low, high = packed & 15, packed >> 4
    if order is NibbleOrder.GGML_SPLIT:
        blocks = (*packed.shape[:-1], -1, 16)
        whole = np.concatenate([low.reshape(blocks), high.reshape(blocks)], axis=-1)
    elif order is NibbleOrder.HIGH_FIRST:
        whole = np.stack([high, low], axis=-1)
    else:
        whole = np.stack([low, high], axis=-1)
    return whole.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :length]


def test_the_even_element_is_in_the_low_nibble():
    assert encode(np.array([1.0, -6.0], np.float32), "e2m1", packed=True).tolist() == [0xF2]
    assert pack(np.array([2, 15, 3], np.uint8)).tolist() == [0xF2, 0x03]


def test_high_first_puts_the_even_element_in_the_high_nibble():
    codes = np.array([2, 15, 3], np.uint8)
    assert [0x2F, 0x30] == pack(codes, order="high_first").tolist()
    assert [2, 15, 3] == unpack(np.array([0x2F, 0x3A], np.uint8), 3, order="high_first").tolist()


def test_ggml_pairs_element_j_with_element_j_plus_16():
    codes = np.zeros(32, np.uint8)
    codes[[0, 16, 3, 19, 15, 31]] = [1, 2, 3, 4, 5, 6]
    expected = [0x21, 0, 0, 0x43, *[0] * 11, 0x65]
    assert expected == pack(codes, order="ggml_split").tolist()
    assert codes.tolist() == unpack(np.array(expected, np.uint8), 32, order="ggml_split").tolist()
    assert [0x01, *[0] * 15] == pack(codes[:1], order="ggml_split").tolist()
    two = np.concatenate([codes, codes[::-1]])
    assert [*expected, *(0x56, *[0] * 11, 0x34, 0, 0, 0x12)] == pack(two, order="ggml_split").tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 528])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_unpack_inverts_pack_at_every_length(rows, length, order):
    codes = np.random.default_rng(length).integers(0, 16, (*rows, length), dtype=np.uint8)
    packed = pack(codes, order=order)
    width = {NibbleOrder.GGML_SPLIT: -(-length // 32) * 16}.get(order, (length + 1) // 2)
    assert width == packed_length(length, order)
    assert packed.shape == (*rows, width)
    assert np.array_equal(codes, first_and_second(packed, order, length))
    assert not first_and_second(packed, order, 2 * width)[..., length:].any()
    assert np.array_equal(codes, unpack(packed, length, order=order))


def test_the_padding_is_not_read():
    assert unpack(np.array([0xF2, 0xA3], np.uint8), 3).tolist() == [2, 15, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_any_strides_give_the_codes_of_the_copy(order):
    codes = np.arange(3 * 6 * 70, dtype=np.uint8).reshape(18, 70) % 16
    codes.setflags(write=False)
    for view in (codes[:, ::2], codes.T, codes[::-1, ::-1], codes[1:5, 3:8], codes[:, 3:67], codes[0, 1:33]):
        packed = pack(view, order=order)
        assert np.array_equal(pack(np.array(view, order="C"), order=order), packed)
        assert np.array_equal(view, unpack(packed, view.shape[-1], order=order))
    packed = pack(codes, order=order)
    assert np.array_equal(codes[::-2], unpack(packed[::-2], 70, order=order))
    shifted = np.zeros(packed.size + 1, np.uint8)[1:].reshape(packed.shape)  # no uint64 can lie there
    shifted[...] = packed
    assert np.array_equal(codes, unpack(shifted, 70, order=order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [31, 32])
def test_out_of_any_strides_is_filled_and_returned(length, order):
    codes = np.random.default_rng(5).integers(0, 16, (4, length), dtype=np.uint8)
    packed = pack(codes, order=order)
    for spread in (1, 2):
        for start in (0, 1):
            room = np.full((4, packed.shape[-1] * spread + start), 0xEE, np.uint8)[:, start::spread]
            assert pack(codes, order=order, out=room) is room
            assert packed.tolist() == room.tolist()
            place = np.full((4, length * spread + start), 0xEE, np.uint8)[:, start::spread]
            assert unpack(packed, length, order=order, out=place) is place
            assert codes.tolist() == place.tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_out_may_overlap_the_argument(order):
    memory = np.tile(RAMP, 8)
    expected = pack(memory, order=order)
    assert expected.tolist() == pack(memory, order=order, out=memory[64:192]).tolist()
    memory[:128] = expected
    assert np.tile(RAMP, 8).tolist() == unpack(memory[:128], 256, order=order, out=memory).tolist()


def test_a_wrong_out_is_refused():
    frozen = np.zeros(16, np.uint8)
    frozen.setflags(write=False)
    with pytest.raises(FormatError, match=r"out is uint8 of shape \(15,\); it must be uint8 of shape \(16,\)"):
        pack(RAMP, out=np.zeros(15, np.uint8))
    with pytest.raises(FormatError, match=r"out is int8 of shape \(32,\); it must be uint8 of shape \(32,\)"):
        unpack(pack(RAMP), 32, out=np.zeros(32, np.int8))
    with pytest.raises(FormatError, match=r"out is list; it must be uint8 of shape \(16,\)"):
        pack(RAMP, out=[0] * 16)
    with pytest.raises(FormatError, match="out is read-only"):
        pack(RAMP, out=frozen)


@pytest.mark.parametrize("length", [-1, 2, 5])
def test_a_length_that_does_not_fit_is_refused(length):
    with pytest.raises(FormatError, match=f"length {length} does not fit a last axis of 2 bytes, which holds 3 or 4"):
        unpack(np.zeros(2, np.uint8), length)


@pytest.mark.parametrize("length", [-1, 0, 32, 65])
def test_a_length_that_does_not_fit_ggml_blocks_is_refused(length):
    with pytest.raises(
        FormatError, match=f"length {length} does not fit a last axis of 32 bytes, which holds 33 to 64"
    ):
        unpack(np.zeros(32, np.uint8), length, order="ggml_split")
    with pytest.raises(FormatError, match="17 bytes, which is no whole number of ggml_split blocks of 16 bytes"):
        unpack(np.zeros(17, np.uint8), length, order="ggml_split")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("place", "length"), [(0, 64), (33, 64), (47, 64), (63, 64), (0, 65), (64, 65), (70, 71)])
def test_a_code_above_15_is_refused_wherever_it_stands(place, length, order):
    codes = np.full((2, length), 15, np.uint8)
    assert (2, packed_length(length, order)) == pack(codes, order=order).shape
    codes[1, place] = 16
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15"):
        pack(codes, order=order)
    codes[1, place] = 128
    with pytest.raises(FormatError, match=r"code 128 is outside 0\.\.15"):
        pack(codes, order=order)


def test_wrong_codes_are_refused():
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15"):
        pack(np.array([0, 16], np.uint8))
    with pytest.raises(FormatError, match="int64"):
        pack(np.array([1, 2], np.int64))
    with pytest.raises(FormatError, match="needs uint8 with an axis"):
        pack(np.uint8(3))


def test_an_unknown_order_is_refused_with_the_closest_and_the_known():
    known = "known: low_first, high_first, ggml_split"
    with pytest.raises(FormatError, match=f"unknown nibble order 'low_frist': did you mean 'low_first'[?] {known}"):
        pack(RAMP, order="low_frist")
    with pytest.raises(FormatError, match=f"unknown nibble order 'ggml': did you mean 'ggml_split'[?] {known}"):
        unpack(RAMP, 64, order="ggml")
    with pytest.raises(FormatError, match=f"unknown nibble order 'xyz': {known}"):
        packed_length(3, "xyz")
    assert pack(RAMP, order="high_first").tolist() == pack(RAMP, order="HIGH_FIRST").tolist()


def test_kernels_of_words_get_aligned_words(monkeypatch):
    aligned = []

    def watch(name):
        kernel = getattr(packing_kernels, name)

        def watched(*arrays):
            aligned.extend(array.flags.aligned for array in arrays)
            kernel(*arrays)

        monkeypatch.setattr(packing_kernels, name, watched)

    watch("pack_ggml_split")
    watch("unpack_ggml_split")
    codes, packed = np.zeros(65, np.uint8)[1:], np.zeros(33, np.uint8)[1:]
    codes[:] = np.tile(RAMP, 2)
    pack(codes, order="ggml_split", out=packed)
    assert codes.tolist() == unpack(packed, 64, order="ggml_split", out=np.zeros(65, np.uint8)[1:]).tolist()
    assert [True] * 5 == aligned


@pytest.mark.parametrize("length", [31, 32])
def test_the_kernel_for_codes_known_to_be_4_bit_packs_low_first(length):
    codes = np.random.default_rng(length).integers(0, 16, (3, length), dtype=np.uint8)
    packed = np.full((3, 16), 0xEE, np.uint8)
    packing_kernels.pack(codes, packed)
    assert pack(codes).tolist() == packed.tolist()
