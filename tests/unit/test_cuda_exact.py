"""The exact matrix product of float32 on a device: emulated, equal to the CPU's and to rationals, bit for bit."""

import numpy as np
import pytest

import qsim
from cuda_kernels import exact
from cuda_kernels._place import HOST, Host
from cuda_kernels.exact import EXACT, MAX_DEPTH, SETTLE, matmul, matmul_summed
from qsim.arrays import FLT_MAX
from qsim.gemm import matmul as on_cpu
from qsim.gemm import matmul_oracle
from tests.places import changed, launch, launch_at, played_device

pytestmark = pytest.mark.usefixtures("gpp")
TINY, NAN, INF = 2.0**-149, float("nan"), float("inf")
BOTH = (EXACT, SETTLE)
NO_PROOF = (
    ("return same && (fabs(t) > d || d == 0.0);", "return false;"),
    ("return !qsim_finite(s) || bound == 0.0 || fabs(s) > bound;", "return false;"),
)

KNOWN = [
    ([1.0, 2.0**-24], [1.0, 1.0], 0x3F800000),  # a tie, to even
    ([1.0, 2.0**-24, 2.0**-100], [1.0, 1.0, 2.0**-100], 0x3F800001),  # just above it
    ([1.0, 2.0**-24, 2.0**-100], [1.0, 1.0, -(2.0**-100)], 0x3F800000),
    ([1.0, 3 * 2.0**-24], [1.0, 1.0], 0x3F800002),  # a tie, to even, upwards
    ([1.0, 3 * 2.0**-24, 2.0**-100], [1.0, 1.0, -(2.0**-100)], 0x3F800001),
    ([-1.0, 2.0**-24, -TINY], [1.0, -1.0, TINY], 0xBF800001),
    ([2.0**24 + 2, -1.0, 2.0**-40], [1.0, 1.0, 1.0], 0x4B800001),  # HH = 2^24 + 1, M = 2^-40: 16777218
    ([TINY], [0.5], 0x00000000),  # a tie with zero
    ([TINY], [-0.5], 0x80000000),  # what rounds to zero keeps its sign
    ([2.0**-100, -(2.0**-130), 2.0**-100], [2.0**-100, 2.0**-130, -(2.0**-100)], 0x80000000),
    ([TINY, TINY], [0.5, TINY], 0x00000001),
    ([3.0], [TINY], 0x00000003),
    ([TINY, TINY], [2.5, 0.0], 0x00000002),  # ties of subnormals
    ([TINY, TINY], [2.5, TINY], 0x00000003),
    ([2.0**-126, -TINY], [1.0, 0.5], 0x00800000),  # between the largest subnormal and the smallest normal
    ([2.0**-126, -TINY, -TINY], [1.0, 0.5, TINY], 0x007FFFFF),
    ([2.0**127, 2.0**127], [1.0, 1.0], 0x7F800000),
    ([2.0**127, 2.0**127, -(2.0**102)], [1.0, 1.0, 2.0], 0x7F800000),  # 2^128 - 2^103: the tie overflows
    ([2.0**127, 2.0**127, -(2.0**102), -TINY], [1.0, 1.0, 2.0, TINY], 0x7F7FFFFF),
    ([FLT_MAX, FLT_MAX, 1.0], [FLT_MAX, -FLT_MAX, 3.0], 0x40400000),  # 2^256 passes through and cancels
    ([FLT_MAX, FLT_MAX, TINY], [FLT_MAX, -FLT_MAX, -TINY], 0x80000000),  # and leaves 2^-298
    ([], [], 0x00000000),
    ([-0.0, -0.0], [1.0, 1.0], 0x00000000),  # an exact zero is +0
    ([1.0, -1.0], [1.0, 1.0], 0x00000000),
    ([INF, 1.0], [2.0, 1.0], 0x7F800000),
    ([INF, 1.0], [-2.0, 1.0], 0xFF800000),
    ([INF, 1.0], [0.0, 1.0], 0x7FC00000),
    ([INF, INF], [1.0, -1.0], 0x7FC00000),
    ([INF, -INF], [-1.0, 1.0], 0xFF800000),
    ([-NAN, 1.0], [1.0, 1.0], 0x7FC00000),
    ([INF, -FLT_MAX], [1.0, FLT_MAX], 0x7F800000),
]


def rng(*key):
    return np.random.default_rng([20260203, *key])


def normal(shape, *key):
    return rng(*key).standard_normal(shape).astype(np.float32)


def any_finite(shape, *key):
    """Uniform over finite bit patterns: all exponents, subnormals, both zeros."""
    x = rng(*key).integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(0))


def narrow(shape, *key):
    """Small integers times powers of two: many sums land on a tie of float32."""
    g = rng(*key)
    return (g.integers(-15, 16, shape) * 2.0 ** g.integers(-14, 15, shape)).astype(np.float32)


