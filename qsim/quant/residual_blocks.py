"""Residuals cast by a block recipe, with scales of their own. Knows no recipe with memory and no state.

Each replica is a matrix of its own, so its bits depend on no other.
"""

from __future__ import annotations

import math

import numpy as np

from qsim.arrays import F32, AnyArray, frozen
from qsim.backends.protocol import Backend, CastCounts
from qsim.backends.scaling import count
from qsim.codec.residual import QUIET_NAN, signed_residual
from qsim.codec.scaled.recipes import TENSOR, ScaleRecipe
from qsim.codec.scaled.refusals import RefusedError
from qsim.codec.scaled.result import BlockCounts, ScaledCodes
from qsim.errors import FormatError, UsageError
from qsim.formats import CastPolicy
from qsim.quant.state import Layout, QuantizedTensor, QuantSnapshot


def cast_blocks(
    x: F32, snapshot: QuantSnapshot, elements: ScaleRecipe, *, center: F32 | None, backend: Backend, policy: CastPolicy
) -> QuantizedTensor:
    """RN(x - center), each replica cast as a matrix [rows, columns]: its bits depend on no other replica."""
    lead = snapshot.scale.shape
    rest = x.shape[len(lead) :]
    if not rest:
        raise UsageError(f"elements {elements.name} of {snapshot.op}: tensor {list(x.shape)} has no columns to block")
    x = backend.get(x)  # a residual of several replicas is cast one by one
    r = x if center is None else signed_residual(x, center)
    parts = []
    for i, one in enumerate(r.reshape(math.prod(lead), math.prod(rest[:-1]), rest[-1])):
        try:
            parts.append(backend.quantize_blocks(np.ascontiguousarray(one), elements, policy))
        except RefusedError as error:
            numbers = i * one.size + np.arange(one.size).reshape(one.shape)
            raise FormatError(error.refused.named(x, numbers, steps=" less its centre")) from None
    grid = parts[0].scales.shape
    if elements.block == TENSOR and grid == (1, 1):
        grid = ()
    elif elements.block.rows == 1:
        grid = (*rest[:-1], grid[-1])
    g = [part.tensor_scale for part in parts if part.tensor_scale is not None]
    return QuantizedTensor(
        codes=_stacked([part.codes for part in parts], x.shape),
        scales=_stacked([part.scales for part in parts], (*lead, *grid)),
        layout=Layout.ONE_PER_BYTE,
        shape=x.shape,
        snapshot=snapshot,
        amax=_stacked([part.amax for part in parts], lead),
        counts=CastCounts(
            saturated=_stacked([np.asarray(part.counts.saturated, np.int64) for part in parts], lead),
            flushed=_stacked([np.asarray(part.counts.flushed, np.int64) for part in parts], lead),
            nan=frozen(count(np.isnan(x), lead)),
            inf=frozen(count(np.isinf(x), lead)),
        ),
        recipe=elements,
        tensor_scale=_stacked(g, lead) if g else None,
    )


def decode_blocks(
    tensor: QuantizedTensor, elements: ScaleRecipe, *, lead: tuple[int, ...], center: F32 | None, backend: Backend
) -> F32:
    """RN(decoded residual + center), replica by replica."""
    assert tensor.scales is not None, "codes of a block recipe have its scales beside them"
    replicas, rest = math.prod(lead), tensor.shape[len(lead) :]
    shape = math.prod(rest[:-1]), rest[-1]
    codes = backend.get(tensor.codes).reshape(replicas, *shape)
    scales = tensor.scales.reshape(replicas, *elements.block.grid(shape))
    g = None if tensor.tensor_scale is None else tensor.tensor_scale.reshape(replicas)
    parts = [
        backend.dequantize_blocks(
            ScaledCodes(
                codes=codes[i],
                scales=scales[i],
                tensor_scale=None if g is None else g[i : i + 1].reshape(()),
                amax=np.zeros((), np.float32),
                counts=BlockCounts(0, 0, 0, 0, 0),
            ),
            elements,
        )
        for i in range(replicas)
    ]
    out = np.stack(parts).reshape(tensor.shape)
    if center is not None:
        with np.errstate(over="ignore"):
            out = out + center
    return np.where(np.isnan(out), QUIET_NAN, np.asarray(out, np.float32))


def _stacked(parts: list[AnyArray], shape: tuple[int, ...]) -> AnyArray:
    """One read-only array of what the replicas have; without a replica axis, what the one has."""
    stacked: AnyArray = np.stack(parts).reshape(shape)
    return frozen(stacked)
