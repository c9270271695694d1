"""The CUDA reductions: compiled for every target, and emulated equal to the CPU backend whatever the grid."""

import numpy as np
import pytest

from cuda_kernels._place import HOST, Host
from cuda_kernels.reduce import observe, sums, totals
from qsim.backends import get_backend
from qsim.backends.checks import mean_shape, rows_of
from qsim.codec import sums_kernels
from tests.places import launch

NUMBA = get_backend("numba")


def hostile(shape, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -3e38], np.float32)
    places = rng.choice(flat.size, min(flat.size // 4, 40), replace=False)
    flat[places] = rng.choice(special, places.size)
    return x


CASES = [
    ((3, 7, 33), 1, None), ((3, 7, 33), 1, (1, 1, 33)), ((3, 7, 33), 1, (3, 1, 1)), ((3, 7, 33), 1, (3, 7, 1)),
    ((5, 1000), 0, None), ((5, 1000), 0, (1, 1000)), ((1,), 0, None), ((4, 0), 1, None), ((70, 2), 1, (70, 2)),
]  # fmt: skip


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(("shape", "lead", "own"), CASES)
def test_emulated_observe_equals_the_cpu_backend(shape, lead, own):
    x = hostile(shape)
    center = None if own is None else np.random.default_rng(1).standard_normal(own).astype(np.float32)
    seen = launch(observe, x, lead=lead, center=center)
    expected = NUMBA.observe(x, center, lead=lead, mean_axes=None)
    assert expected.amax.tobytes() == seen.top.view(np.float32).tobytes()
    assert (expected.nan_count == seen.nan_count.astype(np.int64)).all()
    assert (expected.inf_count == seen.inf_count.astype(np.int64)).all()


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)])
def test_emulated_sums_equal_the_cpu_backend(axes):
    x = hostile((3, 20, 50), 2)
    expected = NUMBA.sums(x, lead=1, axes=axes)
    rows = rows_of(x.shape, 1, mean_shape(x.shape, 1, axes))
    flat = x.reshape(-1, rows.shape[2])
    slots, width = rows.partner
    top, count = launch(sums, flat, np.ascontiguousarray(rows.row_of), slots, width)
    exponent, unit = np.empty((slots, width), np.int32), np.empty((slots, width))
    sums_kernels.sums_scale(top, exponent, unit)
    total = launch(totals, flat, np.ascontiguousarray(rows.row_of), unit)
    assert expected.total.reshape(-1).tolist() == total.reshape(-1).tolist()
    assert expected.exponent.reshape(-1).tolist() == exponent.reshape(-1).tolist()
    assert expected.count.reshape(-1).tolist() == count.astype(np.int64).reshape(-1).tolist()


@pytest.mark.usefixtures("gpp")
def test_the_grid_never_changes_a_bit():
    x = hostile((4, 5000), 3)
    expected = launch(observe, x, lead=1)
    for blocks, threads in (((1, 1), 32), ((7, 2), 128), ((3, 4), 1024)):
        seen = observe(Host(blocks=blocks, threads=threads), x, lead=1)
        for a, b in zip(expected, seen, strict=True):
            assert a.tobytes() == b.tobytes()


def test_wrong_arguments_are_named():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match="float64"):
        observe(HOST, x.astype(np.float64), lead=0)
    with pytest.raises(ValueError, match="lead 2"):
        observe(HOST, x, lead=2)
    with pytest.raises(ValueError, match="does not broadcast"):
        observe(HOST, x, lead=0, center=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        sums(HOST, x, np.zeros(3, np.int64), 1, 3)
