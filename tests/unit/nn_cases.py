"""The nodes of ``qsim.nn`` as cases: inputs, forward, backward, and torch's forward. Knows no expected number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsim.arrays import AnyArray
from qsim.backends import get_backend
from qsim.nn.arithmetic import Arithmetic
from qsim.nn.attention import (
    join3,
    merge_heads,
    probabilities,
    softmax,
    softmax_backward,
    split3,
    split_heads,
)
from qsim.nn.dims import Dims
from qsim.nn.embedding import embed, embed_backward
from qsim.nn.feed_forward import gelu, gelu_backward, swiglu, swiglu_backward
from qsim.nn.loss import cross_entropy, scale_gradient
from qsim.nn.norm import rmsnorm, rmsnorm_backward
from qsim.philox import Purpose, random_bell, random_words

EXACT = Arithmetic(backend=get_backend("numba"))
FAST = Arithmetic(backend=get_backend("numba"), exact=False)
D = Dims(batch=2, context=5, heads=2, width=6, vocabulary=11)

Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCase:
    """shapes: of the inputs, without the replica axis. backward takes what forward took, and the gradient of y."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    forward: Callable[[Arithmetic, Arrays], AnyArray]
    backward: Callable[[Arithmetic, Arrays, AnyArray], Arrays]
    by_torch: Callable[[Any, Any], Any]
    size: float = 1.0

    def inputs(self, replicas: int, dtype: type = np.float32) -> dict[str, AnyArray]:
        """Normal numbers times ``size``."""
        rng = np.random.default_rng(len(self.name))
        return {
            name: (rng.normal(size=(replicas, *shape)) * self.size).astype(dtype) for name, shape in self.shapes.items()
        }


def tokens(replicas: int, key: int) -> AnyArray:
    """Integers [R, B, T], some of them equal."""
    words = random_words(key, Purpose.ROWS, count=4 * D.tokens)  # the same under every version of numpy
    return (words % D.vocabulary).astype(np.int64).reshape(4, D.batch, D.context)[:replicas]


def _attend(A: Arithmetic, x: Arrays) -> tuple[AnyArray, AnyArray, AnyArray]:
    """o, p and s of x [R, N, 3d]."""
    q, k, v = (split_heads(D, part) for part in split3(x["x"]))
    s = A.product(q, k.swapaxes(-1, -2))
    p, lse = softmax(A, D, s)
    if A.exact:
        assert np.allclose(p, probabilities(A, D, s, lse), rtol=1e-5, atol=1e-7)
    return merge_heads(D, A.product(p, v)), p, s


def _attend_backward(A: Arithmetic, x: Arrays, do: AnyArray) -> Arrays:
    q, k, v = (split_heads(D, part) for part in split3(x["x"]))
    o, p, _ = _attend(A, x)
    by_head = split_heads(D, do)
    ds = softmax_backward(A, D, p, A.product(by_head, v.swapaxes(-1, -2)), do, o)
    parts = A.product(ds, k), A.product(ds.swapaxes(-1, -2), q), A.product(p.swapaxes(-1, -2), by_head)
    return {"x": join3(*(merge_heads(D, part) for part in parts))}


def _attend_torch(torch: Any, x: Any) -> Any:
    heads = [
        part.reshape(-1, D.batch, D.context, D.heads, D.head_width).transpose(2, 3)
        for part in x["x"].chunk(3, dim=-1)
    ]  # fmt: skip
    o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return o.transpose(2, 3).reshape(-1, D.tokens, D.width)


def _norm_torch(torch: Any, x: Any) -> Any:
    y = torch.nn.functional.rms_norm(x["x"], (D.width,), eps=D.eps)
    return y * x["g"][:, None]


def _swiglu_torch(torch: Any, x: Any) -> Any:
    a, b = x["u"].chunk(2, dim=-1)
    return torch.nn.functional.silu(a) * b


