"""Sums by halves, the largest element, products: bits by hand, and never across replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qsim.arrays import F32, AnyArray, same_bits
from qsim.backends import get_backend
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError
from qsim.gemm.exact import matmul_oracle
from qsim.nn.arithmetic import Arithmetic

EXACT = Arithmetic(backend=get_backend("numba"))
FAST = Arithmetic(backend=get_backend("numba"), exact=False)


def by_hand(numbers: list[np.float32]) -> np.float32:
    """Halves: the second half is added to the first, an odd last element carried."""
    while len(numbers) > 1:
        half = len(numbers) // 2
        with np.errstate(all="ignore"):
            added = [np.add(numbers[i], numbers[i + half]) for i in range(half)]
        numbers = added + numbers[2 * half :]
    return numbers[0]


def tensor(*shape: int) -> F32:
    rng = np.random.default_rng(sum(shape))
    return (rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 16, 17, 31, 33, 64, 1000])
def test_a_total_is_the_tree_of_halves(length: int) -> None:
    x = tensor(2, 3, length)
    expected = np.array([[by_hand(list(row)) for row in plane] for plane in x], np.float32)
    assert_bits_equal(expected, EXACT.total(x, -1))
    assert_bits_equal(expected, EXACT.total(x.transpose(0, 2, 1).copy(), 1))
    assert_bits_equal(expected, EXACT.total(np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0), 2))
    wide = x.astype(np.float64)
    assert EXACT.total64(x, 2).dtype == np.float64
    assert EXACT.total64(x, 2).tolist() == [[float(by_hand(list(row))) for row in plane] for plane in wide]


def test_small_totals_are_these_numbers() -> None:
    """1 is lost beside 2^24 unless it meets another 1 first."""
    big = 2.0**24
    sums = {(big, 1.0, 1.0): big, (big, 1.0, 0.0, 1.0): big + 2, (1.0, big, 1.0, 0.0): big + 2, (big, 1.0): big}
    for numbers, expected in sums.items():
        assert expected == EXACT.total(np.array([numbers], np.float32), 1)[0]


@pytest.mark.parametrize("how", [EXACT.total, EXACT.total64, EXACT.largest])
def test_no_bit_depends_on_the_other_replicas_or_on_layout(how: Callable[[F32, int], F32]) -> None:
    x = tensor(5, 6, 77)
    for axis in (1, 2):
        together = how(x, axis)
        for r in range(5):
            assert same_bits(together[r : r + 1], how(x[r : r + 1], axis))
        assert same_bits(together, how(np.asfortranarray(x), axis))
        assert same_bits(how(x[:, ::2, ::3].copy(), axis), how(x[:, ::2, ::3], axis))


def test_an_input_may_be_read_only_and_is_not_returned() -> None:
    for length in (1, 8):
        x = tensor(2, length)
        x.setflags(write=False)
        for made in (EXACT.total(x, 1), EXACT.largest(x, 1), FAST.total(x, 1)):
            assert not np.shares_memory(x, made)
    assert [0.0] == EXACT.total(np.zeros((1, 0), np.float32), 1).tolist()


def test_the_largest_is_nan_where_one_is_and_its_zero_is_positive() -> None:
    x = np.array([[1, np.nan, 3], [-0.0, 0.0, -0.0], [-0.0, -0.0, -1], [-np.inf, -np.inf, -2]], np.float32)
    found = EXACT.largest(x, 1)
    assert np.isnan(found[0])
    assert_bits_equal(np.array([0.0, 0.0, -2.0], np.float32), found[1:])


@pytest.mark.parametrize("axis", [0, -2, 2, -3])
def test_the_axis_of_replicas_is_never_summed(axis: int) -> None:
    for how in (EXACT.total, FAST.total, EXACT.total64, EXACT.largest):
        with pytest.raises(UsageError, match="axis 0 is that of replicas"):
            how(np.ones((3, 4), np.float32), axis)


def test_a_product_is_the_exact_sum_or_the_modules_own() -> None:
    a, b = tensor(2, 5, 40), tensor(2, 40, 3)
    assert_bits_equal(matmul_oracle(a, b), EXACT.product(a, b))
    assert_bits_equal(np.matmul(a, b), FAST.product(a, b))
    assert not np.array_equal(EXACT.product(a, b), FAST.product(a, b))


def test_exp_and_log_are_the_backends_or_the_modules_own() -> None:
    x = np.array([[-np.inf, -1.5, 0.0, 2.0, 200.0, np.nan]], np.float32)
    for name in ("exp", "log"):
        assert_bits_equal(getattr(EXACT.backend, name)(x), getattr(EXACT, name)(x))
    wide: AnyArray = np.array([[1.5]])
    assert same_bits(np.exp(wide), FAST.exp(wide))
    assert same_bits(np.log(wide), FAST.log(wide))
    assert np.isinf(FAST.exp(x)[0, 4])  # and no warning
