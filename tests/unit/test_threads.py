"""Spans and threads: everything is covered once, whatever the number of threads, and errors come through."""

import itertools
import os

import numpy as np
import pytest

from qsim.codec import decode, encode
from qsim.codec.threads import GRAIN, in_chunks, set_threads, spans, thread_count, threads
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import UsageError
from qsim.formats import get_format
from qsim.quant.plain import quantize


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, GRAIN - 1, 2 * GRAIN, 5 * GRAIN + 3])
@pytest.mark.parametrize("align", [1, 2, 48])
def test_spans_cover_everything_once_at_aligned_places(count, size, align):
    with threads(count):
        cuts = spans(size, align=align)
    assert 1 <= len(cuts) <= count
    assert (0, size) == (cuts[0][0], cuts[-1][1])
    assert all(a[1] == b[0] and a[1] % align == 0 for a, b in itertools.pairwise(cuts))


def test_small_work_stays_on_one_thread():
    with threads(4):
        assert [(0, GRAIN)] == spans(GRAIN)
        assert [(0, 3)] == spans(3, cost=8)
        assert 2 == len(spans(4, cost=GRAIN // 2))


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_the_number_of_threads_changes_no_bit(fmt):
    x = np.random.default_rng(0).standard_normal(5 * GRAIN + 7, np.float32) * 100
    x[:: 1 << 14] = np.nan
    with threads(1):
        codes = encode(x, fmt)
        values = decode(codes, fmt)
    for count in (2, 3):
        with threads(count):
            assert_codes_equal(codes, encode(x, fmt), get_format(fmt))
            assert_bits_equal(values, decode(codes, fmt))


@pytest.mark.parametrize("center", ["tensor", "channel", "token", "block"])
@pytest.mark.parametrize("shape", [(1, 3 * GRAIN + 5), (300, 4100)])
def test_the_number_of_threads_changes_no_bit_of_a_mean(center, shape):
    x = np.random.default_rng(1).standard_normal(shape, np.float32) + np.float32(3)
    x[0, ::999] = np.nan
    with threads(1):
        alone = quantize(x, "mxfp4_rceil", center=center)
    for count in (2, 3):
        with threads(count):
            q = quantize(x, "mxfp4_rceil", center=center)
        assert alone.center.tobytes() == q.center.tobytes()
        assert alone.codes.tobytes() == q.codes.tobytes()


def test_an_error_on_any_thread_comes_through():
    def work(start, stop):
        if start:
            raise ValueError("of a later span")

    with threads(3), pytest.raises(ValueError, match="of a later span"):
        in_chunks(work, 3 * GRAIN)


def test_the_environment_names_the_number(monkeypatch):
    monkeypatch.setenv("QSIM_THREADS", "3")
    assert 3 == thread_count()
    with threads(2):
        assert 2 == thread_count()
    monkeypatch.setenv("QSIM_THREADS", "many")
    with pytest.raises(UsageError, match="QSIM_THREADS is 'many'"):
        thread_count()
    with pytest.raises(UsageError, match="number of threads 0"):
        set_threads(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own():
    x = np.ones(2 * GRAIN, np.float32)
    with threads(2):
        encode(x, "e4m3")  # the parent's pool exists
        child = os.fork()
        if child == 0:
            os._exit(0 if (encode(x, "e4m3") == 0x38).all() else 1)
        assert 0 == os.waitpid(child, 0)[1]
