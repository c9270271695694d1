"""The 128x4 tiles of block scales, against offsets worked out by hand and by the definition in integers."""

import numpy as np
import pytest

from qsim.codec import swizzle_scales, unswizzle_scales
from qsim.codec.swizzle import swizzled_offset, swizzled_size
from qsim.errors import FormatError, UsageError

SHAPES = [(1, 1), (31, 3), (32, 4), (33, 5), (127, 4), (128, 4), (129, 9), (130, 5), (256, 8), (300, 1), (1, 17)]


def some_scales(rows, columns):
    """No byte is 0, so every 0 is padding."""
    return np.random.default_rng(rows * 1000 + columns).integers(1, 256, (rows, columns), dtype=np.uint8)


def offsets(rows, columns):
    return np.array([swizzled_offset(r, c, columns) for r in range(rows) for c in range(columns)], np.int64)


@pytest.mark.parametrize(
    ("row", "column", "columns", "offset"),
    [
        (0, 0, 4, 0), (0, 3, 4, 3), (1, 0, 4, 16), (31, 3, 4, 499), (32, 0, 4, 4), (96, 3, 4, 15), (127, 3, 4, 511),
        (0, 4, 8, 512), (128, 0, 8, 1024), (129, 5, 8, 1024 + 512 + 16 + 1), (128, 0, 5, 1024), (128, 0, 4, 512),
    ],
)  # fmt: skip
def test_a_scale_stands_where_the_layout_says(row, column, columns, offset):
    assert offset == swizzled_offset(row, column, columns)
    scales = np.zeros((row + 1, columns), np.uint8)
    scales[row, column] = 7
    assert [offset] == np.flatnonzero(swizzle_scales(scales)).tolist()


def test_130_rows_of_5_scales_take_2048_bytes_with_1398_zeros():
    flat = swizzle_scales(some_scales(130, 5))
    assert (2048,) == flat.shape
    assert 1398 == int((flat == 0).sum())
    assert 2048 == swizzled_size(130, 5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_array_form_equals_the_definition(rows, columns):
    scales = some_scales(rows, columns)
    expected = np.zeros(swizzled_size(rows, columns), np.uint8)
    expected[offsets(rows, columns)] = scales.reshape(-1)
    assert expected.tolist() == swizzle_scales(scales).tolist()
    assert scales.tolist() == unswizzle_scales(expected, rows, columns).tolist()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_poisoned_padding_changes_no_scale(rows, columns):
    scales = some_scales(rows, columns)
    flat = swizzle_scales(scales)
    padding = np.ones(flat.size, bool)
    padding[offsets(rows, columns)] = False
    assert flat.size - rows * columns == int(padding.sum())
    for poison in (0x7F, 0xFF, 0x80):
        flat[padding] = poison
        assert scales.tolist() == unswizzle_scales(flat, rows, columns).tolist()


def test_any_strides_give_the_layout_of_the_copy():
    base = some_scales(140, 12)
    base.setflags(write=False)
    for view in (base[::-1], base[:, ::-2], base.T, base[3:133:2, 1:6]):
        flat = swizzle_scales(view)
        assert swizzle_scales(np.array(view, order="C")).tolist() == flat.tolist()
        spread = np.zeros(2 * flat.size, np.uint8)
        spread[::-2] = flat
        back = unswizzle_scales(spread[::-2], *view.shape)
        assert np.array_equal(view, back)
        assert back.flags.c_contiguous


def test_the_result_never_shares_memory_with_the_argument():
    scales = some_scales(128, 4)
    flat = swizzle_scales(scales)
    back = unswizzle_scales(flat, 128, 4)
    flat[:] = 0
    assert np.array_equal(scales, back)


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (5, 0)])
def test_no_scales_take_no_bytes(shape):
    assert (0,) == swizzle_scales(np.zeros(shape, np.uint8)).shape
    assert shape == unswizzle_scales(np.zeros(0, np.uint8), *shape).shape


def test_what_does_not_fit_is_refused():
    flat = np.zeros(512, np.uint8)
    with pytest.raises(FormatError, match=r"scales are float32; .* pass uint8 codes"):
        swizzle_scales(np.zeros((4, 4), np.float32))
    with pytest.raises(FormatError, match="swizzled scales are int64"):
        unswizzle_scales(np.zeros(512, np.int64), 4, 4)
    with pytest.raises(UsageError, match=r"scales have shape \(4,\); pass an array of 2 axes"):
        swizzle_scales(np.zeros(4, np.uint8))
    with pytest.raises(UsageError, match=r"\(2, 3, 4\); pass an array of 2 axes: take \.reshape\(-1, 4\)$"):
        swizzle_scales(np.zeros((2, 3, 4), np.uint8))
    with pytest.raises(UsageError, match=r"\(4,\); pass an array of 2 axes$"):
        swizzle_scales(np.zeros(4, np.uint8))
    with pytest.raises(UsageError, match=r"pass an array of 1 axis: take \.reshape\(-1\)$"):
        unswizzle_scales(flat.reshape(1, 512), 4, 4)
    with pytest.raises(UsageError, match=r"swizzled scales have shape \(1, 512\); pass an array of 1 axis"):
        unswizzle_scales(flat.reshape(1, 512), 4, 4)
    with pytest.raises(UsageError, match=r"512 bytes .* do not hold 129 rows of 4 scales: .* 1024 bytes"):
        unswizzle_scales(flat, 129, 4)
    with pytest.raises(UsageError, match=r"512 bytes .* do not hold 0 rows of 4 scales: .* 0 bytes"):
        unswizzle_scales(flat, 0, 4)
    with pytest.raises(UsageError, match="0 bytes of swizzled scales do not hold -1 rows of -4 scales"):
        unswizzle_scales(flat[:0], -1, -4)
