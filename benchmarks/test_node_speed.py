"""Speed of a decoder's nodes, fused against their array formula in the same run. Run with ``make bench``.

Sizes are those of the default model: 8 sequences of 64 tokens, width 64, 4 heads, SwiGLU 128. The formula has the exp
and log of the Numba backend; "numpy" is the formula without ``exact``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsim.arrays import F32
from qsim.backends import get_backend
from qsim.backends.numba_backend import NumbaBackend
from qsim.codec.threads import threads
from qsim.nn import Arithmetic, Dims, Hyper, initial_state, update
from qsim.nn.attention import probabilities, softmax, softmax_backward
from qsim.nn.feed_forward import swiglu, swiglu_backward
from qsim.nn.loss import cross_entropy
from qsim.nn.norm import rmsnorm, rmsnorm_backward
from qsim.training.config import ModelParams
from qsim.training.model import shapes

D = Dims(batch=8, context=64, heads=4, width=64)


class _Plain(NumbaBackend):
    """The Numba backend without its fused nodes."""

    @property
    def fused(self) -> None:
        return None


WAYS = {
    "fused": Arithmetic(backend=get_backend("numba")),
    "formula": Arithmetic(backend=_Plain()),
    "numpy": Arithmetic(backend=_Plain(), exact=False),
}


def x(*shape: int) -> F32:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


S, DP, H, LOGITS, U = x(1, 8, 4, 64, 64), x(1, 8, 4, 64, 64), x(1, 512, 64), x(1, 512, 256), x(1, 512, 256)
DG = x(1, 512, 128)
TARGETS = np.random.default_rng(0).integers(0, 256, (1, 8, 64))
P, LSE = softmax(WAYS["fused"], D, S)
PARAMS = {name: x(1, *shape) for name, shape in shapes(ModelParams()).items()}
HYPER = Hyper(lr=1e-3, clip=1.0, weight_decay=0.1)
STATE = initial_state(WAYS["fused"], HYPER, PARAMS, 1.0)

NODES: dict[str, Callable[[Arithmetic], Any]] = {
    "softmax": lambda A: softmax(A, D, S),
    "probabilities": lambda A: probabilities(A, D, S, LSE),
    "softmax_backward": lambda A: softmax_backward(A, D, P, DP, H, H),
    "swiglu": lambda A: swiglu(A, U),
    "swiglu_backward": lambda A: swiglu_backward(A, U, DG),
    "rmsnorm": lambda A: rmsnorm(A, D, H, H[:, 0]),
    "rmsnorm_backward": lambda A: rmsnorm_backward(A, D, H, H[:, 0], H),
    "cross_entropy": lambda A: cross_entropy(A, D, LOGITS, TARGETS),
    "update": lambda A: update(A, HYPER, PARAMS, PARAMS, STATE, True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NODES)
def test_node(benchmark: Any, name: str, way: str) -> None:
    benchmark.group = name
    with threads(1):
        made = benchmark(NODES[name], WAYS[way])
    assert made is not None
