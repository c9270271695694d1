"""The CUDA Hadamard rotation and its way back, emulated equal to the codec in every bit."""

import numpy as np
import pytest

import cuda_kernels._kernel as kernels
from cuda_kernels import hadamard as module
from cuda_kernels import host, source
from cuda_kernels._place import HOST, Host
from cuda_kernels.footprint import compiled
from cuda_kernels.hadamard import HADAMARD, hadamard
from qsim.codec import hadamard_signs, rotate, rotate_back
from qsim.codec.hadamard import FACTORS
from qsim.conformance.compare import assert_bits_equal
from tests.places import Given, launch_at, played_device
from tests.unit.test_hadamard import hard_blocks

pytestmark = pytest.mark.usefixtures("gpp")

SIZES = [16, 32]


def blocks(size):
    """Hard ones, and two that make -0: a sum of them, and a product that is none."""
    signs = hadamard_signs(0, size=size)
    zeros, least = np.where(signs > 0, np.float32(-0.0), np.float32(0)), np.zeros(size, np.float32)
    least[1] = 2.0**-149
    return np.concatenate([hard_blocks(size), zeros[None], least[None]])


def forth(x, signs, place=HOST):
    return launch_at(place, hadamard, x, signs, np.full(signs.size, FACTORS[signs.size], np.float32))


def back(y, signs, place=HOST):
    return launch_at(place, hadamard, y, np.ones(signs.size, np.float32), FACTORS[signs.size] * signs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_equals_the_codec_both_ways(size, seed):
    x, signs = blocks(size), hadamard_signs(seed, size=size)
    assert_bits_equal(rotate(x, signs), forth(x, signs))
    assert_bits_equal(rotate_back(x, signs), back(x, signs))
    assert_bits_equal(rotate_back(rotate(x, signs), signs), back(forth(x, signs), signs))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5), (1, 9), (7, 4), (0, 2), (3, 0)])
def test_any_number_of_blocks_is_rotated(size, shape):
    x = np.random.default_rng(size).standard_normal((shape[0], shape[1] * size)).astype(np.float32)
    signs = hadamard_signs(3, size=size)
    assert_bits_equal(rotate(x, signs), forth(x, signs))
    assert_bits_equal(rotate(x.reshape(1, *x.shape), signs), forth(x.reshape(1, *x.shape), signs))


@pytest.mark.parametrize("size", SIZES)
def test_strides_addresses_grids_and_devices_change_no_bit(monkeypatch, size):
    x, signs = blocks(size), hadamard_signs(4, size=size)
    expected = rotate(x, signs)
    shifted = np.zeros(x.size + 1, np.float32)[1:].reshape(x.shape)
    shifted[...] = x
    for same in (shifted, np.asfortranarray(x), x[::-1][::-1], np.repeat(x, 2, axis=1)[:, ::2]):
        assert_bits_equal(expected, forth(same, signs))
    for grid, threads in ((1, 32), (2, 256), (40, 64)):
        monkeypatch.setattr(module, "THREADS", threads)
        assert_bits_equal(expected, forth(x, signs, Host(blocks=(grid, 1))))
    assert_bits_equal(expected, forth(x, signs, played_device(monkeypatch)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place = 4 * lane % size", "place = 4 * lane % 16"),
        ("lane & by ? __fsub_rn(other, v[e])", "lane & by ? __fsub_rn(v[e], other)"),
        ("by < size / 4;", "by < 4;"),
        ("__fadd_rn(__fmul_rn(v[e], last[e]), 0.0f)", "__fmul_rn(v[e], last[e])"),
        ("y == y ? y : __uint_as_float(0x7FC00000u)", "y"),
        ("    qsim_butterfly(v[0], v[2]);\n        qsim_butterfly(v[1], v[3]);\n", ""),
    ],
)
def test_a_wrong_step_is_seen(monkeypatch, old, new):
    plain = source("hadamard.cu")
    assert plain.count(old) == 1
    monkeypatch.setattr(kernels, "source", lambda name: plain.replace(old, new))
    place = Given(made=host.build(HADAMARD.text, HADAMARD.entry, options=("-O0",)))
    x, signs = blocks(32), hadamard_signs(0, size=32)
    assert rotate(x, signs).tobytes() != forth(x, signs, place).tobytes()


def test_the_order_of_the_stages_is_part_of_the_definition(monkeypatch):
    """Distances of lanes first, those inside a lane last: right but for the rounding."""
    plain = source("hadamard.cu")
    begin, middle = (
        plain.index("        qsim_butterfly(v[0], v[1]);"),
        plain.index("        for (int by = 1; by < size"),
    )
    end = plain.index("        #pragma unroll", plain.index("__fadd_rn(v[e], other)"))
    other = plain[:begin] + plain[middle:end] + plain[begin:middle] + plain[end:]
    monkeypatch.setattr(kernels, "source", lambda name: other)
    place = Given(made=host.build(HADAMARD.text, HADAMARD.entry, options=("-O0",)))
    x, signs = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32), hadamard_signs(0, size=32)
    got = forth(x, signs, place)
    assert rotate(x, signs).tobytes() != got.tobytes()
    assert np.abs(rotate(x, signs) - got).max() < 1e-5


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", HADAMARD.arches)
def test_a_lane_reads_and_writes_sixteen_bytes_at_once(arch):
    ptx = compiled(HADAMARD.text, HADAMARD.file, arch).ptx
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


def test_wrong_arguments_are_named():
    x, ones = np.zeros((2, 32), np.float32), np.ones(16, np.float32)
    with pytest.raises(TypeError, match=r"x is numpy\.ndarray of float64"):
        hadamard(HOST, x.astype(np.float64), ones, ones)
    with pytest.raises(ValueError, match="both have 16 numbers, or 32"):
        hadamard(HOST, x, ones, np.ones(32, np.float32))
    with pytest.raises(ValueError, match="both have 16 numbers, or 32"):
        hadamard(HOST, x, ones[:8], ones[:8])
    with pytest.raises(ValueError, match="a multiple of 16"):
        hadamard(HOST, x[:, :20], ones, ones)
    with pytest.raises(ValueError, match="a multiple of 16"):
        hadamard(HOST, x[0, 0, None].reshape(()), ones, ones)
