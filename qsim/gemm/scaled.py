"""Operands of a scaled product: codes, and the factors that their recipe puts beside them. Knows no sum.

Both operands have K last: a [M, K] and b [N, K] give D [M, N]. What an element stands for is an exact real number,

    value(code) * block * row * tensor,

block the scale of its block of several k (E8M0, E4M3 or float32), row what serves whole rows (float32), tensor the one
factor of a two-level recipe: s_dec of TE, pt of torchao, the quotient g / F of the others. Where a scale is one of
those that multiply before encode, its descale RN(1 / scale) is meant. Decode rounds such a product to float32; a
product of matrices does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from qsim.arrays import F32, F64, U8, frozen
from qsim.codec.scaled.recipes import Float32Scale, PowerOfTwoScale, ScaleOrder, ScaleRecipe, TwoLevelScale
from qsim.codec.scaled.result import ScaledCodes
from qsim.codec.scaled.rules import rule_of
from qsim.codec.tables import decode_table
from qsim.codec.threads import in_chunks
from qsim.errors import UsageError
from qsim.formats import E4M3FN, E8M0FNU, FloatFormat
from qsim.gemm import scaled_kernels as kernels

_NONE = np.zeros((0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledOperand:
    """codes uint8 [rows, K], one a byte, of elements in ``fmt``, and their factors.

    block: scales float64 [row blocks, k blocks] of ``extent`` (rows, k), or None. row: float64 [rows], float32 numbers.
    tensor: a rational number, a float32 or a quotient of two integers and one. scale_codes: uint8, beside ``block``
    where it is made of codes of ``scale_format``.
    """

    codes: U8
    fmt: FloatFormat
    row: F64
    tensor: Fraction = Fraction(1)
    block: F64 | None = None
    extent: tuple[int, int] = (1, 1)
    scale_codes: U8 | None = None
    scale_format: str | None = None

    def values(self) -> F64:
        """value(code) * block, float64 [rows, K]: exact, of at most 28 bits."""
        out = np.empty(self.codes.shape)
        codes, block = (
            np.ascontiguousarray(self.codes),
            _NONE if self.block is None else np.ascontiguousarray(self.block),
        )
        bm, bk = self.extent[0], min(self.extent[1], max(self.codes.shape[1], 1))
        table = element_values(self.fmt)

        def work(start: int, stop: int) -> None:
            band = block if block.size == 0 else block[start // bm : -(-stop // bm)]
            kernels.scaled_values(codes[start:stop], table, band, bm, bk, out[start:stop])

        if out.size:
            in_chunks(work, codes.shape[0], cost=codes.shape[1], align=bm)
        return out

    def narrow_values(self) -> F32:
        """value(code), float32 [rows, K]."""
        out, codes, table = np.empty(self.codes.shape, np.float32), self.codes, decode_table(self.fmt)
        codes = np.ascontiguousarray(codes)
        in_chunks(
            lambda start, stop: kernels.narrow_values(codes[start:stop], table, out[start:stop]),
            codes.shape[0], cost=codes.shape[1],
        )  # fmt: skip
        return out


@lru_cache(maxsize=64)
def element_values(fmt: FloatFormat) -> F64:
    """Value of every code, float64 [256]."""
    return frozen(decode_table(fmt).astype(np.float64))


def scaled_operand(scaled: ScaledCodes, recipe: ScaleRecipe) -> ScaledOperand:
    """The operand of unpacked codes [rows, K] and their scales."""
    codes = scaled.codes
    rows, depth = codes.shape
    # K keeps the recipe's own width, which a tensor core asks for; rows are cut to what there is.
    extent = recipe.block.within((rows, depth))[0], recipe.block.extent((rows, depth))[1]
    ones = np.ones(rows)
    match recipe.scale:
        case Float32Scale():
            with np.errstate(divide="ignore", over="ignore"):
                descale = np.divide(np.float32(1), scaled.scales, dtype=np.float32).astype(np.float64)
            if recipe.block.cols == 0:
                row = np.repeat(descale.reshape(-1), extent[0])[:rows] if descale.size else ones
                return ScaledOperand(codes=codes, fmt=recipe.fmt, row=np.ascontiguousarray(row))
            return ScaledOperand(codes=codes, fmt=recipe.fmt, row=ones, block=descale, extent=extent)
        case PowerOfTwoScale():
            block = decode_table(E8M0FNU)[scaled.scales].astype(np.float64)
            return ScaledOperand(
                codes=codes, fmt=recipe.fmt, row=ones, block=block, extent=extent,
                scale_codes=np.asarray(scaled.scales, np.uint8), scale_format=E8M0FNU.name,
            )  # fmt: skip
        case TwoLevelScale(order=order) as scale:
            assert scaled.tensor_scale is not None, "a two-level cast keeps its tensor scale"
            g = np.float32(scaled.tensor_scale)
            floats = rule_of(recipe, g).floats
            tensor = {ScaleOrder.TE: floats[2], ScaleOrder.TORCHAO: floats[4]}.get(order)
            factor = Fraction(float(g)) / scale.full_range if tensor is None else Fraction(float(tensor))
            return ScaledOperand(
                codes=codes, fmt=recipe.fmt, row=ones, tensor=factor, extent=extent,
                block=decode_table(E4M3FN)[scaled.scales].astype(np.float64),
                scale_codes=np.asarray(scaled.scales, np.uint8), scale_format=E4M3FN.name,
            )  # fmt: skip


def check_depths(a: ScaledOperand, b: ScaledOperand) -> int:
    """K; UsageError where the operands differ."""
    if a.codes.shape[1] != b.codes.shape[1]:
        hint = "; b's other axis is that long: transpose_b" if b.codes.shape[0] == a.codes.shape[1] else ""
        raise UsageError(f"a has K = {a.codes.shape[1]} and b K = {b.codes.shape[1]}; they must be equal{hint}")
    return int(a.codes.shape[1])
