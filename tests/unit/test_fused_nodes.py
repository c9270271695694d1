"""The fused nodes: the bits of the array formula, for numbers of every kind, odd sizes and several replicas."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from qsim.arrays import F32, AnyArray
from qsim.backends import get_backend
from qsim.backends.fused import FusedNodes
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import UsageError
from qsim.nn import Arithmetic, Dims
from qsim.nn.attention import probabilities, softmax, softmax_backward
from qsim.nn.feed_forward import swiglu, swiglu_backward
from qsim.nn.loss import cross_entropy
from qsim.nn.norm import rmsnorm, rmsnorm_backward

ROOT = Path(__file__).resolve().parents[2]
FORMULA = Arithmetic(backend=get_backend("oracle"))
FUSED = Arithmetic(backend=get_backend("numba"))
FAST = Arithmetic(backend=get_backend("numba"), exact=False)
NODES = FusedNodes()

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 88.8, -88.8, -104.0, 1e-20, 1e20, 2.0**-126, 0.5],
    np.float32,
)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
KINDS = ("normal", "wide", "special", "broken")

# A context of 100 needs several rounds of the buffer, one of 16 is a whole vector; a head of 3 is none.
SIZES = (
    Dims(batch=2, context=5, heads=2, width=6, vocabulary=11),
    Dims(batch=1, context=1, heads=1, width=1, vocabulary=1),
    Dims(batch=1, context=64, heads=4, width=64, vocabulary=256),
    Dims(batch=3, context=17, heads=2, width=40, vocabulary=33),
    Dims(batch=1, context=100, heads=1, width=96, vocabulary=100),
    Dims(batch=4, context=16, heads=3, width=51, vocabulary=16),
)
EACH_SIZE = pytest.mark.parametrize("dims", SIZES, ids=lambda d: f"T{d.context}d{d.width}")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def numbers(kind: str, seed: int, *shape: int) -> F32:
    """Normal numbers; of every size; a tenth of them special ones; a fiftieth not finite."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-140, 120, shape)).astype(np.float32)
    elif kind != "normal":
        x = np.where(rng.random(shape) < 0.1, rng.choice(SPECIAL, shape), x)
    if kind == "broken":
        x = np.where(rng.random(shape) < 0.02, rng.choice(NOT_FINITE, shape), x)
    return x


def made(A: Arithmetic, dims: Dims, kind: str, replicas: int) -> Iterator[tuple[str, AnyArray]]:
    """Every result of every node."""
    count, width, context = dims.tokens, dims.width, dims.context

    def x(seed: int, *shape: int) -> F32:
        return numbers(kind, seed, 3, *shape)[:replicas]

    square = dims.batch, dims.heads, context, context
    s, dp, do, o = x(1, *square), x(2, *square), x(3, count, width), x(4, count, width)
    p, lse = softmax(A, dims, s)
    yield from {"p": p, "lse": lse}.items()
    yield "probabilities", probabilities(A, dims, s, lse)
    yield "probabilities of other scores", probabilities(A, dims, dp, lse)
    yield "ds", softmax_backward(A, dims, p, dp, do, o)
    u, dg = x(5, count, 2 * width), x(6, count, width)
    yield from {"swiglu": swiglu(A, u), "du": swiglu_backward(A, u, dg)}.items()
    g = x(7, width)
    yield "rmsnorm", rmsnorm(A, dims, do, g)
    yield from zip(("dx", "dg"), rmsnorm_backward(A, dims, do, g, o), strict=True)
    targets = np.random.default_rng(8).integers(0, dims.vocabulary, (3, dims.batch, context))[:replicas]
    yield from zip(("loss", "dlogits"), cross_entropy(A, dims, x(9, count, dims.vocabulary), targets), strict=True)


def assert_same(expected: AnyArray, actual: AnyArray, what: str) -> None:
    """The same bits, but NaN is NaN: of two the processor takes one, and of Inf - Inf it picks the sign."""
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype), what
    assert np.array_equal(np.isnan(expected), np.isnan(actual)), f"{what}: NaN at other places"
    zero = np.float32(0)
    assert_bits_equal(
        np.where(np.isnan(expected), zero, expected), np.where(np.isnan(actual), zero, actual), what=what
    )  # fmt: skip


@EACH_SIZE
@EACH_KIND
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_node_has_the_bits_of_its_formula(dims: Dims, kind: str, replicas: int) -> None:
    assert FORMULA.backend.fused is None
    assert FUSED.backend.fused is not None
    actual = dict(made(FUSED, dims, kind, replicas))
    for name, expected in made(FORMULA, dims, kind, replicas):
        assert_same(expected, actual.pop(name), f"{name} of {kind} numbers")
    assert {} == actual


@EACH_KIND
def test_no_bit_of_a_replica_depends_on_the_others(kind: str) -> None:
    together = dict(made(FUSED, SIZES[3], kind, 3))
    for name, alone in made(FUSED, SIZES[3], kind, 1):
        assert_bits_equal(alone, together[name][:1], what=name)


