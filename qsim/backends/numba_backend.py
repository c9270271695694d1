"""The CPU backend: Numba kernels for bits, BLAS with a certificate for products. Knows no state, no time."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from qsim.arrays import F32, I64, U8, AnyArray
from qsim.backends import elementwise_kernels
from qsim.backends.checks import (
    Rows,
    as_codes,
    as_float32,
    as_matrix,
    lead_shape,
    matrix_center,
    mean_shape,
    rows_of,
    rows_without_partner,
    streams_of,
)
from qsim.backends.fused import FusedNodes
from qsim.backends.host import HostBackend
from qsim.backends.parts import Part, for_each_part
from qsim.backends.protocol import Cast, CastCounts, CastSpec, Observed
from qsim.backends.scaling import count, finite_amax, residual, scaled
from qsim.codec import numba_kernels as kernels
from qsim.codec import packing, sums_kernels
from qsim.codec.general import COUNTS, encode_flat, first_refused
from qsim.codec.means import Sums, check_count
from qsim.codec.oracle import place, refusal
from qsim.codec.scaled import ScaledCodes, ScaleRecipe, fast
from qsim.codec.tables import decode_table, encoder_table, has_fast_kernel
from qsim.codec.threads import in_chunks, run_spans, spans
from qsim.errors import FormatError
from qsim.formats import CastPolicy
from qsim.philox import RandomStream

SHORT_ROW = 4096
"""Elements of a piece of a long row, so that several threads find work in it."""

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
        if spec.streams or not has_fast_kernel(spec.fmt, spec.policy):
            return _quantize_generally(x, scale, center, spec)
        rows, partner = _with_center(x.shape, len(lead), center, _NOTHING_TO_SUBTRACT)
        codes = np.empty(x.shape, np.uint8)
        amax = np.zeros(rows.shape[0], np.float32)
        counts = np.zeros((rows.shape[0], 4), np.int64)
        merging = threading.Lock()  # of this call: a forked child inherits none that is held
        source, target = np.ascontiguousarray(x).reshape(rows.shape), codes.reshape(rows.shape)
        scales, constants = np.ascontiguousarray(scale).reshape(-1), encoder_table(spec.fmt, spec.policy)

        def work(part: Part) -> None:
            own, here = part.replicas, part.place
            top, count = np.empty_like(amax[own]), np.zeros_like(counts[own])
            kernels.quantize(
                source[here], part.partner, part.row_of, scales[own], constants, target[here], top, count
            )  # fmt: skip
            with merging:
                np.maximum(amax[own], top, out=amax[own])
                counts[own] += count

        for_each_part(rows, partner, work)
        saturated, flushed, nan, inf = (_column(counts, i, lead) for i in range(4))
        return Cast(
            codes=codes,
            amax=amax.reshape(lead),
            counts=CastCounts(saturated=saturated, flushed=flushed, nan=nan, inf=inf),
        )

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); see ``Backend.decode``."""
        codes, descale = as_codes(codes), as_float32(descale, "descale")
        lead = lead_shape(descale, codes)
        if spec.fmt.bits < 8 and codes.size:
            spec.fmt.check_code(int(codes.max()))
        rows, partner = _with_center(codes.shape, len(lead), center, _NOTHING_TO_ADD)
        out = np.empty(codes.shape, np.float32)
        source, target = np.ascontiguousarray(codes).reshape(rows.shape), out.reshape(rows.shape)
        table, scales = decode_table(spec.fmt)[: spec.fmt.code_count], np.ascontiguousarray(descale).reshape(-1)

        def work(part: Part) -> None:
            kernels.decode(
                source[part.place], table, scales[part.replicas], part.partner, part.row_of, target[part.place]
            )

        for_each_part(rows, partner, work)
        return out

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual, counts of NaN and Inf, sums for a mean of x; see ``Backend.observe``."""
        x = np.asarray(as_float32(x, "x"), order="C")  # ascontiguousarray would add an axis to 0-d
        shape = x.shape[:lead]
        rows, partner = _with_center(x.shape, lead, center, _NOTHING_TO_SUBTRACT)
        amax = np.zeros(rows.shape[0], np.float32)
        counts = np.zeros((rows.shape[0], 2), np.int64)
        merging = threading.Lock()  # of this call: a forked child inherits none that is held
        source = x.reshape(rows.shape)

        def work(part: Part) -> None:
            own = part.replicas
            top, count = np.empty_like(amax[own]), np.zeros_like(counts[own])
            kernels.observe(source[part.place], part.partner, part.row_of, top, count)
            with merging:
                np.maximum(amax[own], top, out=amax[own])
                counts[own] += count

        for_each_part(rows, partner, work)
        return Observed(
            amax=amax.reshape(shape),
            nan_count=_column(counts, 0, shape),
            inf_count=_column(counts, 1, shape),
            sums=None if mean_axes is None else _sums(x, lead, mean_axes),
        )

    def sums(self, x: F32, *, lead: int, axes: tuple[int, ...]) -> Sums:
        """Fixed-point sums of x for a mean; see ``Backend.sums``."""
        return _sums(np.asarray(as_float32(x, "x"), order="C"), lead, axes)

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


def _with_center(shape: tuple[int, ...], lead: int, center: F32 | None, neutral: F32) -> tuple[Rows, F32]:
    """How to lay out x, and the centre's rows (or the neutral operand)."""
    if center is None:
        return rows_without_partner(shape, lead), neutral
    center = as_float32(center, "center")
    rows = rows_of(shape, lead, center.shape)
    return rows, np.ascontiguousarray(center).reshape(rows.partner)


