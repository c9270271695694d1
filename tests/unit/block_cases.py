"""Matrices and comparisons for tests of the CUDA kernels of scale recipes. Holds no test."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels._place import HOST
from cuda_kernels.blocks import Quantized, quantize_blocks
from qsim.backends import get_backend
from qsim.codec.general import rule_words
from qsim.codec.scaled import SCALE_RECIPES, Block, BlockError, Float32Scale, ScaleOrder, ScaleRecipe, TwoLevelScale
from qsim.codec.scaled.rules import device_numbers
from qsim.codec.tables import decode_table
from qsim.formats import E2M1FN, FORMATS, POLICIES, CastPolicy
from tests.places import launch_at

NUMBA = get_backend("numba")
OCP = POLICIES["ocp"]
FLT_MAX = np.finfo(np.float32).max
NEGATIVE_NAN = np.uint32(0xFFC00001).view(np.float32)


def mine(block: tuple[int, int], *, order: ScaleOrder | None = None, scale_max: int = 448) -> ScaleRecipe:
    """FP4 in blocks of one's own, with a float32 scale or two levels; four over six by squared errors."""
    if order is None:
        return ScaleRecipe(name="mine", fmt=E2M1FN, block=Block(*block), scale=Float32Scale())
    error = BlockError.SQUARED if order is ScaleOrder.FOUR_OVER_SIX else None
    scale = TwoLevelScale(order=order, error=error, scale_max=scale_max)
    return ScaleRecipe(name="mine", fmt=E2M1FN, block=Block(*block), scale=scale)


def spread(shape: tuple[int, int], seed: int = 1, width: float = 3) -> Any:
    """Numbers over many binades."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(width * rng.standard_normal(shape))).astype(np.float32)


def hostile() -> Any:
    """NaN, Inf, zeros of both signs, subnormals, FLT_MAX; blocks of zeros; tails in both directions."""
    x = spread((19, 150))
    x[0, :64], x[1, 16:48] = 0, -0.0
    x[2, :12] = [np.nan, 0, -0.0, 1e-45, -3e38, 1, 2, 3, 4, 5, 6, 7]
    x[3, 33:37] = [NEGATIVE_NAN, -np.inf, np.inf, 1e-40]
    x[4, -1], x[5, 40:42], x[6, 100] = -np.inf, [np.inf, FLT_MAX], np.nan
    x[7], x[8, ::2], x[9, 5] = 1e-42, -0.0, FLT_MAX
    x[10, :40], x[11, 16:32] = [1e-38, -2e-45] * 20, 2.0**-149
    return x


def ordinary() -> Any:
    """Rows that 16-byte loads take, and blocks below one another."""
    return spread((40, 64), seed=2, width=1)


def tiny() -> Any:
    """Down to the subnormals, where 1 / scale and 1 / pt are Inf or subnormal too."""
    return (spread((5, 132), seed=3) * np.float32(1e-43)).astype(np.float32)


def huge() -> Any:
    """Up to FLT_MAX, and a zero and the least number beside it."""
    x = (np.sign(spread((6, 36), seed=4)) * np.linspace(1e38, FLT_MAX, 216).reshape(6, 36)).astype(np.float32)
    x[0, 0], x[0, 1], x[5, :3] = 0, 1e-45, 0
    return x


def ties() -> Any:
    """The midpoints of every format under a scale of 1 (its largest number leads 16), and those beyond the largest."""
    rows = []
    for name in ("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn"):
        values = np.unique(np.abs(decode_table(FORMATS[name])))
        values = values[np.isfinite(values)]
        middle = (values[:-1] + values[1:]) / 2
        for lead in (values[-1], values[-1] + (values[-1] - values[-2]) / 2):
            taken = np.resize(np.concatenate([middle, -middle]), 15 * 17).reshape(17, 15)
            rows.append(np.concatenate([np.full((17, 1), lead), taken], axis=1).reshape(1, -1))
    return np.concatenate(rows).astype(np.float32)


def close_calls() -> Any:
    """Blocks of 16 numbers [n, 16] whose two maps of four over six err by nearly the same; the tensor amax is 1536.

    One number of each was moved to where the choice changes, and to its neighbours: a sum's last bit decides there.
    """
    recipe = SCALE_RECIPES["nvfp4_4over6"]

    def chosen(blocks: Any) -> Any:
        return NUMBA.quantize_blocks(blocks, recipe, OCP, tensor_amax=np.float32(1536)).scales[:, 0]

    x = (np.random.default_rng(5).uniform(0.1, 5.9, (400, 16))).astype(np.float32)
    x[:, 0] = 6
    low, high = x.copy(), x.copy()
    low[:, 7], high[:, 7] = 4, 5
    moving = chosen(low) != chosen(high)
    low, high = low[moving], high[moving]
    at_low = chosen(low)
    for _ in range(30):
        middle = low.copy()
        middle[:, 7] = (low[:, 7] + high[:, 7]) / 2
        same = chosen(middle) == at_low
        low[same], high[~same] = middle[same], middle[~same]
    near = np.repeat(low, 33, axis=0)
    near[:, 7] = (near[:, 7].view(np.int32) + np.tile(np.arange(-16, 17), len(low)).astype(np.int32)).view(np.float32)
    return near


def just_below(stream: Any) -> list[tuple[Any, np.float32]]:
    """Matrices (x [1, n], tensor amax G) with one element y = 6 X / G that is below a number t, which it is in float64.

    G leads the last block, so its scale is 448; X stands beside it. From t on the element's word would send it up. With
    t = T / 2^33, T odd, the small number r = T G - 3 X 2^34 > 0 that is to be the distance has one G modulo 2^34.
    """
    found = []
    for i, word in enumerate(stream.words(8192)):
        for low in (1, 2, 3):
            t = (low << 32) + int(word) + 1
            for r in range(1, 6 if t % 2 and i % 16 else 0):
                g = r * pow(t, -1, 1 << 34) % (1 << 34)
                if g < 1 << 24 and (t * g - r) % 3 == 0:
                    x = np.zeros((1, i // 16 * 16 + 16), np.float32)
                    x[0, i // 16 * 16], x[0, i] = g, (t * g - r) // (3 << 34)
                    found.append((x, np.float32(g)))
    return found


MATRICES = {
    "hostile": hostile,
    "ordinary": ordinary,
    "tiny": tiny,
    "huge": huge,
    "ties": ties,
    "all NaN": lambda: np.full((3, 17), NEGATIVE_NAN),
    "zeros": lambda: np.where(spread((2, 33)) > 0, np.float32(0), np.float32(-0.0)),
    "one": lambda: np.array([[-3e-39]], np.float32),
    "one row": lambda: spread((1, 261), seed=5),
    "one column": lambda: spread((37, 1), seed=6),
    "no columns": lambda: np.zeros((3, 0), np.float32),
    "no rows": lambda: np.zeros((0, 20), np.float32),
}


@cache
def matrix(name: str) -> Any:
    """The matrix of that name."""
    return MATRICES[name]()


def rules(recipe: ScaleRecipe, policy: CastPolicy) -> Any:
    """The elements' format and policy as the kernels read them."""
    return rule_words(recipe.fmt, policy)