def special(shape, *key):
    """Zeros of both signs, infinities, NaN with payloads and signs, and ones."""
    words = np.uint32([0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFF812345])
    return words[rng(*key).choice(8, shape, p=[0.2, 0.2, 0.3, 0.22, 0.03, 0.03, 0.01, 0.01])].view(np.float32)


def cancelling(depth, *key):
    """a [6, depth], b [depth, 7]: right halves nearly repeat left halves, with the other sign."""
    a, b = normal((6, depth // 2), *key), normal((depth // 2, 7), *key, 1)
    return np.hstack([a, np.nextafter(a, np.float32(9))]), np.vstack([b, -b])


def nudged_ties():
    """Odd multiples of 2^-24 near 1, nudged or not by a product far below float64's reach; and near 2^-125."""
    odd = 2 * rng(5).integers(0, 1 << 20, 60) + 1
    b = np.stack([np.ones(60), odd * 2.0**-24, np.resize([2.0**-90, -(2.0**-90), 0.0], 60)]).astype(np.float32)
    return np.float32([[1.0, 1.0, 2.0**-30], [-1.0, -1.0, 2.0**-30], [2.0**-125, 2.0**-125, 2.0**-120]]), b


def known():
    """All known rows against all known columns."""
    a, b = np.zeros((len(KNOWN), 4), np.float32), np.zeros((4, len(KNOWN)), np.float32)
    for n, (row, column, _) in enumerate(KNOWN):
        a[n, : len(row)], b[: len(column), n] = row, column
    return a, b


def cases():
    for family in (normal, any_finite, narrow, special):
        for depth in (1, 2, 17, 40):
            yield family.__name__, family((6, depth), depth, 1), family((depth, 7), depth, 2)
    for depth in (2, 34, 130):
        yield "cancelling", *cancelling(depth, depth)
    yield "ties", *nudged_ties()
    yield "known", *known()
    a, b = normal((8, 24), 3), normal((24, 8), 4)
    for exponent in (-140, -126, -74, 0, 62, 64):
        yield f"near 2^{2 * exponent}", np.float32(2.0**exponent) * a, np.float32(2.0**exponent) * b
    yield "subnormals", np.float32(2.0**-100) * a, np.float32(2.0**-48) * b


@pytest.fixture(scope="module")
def settling():
    """Where no output has a proof: all are summed again."""
    return changed(BOTH, *NO_PROOF)


def test_known_sums_have_the_bits_worked_out_by_hand(settling):
    a, b = known()
    for place in (None, settling):
        got = np.diagonal(launch_at(place, matmul, a, b)).view(np.uint32)
        assert [hex(bits) for *_, bits in KNOWN] == [hex(bits) for bits in got]


@pytest.mark.parametrize(("a", "b"), [pytest.param(a, b, id=f"{name}-{a.shape[1]}") for name, a, b in cases()])
def test_every_output_is_the_rational_sum_rounded_once(settling, a, b):
    expected = matmul_oracle(a, b)
    assert expected.tobytes() == on_cpu(a, b).tobytes() == launch(matmul, a, b).tobytes()
    again = matmul_summed(settling, a, b)
    assert again.open.all()
    assert expected.tobytes() == again.out.tobytes()


@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 16, 64), (65, 15, 63), (63, 33, 130), (200, 7, 1), (2, 300, 66)])
def test_tiles_and_tails_have_the_bits_of_the_cpu(shape):
    t, k, o = shape
    a, b = narrow((t, k), *shape), narrow((k, o), *shape, 1)
    a[0], b[:, -1] = normal(k, 1), normal(k, 2)
    assert on_cpu(a, b).tobytes() == launch(matmul, a, b).tobytes()


def test_strides_are_honoured_and_nothing_is_copied():
    room = normal((9, 50, 60), 1)
    views = (room[0, :7, :20], room[0, :40:2, ::3].T[:7], room[1].T[:7, :20], room[2, 10:3:-1, 25:5:-1],
             room[3:4, :7, 5:25], np.broadcast_to(room[0, :1, :20], (7, 20)), room[::4, :7, :20],
             np.broadcast_to(room[0, :7, :1], (7, 20)), room[:3, :20, :7].swapaxes(1, 2),
             np.broadcast_to(room[0, :7, :20], (3, 7, 20)))  # fmt: skip
    for i, a in enumerate(views):
        assert np.shares_memory(exact._plain_side(HOST, a, a.shape[:-2]).data, room)
        for b in (room[4, :20, :5], room[5, :5, :20].T, views[(i + 3) % len(views)].swapaxes(-1, -2)):
            if a.shape[-1] == b.shape[-2]:
                expected = on_cpu(np.ascontiguousarray(a), np.ascontiguousarray(b))
                got = launch(matmul, a, b)
                assert expected.shape == got.shape
                assert expected.tobytes() == got.tobytes()


