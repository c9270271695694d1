"""The CPU backend: Numba kernels for bits, BLAS with a certificate for products. Knows no state, no time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import numpy as np

from qsim.arrays import F32, I64, U8
from qsim.backends import elementwise_kernels
from qsim.backends.checks import (
    Rows,
    as_codes,
    as_float32,
    as_matrix,
    lead_shape,
    matrix_center,
    rows_of,
    rows_without_partner,
    streams_of,
)
from qsim.backends.fused import FusedNodes
from qsim.backends.host import HostBackend
from qsim.backends.numba_sums import sums_of
from qsim.backends.parts import Part, for_each_part, on_one_thread
from qsim.backends.protocol import Cast, CastCounts, CastSpec, Observed
from qsim.backends.scaling import count, finite_amax, residual, scaled
from qsim.codec import cast_kernels, decode_kernels, packing
from qsim.codec import numba_kernels as kernels
from qsim.codec.general import COUNTS, encode_flat, first_refused
from qsim.codec.means import Sums
from qsim.codec.oracle import place, refusal
from qsim.codec.scaled import ScaledCodes, ScaleRecipe, fast
from qsim.codec.tables import decoder_table, fast_encoder_table
from qsim.codec.threads import in_chunks
from qsim.errors import FormatError
from qsim.formats import CastPolicy
from qsim.philox import RandomStream

# Neutral operands: x - (+0) and v + (-0) return x and v in every bit, zeros of both signs included.
_NOTHING_TO_SUBTRACT = np.zeros((1, 1), np.float32)
_NOTHING_TO_ADD = np.full((1, 1), -0.0, np.float32)

_FUSED = FusedNodes()


class NumbaBackend(HostBackend):
    """Fused kernels, large arrays on several threads; equal to ``OracleBackend`` bit for bit."""

    name = "numba"

    @property
    def fused(self) -> FusedNodes | None:
        """All of them; see ``Backend.fused``."""
        return _FUSED

    def quantize(self, x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
        """Encode RN(RN(x - center) * scale); see ``Backend.quantize``."""
        x, scale = as_float32(x, "x"), as_float32(scale, "scale")
        lead = lead_shape(scale, x)
        constants = None if spec.streams else fast_encoder_table(spec.fmt, spec.policy)
        if constants is None:
            return _quantize_generally(x, scale, center, spec)
        rows, partner = _with_center(x.shape, len(lead), center, _NOTHING_TO_SUBTRACT)
        codes, scales = np.empty(x.shape, np.uint8), np.ascontiguousarray(scale).reshape(-1)
        amax, counts = np.empty(rows.shape[0], np.float32), np.empty((4, rows.shape[0]), np.int64)
        source, target = np.ascontiguousarray(x).reshape(rows.shape), codes.reshape(rows.shape)
        if on_one_thread(x.size):
            kernels.quantize(source, partner, rows.row_of, scales, constants, target, amax, counts)
        else:

            def work(part: Part, top: F32, count: I64) -> None:
                here, own = part.place, scales[part.replicas]
                kernels.quantize(source[here], part.partner, part.row_of, own, constants, target[here], top, count)

            _merge_parts(rows, partner, work, amax, counts)
        return _cast_of(codes, amax, counts, lead)

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); see ``Backend.decode``."""
        codes, descale = as_codes(codes), as_float32(descale, "descale")
        lead = lead_shape(descale, codes)
        rows, partner = _with_center(codes.shape, len(lead), center, _NOTHING_TO_ADD)
        out = np.empty(codes.shape, np.float32)
        source, target = np.ascontiguousarray(codes).reshape(rows.shape), out.reshape(rows.shape)
        (constants, table), scales = decoder_table(spec.fmt), np.ascontiguousarray(descale).reshape(-1)
        stray = np.zeros(1, np.uint32)
        if on_one_thread(codes.size):
            decode_kernels.decode(source, constants, table, scales, partner, rows.row_of, target, stray)
        else:
            strays: list[int] = []

            def work(part: Part) -> None:
                here, own, found = part.place, scales[part.replicas], np.zeros(1, np.uint32)
                decode_kernels.decode(
                    source[here], constants, table, own, part.partner, part.row_of, target[here], found
                )  # fmt: skip
                strays.append(int(found[0]))

            for_each_part(rows, partner, work)
            stray[0] = max(strays)
        if stray[0]:
            spec.fmt.check_code(int(stray[0]))
        return out

    def quantize_and_decode(
        self, x: F32, scale: F32, descale: F32, center: F32 | None, spec: CastSpec
    ) -> tuple[Cast, F32]:
        """``quantize`` and ``decode``: one pass of a tensor for one thread; see ``Backend.quantize_and_decode``."""
        x, scale, descale = as_float32(x, "x"), as_float32(scale, "scale"), as_float32(descale, "descale")
        lead = lead_shape(scale, x)
        encoder = None if spec.streams else fast_encoder_table(spec.fmt, spec.policy)
        if encoder is None or descale.shape != lead or not on_one_thread(x.size):
            cast = self.quantize(x, scale, center, spec)
            return cast, self.decode(cast.codes, descale, center, spec)
        rows, partner = _with_center(x.shape, len(lead), center, _NOTHING_TO_SUBTRACT)
        codes, out = np.empty(x.shape, np.uint8), np.empty(x.shape, np.float32)
        amax, counts = np.empty(rows.shape[0], np.float32), np.empty((4, rows.shape[0]), np.int64)
        decoder, table = decoder_table(spec.fmt)
        cast_kernels.quantize_and_decode(
            np.ascontiguousarray(x).reshape(rows.shape),
            partner,
            _NOTHING_TO_ADD if center is None else partner,
            rows.row_of,
            np.ascontiguousarray(scale).reshape(-1),
            np.ascontiguousarray(descale).reshape(-1),
            encoder,
            decoder,
            table,
            codes.reshape(rows.shape),
            out.reshape(rows.shape),
            amax,
            counts,
        )
        return _cast_of(codes, amax, counts, lead), out

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual, counts of NaN and Inf, sums for a mean of x; see ``Backend.observe``."""
        x = np.asarray(as_float32(x, "x"), order="C")  # ascontiguousarray would add an axis to 0-d
        shape = x.shape[:lead]
        rows, partner = _with_center(x.shape, lead, center, _NOTHING_TO_SUBTRACT)
        amax, counts = np.empty(rows.shape[0], np.float32), np.empty((2, rows.shape[0]), np.int64)
        source = x.reshape(rows.shape)
        if on_one_thread(x.size):
            kernels.observe(source, partner, rows.row_of, amax, counts)
        else:

            def work(part: Part, top: F32, count: I64) -> None:
                kernels.observe(source[part.place], part.partner, part.row_of, top, count)

            _merge_parts(rows, partner, work, amax, counts)
        nan, inf = _by_replica(counts, shape)
        return Observed(
            amax=amax.reshape(shape),
            nan_count=nan,
            inf_count=inf,
            sums=None if mean_axes is None else sums_of(x, lead, mean_axes),
        )

    def sums(self, x: F32, *, lead: int, axes: tuple[int, ...]) -> Sums:
        """Fixed-point sums of x for a mean; see ``Backend.sums``."""
        return sums_of(np.asarray(as_float32(x, "x"), order="C"), lead, axes)

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
        """Codes and scales of a matrix by a scale recipe; see ``Backend.quantize_blocks``."""
        x = np.ascontiguousarray(as_matrix(x))
        return fast.quantize_matrix(
            x,
            recipe,
            policy=policy,
            stream=stream,
            packed=packed,
            counting=counting,
            tensor_amax=tensor_amax,
            center=None if center is None else matrix_center(center, x),
        )

    def dequantize_blocks(self, scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
        """The matrix of codes and scales; see ``Backend.dequantize_blocks``."""
        if recipe.fmt.bits < 8 and scaled.codes.size:
            recipe.fmt.check_code(int(scaled.codes.max()))
        return fast.dequantize_matrix(scaled, recipe)

    def pack(self, codes: U8) -> U8:
        """Two 4-bit codes a byte; see ``qsim.codec.packing.pack``."""
        return packing.pack(codes)

    def unpack(self, packed: U8, length: int) -> U8:
        """Inverse of ``pack``."""
        return packing.unpack(packed, length)

    def matmul(self, a: F32, b: F32) -> F32:
        """The exact sum of products rounded once; see ``qsim.gemm.exact.matmul``."""
        from qsim.gemm.exact import matmul

        return matmul(a, b)

    def exp(self, x: F32) -> F32:
        """e^x rounded once; see ``Backend.exp``."""
        return _elementwise(elementwise_kernels.exp, x)

    def log(self, x: F32) -> F32:
        """ln x rounded once; see ``Backend.log``."""
        return _elementwise(elementwise_kernels.log, x)


def _elementwise(run: Callable[[F32, F32], None], x: F32) -> F32:
    """``run`` over x, a large array on several threads."""
    source = np.ascontiguousarray(as_float32(x, "x")).reshape(-1)
    out = np.empty(x.shape, np.float32)
    target = out.reshape(-1)
    in_chunks(lambda start, stop: run(source[start:stop], target[start:stop]), source.size)
    return out


def _quantize_generally(x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
    """Every rounding and every refusal: residual and product by numpy, then the general kernels."""
    fmt, policy, lead = spec.fmt, spec.policy, scale.shape
    fmt.params()  # refuses a format that holds no elements
    r = residual(x, center)
    shape = math.prod(lead), math.prod(x.shape[len(lead) :])
    y = scaled(x, r, scale)
    flat = np.ascontiguousarray(y).reshape(shape)
    codes, counts = np.empty(shape, np.uint8), np.empty((shape[0], COUNTS), np.int64)
    for replica, stream in enumerate(streams_of(spec, shape[0])):
        counts[replica] = encode_flat(flat[replica], codes[replica], fmt=fmt, policy=policy, stream=stream)
        if counts[replica, -1]:
            first = first_refused(flat[replica], fmt=fmt, policy=policy, stream=stream)
            where = place("scaled x", replica * shape[1] + first, x.shape)
            raise FormatError(refusal(float(flat[replica, first]), fmt, where=where))
    # The kernel saw y, not x: a product that became Inf or 0 is saturated or flushed too.
    return Cast(
        codes=codes.reshape(x.shape),
        amax=finite_amax(r, lead),
        counts=CastCounts(
            saturated=_column(counts, 0, lead) + count(np.isinf(y) & np.isfinite(x), lead),
            flushed=_column(counts, 1, lead) + count((y == 0) & (r != 0), lead),
            nan=count(np.isnan(x), lead),
            inf=count(np.isinf(x), lead),
        ),
    )


def _column(counts: I64, index: int, lead: tuple[int, ...]) -> I64:
    return np.ascontiguousarray(counts[:, index]).reshape(lead)


def _cast_of(codes: U8, amax: F32, counts: I64, lead: tuple[int, ...]) -> Cast:
    saturated, flushed, nan, inf = _by_replica(counts, lead)
    return Cast(
        codes=codes,
        amax=amax if lead else amax.reshape(()),
        counts=CastCounts(saturated=saturated, flushed=flushed, nan=nan, inf=inf),
    )


def _by_replica(counts: I64, lead: tuple[int, ...]) -> Iterable[I64]:
    """Each row of counts [number of counts, R] as an array [lead]."""
    return counts if lead else (row.reshape(()) for row in counts)


def _merge_parts(rows: Rows, partner: F32, work: Callable[[Part, F32, I64], None], amax: F32, counts: I64) -> None:
    """``work(part, amax, counts)`` on several threads; what it finds of every part, merged into amax and counts."""
    merging = threading.Lock()  # of this call: a forked child inherits none that is held
    amax[:], counts[:] = 0, 0

    def one(part: Part) -> None:
        own = part.replicas
        top = np.empty_like(amax[own])
        count = np.empty((counts.shape[0], top.size), np.int64)
        work(part, top, count)
        with merging:
            np.maximum(amax[own], top, out=amax[own])
            counts[:, own] += count

    for_each_part(rows, partner, one)


def _with_center(shape: tuple[int, ...], lead: int, center: F32 | None, neutral: F32) -> tuple[Rows, F32]:
    """How to lay out x, and the centre's rows (or the neutral operand)."""
    if center is None:
        return rows_without_partner(shape, lead), neutral
    center = as_float32(center, "center")
    rows = rows_of(shape, lead, center.shape)
    return rows, np.ascontiguousarray(center).reshape(rows.partner)