def _sums(x: F32, lead: int, axes: tuple[int, ...]) -> Sums:
    shape = mean_shape(x.shape, lead, axes)
    rows = rows_of(x.shape, lead, shape)
    flat: Any = x.reshape(-1, rows.shape[2]) if x.size else x.reshape(0, rows.shape[2])
    row_of = rows.row_of
    if flat.shape[0] == 1 and rows.partner == (1, 1) and flat.shape[1] > SHORT_ROW:  # one long row: cut it up
        whole = flat.shape[1] // SHORT_ROW * SHORT_ROW
        parts = [flat[:, :whole].reshape(-1, SHORT_ROW), flat[:, whole:]]
    else:
        parts = [flat]
    top, count = np.zeros(rows.partner, np.uint32), np.zeros(rows.partner, np.int64)
    found: list[tuple[AnyArray, AnyArray]] = []

    def measure(part: Any, owner: I64) -> None:
        mine = np.zeros_like(top), np.zeros_like(count)
        sums_kernels.sums_amax(part.view(np.uint32), owner, *mine)
        found.append(mine)

    _over_rows(measure, parts, row_of)
    for part_top, part_count in found:
        np.maximum(top, part_top, out=top)
        count += part_count
    check_count(int(count.max(initial=0)))
    exponent, unit = np.empty(rows.partner, np.int32), np.empty(rows.partner, np.float64)
    sums_kernels.sums_scale(top, exponent, unit)
    totals: list[I64] = []

    def add(part: Any, owner: I64) -> None:
        total = np.zeros(rows.partner, np.int64)
        sums_kernels.sums_total(part, owner, unit, total)
        totals.append(total)

    _over_rows(add, parts, row_of)
    total = np.sum([np.zeros(rows.partner, np.int64), *totals], axis=0, dtype=np.int64)
    return Sums(total=total.reshape(shape), exponent=exponent.reshape(shape), count=count.reshape(shape))


def _over_rows(work: Callable[[Any, I64], None], parts: list[Any], row_of: I64) -> None:
    """``work(rows, their slots)`` on every part, its rows spread over the threads."""
    for part in parts:
        if not part.size:
            continue
        owner = row_of if part.shape[0] == row_of.size else np.zeros(part.shape[0], np.int64)
        cuts = spans(part.shape[0], cost=part.shape[1])
        run_spans(functools.partial(_span, work, part, owner), cuts)


def _span(work: Callable[[Any, I64], None], part: Any, owner: I64, start: int, stop: int) -> None:
    work(part[start:stop], owner[start:stop])
