"""Rounding to the types of autocast: against numpy, ml_dtypes and integers, by bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qsim.arrays import F32
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError
from qsim.nn.rounding import ROUNDED_TO, round_to

OTHERS = [name for name in ROUNDED_TO if name != "float32"]


def patterns(stride: int) -> F32:
    """Floats all over, with every neighbour of the ties and limits of each type."""
    marks = [0x477FE000, 0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FEFFF, 0x7F7FF000, 0x33000000, 0x38800000]
    marks += [
        0x3F801000,
        0x3F803000,
        0x3F808000,
        0x3F818000,
        0x00008000,
        0x00018000,
        0x00001000,
        0x7F800000,
        0x7FFFFFFF,
    ]
    near = [mark + step for mark in marks for step in (-1, 0, 1) if mark + step < 1 << 31]
    signed = [word | sign for word in near for sign in (0, 0x80000000)]
    words = np.concatenate([np.arange(0, 1 << 32, stride, dtype=np.uint32), np.array(signed, np.uint32)])
    return words.view(np.float32)


def to_tf32(word: int) -> int:
    """By integers: nearest multiple of 2^13 in the bits of the magnitude, ties to even."""
    sign, magnitude = word & 0x80000000, word & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0x7FC00000
    low, rest = magnitude >> 13, magnitude & 0x1FFF
    return sign | (low + (rest > 0x1000 or (rest == 0x1000 and low % 2 == 1))) << 13


@pytest.mark.parametrize(("name", "other"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_rounding_is_the_types_own(name: str, other: type) -> None:
    x = patterns(4099)
    with np.errstate(all="ignore"):
        expected = x.astype(other).astype(np.float32)
    assert_bits_equal(np.where(np.isnan(x), np.float32(np.nan), expected), round_to(x, name))


def test_tf32_is_ten_bits_by_nearest_even() -> None:
    x = patterns(100_003)
    expected = np.array([to_tf32(int(word)) for word in x.view(np.uint32)], np.uint32)
    assert_bits_equal(expected.view(np.float32), round_to(x, "tf32"))
    assert [1.0, 1 + 2.0**-9, np.inf] == round_to(
        np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.4028235e38], np.float32), "tf32"
    ).tolist()  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_rounding_twice_is_rounding_once_and_leaves_the_input_alone(name: str) -> None:
    x = patterns(1_000_003)[:4000].reshape(2, -1)
    x.setflags(write=False)
    once = round_to(x, name)
    assert_bits_equal(once, round_to(once, name))
    assert_bits_equal(once.T.copy(), round_to(x.T, name).copy())
    assert_bits_equal(once, round_to(np.asfortranarray(x), name))


def test_float32_is_the_array_itself_and_unknown_types_are_refused() -> None:
    x = np.ones((1, 2), np.float32)
    assert round_to(x, "float32") is x
    with pytest.raises(UsageError, match=r"round_to 'fp16' of float32; .* float32, float16, bfloat16, tf32"):
        round_to(x, "fp16")
    with pytest.raises(UsageError, match="of float64"):
        round_to(np.ones((1, 2)), "bfloat16")  # type: ignore[arg-type]
