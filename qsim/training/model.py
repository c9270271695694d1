"""The decoder as a graph of steps, and its parameters by name. Runs nothing; knows no number but sizes.

A layer is a list of steps: norm, QKV, split, scores, softmax, values, projection, residual, norm, up, activation, down,
residual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from qsim.arrays import F32, frozen
from qsim.philox import Purpose, random_bell
from qsim.quant import OpId, Site, TensorRole
from qsim.sim.schedule import DATA, HELD, Block, Graph, Node, Product, param_slot
from qsim.sim.schedule.walk import TAIL
from qsim.training.config import RECOMPUTED, ModelParams

VOCABULARY = 256
"""A token is a byte."""

STEM_PARAMS: Mapping[str, int] = {"embed": Site.EMBED, "positions": Site.POSITIONS}
LAYER_PARAMS: Mapping[str, int] = {
    "norm_attn": Site.NORM_ATTN,
    "qkv": Site.QKV,
    "proj": Site.PROJ,
    "norm_ffn": Site.NORM_FFN,
    "up": Site.FFN_UP,
    "down": Site.FFN_DOWN,
}
TAIL_PARAMS: Mapping[str, int] = {"norm_final": Site.NORM_FINAL, "head": Site.HEAD}
_NAMES = {int(site): name for params in (STEM_PARAMS, LAYER_PARAMS, TAIL_PARAMS) for name, site in params.items()}
_INPUT, _WEIGHT, _GRADIENT = TensorRole.INPUT, TensorRole.WEIGHT, TensorRole.GRAD_OUTPUT


def _linear(site: Site, x: str, w: str, out: str) -> Product:
    return Product("linear", int(site), x, w, out, (_INPUT, _WEIGHT), _GRADIENT)


def _norm(x: str, gain: str, out: str) -> Node:
    return Node("rmsnorm", (x, gain), (out,), reads=(x, gain), flows=(out,), grads=(x, gain))


def _residual(x: str, y: str, out: str) -> Node:
    return Node("add", (x, y), (out,), flows=(out,), grads=(x, y), passes=True)


def decoder(params: ModelParams) -> Graph:
    """The graph of a model. Values: h is what comes into a layer, q, k, v by token and channel of all heads."""
    saved = params.statistics != RECOMPUTED
    softmax = Node(
        "softmax", ("s",), ("p", "lse"), reads=("p", "d:o", "o"), flows=("p",), grads=("s",),
        again="probabilities" if saved else "", again_ins=("s", "lse"), again_outs=("p",),
    )  # fmt: skip
    layer = (
        _norm("h", "norm_attn", "n"),
        _linear(Site.QKV, "n", "qkv", "x"),
        Node("split", ("x",), ("q", "k", "v"), flows=("q", "k", "v"), grads=("x",)),
        Product("scores", int(Site.SCORES), "q", "k", "s", (TensorRole.ATTN_Q, TensorRole.ATTN_K)),
        softmax,
        Product("values", int(Site.VALUES), "p", "v", "o", (TensorRole.ATTN_P, TensorRole.ATTN_V)),
        _linear(Site.PROJ, "o", "proj", "a"),
        _residual("h", "a", "m"),
        _norm("m", "norm_ffn", "nn"),
        _linear(Site.FFN_UP, "nn", "up", "u"),
        Node(params.activation, ("u",), ("g",), reads=("u",), flows=("g",), grads=("u",)),
        _linear(Site.FFN_DOWN, "g", "down", "f"),
        _residual("m", "f", "y"),
    )
    stem = Node(
        "embed", (DATA, "embed", "positions"), ("y",), reads=(DATA,), flows=("y",), grads=("embed", "positions")
    )
    head = Product("linear", int(Site.HEAD), "z", "head", "logits", (_INPUT, _WEIGHT), cast=False)
    loss = Node("loss", ("logits", DATA, HELD), ("loss", "dlogits"))
    return Graph(
        stem=Block(steps=(stem,), source="", result="y", params=STEM_PARAMS),
        layer=Block(
            steps=layer, source="h", result="y", params=LAYER_PARAMS,
            saves=frozenset({"o", "lse"}) if saved else frozenset(),
        ),
        tail=Block(steps=(_norm("y", "norm_final", "z"), head, loss), source="y", result="logits", params=TAIL_PARAMS),
        batch=int(Site.EMBED),
    )  # fmt: skip


def shapes(params: ModelParams) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, without the replica axis: "embed", "L0.qkv" ..., "head"."""
    d, up = params.width, params.hidden * (2 if params.activation == "swiglu" else 1)
    of_layer = {
        "norm_attn": (d,), "qkv": (d, 3 * d), "proj": (d, d),
        "norm_ffn": (d,), "up": (d, up), "down": (params.hidden, d),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, d), "positions": (params.context, d)}
    for layer in range(params.layers):
        found |= {f"L{layer}.{name}": shape for name, shape in of_layer.items()}
    return found | {"norm_final": (d,), "head": (d, VOCABULARY)}


def name_of(op: OpId) -> str:
    """The name of the parameter that ``op`` loads or casts."""
    name = _NAMES[op.site]
    return f"L{op.layer_id}.{name}" if name in LAYER_PARAMS else name


def place_of(name: str) -> str:
    """The slot of a parameter."""
    if "." not in name:
        return param_slot(name, TAIL)
    layer, own = name.split(".")
    return param_slot(own, int(layer[1:]))


def kind_of(name: str) -> str:
    """Kind of a parameter by its name: "qkv", "norm" ..."""
    return name.split(".")[-1].split("_")[0]


def block_of(name: str) -> str:
    """ "L0" ..., "stem" or "tail"."""
    if "." in name:
        return name.split(".")[0]
    return "stem" if name in STEM_PARAMS else "tail"


def drawn(params: ModelParams, seed: int) -> dict[str, F32]:
    """Parameters of an untrained model: bell-shaped with deviation 1/sqrt(fan-in), residual outputs also over
    sqrt(2 layers), embeddings 0.02 and 0.01, gains 1. A pure function of (seed, parameter).
    """
    found: dict[str, F32] = {}
    for name, shape in shapes(params).items():
        kind = kind_of(name)
        if kind == "norm":
            found[name] = frozen(np.ones(shape, np.float32))
            continue
        layer = int(name[1:].split(".")[0]) if "." in name else 0
        site = {n: s for part in (STEM_PARAMS, LAYER_PARAMS, TAIL_PARAMS) for n, s in part.items()}[name.split(".")[-1]]
        sigma = {"embed": 0.02, "positions": 0.01}.get(kind, 1.0 / math.sqrt(shape[0]))
        if kind in ("proj", "down"):
            sigma /= math.sqrt(2.0 * params.layers)
        bell = random_bell(seed, Purpose.WEIGHTS, shape, layer=layer, site=int(site))
        found[name] = frozen(bell * np.float32(sigma))
    return found


def spread(found: Mapping[str, F32], exponents: tuple[int, ...], params: ModelParams) -> dict[str, F32]:
    """W_q * 2^e and W_k * 2^-e in layer l, e = exponents[l]: in float32 the logits keep every bit."""
    changed, d = dict(found), params.width
    for layer, exponent in enumerate(exponents):
        qkv = found[f"L{layer}.qkv"].copy()
        qkv[..., :d] *= np.float32(2.0**exponent)
        qkv[..., d : 2 * d] *= np.float32(2.0**-exponent)
        changed[f"L{layer}.qkv"] = frozen(qkv)
    return changed
