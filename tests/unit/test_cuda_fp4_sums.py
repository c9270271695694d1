"""Exact sums of packed FP4 through INT8 matrix instructions: emulated by fragments, equal to integers."""

import numpy as np
import pytest

import cuda_kernels._kernel as kernels
from cuda_kernels import host, source
from cuda_kernels._place import HOST, Host
from cuda_kernels.fp4_sums import FP4_SUMS, MAX_DEPTH, fp4_sums
from qsim.codec import decode, pack
from qsim.formats import FORMATS
from tests.places import Given, launch

E2M1 = FORMATS["float4_e2m1fn"]
SHAPES = [(1, 1, 1), (1, 1, 2), (3, 5, 7), (16, 8, 32), (64, 64, 64), (65, 70, 129), (130, 20, 96), (2, 200, 31),
          (66, 3, 160)]  # fmt: skip


def drawn(rows, columns, depth):
    rng = np.random.default_rng(rows + 7 * columns + 31 * depth)
    return [rng.integers(0, 16, (n, depth)).astype(np.uint8) for n in (rows, columns)]


def integers(a, b):
    """The oracle: twice the decoded values, multiplied as int64."""
    left, right = ((2 * decode(codes, E2M1)).astype(np.int64) for codes in (a, b))
    return left @ right.T


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_sums_are_the_integers(shape):
    a, b = drawn(*shape)
    got = launch(fp4_sums, pack(a), pack(b), shape[2])
    assert got.dtype == np.int32
    assert np.array_equal(integers(a, b), got)


@pytest.mark.usefixtures("gpp")
def test_every_pair_of_codes_has_its_product():
    a, b = np.arange(16, dtype=np.uint8)[:, None], np.arange(16, dtype=np.uint8)[:, None]
    assert np.array_equal(integers(a, b), launch(fp4_sums, pack(a), pack(b), 1))


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("depth", [31, 63, 5])
def test_the_nibble_behind_an_odd_depth_does_not_count(depth):
    a, b = drawn(5, 6, depth)
    packed = [pack(a), pack(b)]
    for each in packed:
        each[:, -1] |= 0x70
    assert np.array_equal(integers(a, b), launch(fp4_sums, *packed, depth))


@pytest.mark.usefixtures("gpp")
def test_strides_and_addresses_do_not_matter():
    a, b = drawn(70, 9, 64)
    packed = [pack(a), pack(b)]
    room = np.zeros(packed[0].size + 1, np.uint8)
    shifted = room[1:].reshape(packed[0].shape)  # contiguous, at an odd address or one byte off
    shifted[...] = packed[0]
    expected = integers(a, b)
    for left in (shifted, np.asfortranarray(packed[0]), packed[0][::-1][::-1]):
        assert np.array_equal(expected, launch(fp4_sums, left, packed[1], 64))
    assert np.array_equal(expected[::-2], launch(fp4_sums, packed[0][::-2], packed[1], 64))


@pytest.mark.usefixtures("gpp")
def test_the_grid_never_changes_a_sum():
    a, b = drawn(130, 140, 40)
    for grid in (1, 3, 9, 20):
        assert np.array_equal(integers(a, b), fp4_sums(Host(blocks=(grid, 1)), pack(a), pack(b), 40))


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tile.cuh", "at.g + 8 * (i % 2)) * QSIM_PITCH + k + at.t + 4 * (i / 2)",
         "at.g + 8 * (i / 2)) * QSIM_PITCH + k + at.t + 4 * (i % 2)"),  # a[1] and a[2] swapped
        ("tile.cuh", "QSIM_PITCH + k + at.t + 4 * i]", "QSIM_PITCH + k + at.t + 4 * (1 - i)]"),  # b[0] and b[1]
        ("tile.cuh", "at.g + 8 * (i / 2);", "at.g + 8 * (i % 2);"),  # rows of the result
        ("tile.cuh", "2 * at.t + i % 2", "2 * at.t + i / 2"),  # columns of the result
        ("mma.cuh", "right[16 * i + 4 * t + byte][g]", "right[16 * i + 4 * g % 16 + byte][t]"),
        ("fp4.cuh", "0xFDFEFF00u", "0xFDFEFF01u"),  # minus zero
    ],
)  # fmt: skip
def test_a_wrong_fragment_index_is_seen(monkeypatch, file, old, new):
    plain = source(file)
    assert plain.count(old) == 1
    monkeypatch.setattr(kernels, "source", lambda name: plain.replace(old, new) if name == file else source(name))
    changed = Given(made=host.build(FP4_SUMS.text, FP4_SUMS.entry))
    a, b = drawn(16, 16, 64)
    assert not np.array_equal(integers(a, b), fp4_sums(changed, pack(a), pack(b), 64))


@pytest.mark.usefixtures("gpp")
def test_an_int32_holds_the_deepest_sum():
    assert MAX_DEPTH * 144 <= 2**31 - 1 < (MAX_DEPTH + 1) * 144
    six = np.full((1, 100_000), 0x77, np.uint8)
    assert launch(fp4_sums, six, six, 200_000)[0, 0] == 200_000 * 144


def test_nothing_to_add_is_zero():
    assert not launch(fp4_sums, np.zeros((2, 0), np.uint8), np.zeros((3, 0), np.uint8), 0).any()
    assert launch(fp4_sums, np.zeros((0, 4), np.uint8), np.zeros((3, 4), np.uint8), 8).shape == (0, 3)


def test_wrong_arguments_are_named():
    a = np.zeros((2, 3), np.uint8)
    with pytest.raises(TypeError, match=r"b is numpy\.ndarray of int8"):
        fp4_sums(HOST, a, a.astype(np.int8), 6)
    with pytest.raises(ValueError, match=r"a of shape \(2, 3\); depth 8 is \[rows, 4\] bytes"):
        fp4_sums(HOST, a, a, 8)
    with pytest.raises(ValueError, match="an int32 holds"):
        fp4_sums(HOST, a, a, MAX_DEPTH + 1)
