"""The definition of every backend operation, element by element. Knows no kernels and no speed."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from qsim.arrays import F32, U8
from qsim.backends.checks import as_codes, as_float32, as_matrix, lead_shape, matrix_center, mean_shape, streams_of
from qsim.backends.host import HostBackend
from qsim.backends.protocol import Cast, CastCounts, CastSpec, Observed
from qsim.backends.scaling import check_broadcast, count, finite_amax, residual, scaled
from qsim.codec.means import FRACTION_BITS, LOWEST_EXPONENT, Sums, check_count
from qsim.codec.oracle import decode_scalar, encode_by_policy, place, refusal, round_magnitude
from qsim.codec.residual import QUIET_NAN, signed_residual
from qsim.codec.scaled import ScaledCodes, ScaleRecipe, dequantize_oracle, quantize_oracle
from qsim.codec.scaled.rules import check_cast
from qsim.errors import FormatError
from qsim.formats import CastPolicy
from qsim.philox import RandomStream


class OracleBackend(HostBackend):
    """Exact scalars, and numpy float32 only for single correctly rounded operations. Slow on purpose."""

    name = "oracle"

    def quantize(self, x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
        """Encode RN(RN(x - center) * scale); see ``Backend.quantize``."""
        x, scale = as_float32(x, "x"), as_float32(scale, "scale")
        lead = lead_shape(scale, x)
        spec.fmt.params()  # refuses a format that holds no elements
        r = residual(x, center)
        y = scaled(x, r, scale)
        replicas, size = math.prod(lead), math.prod(x.shape[len(lead) :])
        streams = streams_of(spec, replicas)
        words = [None if stream is None else stream.words(size) for stream in streams]
        codes, places = np.empty(y.size, np.uint8), np.empty(y.size, np.int64)
        for i, v in enumerate(y.flat):
            own = words[i // size]
            word = 0 if own is None else int(own[i % size])
            places[i] = _rounded(float(v), spec, word)
            try:
                codes[i] = encode_by_policy(float(v), spec.fmt, spec.policy, word=word)
            except FormatError:
                raise FormatError(refusal(float(v), spec.fmt, where=place("scaled x", i, x.shape))) from None
        rounded = places.reshape(x.shape)
        counts = CastCounts(
            saturated=count((rounded > spec.fmt.max_code) & np.isfinite(x), lead),
            flushed=count((rounded == 0) & (r != 0), lead),
            nan=count(np.isnan(x), lead),
            inf=count(np.isinf(x), lead),
        )
        return Cast(codes=codes.reshape(x.shape), amax=finite_amax(r, lead), counts=counts)

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); see ``Backend.decode``."""
        codes, descale = as_codes(codes), as_float32(descale, "descale")
        lead = lead_shape(descale, codes)
        values = np.array([decode_scalar(int(code), spec.fmt) for code in codes.flat], np.float32)
        with np.errstate(all="ignore"):
            out = values.reshape(codes.shape) * descale.reshape(lead + (1,) * (codes.ndim - len(lead)))
            if center is not None:
                center = as_float32(center, "center")
                check_broadcast(codes.shape, center.shape)
                out = out + center
        return np.where(np.isnan(out), QUIET_NAN, np.asarray(out, np.float32))

    def quantize_and_decode(
        self, x: F32, scale: F32, descale: F32, center: F32 | None, spec: CastSpec
    ) -> tuple[Cast, F32]:
        """``quantize``, then ``decode``; see ``Backend.quantize_and_decode``."""
        cast = self.quantize(x, scale, center, spec)
        return cast, self.decode(cast.codes, descale, center, spec)

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual, counts of NaN and Inf, sums for a mean of x; see ``Backend.observe``."""
        x = as_float32(x, "x")
        shape = x.shape[:lead]
        return Observed(
            amax=finite_amax(residual(x, center), shape),
            nan_count=count(np.isnan(x), shape),
            inf_count=count(np.isinf(x), shape),
            sums=None if mean_axes is None else _sums(x, mean_shape(x.shape, lead, mean_axes)),
        )

    def sums(self, x: F32, *, lead: int, axes: tuple[int, ...]) -> Sums:
        """Fixed-point sums of x for a mean; see ``Backend.sums``."""
        x = as_float32(x, "x")
        return _sums(x, mean_shape(x.shape, lead, axes))

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
        """Codes and scales of a matrix by a scale recipe; see ``Backend.quantize_blocks``. Always counts."""
        check_cast(recipe, packed=packed, tensor_amax=tensor_amax)
        r = as_matrix(x)
        if center is not None:
            r = signed_residual(r, matrix_center(center, x))
        scaled = quantize_oracle(r, recipe, policy=policy, stream=stream, tensor_amax=tensor_amax)
        return replace(scaled, codes=self.pack(scaled.codes)) if packed else scaled

    def dequantize_blocks(self, scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
        """The matrix of codes and scales; see ``Backend.dequantize_blocks``."""
        return dequantize_oracle(scaled, recipe)

    def pack(self, codes: U8) -> U8:
        """Two 4-bit codes a byte along the last axis, even element low, odd tail padded with 0."""
        codes = as_codes(codes)
        if codes.ndim == 0 or any(int(code) > 15 for code in codes.flat):
            raise FormatError(f"codes of shape {codes.shape}: packing needs an axis and codes 0..15")
        packed = np.zeros((*codes.shape[:-1], (codes.shape[-1] + 1) // 2), np.uint8)
        for index in np.ndindex(codes.shape):
            packed[(*index[:-1], index[-1] // 2)] |= codes[index] << (4 * (index[-1] % 2))
        return packed

    def unpack(self, packed: U8, length: int) -> U8:
        """Inverse of ``pack``."""
        packed = as_codes(packed)
        if packed.ndim == 0 or length < 0 or (length + 1) // 2 != packed.shape[-1]:
            raise FormatError(f"length {length} does not fit packed codes of shape {packed.shape}")
        codes = np.empty((*packed.shape[:-1], length), np.uint8)
        for index in np.ndindex(codes.shape):
            codes[index] = packed[(*index[:-1], index[-1] // 2)] >> (4 * (index[-1] % 2)) & 15
        return codes

    def matmul(self, a: F32, b: F32) -> F32:
        """The exact sum of products rounded once; see ``qsim.gemm.exact.matmul_oracle``."""
        from qsim.gemm.exact import matmul_oracle

        return matmul_oracle(a, b)


def _rounded(y: float, spec: CastSpec, word: int) -> int:
    """The code of |y| with an unbounded exponent; one above every finite code for Inf, -1 for NaN."""
    if math.isnan(y):
        return -1
    if math.isinf(y):
        return spec.fmt.max_code + 1
    return round_magnitude(
        abs(Fraction(y)),
        spec.fmt,
        rounding=spec.policy.rounding,
        negative=y < 0,
        word=word,
        random_bits=spec.policy.random_bits,
    )


def _sums(x: F32, shape: tuple[int, ...]) -> Sums:
    total, exponent = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    counts = np.zeros(shape, np.int64)
    for slot in np.ndindex(shape):
        span = tuple(slice(None) if size == 1 else i for i, size in zip(slot, shape, strict=True))
        column = [Fraction(float(v)) for v in np.asarray(x[span]).flat if np.isfinite(v)]
        check_count(len(column))
        k = max((_exponent(v) for v in column if v), default=LOWEST_EXPONENT)
        # Python rounds a Fraction to the nearest integer, ties to even.
        total[slot] = sum(round(v * Fraction(2) ** (FRACTION_BITS - k)) for v in column)
        exponent[slot], counts[slot] = k, len(column)
    return Sums(total=total, exponent=exponent, count=counts)


def _exponent(v: Fraction) -> int:
    return math.frexp(float(v))[1] - 1  # float64 holds every float32 exactly, and as a normal number