def test_without_exact_the_nodes_are_fused_too_and_in_float64_they_are_the_formula() -> None:
    dims = SIZES[0]
    exact = dict(made(FUSED, dims, "normal", 2))
    for name, fast in made(FAST, dims, "normal", 2):
        assert_bits_equal(exact[name], fast, what=name)
    x: AnyArray = np.ones((1, dims.tokens, dims.width))
    g: AnyArray = np.ones((1, dims.width))
    assert FAST.fused(x) is None
    assert FAST.fused(x.astype(np.float32), g) is None
    assert np.float64 == rmsnorm(FAST, dims, x, g).dtype


def test_many_keys_are_softened_a_row_at_a_time() -> None:
    dims = Dims(batch=1, context=2100, heads=1, width=1)
    s = numbers("normal", 1, 1, 1, 1, 2100, 2100)
    for expected, actual in zip(softmax(FORMULA, dims, s), softmax(FUSED, dims, s), strict=True):
        assert_same(expected, actual, "many keys")


def test_a_nan_of_a_score_is_one_pattern_in_all_of_its_row_and_masked_places_stay_zero() -> None:
    dims = SIZES[0]
    s = numbers("normal", 1, 1, 2, 2, 5, 5)
    s.view(np.uint32)[0, 1, 0, 3, 1] = 0xFF800001  # negative and signalling
    p, lse = softmax(FUSED, dims, s)
    assert [0x7FC00000] * 4 + [0] == p.view(np.uint32)[0, 1, 0, 3].tolist()
    assert np.isnan(lse[0, 1, 0, 3])
    assert [0x7FC00000] * 4 + [0] == probabilities(FUSED, dims, s, lse).view(np.uint32)[0, 1, 0, 3].tolist()


@pytest.mark.parametrize("words", [1, 3, 256])
def test_a_mean_over_tokens_that_are_no_power_of_two_is_a_division(words: int) -> None:
    for count in (1, 3, 8, 12, 100):
        dims = Dims(batch=1, context=count, heads=1, width=1, vocabulary=words)
        logits = numbers("normal", count, 2, count, words) * np.float32(30)
        targets = np.random.default_rng(1).integers(0, words, (2, 1, count))
        for expected, actual in zip(
            cross_entropy(FORMULA, dims, logits, targets), cross_entropy(FUSED, dims, logits, targets), strict=True
        ):
            assert_same(expected, actual, f"{count} tokens")


def ones(*shape: int) -> F32:
    return np.ones(shape, np.float32)


ONE = np.float32(1)
SQUARE, OUT = ones(1, 2, 2, 3, 3), ones(1, 6, 4)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: NODES.softmax(ones(2, 3, 4), ONE), "queries by keys"),
        (lambda: NODES.softmax(ones(0, 0), ONE), "queries by keys"),
        (lambda: NODES.probabilities(ones(2, 3, 3), ones(2, 2), ONE), "lse is"),
        (lambda: NODES.softmax_backward(SQUARE, ones(1, 2, 2, 3, 2), OUT, OUT, ONE), "dp is"),
        (lambda: NODES.softmax_backward(SQUARE, SQUARE, OUT, ones(1, 6, 6), ONE), "do is"),
        (lambda: NODES.softmax_backward(SQUARE, SQUARE, ones(1, 5, 4), ones(1, 5, 4), ONE), "does not fit to p"),
        (lambda: NODES.softmax_backward(SQUARE, SQUARE, ones(1, 6, 5), ones(1, 6, 5), ONE), "does not fit to p"),
        (lambda: NODES.cross_entropy(ones(1, 2, 3), np.zeros(3, np.int64)), "targets is"),
        (lambda: NODES.cross_entropy(ones(1, 2, 3), np.array([0, 3])), r"1 of 2 targets are not in 0\.\.2"),
        (lambda: NODES.cross_entropy(ones(1, 2, 3), np.array([-1, 2])), r"1 of 2 targets are not in 0\.\.2"),
        (lambda: NODES.swiglu(ones(1, 2, 3)), "u is"),
        (lambda: NODES.swiglu_backward(ones(1, 2, 4), ones(1, 2, 3)), "u is"),
        (lambda: NODES.rmsnorm(ones(1, 2, 3), ones(1, 2), ONE), "g is"),
        (lambda: NODES.rmsnorm_backward(ones(1, 2, 3), ones(1, 2), ones(1, 2, 3), ONE), "g is"),
        (lambda: NODES.rmsnorm_backward(ones(1, 2, 3), ones(1, 3), ones(1, 3, 3), ONE), "dy is"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_memory_is_touched(call: Callable[[], object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        call()


def digest() -> str:
    """Of all nodes; what the subprocess prints. NaN is left out: processors differ."""
    found = hashlib.sha256()
    for kind in ("normal", "wide", "special"):
        for _, x in made(FUSED, SIZES[3], kind, 2):
            found.update(np.where(np.isnan(x), np.float32(0), x).tobytes())
    return found.hexdigest()


def test_a_processor_without_vectors_gives_the_same_bits(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    script = "from tests.unit.test_fused_nodes import digest; print(digest())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert f"{digest()}\n" == done.stdout
    assert list(tmp_path.rglob("*.nbi")), "the kernels were compiled for it, not loaded"
