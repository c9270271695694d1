"""The random Hadamard rotation, bit by bit against its definition, and in exact rationals where all steps are exact."""

from fractions import Fraction

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.codec import hadamard, hadamard_signs, rotate, rotate_back
from qsim.codec.hadamard import FACTORS, rotate_block, rotate_block_back
from qsim.errors import FormatError, UsageError
from qsim.philox import Purpose, random_words

SIZES = [16, 32]
QUIET_NAN = 0x7FC00000
FLT_MAX = np.finfo(np.float32).max


def sylvester(size):
    """H_ij = (-1)^popcount(i & j), from its definition."""
    return np.array([[-1 if (i & j).bit_count() % 2 else 1 for j in range(size)] for i in range(size)])


def by_definition(x, signs, block=rotate_block):
    rows = x.reshape(-1, signs.size)
    return np.array([block(row, signs) for row in rows], np.float32).reshape(x.shape)


def hard_blocks(size):
    """Blocks of every kind: ordinary, wide, subnormal, zeros of both signs, overflowing, infinite, NaN."""
    rng = np.random.default_rng(size)
    wide = (rng.standard_normal((40, size)) * np.exp2(rng.integers(-140, 120, (40, size)))).astype(np.float32)
    tiny = rng.integers(0, 1 << 24, (10, size), dtype=np.uint32).view(np.float32)
    zeros = np.where(rng.integers(0, 2, (6, size)) == 1, np.float32(-0.0), np.float32(0.0))
    huge = np.where(rng.integers(0, 2, (6, size)) == 1, -FLT_MAX, FLT_MAX).astype(np.float32)
    odd = rng.standard_normal((8, size)).astype(np.float32)
    odd[0, 3], odd[1, 5], odd[2, [1, 2]] = np.inf, -np.inf, np.inf
    odd[3, [0, 7]] = np.inf, -np.inf
    odd[4, size - 1] = np.uint32(0xFFC12345).view(np.float32)
    odd[5, 0] = np.uint32(0x7F800001).view(np.float32)
    any_bits = rng.integers(0, 1 << 32, (60, size), dtype=np.uint32).view(np.float32)
    ordinary = rng.standard_normal((40, size)).astype(np.float32)
    return np.concatenate([ordinary, wide, tiny, zeros, huge, odd, any_bits])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kernel_equals_the_definition_in_every_bit(size, seed):
    x, signs = hard_blocks(size), hadamard_signs(seed, size=size)
    for fast, slow in ((rotate, rotate_block), (rotate_back, rotate_block_back)):
        expected, actual = by_definition(x, signs, slow), fast(x, signs)
        assert expected.view(np.uint32).tolist() == actual.view(np.uint32).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_a_unit_vector_becomes_its_column_of_the_matrix(size):
    signs = hadamard_signs(3, size=size)
    expected = (sylvester(size) * signs).T.astype(np.float32) * FACTORS[size]
    assert same_bits(expected, rotate(np.eye(size, dtype=np.float32), signs))
    back = (sylvester(size) * signs[:, None]).T.astype(np.float32) * FACTORS[size]
    assert same_bits(back, rotate_back(np.eye(size, dtype=np.float32), signs))


@pytest.mark.parametrize("size", SIZES)
def test_integers_give_the_exact_product_rounded_by_the_factor_alone(size):
    x = np.random.default_rng(1).integers(-(1 << 18), 1 << 18, (50, size))
    signs = hadamard_signs(2, size=size)
    whole = (x * signs.astype(np.int64)) @ sylvester(size)
    assert int(abs(whole).max()) < 1 << 24
    assert same_bits(whole.astype(np.float32) * FACTORS[size], rotate(x.astype(np.float32), signs))


def test_the_order_of_the_stages_is_part_of_the_definition():
    x = np.zeros(16, np.float32)
    x[[0, 1, 2]] = 1.0, 2.0**-24, -1.0
    # Distance 1 first: 1 + 2^-24 is a tie and goes to 1, so that nothing is left of 2^-24 beside -1.
    assert 0.0 == rotate(x, np.ones(16, np.float32))[0]
    x[[1, 2]] = x[[2, 1]]
    assert 2.0**-26 == rotate(x, np.ones(16, np.float32))[0]