def words(stream: Any) -> Any:
    """A stream as the kernels read it, or None."""
    return None if stream is None else np.array([*stream.key(), *stream.counter()], np.uint32)


def run(x: Any, recipe: ScaleRecipe, policy: CastPolicy = OCP, *, place: Any = HOST, **options: Any) -> Quantized:
    """The launcher, with arguments of the backend."""
    options["stream"] = words(options.get("stream"))
    if options.get("tensor_amax") is not None:
        options["tensor_amax"] = np.array([options["tensor_amax"]], np.float32)
    return launch_at(place, quantize_blocks, x, rules(recipe, policy), device_numbers(recipe), **options)


def difference(expected: Any, got: Quantized) -> str:
    """What of a cast of the CPU backend differs from one of the kernels; nothing where it is the same to the bit."""
    pairs = {
        "codes": (expected.codes, got.codes),
        "scales": (expected.scales, got.scales),
        "amax": (expected.amax.reshape(1), got.top.view(np.float32)),
        "counts": (np.array(expected.counts, np.uint64), got.counts[:5]),
    }
    if expected.tensor_scale is not None or got.tensor is not None:
        pairs["tensor"] = (expected.tensor_scale.reshape(1), got.tensor)
    for name, (a, b) in pairs.items():
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            return name
    return "refused" if got.counts[5] else ""


def assert_same(x: Any, recipe: ScaleRecipe, policy: CastPolicy = OCP, *, place: Any = HOST, **options: Any) -> None:
    """The kernels cast as the CPU backend does."""
    expected = NUMBA.quantize_blocks(x, recipe, policy, **options)
    assert not difference(expected, run(x, recipe, policy, place=place, **options)), recipe.name
