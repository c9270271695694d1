"""Fixed-point means against fractions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from qsim.backends import get_backend
from qsim.codec.means import (
    LOWEST_EXPONENT,
    MAX_COUNT,
    Sums,
    check_count,
    mean_of,
    merge_sums,
    power_of_two,
)
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError

NUMBA = get_backend("numba")


def sums_of(x, axes=(0,)):
    return NUMBA.observe(np.asarray(x, np.float32), None, lead=0, mean_axes=axes).sums


def sums(total, exponent, count):
    return Sums(
        total=np.array(total, np.int64),
        exponent=np.array(exponent, np.int32),
        count=np.array(count, np.int64),
    )


def exact_total(column):
    """(total, exponent) of a list of finite float32 numbers, in fractions."""
    top = max(abs(Fraction(float(v))) for v in column)
    k = math.floor(math.log2(top)) if top else LOWEST_EXPONENT
    while top and Fraction(2) ** k > top:
        k -= 1
    while top and Fraction(2) ** (k + 1) <= top:
        k += 1
    return sum(round(Fraction(float(v)) * Fraction(2) ** (40 - k)) for v in column), k


def round_to_float32(value: Fraction) -> np.float32:
    """Nearest float32 of a fraction, ties to even, by integers."""
    if value == 0:
        return np.float32(0)
    k = math.frexp(float(value))[1] - 1
    while abs(value) >= Fraction(2) ** (k + 1):
        k += 1
    while abs(value) < Fraction(2) ** k:
        k -= 1
    k = max(k, -126)
    return np.float32(math.ldexp(round(value * Fraction(2) ** (23 - k)), k - 23))


@pytest.mark.parametrize("scale", [1.0, 2.0**-130, 2.0**100, 2.0**-149, 1e-3])
def test_sums_equal_the_fractions(scale):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((50, 7)) * np.exp(rng.standard_normal((50, 7)) * 4) * scale).astype(np.float32)
    found = sums_of(x)
    for j in range(7):
        assert (int(found.total[0, j]), int(found.exponent[0, j])) == exact_total(x[:, j])
    assert (found.count == 50).all()


def test_the_mean_is_the_exact_mean_rounded_once():
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((97, 400)) + rng.standard_normal(400)).astype(np.float32)
    x = np.where(np.abs(x) < 2.0**-6, np.float32(0.25), x)  # then 40 bits below amax lose nothing
    expected = np.array([[round_to_float32(sum(Fraction(float(v)) for v in x[:, j]) / 97) for j in range(400)]])
    assert_bits_equal(expected, mean_of(sums_of(x)))


def test_a_constant_has_its_own_mean():
    for value in (0.1, -0.1, 1e-40, 3e38, np.float32(1) / 3):
        x = np.full(1000, value, np.float32)
        assert_bits_equal(x[:1], mean_of(sums_of(x)))


def test_the_order_of_elements_does_not_matter():
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(1000) * np.exp(rng.standard_normal(1000) * 8)).astype(np.float32)
    reference = sums_of(x)
    for seed in range(5):
        shuffled = sums_of(np.random.default_rng(seed).permutation(x))
        assert (int(reference.total[0]), int(reference.exponent[0])) == (
            int(shuffled.total[0]),
            int(shuffled.exponent[0]),
        )


def test_the_order_of_parts_does_not_matter_and_equals_the_fractions():
    parts = [
        sums([5], [3], [2]),
        sums([-7], [0], [3]),
        sums([1 << 52], [-9], [10]),
        sums([-(1 << 40) - 1], [-20], [1]),
    ]
    results = [merge_sums(list(order)) for order in itertools.permutations(parts)]
    expected = sum(round(Fraction(int(p.total[0]), 2 ** (3 - int(p.exponent[0])))) for p in parts)
    assert {(expected, 3, 16)} == {(int(r.total[0]), int(r.exponent[0]), int(r.count[0])) for r in results}
    assert (np.int64, np.int32, np.int64) == tuple(
        a.dtype for a in (results[0].total, results[0].exponent, results[0].count)
    )


@pytest.mark.parametrize("shift", [0, 1, 2, 5, 40, 62, 63, 64, 65, 276])
def test_a_merge_rounds_each_total_to_nearest_even(shift):
    rng = np.random.default_rng(shift)
    totals = [
        *rng.integers(-(2**62), 2**62, 40).tolist(),
        2**63 - 1,
        -(2**63),
        2**62,
        -(2**62),
        3 << 61,
        0,
        1,
        -1,
    ]
    totals += [m << (shift - 1) for m in (-5, -3, -1, 1, 3, 5) if 1 <= shift <= 60]  # ties
    for total in totals:
        merged = merge_sums([sums(total, 127 - shift, 1), sums(0, 127, 1)])
        assert round(Fraction(total, 2**shift)) == int(merged.total)


def test_merging_parts_of_one_exponent_is_the_sum_of_the_whole():
    rng = np.random.default_rng(6)
    x = (rng.random((64, 5)) + 1).astype(np.float32)  # one binade: all parts have exponent 0
    whole = sums_of(x)
    merged = merge_sums([sums_of(x[:10]), sums_of(x[10:11]), sums_of(x[11:])])
    assert np.array_equal(whole.total, merged.total)
    assert np.array_equal(whole.count, merged.count)
    assert_bits_equal(mean_of(whole), mean_of(merged))


def test_a_zero_column_never_raises_the_common_exponent():
    zero, small = sums_of(np.zeros(4)), sums_of(np.full(4, 1e-40))
    assert int(zero.exponent[0]) == LOWEST_EXPONENT
    merged = merge_sums([zero, small])
    assert int(small.exponent[0]) == int(merged.exponent[0])
    assert int(merged.count[0]) == 8


def test_non_finite_elements_are_left_out():
    found = sums_of(np.array([[1, np.nan], [np.inf, np.nan], [3, -np.inf]]))
    assert found.count.tolist() == [[2, 0]]
    assert_bits_equal(np.array([[2.0, 0.0]], np.float32), mean_of(found))


def test_the_mean_is_never_minus_zero():
    tiny = sums([-1, 0, -1], [-149, 0, -110], [1, 0, 3])
    assert_bits_equal(np.zeros(3, np.float32), mean_of(tiny))
    assert_bits_equal(np.zeros(1, np.float32), mean_of(sums_of(np.full(3, -0.0))))
    assert_bits_equal(np.zeros((1, 1), np.float32), mean_of(sums_of(np.zeros((0, 1)))))


def test_the_mean_is_rounded_as_the_contract_says():
    rng = np.random.default_rng(7)
    total = rng.integers(-(2**62), 2**62, 200)
    count = rng.integers(1, 2**22, 200)
    exponent = rng.integers(-149, 128, 200)
    with np.errstate(over="ignore"):
        expected = np.array(
            [
                np.float32(math.ldexp(float(int(t)) / int(n), int(k) - 40))
                for t, n, k in zip(total, count, exponent, strict=True)
            ],
            np.float32,
        )
        found = mean_of(sums(total, exponent, count))
    assert_bits_equal(expected + np.float32(0), found)


def test_the_exponent_is_right_in_every_binade_and_at_its_edges():
    k = np.arange(-149, 128)
    low = np.ldexp(np.ones(k.size), k).astype(np.float32)
    high = np.nextafter(np.append(low[1:], np.float32(np.inf)), np.float32(0))
    assert sums_of(np.stack([low, np.zeros_like(low)])).exponent.tolist() == [k.tolist()]
    assert sums_of(np.stack([-high, np.zeros_like(low)])).exponent.tolist() == [k.tolist()]
    assert sums_of(np.zeros(3)).exponent.tolist() == [LOWEST_EXPONENT]
    assert [float(v) for v in power_of_two(k.astype(np.int32))] == [math.ldexp(1.0, int(n)) for n in k]


def test_wrong_merges_are_refused():
    with pytest.raises(UsageError, match="no sums"):
        merge_sums([])
    with pytest.raises(UsageError, match="unequal shapes"):
        merge_sums([sums([1], [0], [1]), sums([1, 2], [0, 0], [1, 1])])
    with pytest.raises(UsageError, match="a mean over 4194305 elements"):
        merge_sums([sums([1], [0], [MAX_COUNT]), sums([1], [0], [1])])
    check_count(MAX_COUNT)