@pytest.mark.parametrize("size", SIZES)
def test_the_factor_is_the_correctly_rounded_root(size):
    below, factor, above = (
        Fraction(float(np.nextafter(FACTORS[size], np.float32(0)))),
        Fraction(float(FACTORS[size])),
        Fraction(float(np.nextafter(FACTORS[size], np.float32(1)))),
    )
    assert ((below + factor) / 2) ** 2 < Fraction(1, size) < ((factor + above) / 2) ** 2
    assert {16: 0x3E800000, 32: 0x3E3504F3}[size] == int(FACTORS[size].view(np.uint32))


def test_a_constant_block_becomes_one_spike():
    ones = np.ones(16, np.float32)
    assert [12.0, *[0.0] * 15] == rotate(3 * ones, ones).tolist()
    signs = hadamard_signs(0)
    assert [12.0, *[0.0] * 15] == rotate(3 * signs, signs).tolist()
    for k in range(16):
        spike = np.zeros(16, np.float32)
        spike[k] = 4.0
        row = sylvester(16)[k].astype(np.float32)
        assert same_bits(spike, rotate(row * signs, signs))
        assert same_bits(row * signs, rotate_back(spike, signs))


def test_back_returns_every_bit_where_all_steps_are_exact():
    x = np.random.default_rng(4).integers(-(1 << 15), 1 << 15, (64, 48)).astype(np.float32)
    signs = hadamard_signs(5, step=7)
    assert same_bits(x, rotate_back(rotate(x, signs), signs))
    assert not same_bits(x, rotate_back(rotate(x, signs), hadamard_signs(5, step=8)))


def test_back_returns_within_rounding_for_32():
    x = np.random.default_rng(4).standard_normal((64, 96)).astype(np.float32)
    signs = hadamard_signs(5, size=32)
    error = np.abs(rotate_back(rotate(x, signs), signs).astype(np.float64) - x).max()
    # Each way at most 5 additions and a product, in blocks of norm <= sqrt(32) max|x|.
    assert 0 < error < 2 * 6 * 2.0**-24 * np.sqrt(32) * np.abs(x).max()


def test_energy_is_kept_exactly_on_integers():
    x = np.random.default_rng(6).integers(-1000, 1000, (20, 16)).astype(np.float32)
    y = rotate(x, hadamard_signs(1))
    before = [sum(Fraction(float(v)) ** 2 for v in row) for row in x]
    after = [sum(Fraction(float(v)) ** 2 for v in row) for row in y]
    assert before == after


def test_the_mean_of_the_rotated_is_the_rotated_mean():
    x = np.random.default_rng(7).integers(-1000, 1000, (21, 32)).astype(np.float32)
    signs = hadamard_signs(9)
    y = rotate(x, signs)
    mean = [sum(Fraction(float(v)) for v in column) / 21 for column in x.T]
    mean_of_rotated = [sum(Fraction(float(v)) for v in column) / 21 for column in y.T]
    h = sylvester(16)
    rotated_mean = [
        sum(int(h[i, j]) * int(signs[j]) * mean[16 * block + j] for j in range(16)) / 4
        for block in range(2)
        for i in range(16)
    ]
    assert rotated_mean == mean_of_rotated


def test_a_product_along_the_axis_is_unchanged_when_both_operands_are_rotated():
    rng = np.random.default_rng(8)
    x, w = (rng.integers(-100, 100, (5, 48)).astype(np.float32) for _ in range(2))
    signs = hadamard_signs(11)
    rotated = rotate(x, signs).astype(np.float64) @ rotate(w, signs).astype(np.float64).T
    assert (x.astype(np.float64) @ w.astype(np.float64).T).tolist() == rotated.tolist()


