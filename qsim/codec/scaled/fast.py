"""Scaled casts at memory speed: equal to ``oracle`` bit for bit. Knows no axis and no layout but rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32
from qsim.codec.inputs import check_stream
from qsim.codec.packing import pack
from qsim.codec.residual import signed_residual
from qsim.codec.scaled import decode_kernels, measure_kernels
from qsim.codec.scaled.blocks import BlockCast
from qsim.codec.scaled.recipes import Float32Scale, ScaleRecipe, TwoLevelScale
from qsim.codec.scaled.result import BlockCounts, ScaledCodes
from qsim.codec.scaled.rules import check_cast, decode_operands, rule_of
from qsim.codec.tables import decode_table
from qsim.codec.threads import in_chunks
from qsim.formats import CastPolicy, RoundMode

if TYPE_CHECKING:
    from qsim.philox import RandomStream

_NO_CENTER = np.zeros((0, 0), np.float32)


def amax_of(x: F32, center: F32 | None = None) -> np.float32:
    """The largest finite |RN(x - center)| of a matrix; 0.0 where there is none. center [1 or M, 1 or K]."""
    rows, columns = x.shape
    flat = center is None or center.size == 1
    center = _NO_CENTER if center is None else center
    source = x.reshape(1, -1) if flat else x
    found: list[int] = []

    def work(start: int, stop: int) -> None:
        part = source[:, start:stop] if flat else source[start:stop]
        own = center[start:stop] if center.shape[0] == rows > 1 else center
        top, bad = np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.uint32)
        measure_kernels.measure(part, np.ascontiguousarray(own), part.shape[0], part.shape[1], top, bad)
        found.append(int(top[0, 0]))

    if x.size:
        in_chunks(work, x.size if flat else rows, cost=1 if flat else columns)
    return np.uint32(max(found, default=0)).view(np.float32)


def quantize_matrix(
    x: F32,
    recipe: ScaleRecipe,
    *,
    policy: CastPolicy,
    stream: RandomStream | None = None,
    packed: bool = False,
    counting: bool = True,
    tensor_amax: np.float32 | None = None,
    center: F32 | None = None,
) -> ScaledCodes:
    """Codes and scales of the contiguous float32 matrix RN(x - center) [M, K]; equal to ``quantize_oracle``.

    center [1 or M, 1 or K].

    stream: words of stochastic rounding; element i in C order takes word i. packed: codes [M, (K + 1) // 2], even
    element in the low nibble. Without ``counting`` the counts are 0. tensor_amax: the g of a two-level scale, by
    default the amax of x. FormatError: what the policy refuses; UsageError: a stream where none is drawn from, or none.
    """
    two_level = isinstance(recipe.scale, TwoLevelScale)
    g = np.float32(0)
    if two_level:
        g = amax_of(x, center) if tensor_amax is None else tensor_amax
    check_stream(policy, stream, x.size)
    check_cast(recipe, packed=packed, tensor_amax=tensor_amax)
    shape = (x.shape[0], x.shape[1])
    resolved = policy.codes(recipe.fmt)
    usual = policy.rounding is RoundMode.TIES_TO_EVEN and not (resolved.refuses_nan or resolved.refuses_overflow)
    if center is not None and not (usual and np.isfinite(center).all()):
        x, center = signed_residual(x, center), None
    (bm, bk), grid = recipe.block.within(shape), recipe.block.grid(shape)
    fused = usual and packed and (bk % 2 == 0 or grid[1] <= 1)  # else two blocks share a byte
    own = isinstance(recipe.scale, Float32Scale)
    job = BlockCast(
        x=x,
        center=_NO_CENTER if center is None else center,
        bm=bm,
        bk=bk,
        rule=rule_of(recipe, g),
        fmt=recipe.fmt,
        policy=policy,
        packed=fused,
        counting=counting,
        codes=np.empty((shape[0], (shape[1] + 1) // 2 if fused else shape[1]), np.uint8),
        scales=np.empty((grid[0], grid[1] if own else 0), np.float32),
        scale_codes=np.empty((grid[0], 0 if own else grid[1]), np.uint8),
    )
    if not usual:
        counts, amax = job.generally(stream)
    elif recipe.block.rows == 0:
        counts, amax = job.in_phases()
    else:
        counts, amax = job.in_tiles()
    return ScaledCodes(
        codes=pack(job.codes) if packed and not fused else job.codes,
        scales=job.scales if own else job.scale_codes,
        tensor_scale=np.asarray(g, np.float32) if two_level else None,
        amax=np.asarray(amax, np.float32),
        counts=BlockCounts(*(int(n) for n in counts)),
    )


def dequantize_matrix(scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
    """The float32 matrix [M, K] of unpacked codes and scales; NaN is always the bits 0x7FC00000."""
    codes = np.ascontiguousarray(scaled.codes)
    shape = (codes.shape[0], codes.shape[1])
    out = np.empty(shape, np.float32)
    a, b, c, exact = decode_operands(scaled, recipe)
    bm, bk = recipe.block.within(shape)
    table = decode_table(recipe.fmt)[: recipe.fmt.code_count]

    def work(start: int, stop: int) -> None:
        band = slice(start // bm, -(-stop // bm))
        decode_kernels.decode_blocks(codes[start:stop], bm, bk, table, a[band], b, c, exact, out[start:stop])

    if out.size:
        one = recipe.block.rows == 0
        in_chunks(work, shape[0], cost=shape[1], align=1 if one else bm)
    return out