def _embed_torch(torch: Any, x: Any) -> Any:
    rows = [table[torch.tensor(own)] for table, own in zip(x["table"], tokens(4, 1), strict=False)]
    h = torch.stack(rows) + x["positions"][:, None]
    return h.reshape(-1, D.tokens, D.width)


def _loss_torch(torch: Any, x: Any) -> Any:
    own = torch.tensor(tokens(len(x["logits"]), 2).reshape(-1, D.tokens))
    nats = torch.nn.functional.cross_entropy(x["logits"].transpose(1, 2), own, reduction="none")
    return nats.mean(dim=1)


def _both(names: tuple[str, ...], backward: Callable[..., Any], A: Arithmetic, x: Arrays, dy: AnyArray) -> Arrays:
    made = backward(A, x, dy)
    return dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))


CASES = (
    NodeCase(
        name="rmsnorm",
        shapes={"x": (D.tokens, D.width), "g": (D.width,)},
        forward=lambda A, x: rmsnorm(A, D, x["x"], x["g"]),
        backward=functools.partial(_both, ("x", "g"), lambda A, x, dy: rmsnorm_backward(A, D, x["x"], x["g"], dy)),
        by_torch=_norm_torch,
    ),
    NodeCase(
        name="swiglu",
        shapes={"u": (D.tokens, 8)},
        forward=lambda A, x: swiglu(A, x["u"]),
        backward=functools.partial(_both, ("u",), lambda A, x, dy: swiglu_backward(A, x["u"], dy)),
        by_torch=_swiglu_torch,
        size=3.0,
    ),
    NodeCase(
        name="gelu",
        shapes={"u": (D.tokens, 8)},
        forward=lambda A, x: gelu(A, x["u"]),
        backward=functools.partial(_both, ("u",), lambda A, x, dy: gelu_backward(A, x["u"], dy)),
        by_torch=lambda torch, x: torch.nn.functional.gelu(x["u"], approximate="tanh"),
        size=2.0,
    ),
    NodeCase(
        name="attention",
        shapes={"x": (D.tokens, 3 * D.width)},
        forward=lambda A, x: _attend(A, x)[0],
        backward=_attend_backward,
        by_torch=_attend_torch,
        size=1.5,
    ),
    NodeCase(
        name="embed",
        shapes={"table": (D.vocabulary, D.width), "positions": (D.context, D.width)},
        forward=lambda A, x: embed(A, D, tokens(len(x["table"]), 1), x["table"], x["positions"]),
        backward=functools.partial(
            _both, ("table", "positions"), lambda A, x, dy: embed_backward(A, D, tokens(len(dy), 1), dy)
        ),
        by_torch=_embed_torch,
    ),
    NodeCase(
        name="cross_entropy",
        shapes={"logits": (D.tokens, D.vocabulary)},
        forward=lambda A, x: cross_entropy(A, D, x["logits"], tokens(len(x["logits"]), 2))[0],
        backward=functools.partial(
            _both,
            ("logits",),
            lambda A, x, dy: scale_gradient(cross_entropy(A, D, x["logits"], tokens(len(dy), 2))[1], dy),
        ),
        by_torch=_loss_torch,
        size=4.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder of ``layers`` layers put together from the nodes: attention and SwiGLU, pre-norm, weights [K, O]."""

    layers: int
    hidden: int = 7

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its parameters, without the replica axis."""
        d, h = D.width, self.hidden
        made: dict[str, tuple[int, ...]] = {"table": (D.vocabulary, d), "positions": (D.context, d)}
        for i in range(self.layers):
            made |= {f"{i}.n1": (d,), f"{i}.qkv": (d, 3 * d), f"{i}.out": (d, d)}
            made |= {f"{i}.n2": (d,), f"{i}.up": (d, 2 * h), f"{i}.down": (h, d)}
        return made | {"n": (d,), "head": (d, D.vocabulary)}

    def parameters(self, replicas: int, dtype: type) -> dict[str, AnyArray]:
        """Bell-shaped numbers, gains about 1."""
        made: dict[str, AnyArray] = {}
        for i, (name, shape) in enumerate(self.shapes().items()):
            x = random_bell(5, Purpose.WEIGHTS, (replicas, *shape), step=i).astype(np.float64)
            made[name] = (x / math.sqrt(shape[0]) if len(shape) > 1 else 1 + 0.3 * x).astype(dtype)
        return made

    def forward(self, A: Arithmetic, w: Arrays) -> tuple[AnyArray, AnyArray, list[dict[str, AnyArray]]]:
        """loss [R], gradient of the logits, and what each layer keeps."""
        replicas = len(w["head"])
        x, kept = embed(A, D, tokens(replicas, 1), w["table"], w["positions"]), []
        for i in range(self.layers):
            own = {"x": x, "a": rmsnorm(A, D, x, w[f"{i}.n1"])}
            own["qkv"] = A.product(own["a"], w[f"{i}.qkv"])
            own["o"] = _attend(A, {"x": own["qkv"]})[0]
            own["y"] = x + A.product(own["o"], w[f"{i}.out"])
            own["b"] = rmsnorm(A, D, own["y"], w[f"{i}.n2"])
            own["u"] = A.product(own["b"], w[f"{i}.up"])
            own["g"] = swiglu(A, own["u"])
            x = own["y"] + A.product(own["g"], w[f"{i}.down"])
            kept.append(own)
        kept.append({"x": x, "a": rmsnorm(A, D, x, w["n"])})
        loss, dlogits = cross_entropy(A, D, A.product(kept[-1]["a"], w["head"]), tokens(replicas, 2))
        return loss, dlogits, kept

    def gradients(self, A: Arithmetic, w: Arrays) -> tuple[AnyArray, dict[str, AnyArray]]:
        """loss [R] and the gradient of every parameter."""
        loss, dlogits, kept = self.forward(A, w)
        made: dict[str, AnyArray] = {}

        def back(x: AnyArray, name: str, dy: AnyArray) -> AnyArray:
            made[name] = A.product(x.swapaxes(1, 2), dy)
            return A.product(dy, w[name].swapaxes(1, 2))

        last = kept.pop()
        dx, made["n"] = rmsnorm_backward(A, D, last["x"], w["n"], back(last["a"], "head", dlogits))
        for i in reversed(range(self.layers)):
            own = kept[i]
            db = back(own["b"], f"{i}.up", swiglu_backward(A, own["u"], back(own["g"], f"{i}.down", dx)))
            dy, made[f"{i}.n2"] = rmsnorm_backward(A, D, own["y"], w[f"{i}.n2"], db)
            dy += dx
            dqkv = _attend_backward(A, {"x": own["qkv"]}, back(own["o"], f"{i}.out", dy))["x"]
            dx, made[f"{i}.n1"] = rmsnorm_backward(A, D, own["x"], w[f"{i}.n1"], back(own["a"], f"{i}.qkv", dqkv))
            dx += dy
        made["table"], made["positions"] = embed_backward(A, D, tokens(len(dx), 1), dx)
        return loss, made

    def by_torch(self, torch: Any, w: Any) -> Any:
        """loss [R]."""
        x = _embed_torch(torch, w)
        for i in range(self.layers):
            qkv = _norm_torch(torch, {"x": x, "g": w[f"{i}.n1"]}) @ w[f"{i}.qkv"]
            y = x + _attend_torch(torch, {"x": qkv}) @ w[f"{i}.out"]
            u = _norm_torch(torch, {"x": y, "g": w[f"{i}.n2"]}) @ w[f"{i}.up"]
            x = y + _swiglu_torch(torch, {"u": u}) @ w[f"{i}.down"]
        return _loss_torch(torch, {"logits": _norm_torch(torch, {"x": x, "g": w["n"]}) @ w["head"]})