@pytest.mark.parametrize("turn", [rotate, rotate_back])
@pytest.mark.parametrize("size", SIZES)
def test_nan_fills_its_block_and_no_other(turn, size):
    x = np.ones((3, 2 * size), np.float32)
    x[1, size + 2] = np.uint32(0xFF812345).view(np.float32)
    bits = turn(x, hadamard_signs(0, size=size)).view(np.uint32)
    assert [QUIET_NAN] * size == bits[1, size:].tolist()
    assert size == int((bits == QUIET_NAN).sum())


def test_one_infinity_fills_its_block_and_two_of_opposite_signs_meet_as_nan():
    x = np.ones((2, 16), np.float32)
    x[0, 3] = -np.inf
    x[1, [0, 1]] = np.inf
    y = rotate(x, np.ones(16, np.float32))
    assert (-np.inf * sylvester(16)[3]).tolist() == y[0].tolist()
    assert [np.inf] * 8 == y[1, 0::2].tolist()
    assert [QUIET_NAN] * 8 == y[1, 1::2].view(np.uint32).tolist()


@pytest.mark.parametrize("turn", [rotate, rotate_back])
@pytest.mark.parametrize("size", SIZES)
def test_a_zero_comes_out_as_plus_zero(turn, size):
    mixed = np.where(np.arange(2 * size) % 3 == 0, np.float32(-0.0), np.float32(0.0))
    for x in (mixed, np.zeros(size, np.float32), np.full(size, -0.0, np.float32)):
        assert same_bits(np.zeros(x.shape, np.float32), turn(x, hadamard_signs(0, size=size)))
    least = np.zeros(size, np.float32)
    least[0] = np.uint32(0x80000001).view(np.float32)  # a quarter of it is below half of the least number
    assert same_bits(np.zeros(size, np.float32), turn(least, np.ones(size, np.float32)))


def test_subnormals_are_kept():
    x = np.full(16, 2.0**-149, np.float32)
    assert [2.0**-147, *[0.0] * 15] == rotate(x, np.ones(16, np.float32)).tolist()


def test_signs_are_bit_31_of_the_words_of_their_stream():
    words = random_words(12, Purpose.HADAMARD, count=32, step=5, layer=6, site=7, role=8)
    expected = [-1.0 if int(word) >= 1 << 31 else 1.0 for word in words]
    assert expected == hadamard_signs(12, size=32, step=5, layer=6, site=7, role=8).tolist()
    assert expected[:16] == hadamard_signs(12, step=5, layer=6, site=7, role=8).tolist()
    assert "-++--++-+---++-+" == "".join("-" if s < 0 else "+" for s in hadamard_signs(0))


@pytest.mark.parametrize("field", ["seed", "step", "layer", "site", "role"])
def test_every_field_draws_other_signs(field):
    identity = {"seed": 1, "step": 1, "layer": 1, "site": 1, "role": 1}
    first, second = (hadamard_signs(**{**identity, field: value}, size=32).tolist() for value in (1, 2))
    assert first != second
    assert {1.0, -1.0} == {*first, *second}


def test_signs_are_float32_and_cannot_be_written():
    signs = hadamard_signs(0)
    assert np.float32 == signs.dtype
    with pytest.raises(ValueError, match="read-only"):
        signs[0] = 1


@pytest.mark.parametrize("turn", [rotate, rotate_back])
@pytest.mark.parametrize("size", SIZES)
def test_no_layout_changes_a_bit(turn, size):
    base = np.random.default_rng(2).standard_normal((3 * size, 2 * size)).astype(np.float32)
    base.setflags(write=False)
    signs = hadamard_signs(1, size=size)
    unaligned = np.frombuffer(b"\0" + base.tobytes(), np.float32, offset=1).reshape(base.shape)
    for view in (base[:, ::2], base.T, base[::-1, ::-1], base[::-2, size:], base.reshape(3, size, 2, size), unaligned):
        expected = turn(np.array(view, order="C"), signs)
        assert same_bits(expected, turn(view, signs))
        for out in (np.empty(view.shape, np.float32), np.empty((*view.shape, 2), np.float32)[..., 1]):
            assert turn(view, signs, out=out) is out
            assert same_bits(expected, np.array(out))


