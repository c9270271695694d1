"""exp and log: right numbers, the same bits from formula and kernel, on every backend and for any instruction set."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from qsim.arrays import F32, F64
from qsim.backends import Backend, elementwise, elementwise_kernels
from qsim.backends.elementwise import LOG_MISROUNDED
from qsim.backends.numba_backend import NumbaBackend
from qsim.codec.threads import GRAIN, threads
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import FormatError
from tests.backends import EACH

ROOT = Path(__file__).resolve().parents[2]
NUMBA = NumbaBackend()
NAN, NEGATIVE_NAN, SIGNALLING_NAN = 0x7FC00000, 0xFFC00000, 0x7F800001
INF, NEGATIVE_INF, ONE = 0x7F800000, 0xFF800000, 0x3F800000

# All patterns whose float64 value lies within 2^-50 of itself of a tie, but the five that log misrounds.
CLOSE = {
    "exp": "377eff81 39c6be5b 4001b249 40315b33 b3000000 bae0e25c bbf0edf1 c16912cd",
    "log": (
        "064cb44b 07c060fa 0dc8bba4 0f61ff63 111c87f8 145cb6d4 14907055 16c5ee7a 18b06f2a 1a8446cb 1b81ab52 1f116ab8 "
        "22925ad4 2423c085 28e3fa26 29e6126b 29fd22f8 2c4c24b7 2e492984 3418949b 38dcbe38 39c31348 39c7b1f9 3bf86ef0 "
        "464d5b2b 4665a9a6 4d604ebe 4e85f412 54af989d 5d800341 5ee8984e 5f64c24a 62b467ba 64e27fa3 66a8c860 66abbd63 "
        "6914cb96 6d1f23eb 7405dee8 79e7ec37 7d98b8f4"
    ),
}
SPECIAL = {
    "exp": [
        (0x00000000, ONE),
        (0x80000000, ONE),
        (0x00000001, ONE),
        (INF, INF),
        (NEGATIVE_INF, 0),
        (NAN, NAN),
        (NEGATIVE_NAN, NAN),
        (SIGNALLING_NAN, NAN),
        (0x7F7FFFFF, INF),
        (0xFF7FFFFF, 0),
        (0x42B17217, 0x7F7FFF84),  # 88.72283: the last finite one
        (0x42B17218, INF),
        (0xC2CFF1B4, 1),  # -103.97207: half the smallest subnormal is just passed
        (0xC2CFF1B5, 0),
    ],
    "log": [
        (0x00000000, NEGATIVE_INF),
        (0x80000000, NEGATIVE_INF),
        (ONE, 0),
        (INF, INF),
        (NEGATIVE_INF, NAN),
        (0xBF800000, NAN),
        (0x80000001, NAN),
        (NAN, NAN),
        (NEGATIVE_NAN, NAN),
        (SIGNALLING_NAN, NAN),
        (0x00000001, 0xC2CE8ED0),  # the smallest subnormal: -149 ln 2
    ],
}


def floats(patterns: object) -> F32:
    return np.array(patterns, np.uint32).view(np.float32)


def backend_call(name: str, x: F32) -> F32:
    result: F32 = getattr(NUMBA, name)(x)
    return result


def formula(name: str, x: F32) -> F32:
    result: F32 = getattr(elementwise, name)(x, np)
    return result


def misrounded(name: str, x: F32, y: F32) -> list[int]:
    """Bits of those x whose y is not the float32 number nearest to the true value; finite non-zero y only."""
    wrong = []
    below, above = np.nextafter(y, np.float32(-np.inf)), np.nextafter(y, np.float32(np.inf))
    lower = (below.astype(np.float64) + y) / 2  # exact
    upper = (above.astype(np.float64) + y) / 2
    with localcontext() as context:
        context.prec = 40
        for bits, at, low, high in zip(x.view(np.uint32), x, lower, upper, strict=True):
            true = Decimal(float(at)).exp() if name == "exp" else Decimal(float(at)).ln()
            if not Decimal(float(low)) < true < Decimal(float(high)):
                wrong.append(int(bits))
    return wrong


@EACH
@pytest.mark.parametrize("name", ["exp", "log"])
def test_special_numbers_have_the_stated_bits_on_every_backend(backend: Backend, name: str) -> None:
    at, expected = zip(*SPECIAL[name], strict=True)
    assert_bits_equal(floats(expected), getattr(backend, name)(floats(at)))


@EACH
@pytest.mark.parametrize("name", ["exp", "log"])
def test_every_backend_has_the_bits_of_the_kernel(backend: Backend, name: str) -> None:
    x = np.arange(0, 1 << 32, 1_000_003, dtype=np.uint32).view(np.float32)
    assert_bits_equal(backend_call(name, x), getattr(backend, name)(x))
    on_device = backend.put(x.reshape(5, -1))
    assert_bits_equal(backend_call(name, x), backend.get(getattr(backend, name)(on_device)).reshape(-1))


@pytest.mark.parametrize("name", ["exp", "log"])
def test_kernel_and_formula_agree_on_every_257th_pattern(name: str) -> None:
    run = getattr(elementwise_kernels, name)
    for start in range(0, 1 << 32, 1 << 27):
        x = np.arange(start, start + (1 << 27), 257, dtype=np.uint32).view(np.float32)
        out = np.empty_like(x)
        run(x, out)
        assert_bits_equal(formula(name, x), out, what=f"{name} from pattern {start:08x}")


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def wide_kernel(run: Any, x: F64, out: F64) -> None:
    for i in range(x.size):
        out[i] = run(x[i])


@pytest.mark.parametrize("name", ["exp", "log"])
def test_kernel_and_formula_agree_in_float64_before_the_rounding(name: str) -> None:
    """Rounding to float32 hides nearly every change of an order of additions; another processor would show it."""
    x = np.random.default_rng(11).uniform(-104 if name == "exp" else 2.0**-149, 89, 50_000)
    x[::3] *= 2.0**-20
    out = np.empty_like(x)
    wide_kernel(getattr(elementwise_kernels, f"{name}_wide"), x, out)
    expected = elementwise.exp_wide(x, np) if name == "exp" else elementwise.log_wide(x)
    assert expected.tobytes() == out.tobytes()


@pytest.mark.parametrize("name", ["exp", "log"])
def test_results_are_correctly_rounded(name: str) -> None:
    rng = np.random.default_rng(7)
    wide = rng.uniform(-104, 88.7, 20_000) if name == "exp" else np.exp(rng.uniform(-103, 88, 10_000))
    near = rng.normal(size=10_000) * 0.3 if name == "exp" else 1 + rng.normal(size=10_000) * 0.01
    x = np.concatenate([wide, near]).astype(np.float32)
    x = np.concatenate([x, floats([int(word, 16) for word in CLOSE[name].split()])])
    assert [] == misrounded(name, x, backend_call(name, x))


def test_log_misrounds_exactly_the_patterns_that_it_names() -> None:
    x = floats(LOG_MISROUNDED)
    y = backend_call("log", x)
    assert list(LOG_MISROUNDED) == misrounded("log", x, y)
    other = np.array([float(Decimal(float(v)).ln()) for v in x]).astype(np.float32)
    assert (np.abs(other.view(np.int32) - y.view(np.int32)) <= 1).all()


@pytest.mark.parametrize("name", ["exp", "log"])
def test_layout_shape_and_threads_change_no_bit(name: str) -> None:
    x = np.random.default_rng(3).uniform(0.01, 40, (3, 4 * GRAIN // 3 + 5)).astype(np.float32)
    with threads(1):
        expected = backend_call(name, x)
    assert expected.flags.c_contiguous
    with threads(3):
        assert_bits_equal(expected, backend_call(name, x))
    assert_bits_equal(expected[:, ::7], backend_call(name, x[:, ::7]))
    assert_bits_equal(expected[:, :50].T, backend_call(name, np.asfortranarray(x[:, :50]).T))
    assert_bits_equal(formula(name, x[:, :50].T), backend_call(name, x[:, :50].T))
    assert (backend_call(name, x[0, 0]).shape, backend_call(name, x[:0]).shape) == ((), (0, x.shape[1]))


@pytest.mark.parametrize("name", ["exp", "log"])
def test_read_only_input_is_taken_and_another_dtype_refused(name: str) -> None:
    x = np.ones(3, np.float32)
    x.setflags(write=False)
    assert not np.shares_memory(x, backend_call(name, x))
    with pytest.raises(FormatError, match="x is float64"):
        getattr(NUMBA, name)(np.ones(3))


def digest() -> str:
    """Of both functions over patterns of every kind; what the subprocess prints."""
    x = np.arange(0, 1 << 32, 12_289, dtype=np.uint32).view(np.float32)
    made = hashlib.sha256()
    for run in (elementwise_kernels.exp, elementwise_kernels.log):
        out = np.empty_like(x)
        run(x, out)
        made.update(out.tobytes())
    return made.hexdigest()


@pytest.mark.parametrize("processor", ["generic"])
def test_a_processor_without_vectors_gives_the_same_bits(processor: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    script = (
        "from numba.core.registry import cpu_target;"
        "from tests.unit.test_elementwise import digest;"
        "print(cpu_target.target_context.codegen().magic_tuple()[1], digest())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert f"{processor} {digest()}\n" == done.stdout
    assert list(tmp_path.rglob("*.nbi")), "the kernels were compiled for it, not loaded"
