"""Properties of every nibble order, on generated codes in generated layouts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qsim.codec import NibbleOrder, pack, packed_length, unpack

modest = settings(max_examples=120, deadline=None, derandomize=True, database=None)
orders = st.sampled_from(NibbleOrder)
steps = st.sampled_from([-3, -2, -1, 1, 2, 3])


def laid_out(values, row_step, step, start):
    """The same values as a read-only view with these steps, beginning ``start`` bytes into its memory."""
    rows, length = values.shape
    memory = np.full(start + rows * abs(row_step) * max(length * abs(step), 1), 0xEE, np.uint8)
    view = memory[start:].reshape(rows * abs(row_step), -1)[::row_step, ::step][:rows, :length]
    view[...] = values
    view.setflags(write=False)
    return view


@modest
@given(orders, st.integers(0, 100), st.integers(1, 3), steps, steps, st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack_in_every_layout(order, length, rows, row_step, step, start, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (rows, length), dtype=np.uint8)
    packed = pack(laid_out(codes, row_step, step, start), order=order)
    assert pack(codes, order=order).tolist() == packed.tolist()
    assert (rows, packed_length(length, order)) == packed.shape
    assert codes.tolist() == unpack(laid_out(packed, row_step, step, start), length, order=order).tolist()


@modest
@given(orders, st.integers(0, 100), st.integers(1, 3), st.integers(1, 15), st.integers(0, 2**32 - 1))
def test_poison_in_the_padding_is_never_read(order, length, rows, poison, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (rows, length), dtype=np.uint8)
    whole = np.full((rows, 2 * packed_length(length, order)), poison, np.uint8)
    whole[:, :length] = codes
    poisoned = pack(whole, order=order)
    assert codes.tolist() == unpack(poisoned, length, order=order).tolist()
    assert (2 * poisoned.shape[1] == length) == np.array_equal(poisoned, pack(codes, order=order))


@modest
@given(orders, st.integers(1, 100), st.data())
def test_one_code_moves_to_one_nibble(order, length, data):
    index, code = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 15))
    codes = np.zeros(length, np.uint8)
    codes[index] = code
    if order is NibbleOrder.GGML_SPLIT:
        place, high = index // 32 * 16 + index % 16, index % 32 >= 16
    else:
        place, high = index // 2, (index % 2 == 1) == (order is NibbleOrder.LOW_FIRST)
    expected = np.zeros(packed_length(length, order), np.uint8)
    expected[place] = code << 4 if high else code
    assert expected.tolist() == pack(codes, order=order).tolist()
