"""Training steps have the same bits under other instruction sets, another BLAS kernel and another number of threads."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qsim.arrays import AnyArray
from qsim.nn.loss import scale_gradient
from qsim.nn.optimizer import Hyper, initial_state, update
from tests.unit.nn_cases import EXACT, Decoder

ROOT = Path(__file__).resolve().parents[2]
STEPS = "4712d7ae2c4d241f"


def digest() -> str:
    """Of losses, norms and parameters of four steps of a decoder of two layers."""
    decoder, made = Decoder(layers=2), hashlib.sha256()
    params: Mapping[str, AnyArray] = decoder.parameters(2, np.float32)
    hyper = Hyper(lr=1e-2, clip=0.5, warmup=3, weight_decay=0.1)
    state = initial_state(EXACT, hyper, params, 1024.0)
    for _ in range(4):
        loss, grads = decoder.gradients(EXACT, params)
        grads = {name: scale_gradient(x, state.loss_scale) for name, x in grads.items()}
        params, state, report = update(EXACT, hyper, params, grads, state, True)
        made.update(loss.tobytes() + report.norm.tobytes())
    for name, x in params.items():
        made.update(name.encode() + x.tobytes())
    return made.hexdigest()


def test_four_steps_have_these_bits_on_any_machine() -> None:
    assert STEPS == digest()[: len(STEPS)]


def test_a_plain_processor_gives_the_same_steps(tmp_path: Path) -> None:
    numpy = importlib.import_module("numpy._core._multiarray_umath")
    env = {
        **os.environ,
        "NPY_DISABLE_CPU_FEATURES": " ".join(numpy.__cpu_dispatch__),
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_NUM_THREADS": "2",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    script = "from tests.unit.test_nn_reproducible import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert f"{digest()}\n" == done.stdout, done.stderr
