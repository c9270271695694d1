"""What a backend must do: arrays and numbers only. Knows no owner, no state, no time.

A tensor is a numpy array or one that ``put`` made; results of tensors lie where the first argument does. What is one
number a replica or a centre - scales, amaxes, counts, sums - is numpy everywhere.

Every array carries ``lead`` leading replica axes (0 or 1); a reduction never crosses them, so the bits of
one replica do not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from qsim.arrays import F32, F64, I64, U8, AnyArray
from qsim.codec.counts import CastCounts
from qsim.codec.means import Sums
from qsim.codec.scaled import ScaledCodes, ScaleRecipe
from qsim.formats import CastPolicy, FloatFormat
from qsim.philox import RandomStream

if TYPE_CHECKING:
    from qsim.backends.fused import FusedNodes
    from qsim.gemm.epilogue import Epilogue
    from qsim.gemm.models import TensorCoreModel
    from qsim.gemm.products import Accumulator
    from qsim.gemm.scaled import ScaledOperand

__all__ = ["Backend", "Cast", "CastCounts", "CastSpec", "Finish", "Observed", "Sums"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """How a tensor is cast: the format and the policy (rounding, overflow, NaN).

    streams: for stochastic rounding one stream a replica (one in all without a replica axis), else none. Element i
    of a replica, in C order, takes word i of the replica's stream, so its bits depend on no other replica.
    """

    fmt: FloatFormat
    policy: CastPolicy
    streams: tuple[RandomStream, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Result of ``quantize``: codes uint8 [lead + rest] (one code a byte), amax float32 [lead], counts.

    amax is the largest finite |RN(x - center)|, 0.0 where there is none.
    """

    codes: U8
    amax: F32
    counts: CastCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Result of ``observe``: amax float32 [lead], counts int64 [lead], sums where a mean was asked for."""

    amax: F32
    nan_count: I64
    inf_count: I64
    sums: Sums | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How an accumulator becomes D: order of factors, shape [..., N] of D, a correction float32 [M, N] of centres, the
    output format, the bits of every NaN of y."""

    order: str
    shape: tuple[int, ...]
    out_dtype: str
    nan: int
    correction: F32 | None = None


@runtime_checkable
class Backend(Protocol):
    """Arrays on one device. The oracle is the definition; every other backend equals it bit for bit."""

    name: str

    @property
    def xp(self) -> Any:
        """Module of this backend's arrays: numpy, or cupy."""
        ...

    @property
    def fused(self) -> FusedNodes | None:
        """Nodes of a decoder that run faster here than their array formulas, with the same bits; None: none do."""
        ...

    def put(self, x: AnyArray) -> Any:
        """``x`` as this backend's array; itself where it is one."""
        ...

    def get(self, x: Any) -> AnyArray:
        """``x`` as a numpy array; itself where it is one."""
        ...

    def quantize(self, x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
        """Encode RN(RN(x - center) * scale); without a centre nothing is subtracted.

        x float32 [lead + rest], scale float32 [lead], center None or float32 that broadcasts to x. The sign
        of a NaN code is the sign of x where x is NaN; a NaN made by arithmetic (Inf - Inf, Inf * 0) is
        positive, as processors differ there. FormatError: another dtype, a format without sign or zero, or a
        scaled number that the policy refuses, with its index. UsageError: shapes that do not fit, or another
        number of streams than the rounding needs.
        """
        ...

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); without a centre nothing is added.

        codes uint8 [lead + rest], descale float32 [lead], center as in quantize; float32 [lead + rest]. NaN
        is always the bits 0x7FC00000. A code outside the format is a FormatError on the host backends.
        """
        ...

    def quantize_and_decode(
        self, x: F32, scale: F32, descale: F32, center: F32 | None, spec: CastSpec
    ) -> tuple[Cast, F32]:
        """``quantize``, and ``decode`` of its codes with ``descale`` and the same centre; a backend may fuse them."""
        ...

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual RN(x - center), non-finite counts of x, and fixed-point sums of x itself.

        mean_axes: the axes of x (never a lead axis) that the mean runs over; None for no mean. UsageError for
        axes that do not exist, or for a mean over more than 2^22 elements.
        """
        ...

    def sums(self, x: F32, *, lead: int, axes: tuple[int, ...]) -> Sums:
        """Fixed-point sums of the finite elements of x over ``axes``, none of them a lead axis; else UsageError."""
        ...

    def quantize_blocks(
        self,
        x: F32,
        recipe: ScaleRecipe,
        policy: CastPolicy,
        *,
        stream: RandomStream | None = None,
        packed: bool = False,
        counting: bool = True,
        tensor_amax: np.float32 | None = None,
        center: F32 | None = None,
    ) -> ScaledCodes:
        """Codes and scales of the matrix RN(x - center) by a scale recipe; see ``ScaleRecipe`` for the formulas.

        x float32 [M, K]; center float32 [1 or M, 1 or K], by default none: x itself.
        stream: the words of stochastic rounding; element i in C order takes word i. packed: two 4-bit codes a
        byte along K, even element low. Without ``counting`` the counts may be 0. tensor_amax: what a two-level
        scale is relative to, by default the amax of the residual. FormatError: another dtype; RefusedError, which is
        one: what the policy refuses (``qsim.codec.scaled.refusals``). UsageError: no matrix, a stream that is missing
        or not drawn from.
        """
        ...

    def dequantize_blocks(self, scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
        """The float32 matrix [M, K] of unpacked codes and their scales; NaN is always the bits 0x7FC00000."""
        ...

    def pack(self, codes: U8) -> U8:
        """Two 4-bit codes a byte along the last axis, even element in the low nibble, odd tail 0."""
        ...

    def unpack(self, packed: U8, length: int) -> U8:
        """Inverse of ``pack``; ``length`` is the number of codes along the last axis."""
        ...

    def matmul(self, a: F32, b: F32) -> F32:
        """The exact sum of products rounded once to float32: a [..., T, K] @ b [..., K, O]."""
        ...

    def exp(self, x: F32) -> F32:
        """e^x rounded once, the same bits on every backend; see ``qsim.backends.elementwise.exp``."""
        ...

    def log(self, x: F32) -> F32:
        """ln x rounded once, the same bits on every backend; see ``qsim.backends.elementwise.log``."""
        ...

    def rotate(self, x: F32, signs: F32, *, back: bool = False) -> F32:
        """The Hadamard rotation of x along its last axis, or its way back; see ``qsim.codec.hadamard``."""
        ...

    def accumulate(
        self, a: ScaledOperand, b: ScaledOperand, how: str | TensorCoreModel, *, promote_every: int | None = None,
        split_k: int = 1, factors: bool = True,
    ) -> Accumulator:  # fmt: skip
        """The accumulator of a scaled product; see ``qsim.gemm.products.accumulate``.

        UsageError besides: a model that this backend has no instruction for.
        """
        ...

    def finish(self, acc: F32, row: F64, column: F64, epilogue: Epilogue, how: Finish) -> tuple[F32, AnyArray]:
        """(y, D) of an accumulator [M, N], numpy: float32 after the epilogue, and in its output format.

        row [M], column [N]: float32 numbers. FormatError: what the output format refuses.
        """
        ...
