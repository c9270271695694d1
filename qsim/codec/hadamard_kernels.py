"""Numba kernels of the fast Hadamard transform on blocks of 16 or 32. Knows no sign stream and no shape rule.

Contract: x, out float32 [blocks, n], C-contiguous, x perhaps read-only; ``out`` may be x itself. out is
H(x * before) * after + 0 in the order that ``qsim.codec.hadamard`` defines: a block is one vector of n lanes, and a
stage is one exchange of lanes at its distance, one addition and one subtraction, each correctly rounded. Written in
LLVM's own vectors because the same steps on 16 scalars are half as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

from qsim.codec.jit import kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import F32

_F4 = numba.float32
_LANE, _INDEX = ir.FloatType(), ir.IntType(32)
_FLOAT_ALIGN = 4


def _lanes(order: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_INDEX, len(order)), order)


def _butterflies(builder: Any, v: Any, size: int) -> Any:
    """Stages of distance 1, 2, 4 ...: lane i without that bit becomes v[i] + v[i + d], its partner v[i] - v[i + d]."""
    distance = 1
    while distance < size:
        other = builder.shuffle_vector(v, v, _lanes([i ^ distance for i in range(size)]))
        total = builder.fadd(other, v)
        difference = builder.fsub(other, v)  # right in the upper lane: lower less upper
        upper = [i + size if i & distance else i for i in range(size)]
        v = builder.shuffle_vector(total, difference, _lanes(upper))
        distance *= 2
    return v


def _transform_of(size: int) -> Any:
    """The whole transform of one block, for use in a kernel: transform(x, before, after, out), all [size]."""
    vector = ir.VectorType(_LANE, size)

    @intrinsic  # type: ignore[untyped-decorator]
    def transform(context: Any, x: Any, before: Any, after: Any, out: Any) -> Any:
        def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_at, before_at, after_at, out_at = (
                builder.bitcast(target.make_array(kind)(target, builder, value).data, vector.as_pointer())
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            v = builder.fmul(builder.load(x_at, align=_FLOAT_ALIGN), builder.load(before_at, align=_FLOAT_ALIGN))
            v = builder.fmul(_butterflies(builder, v, size), builder.load(after_at, align=_FLOAT_ALIGN))
            v = builder.fadd(v, ir.Constant(vector, [0.0] * size))  # -0 becomes +0, all else stays
            nan = ir.Constant(vector, [float("nan")] * size)  # 0x7FC00000 whatever NaN the processor made
            v = builder.select(builder.fcmp_unordered("uno", v, v), nan, v)
            builder.store(v, out_at, align=_FLOAT_ALIGN)
            return target.get_dummy_value()

        return numba.types.void(x, before, after, out), build

    return transform


_transform_16 = _transform_of(16)
_transform_32 = _transform_of(32)


@kernel(read(_F4, 2), read(_F4, 1), read(_F4, 1), write(_F4, 2))
def hadamard_16(x: F32, before: F32, after: F32, out: F32) -> None:
    """out = H(x * before) * after + 0, blocks of 16; NaN always as 0x7FC00000."""
    for block in range(x.shape[0]):
        _transform_16(x[block], before, after, out[block])


@kernel(read(_F4, 2), read(_F4, 1), read(_F4, 1), write(_F4, 2))
def hadamard_32(x: F32, before: F32, after: F32, out: F32) -> None:
    """out = H(x * before) * after + 0, blocks of 32; NaN always as 0x7FC00000."""
    for block in range(x.shape[0]):
        _transform_32(x[block], before, after, out[block])