def test_the_kernel_gets_aligned_arrays(monkeypatch):
    kernel, aligned = hadamard._KERNELS[16], []

    def watched(*arrays):
        aligned.extend(array.flags.aligned for array in arrays)
        kernel(*arrays)

    monkeypatch.setitem(hadamard._KERNELS, 16, watched)
    x, out = (np.frombuffer(bytearray(65), np.float32, offset=1) for _ in range(2))
    x[0] = 4.0
    assert [1.0] * 16 == rotate(x, np.ones(16, np.float32), out=out).tolist() == out.tolist()
    assert [1.0] * 16 == rotate(x, np.ones(16, np.float32), out=x).tolist() == x.tolist()
    assert [True] * 8 == aligned


@pytest.mark.parametrize("turn", [rotate, rotate_back])
def test_out_may_be_the_argument_or_overlap_it(turn):
    memory = np.random.default_rng(3).standard_normal(96).astype(np.float32)
    signs = hadamard_signs(1)
    expected = turn(memory, signs)
    x = memory.copy()
    assert same_bits(expected, turn(x, signs, out=x))
    x = memory.copy()
    assert same_bits(expected[:80], turn(x[:80], signs, out=x[4:84]))
    x = memory.copy()
    assert same_bits(turn(x[16:], signs), turn(x[16:], signs, out=x[:80]))
    own = np.concatenate([signs, signs])
    assert same_bits(turn(memory[:32], signs), turn(memory[:32], own[:16], out=own))


@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0), (2, 0, 32)])
def test_an_empty_array_stays_empty(shape):
    assert shape == rotate(np.zeros(shape, np.float32), hadamard_signs(0)).shape


def test_what_does_not_fit_is_refused():
    signs = hadamard_signs(0)
    with pytest.raises(UsageError, match=r"x of shape \(2, 20\) cannot be rotated in blocks of 16: .* multiple of 16"):
        rotate(np.zeros((2, 20), np.float32), signs)
    with pytest.raises(UsageError, match=r"x of shape \(\) cannot be rotated"):
        rotate(np.float32(1), signs)
    with pytest.raises(FormatError, match="x is float64; a rotation takes float32"):
        rotate_back(np.zeros(16), signs)
    with pytest.raises(
        UsageError, match=r"signs are float32 of shape \(8,\); pass float32 of shape \(16,\) or \(32,\)"
    ):
        rotate(np.zeros(16, np.float32), np.ones(8, np.float32))
    with pytest.raises(UsageError, match=r"signs are float64 of shape \(16,\)"):
        rotate(np.zeros(16, np.float32), np.ones(16))
    for wrong in (0.0, 2.0, np.nan):
        bad = np.array([1, -1, wrong, *[1] * 13], np.float32)
        with pytest.raises(UsageError, match=f"sign {np.float32(wrong)} is neither 1 nor -1"):
            rotate(np.zeros(16, np.float32), bad)
    with pytest.raises(UsageError, match="a Hadamard rotation of size 8; known sizes: 16, 32"):
        hadamard_signs(0, size=8)
    for wrong in ([1, 2], {}, "a", None):
        with pytest.raises(UsageError, match=r"size .* is no integer"):
            hadamard_signs(0, size=wrong)
    ragged = [[1], [1, 2]]
    with pytest.raises(FormatError, match="x is no array"):
        rotate(ragged, signs)
    with pytest.raises(FormatError, match="signs is no array"):
        rotate_back(np.zeros(16, np.float32), ragged)
    with pytest.raises(UsageError, match="layer 4096 does not fit its 12 bits"):
        hadamard_signs(0, layer=4096)
    with pytest.raises(FormatError, match=r"out is float64 of shape \(16,\); it must be float32 of shape \(16,\)"):
        rotate(np.zeros(16, np.float32), signs, out=np.zeros(16))
    with pytest.raises(FormatError, match="out is read-only"):
        rotate(np.zeros(16, np.float32), signs, out=signs)
