"""The exact matrix product against its definition in rational numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from qsim.arrays import F32, FLT_MAX, bits
from qsim.errors import UsageError
from qsim.gemm import MatmulReport, matmul, matmul_oracle, matmul_with_report
from qsim.gemm.numba_kernels import exact_sums

TINY = 2.0**-149  # the smallest float32 subnormal
NAN = math.nan
INF = math.inf


def hexadecimal(value: np.float32) -> str:
    return f"{np.asarray(value).view(np.uint32)[()]:08x}"


def assert_same_bits(expected: F32, actual: F32) -> None:
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    differing = np.flatnonzero(bits(expected).reshape(-1) != bits(actual).reshape(-1))
    if differing.size:
        at = int(differing[0])
        want, have = expected.reshape(-1)[at], actual.reshape(-1)[at]
        raise AssertionError(
            f"{differing.size} of {expected.size} differ, first at {np.unravel_index(at, expected.shape)}: "
            f"expected {want!r} ({hexadecimal(want)}), got {have!r} ({hexadecimal(have)})"
        )


def dot(row: list[float], column: list[float], by: Callable[[F32, F32], F32] = matmul) -> np.float32:
    a = np.array([row], np.float32).reshape(1, -1)
    b = np.array([column], np.float32).reshape(-1, 1)
    return np.float32(by(a, b)[0, 0])


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([20260101, *key])


def normal(shape: tuple[int, ...], *key: int) -> F32:
    return rng(*key).standard_normal(shape).astype(np.float32)


def any_finite(shape: tuple[int, ...], *key: int) -> F32:
    """Uniform over finite bit patterns: all exponents, subnormals, both zeros."""
    words = rng(*key).integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
    x = words.view(np.float32)
    x[~np.isfinite(x)] = 0.0
    return x


def narrow(shape: tuple[int, ...], *key: int) -> F32:
    """Small integers times powers of two: many sums land on a tie of float32."""
    g = rng(*key)
    return (g.integers(-15, 16, shape) * 2.0 ** g.integers(-14, 15, shape)).astype(np.float32)


def cancelling(shape: tuple[int, ...], *key: int) -> F32:
    """Right halves nearly repeat left halves: against [b, -b] the large part of every sum cancels."""
    half = normal((*shape[:-1], shape[-1] // 2), *key)
    return np.concatenate([half, np.nextafter(half, np.float32(9))], axis=-1)


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ([1.0, 2.0**-24], [1.0, 1.0], 0x3F800000),  # a tie, to even
        ([1.0, 2.0**-24, 2.0**-100], [1.0, 1.0, 2.0**-100], 0x3F800001),  # just above it: seen only exactly
        ([1.0, 2.0**-24, 2.0**-100], [1.0, 1.0, -(2.0**-100)], 0x3F800000),
        ([1.0, 3 * 2.0**-24], [1.0, 1.0], 0x3F800002),  # a tie, to even, upwards
        ([1.0, 3 * 2.0**-24, 2.0**-100], [1.0, 1.0, -(2.0**-100)], 0x3F800001),
        ([-1.0, 2.0**-24, -(2.0**-149)], [1.0, -1.0, 2.0**-149], 0xBF800001),
        ([TINY], [0.5], 0x00000000),  # a tie with zero
        ([TINY], [-0.5], 0x80000000),  # a non-zero sum keeps its sign
        ([2.0**-100, -(2.0**-130), 2.0**-100], [2.0**-100, 2.0**-130, -(2.0**-100)], 0x80000000),
        ([TINY, TINY], [0.5, TINY], 0x00000001),
        ([3.0], [TINY], 0x00000003),
        (
            [2.0**-126, -TINY],
            [1.0, 0.5],
            0x00800000,
        ),  # a tie between the largest subnormal and the smallest normal
        ([2.0**-126, -TINY, -TINY], [1.0, 0.5, TINY], 0x007FFFFF),
        ([2.0**127, 2.0**127], [1.0, 1.0], 0x7F800000),
        ([2.0**127, 2.0**127, -(2.0**102)], [1.0, 1.0, 2.0], 0x7F800000),  # 2^128 - 2^103: the tie overflows
        ([2.0**127, 2.0**127, -(2.0**102), -TINY], [1.0, 1.0, 2.0, TINY], 0x7F7FFFFF),
        ([FLT_MAX, FLT_MAX, 1.0], [FLT_MAX, -FLT_MAX, 3.0], 0x40400000),  # 2^256 passes through and cancels
        ([], [], 0x00000000),
        ([-0.0, -0.0], [1.0, 1.0], 0x00000000),  # an exactly zero sum is +0
        ([1.0, -1.0], [1.0, 1.0], 0x00000000),
        ([INF, 1.0], [2.0, 1.0], 0x7F800000),
        ([INF, 1.0], [-2.0, 1.0], 0xFF800000),
        ([INF, 1.0], [0.0, 1.0], 0x7FC00000),
        ([INF, INF], [1.0, -1.0], 0x7FC00000),
        ([INF, -INF], [-1.0, 1.0], 0xFF800000),
        ([-NAN, 1.0], [1.0, 1.0], 0x7FC00000),
        ([NAN], [0.0], 0x7FC00000),
        ([0.0], [-INF], 0x7FC00000),
        ([INF, -FLT_MAX], [1.0, FLT_MAX], 0x7F800000),
    ],
)
def test_known_sums_have_the_bits_worked_out_by_hand(row: list[float], column: list[float], expected: int) -> None:
    assert f"{expected:08x}" == hexadecimal(dot(row, column, matmul_oracle))
    assert f"{expected:08x}" == hexadecimal(dot(row, column))


@pytest.mark.parametrize("family", [normal, any_finite, narrow, cancelling])
@pytest.mark.parametrize("depth", [2, 6, 34, 130])
def test_every_output_equals_the_oracle(family: Callable[..., F32], depth: int) -> None:
    a = family((2, 6, depth), depth, 1)
    b = np.swapaxes(family((2, 7, depth), depth, 2), -1, -2)
    if family is cancelling:
        b = np.concatenate([b[:, : depth // 2], -b[:, : depth // 2]], axis=1)
    assert_same_bits(matmul_oracle(a, b), matmul(a, b))


def test_scales_from_subnormal_to_overflow_equal_the_oracle() -> None:
    a, b = normal((8, 24), 3), normal((24, 8), 4)
    for exponent in (-140, -126, -100, 0, 61, 62, 63, 64):
        x, y = (np.float32(2.0**exponent) * m for m in (a, b))
        assert_same_bits(matmul_oracle(x, y), matmul(x, y))
    x, y = np.float32(2.0**-100) * a, np.float32(2.0**-48) * b  # results around the subnormals' end
    assert_same_bits(matmul_oracle(x, y), matmul(x, y))


def test_ties_nudged_by_a_far_smaller_product_equal_the_oracle() -> None:
    # Columns: an odd multiple of 2^-24 near 1 (a tie), nudged or not by a product far below float64's reach.
    count = 64
    odd = 2 * rng(5).integers(0, 1 << 20, count) + 1
    b = np.stack(
        [
            np.ones(count),
            odd * 2.0**-24,
            np.resize([2.0**-90, -(2.0**-90), 0.0], count),
        ]
    ).astype(np.float32)
    a = np.array([[1.0, 1.0, 2.0**-30], [-1.0, -1.0, 2.0**-30], [2.0**-125, 2.0**-125, 2.0**-120]], np.float32)
    actual, report = matmul_with_report(a, b)
    assert_same_bits(matmul_oracle(a, b), actual)
    assert report.recomputed >= 2 * (count * 2 // 3)


def test_non_finite_operands_follow_the_rules_of_the_oracle() -> None:
    specials = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, -2.0, FLT_MAX, TINY], np.float32)
    a = rng(6).choice(specials, (40, 3), p=[0.05, 0.1, 0.1, 0.15, 0.1, 0.2, 0.1, 0.1, 0.1])
    b = rng(7).choice(specials, (3, 40), p=[0.05, 0.1, 0.1, 0.15, 0.1, 0.2, 0.1, 0.1, 0.1])
    actual, report = matmul_with_report(a, b)
    assert_same_bits(matmul_oracle(a, b), actual)
    touched = ~np.isfinite(a).all(1)[:, None] | ~np.isfinite(b).all(0)[None, :]
    assert int(touched.sum()) == report.non_finite


def test_a_nan_row_leaves_the_other_rows_alone() -> None:
    a, b = normal((9, 33), 8), normal((33, 5), 9)
    clean = matmul(a, b)
    a.view(np.uint32)[4, 17] = 0xFF800001  # signalling, with a sign and a payload
    dirty = matmul(a, b)
    assert_same_bits(np.full(5, NAN, np.float32), dirty[4])
    assert_same_bits(np.delete(clean, 4, 0), np.delete(dirty, 4, 0))


@pytest.mark.parametrize(
    ("a_lead", "b_lead"),
    [((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 1), (3,)), ((2, 3), (3,)), ((0,), ())],
)
def test_leading_axes_broadcast_as_in_numpy(a_lead: tuple[int, ...], b_lead: tuple[int, ...]) -> None:
    a, b = narrow((*a_lead, 4, 10), 10), narrow((*b_lead, 10, 5), 11)
    actual = matmul(a, b)
    assert np.matmul(a, b).shape == actual.shape
    assert_same_bits(matmul_oracle(a, b), actual)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_axes_give_empty_or_zero_results(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    for lead in ((), (2,)):
        a, b = normal((*lead, rows, depth), 12), normal((*lead, depth, columns), 13)
        assert_same_bits(np.zeros((*lead, rows, columns), np.float32), matmul(a, b))


def test_rows_and_batches_alone_have_the_bits_they_have_together() -> None:
    a = np.concatenate([normal((6, 17, 320), 14), narrow((2, 17, 320), 15)])
    b = np.concatenate([normal((6, 320, 48), 16), narrow((2, 320, 48), 17)])
    whole = matmul(a, b)
    assert_same_bits(whole[3], matmul(a[3], b[3]))
    assert_same_bits(whole[7], matmul(a[7], b[7]))
    assert_same_bits(whole[:, 5:6], matmul(a[:, 5:6], b))
    assert_same_bits(whole[:, :, 9:10], matmul(a, b[:, :, 9:10]))
    assert_same_bits(matmul(a, b[0])[4, 3], matmul(a[4, 3:4], b[0])[0])


def test_the_order_of_k_does_not_matter() -> None:
    a, b = narrow((40, 512), 18), normal((512, 30), 19)
    order = rng(20).permutation(512)
    assert_same_bits(matmul(a, b), matmul(a[:, order], b[order]))


def test_one_and_two_blas_threads_give_the_same_bits() -> None:
    for shape in ((300, 700, 200), (64, 2048, 64), (1, 4096, 33)):
        a, b = normal(shape[:2], 21), normal(shape[1:], 22)
        with threadpool_limits(1):
            one = matmul(a, b)
        with threadpool_limits(2):
            two = matmul(a, b)
        assert_same_bits(one, two)


def test_strided_reversed_transposed_and_read_only_operands_change_nothing() -> None:
    a, b = normal((24, 60), 23), normal((60, 36), 24)
    expected = matmul(a[::2, ::3].copy(), b[2:22, ::-1].copy())
    assert_same_bits(expected, matmul(a[::2, ::3], b[2:22, ::-1]))
    assert_same_bits(expected, matmul(np.asfortranarray(a[::2, ::3]), np.asfortranarray(b[2:22, ::-1])))
    kept = a.copy()
    a.setflags(write=False)
    b.setflags(write=False)
    assert_same_bits(expected, matmul(a[::2, ::3], b[2:22, ::-1]))
    assert_same_bits(kept, a)
    gram = matmul(a, a.T)
    assert_same_bits(matmul_oracle(a[:3], a.T), gram[:3])


def test_the_report_tells_ties_sums_and_non_finite_apart() -> None:
    ones = np.ones((1, 2), np.float32)
    ties = np.array([[1.0] * 64, [2.0**-24] * 64], np.float32)
    expected = MatmulReport(outputs=64, on_grid=64, recomputed=0, non_finite=0)
    assert expected == matmul_with_report(ones, ties)[1]
    far = np.array([[1.0] * 64, [2.0**-24] * 64, [2.0**-120] * 64], np.float32)
    expected = MatmulReport(outputs=64, on_grid=0, recomputed=64, non_finite=0)
    assert expected == matmul_with_report(np.ones((1, 3), np.float32), far)[1]
    far[2, :5] = INF
    expected = MatmulReport(outputs=64, on_grid=0, recomputed=59, non_finite=5)
    assert expected == matmul_with_report(np.ones((1, 3), np.float32), far)[1]
    expected = MatmulReport(outputs=36, on_grid=0, recomputed=0, non_finite=0)
    assert expected == matmul_with_report(narrow((6, 1), 25), narrow((1, 6), 26))[1]


def test_exact_sums_equal_integer_arithmetic_over_all_exponents() -> None:
    rows, columns = any_finite((400, 50), 27), any_finite((400, 50), 28)
    rows[:200, 25:] = rows[:200, :25]
    columns[:200, 25:] = -columns[:200, :25]  # half of the rows cancel but for one product
    columns[:200, 49] = any_finite((200,), 29)
    products = rows.astype(np.float64) * columns.astype(np.float64)
    words = np.empty(400, np.int64)
    assert exact_sums(products.view(np.int64), words) == 0
    for i in range(400):
        pairs = zip(rows[i].tolist(), columns[i].tolist(), strict=True)
        total = sum((Fraction(x) * Fraction(y) for x, y in pairs), start=Fraction(0))
        # Independent of the oracle's rounding: no neighbour is nearer (float() would round to 53 bits first).
        actual = words[i : i + 1].astype(np.uint32).view(np.float32)[0]
        if np.isinf(actual):
            assert abs(total) >= 2**128 - 2**103
            continue
        error = abs(total - Fraction(float(actual)))
        for side in (-INF, INF):
            neighbour = np.nextafter(actual, np.float32(side))
            if np.isfinite(neighbour):
                assert error <= abs(total - Fraction(float(neighbour)))


def test_wrong_dtypes_and_shapes_are_refused_with_the_value_and_the_place() -> None:
    a, b = normal((3, 4), 30), normal((4, 5), 31)
    with pytest.raises(UsageError, match="b is float64"):
        matmul(a, b.astype(np.float64))
    with pytest.raises(UsageError, match=r"a has shape \(3,\)"):
        matmul(a[:, 0], b)
    with pytest.raises(UsageError, match="differ in K, 4 and 3"):
        matmul(a, b[:3])
    with pytest.raises(UsageError, match="do not broadcast"):
        matmul(np.stack([a, a]), np.stack([b, b, b]))


def test_a_sum_just_above_a_tie_is_rounded_once() -> None:
    # 2^24 + 1 is a tie that goes down; 2^-40 more, lost where the sum is rounded before it is added, sends it up.
    a = np.array([[2.0**24, 1.0, 0.0], [2.0**24, 1.0, 2.0**-40], [2.0**24, 1.0, -(2.0**-40)]], np.float32)
    assert [16777216.0, 16777218.0, 16777216.0] == matmul(a, np.ones((3, 1), np.float32))[:, 0].tolist()
