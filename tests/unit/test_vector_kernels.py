"""Vectors inside kernels: sums by halves of any length, loads and stores that stay within their count."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from qsim.arrays import F32
from qsim.backends import get_backend
from qsim.backends.vector_kernels import (
    LANES,
    every,
    halved,
    halved_rows,
    kept,
    larger,
    largest,
    load,
    load_some,
    root,
    store,
    store_some,
)
from qsim.codec.jit import OPTIONS
from qsim.conformance.compare import assert_bits_equal
from qsim.nn import Arithmetic

FORMULA = Arithmetic(backend=get_backend("oracle"))
LENGTHS = (*range(1, 70), 96, 100, 127, 128, 129, 250, 256, 1000, 1023)
NAN = np.float32(np.nan)


@numba.njit(**OPTIONS)  # type: ignore[untyped-decorator]
def sum_of(row: F32, n: int) -> Any:
    return halved(row, n)


@numba.njit(**OPTIONS)  # type: ignore[untyped-decorator]
def sum_of_rows(rows: F32, n: int, width: int) -> None:
    halved_rows(rows, n, width)


@numba.njit(**OPTIONS)  # type: ignore[untyped-decorator]
def operated(a: F32, b: F32, out: F32) -> None:
    x, y = load(a, 0), load(b, 0)
    store(x + y, out, 0)
    store(x - y, out, LANES)
    store(x * y, out, 2 * LANES)
    store(x / y, out, 3 * LANES)
    store(root(x), out, 4 * LANES)
    store(larger(x, y), out, 5 * LANES)
    store(every(largest(x)), out, 6 * LANES)


@numba.njit(**OPTIONS)  # type: ignore[untyped-decorator]
def moved(x: F32, out: F32, at: int, count: int, rest: np.float32) -> None:
    store_some(load_some(x, at, count, rest), out, 0, count)
    store(load_some(x, at, count, rest), out, LANES)
    store(kept(load(x, at), count), out, 2 * LANES)


def uneven(seed: int, *shape: int) -> F32:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


def test_a_row_of_any_length_is_summed_by_halves() -> None:
    for n in LENGTHS:
        x = uneven(n, n)
        row = np.concatenate([x, np.full(LANES, NAN)])  # what lies behind is read, and must not count
        assert_bits_equal(FORMULA.total(x[None], 1), np.array([sum_of(row, n)], np.float32), what=f"{n} numbers")


@pytest.mark.parametrize("width", [1, 3, 4, 8, 15, 16, 17, 40, 64])
def test_any_number_of_rows_is_summed_by_halves(width: int) -> None:
    for n in (*range(1, 20), 33, 64, 100):
        x = uneven(n, n, width)
        rows = np.concatenate([x.reshape(-1), np.full(LANES, NAN)])
        sum_of_rows(rows, n, width)
        assert_bits_equal(FORMULA.total(x[None], 1)[0], rows[:width], what=f"{n} rows")


def test_operations_are_numpys_in_every_place() -> None:
    a, b = uneven(1, LANES), uneven(2, LANES)
    a[:4], b[:4] = [np.inf, 0.0, -0.0, 3e38], [1.0, -0.0, 0.0, 3e38]
    out = np.empty(7 * LANES, np.float32)
    operated(a, b, out)
    with np.errstate(all="ignore"):
        expected = [a + b, a - b, a * b, a / b, np.sqrt(a), np.where(a > b, a, b), np.full(LANES, a.max())]
    for one, other in zip(expected, out.reshape(7, LANES), strict=True):
        assert np.array_equal(np.isnan(one), np.isnan(other))
        assert_bits_equal(one[~np.isnan(one)], other[~np.isnan(one)])


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16, 17, 1000])
def test_what_lies_behind_a_count_is_neither_read_nor_written(count: int) -> None:
    x, out = np.arange(1, 41, dtype=np.float32), np.full(3 * LANES, -1, np.float32)
    moved(x, out, 5, count, np.float32(99))
    few = min(count, LANES)
    stored, filled, zeroed = out.reshape(3, LANES).tolist()
    own = list(range(6, 6 + few))
    assert own + [-1] * (LANES - few) == stored
    assert own + [99] * (LANES - few) == filled
    assert own + [0] * (LANES - few) == zeroed
