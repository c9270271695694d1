"""The CUDA pack and unpack: emulated equal to the CPU's, whatever the length, the strides and the grid."""

import numpy as np
import pytest

from cuda_kernels import host, source
from cuda_kernels._place import HOST, Host
from cuda_kernels.pack import PACK, pack, unpack
from qsim.codec import pack as packed_on_cpu
from qsim.codec import unpack as unpacked_on_cpu
from tests.places import Given, launch

SHAPES = [(1,), (2,), (5, 1), (3, 7), (4, 64), (2, 3, 129), (0, 4), (3, 0)]


def drawn(shape):
    return np.random.default_rng(len(shape)).integers(0, 16, shape).astype(np.uint8)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_equal_those_of_the_cpu(shape):
    codes = drawn(shape)
    expected = packed_on_cpu(codes)
    for place in (HOST, Host(blocks=(1, 1), threads=1), Host(blocks=(7, 1), threads=33)):
        packed = pack(place, codes)
        assert (expected.shape, expected.tobytes()) == (packed.shape, packed.tobytes())
        noise = packed | np.uint8(0xF0) if shape[-1] == 1 else packed  # the nibble behind an odd length is not read
        assert codes.tobytes() == unpack(place, noise, shape[-1]).tobytes()


@pytest.mark.usefixtures("gpp")
def test_strides_do_not_matter_and_high_bits_are_cut():
    codes = drawn((6, 10, 14))
    for view in (codes[:, ::2, 1::2], np.asfortranarray(codes), codes[::-1]):
        assert packed_on_cpu(view).tobytes() == launch(pack, view).tobytes()
    packed = packed_on_cpu(codes)[:, ::2]
    assert unpacked_on_cpu(packed, 14).tobytes() == launch(unpack, packed, 14).tobytes()
    assert launch(pack, codes[0] | 0xF0).tobytes() == packed_on_cpu(codes[0]).tobytes()


@pytest.mark.usefixtures("gpp")
def test_swapped_nibbles_are_seen():
    text = source("pack.cu").replace("(own[0] & 15u) | high << 4", "high | own[0] << 4")
    wrong = Given(made=host.build(text, PACK.entry))
    codes = drawn((3, 7))
    assert packed_on_cpu(codes).tobytes() != pack(wrong, codes).tobytes()


def test_wrong_arguments_are_named():
    codes = np.zeros((2, 3), np.uint8)
    with pytest.raises(TypeError, match=r"codes is numpy\.ndarray of int8"):
        pack(HOST, codes.astype(np.int8))
    with pytest.raises(ValueError, match="no axis"):
        pack(HOST, np.zeros((), np.uint8))
    with pytest.raises(ValueError, match="length 4 does not fit"):
        unpack(HOST, codes, 4)
