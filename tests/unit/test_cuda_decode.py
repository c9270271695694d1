"""The CUDA decode: compiled for every target, and emulated equal to the codec and the CPU backend."""

import numpy as np
import pytest

from cuda_kernels._place import HOST
from cuda_kernels.decode import decode as decode_codes
from qsim.backends import CastSpec, get_backend
from qsim.codec import decode
from qsim.codec.tables import decode_table
from qsim.formats import FORMATS, POLICIES
from tests.places import launch

NUMBA = get_backend("numba")


def table_of(fmt):
    return np.array(decode_table(fmt)[: fmt.code_count])


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_code_has_its_value(fmt):
    codes = np.arange(fmt.code_count, dtype=np.uint8)
    expected = decode(codes, fmt)
    expected[np.isnan(expected)] = np.uint32(0x7FC00000).view(np.float32)
    assert expected.tobytes() == launch(decode_codes, codes, table_of(fmt)).tobytes()


CASES = [((3, 5, 17), 1, None), ((3, 5, 17), 1, (1, 1, 17)), ((3, 5, 17), 1, (3, 1, 1)), ((3, 5, 17), 1, (3, 5, 1)),
         ((900,), 0, None), ((5, 1), 1, (5, 1)), ((2, 0), 1, None), ((2, 6400), 1, (2, 6400))]  # fmt: skip


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize(("shape", "lead", "own"), CASES)
def test_emulated_it_equals_the_cpu_backend(name, shape, lead, own):
    rng, fmt = np.random.default_rng(4), FORMATS[name]
    codes = rng.integers(0, fmt.code_count, shape).astype(np.uint8)
    descale = np.float32(rng.choice([1e-38, 0.7, 3.0, np.inf], shape[0])) if lead else np.asarray(0.3, np.float32)
    center = None if own is None else rng.standard_normal(own).astype(np.float32)
    expected = NUMBA.decode(codes, descale, center, CastSpec(fmt=fmt, policy=POLICIES["ocp"]))
    for view in (codes, np.asfortranarray(codes)):
        got = launch(decode_codes, view, table_of(fmt), descale=descale, center=center)
        assert expected.tobytes() == got.tobytes()


@pytest.mark.usefixtures("gpp")
def test_a_code_outside_the_table_is_nan():
    codes = np.array([[15, 16, 255]], np.uint8)
    got = launch(decode_codes, codes, np.ones(16, np.float32), descale=np.full(1, 2, np.float32))
    assert [0x40000000, 0x7FC00000, 0x7FC00000] == got.view(np.uint32)[0].tolist()


def test_wrong_arguments_are_named():
    codes, table = np.zeros((2, 3), np.uint8), table_of(FORMATS["float4_e2m1fn"])
    with pytest.raises(TypeError, match=r"codes is numpy\.ndarray of int8"):
        decode_codes(HOST, codes.astype(np.int8), table)
    with pytest.raises(ValueError, match="leading axis"):
        decode_codes(HOST, codes, table, descale=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="at most 256"):
        decode_codes(HOST, codes, np.zeros(300, np.float32))