@pytest.mark.parametrize(("a", "b"), [
    ((3, 2, 5), (3, 5, 4)), ((1, 2, 5), (3, 5, 4)), ((3, 2, 5), (1, 5, 4)), ((3, 2, 5), (5, 4)), ((2, 5), (3, 5, 4)),
    ((1, 2, 5), (5, 4)), ((2, 3, 2, 5), (3, 5, 4)), ((2, 1, 2, 5), (1, 3, 5, 4)), ((2, 3, 2, 5), (2, 1, 5, 4)),
])  # fmt: skip
def test_leading_axes_broadcast(a, b):
    x, y = normal(a, 1), normal(b, 2)
    expected, got = on_cpu(x, y), launch(matmul, x, y)
    assert expected.shape == got.shape
    assert expected.tobytes() == got.tobytes()


def test_an_address_within_an_element_is_read_all_the_same():
    room = np.zeros(4 * 35 + 3, np.uint8)
    odd = room[3:].view(np.float32).reshape(5, 7)
    odd[...] = normal((5, 7), 1)
    rows = np.zeros((5, 31), np.uint8)[:, :28].view(np.float32)  # rows of 31 bytes: no whole number of elements
    rows[...] = odd
    assert on_cpu(odd.copy(), odd.T.copy()).tobytes() == launch(matmul, odd, rows.T).tobytes()


def test_empty_sums_are_plus_zero_and_empty_outputs_have_their_shape():
    zero = launch(matmul, np.zeros((3, 2, 0), np.float32), np.zeros((0, 4), np.float32))
    assert (3, 2, 4) == zero.shape
    assert not zero.view(np.uint32).any()
    for a, b in (((0, 5), (5, 4)), ((2, 5), (5, 0)), ((0, 2, 5), (5, 4)), ((0, 2, 5), (1, 5, 4))):
        assert np.matmul(np.zeros(a), np.zeros(b)).shape == launch(matmul, np.zeros(a, "f4"), np.zeros(b, "f4")).shape


@pytest.mark.parametrize(
    "place", [Host(blocks=(1, 1)), Host(blocks=(2, 5), threads=32), Host(blocks=(99, 99), threads=96)]
)
def test_no_grid_changes_a_bit(settling, place):
    a, b = any_finite((2, 70, 20), 1), any_finite((20, 130), 2)
    assert on_cpu(a, b).tobytes() == launch_at(place, matmul, a, b).tobytes()
    also = type(settling)(blocks=place.blocks, threads=place.threads, made=settling.made)
    few = matmul_summed(also, a[:, :5], b[:, :9])
    assert few.open.all()
    assert on_cpu(a[:, :5], b[:, :9]).tobytes() == few.out.tobytes()


def test_a_device_gets_addresses_strides_and_exact_types(monkeypatch):
    place = played_device(monkeypatch)
    a, b = normal((3, 20, 40), 1)[:, ::2, 1:], normal((5, 39), 2).T
    assert on_cpu(a, b).tobytes() == launch_at(place, matmul, a, b).tobytes()


@pytest.mark.parametrize(("fmt", "share"), [("e4m3", 0.0), ("e5m2", 0.0), (None, 0.01)])
def test_data_as_they_come_are_seldom_summed_twice(fmt, share):
    a, b = normal((40, 1024), 1), normal((1024, 50), 2)
    if fmt:
        a, b = (qsim.decode(qsim.encode(x, fmt), fmt) for x in (a, b))
    summed = launch(matmul_summed, a, b)
    assert summed.open.mean() <= share
    assert on_cpu(a, b).tobytes() == summed.out.tobytes()


def test_what_cancels_is_summed_again():
    a, b = cancelling(34, 1)
    assert launch(matmul_summed, a, b).open.mean() > 0.5
    assert not launch(matmul_summed, *narrow_ties()).open.any()


def narrow_ties():
    """Sums that are ties of float32 and exact in float64."""
    return np.float32([[2.0**24, 1.0]]), np.float32([[1.0, 1.0, -1.0], [1.0, 3.0, 1.0]])


def test_wrong_arguments_are_named():
    a = np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"b is numpy\.ndarray of float64"):
        matmul(HOST, a, a.T.astype(np.float64))
    with pytest.raises(ValueError, match=r"a \(2, 3\) and b \(2, 3\) are not \[..., T, K\] and \[..., K, O\]"):
        matmul(HOST, a, a)
    with pytest.raises(ValueError, match=r"leading axes of a \(2, 1, 3\) and b \(3, 3, 1\) do not broadcast"):
        matmul(HOST, np.zeros((2, 1, 3), np.float32), np.zeros((3, 3, 1), np.float32))
    deep = np.broadcast_to(np.float32(0), (1, MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="as far as the proof goes"):
        matmul(HOST, deep, deep.T)
