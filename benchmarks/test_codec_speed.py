"""Speed of the codec against named peers in the same run: read the medians as ratios. Run with ``make bench``."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qsim.codec import decode, encode

SIZE = 4 << 20
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


@pytest.fixture(scope="module")
def x() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


@pytest.mark.benchmark(group="encode 4 Mi float32 into out")
@pytest.mark.parametrize("fmt", FORMATS)
def test_encode(benchmark: Any, x: Any, fmt: str) -> None:
    out = np.empty(SIZE, np.uint8)
    benchmark(encode, x, fmt, out=out)
    assert out.any()


@pytest.mark.benchmark(group="encode 4 Mi float32 into out")
def test_peer_copyto(benchmark: Any, x: Any) -> None:
    out = np.empty_like(x)
    benchmark(np.copyto, out, x)
    assert out[0] == x[0]


@pytest.mark.benchmark(group="encode 4 Mi float32 into out")
def test_peer_ml_dtypes(benchmark: Any, x: Any) -> None:
    codes = benchmark.pedantic(x.astype, args=(ml_dtypes.float8_e4m3fn,), rounds=3, iterations=1)
    assert codes.size == SIZE


@pytest.mark.benchmark(group="decode 4 Mi codes")
@pytest.mark.parametrize("fmt", FORMATS)
def test_decode(benchmark: Any, x: Any, fmt: str) -> None:
    codes, out = encode(x, fmt), np.empty(SIZE, np.float32)
    benchmark(decode, codes, fmt, out=out)
    assert out.any()


@pytest.mark.benchmark(group="decode 4 Mi codes")
def test_peer_ml_dtypes_decode(benchmark: Any, x: Any) -> None:
    codes = encode(x, "float8_e4m3fn").view(ml_dtypes.float8_e4m3fn)
    values = benchmark.pedantic(codes.astype, args=(np.float32,), rounds=3, iterations=1)
    assert values.size == SIZE
