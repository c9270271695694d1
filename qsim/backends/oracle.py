"""The definition of every backend operation, element by element. Knows no kernels and no speed."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from qsim.arrays import F32, U8, Bool
from qsim.backends.checks import as_codes, as_float32, lead_shape, mean_shape
from qsim.backends.protocol import Cast, CastCounts, CastSpec, Observed
from qsim.codec.means import FRACTION_BITS, LOWEST_EXPONENT, Sums, check_count
from qsim.codec.oracle import decode_scalar, encode_by_codes, round_magnitude
from qsim.errors import FormatError, UsageError

_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)


class OracleBackend:
    """Exact scalars, and numpy float32 only for single correctly rounded operations. Slow on purpose."""

    name = "oracle"

    def quantize(self, x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
        """Encode RN(RN(x - center) * scale); see ``Backend.quantize``."""
        x, scale = as_float32(x, "x"), as_float32(scale, "scale")
        lead = lead_shape(scale, x)
        spec.fmt.params()  # refuses a format that holds no elements
        with np.errstate(all="ignore"):
            r = _residual(x, center)
            y = np.asarray(r * scale.reshape(lead + (1,) * (x.ndim - len(lead))), np.float32)
        # The sign of a NaN made by arithmetic differs between processors: only x's own NaN has one.
        made = np.isnan(y) & ~np.isnan(x)
        y = np.where(np.isnan(x), np.copysign(_QUIET_NAN, x), np.where(made, _QUIET_NAN, y))
        resolved = spec.policy.codes(spec.fmt)
        codes = np.array([encode_by_codes(float(v), spec.fmt, resolved) for v in y.flat], np.uint8)
        rounded = [_rounded(float(v), spec) for v in y.flat]
        over = np.array([n > spec.fmt.max_code for n in rounded], bool).reshape(x.shape)
        zero = np.array([n == 0 for n in rounded], bool).reshape(x.shape)
        counts = CastCounts(
            saturated=_count(over & np.isfinite(x), lead),
            flushed=_count(zero & (r != 0), lead),
            nan=_count(np.isnan(x), lead),
            inf=_count(np.isinf(x), lead),
        )
        return Cast(codes=codes.reshape(x.shape), amax=_amax(r, lead), counts=counts)

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); see ``Backend.decode``."""
        codes, descale = as_codes(codes), as_float32(descale, "descale")
        lead = lead_shape(descale, codes)
        values = np.array([decode_scalar(int(code), spec.fmt) for code in codes.flat], np.float32)
        with np.errstate(all="ignore"):
            out = values.reshape(codes.shape) * descale.reshape(lead + (1,) * (codes.ndim - len(lead)))
            if center is not None:
                center = as_float32(center, "center")
                _check_broadcast(codes.shape, center.shape)
                out = out + center
        return np.where(np.isnan(out), _QUIET_NAN, np.asarray(out, np.float32))

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual, counts of NaN and Inf, sums for a mean of x; see ``Backend.observe``."""
        x = as_float32(x, "x")
        shape = x.shape[:lead]
        with np.errstate(all="ignore"):
            r = _residual(x, center)
        return Observed(
            amax=_amax(r, shape),
            nan_count=_count(np.isnan(x), shape),
            inf_count=_count(np.isinf(x), shape),
            sums=None if mean_axes is None else _sums(x, mean_shape(x.shape, lead, mean_axes)),
        )

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


def _check_broadcast(shape: tuple[int, ...], center: tuple[int, ...]) -> None:
    full = (1,) * (len(shape) - len(center)) + center
    if len(full) != len(shape) or any(c not in (1, n) for c, n in zip(full, shape, strict=True)):
        raise UsageError(f"center of shape {center} does not broadcast to x of shape {shape}")


def _residual(x: F32, center: F32 | None) -> F32:
    if center is None:
        return x
    center = as_float32(center, "center")
    _check_broadcast(x.shape, center.shape)
    return np.asarray(x - center, np.float32)


def _rounded(y: float, spec: CastSpec) -> int:
    """The code of |y| with an unbounded exponent; one above every finite code for Inf, -1 for NaN."""
    if math.isnan(y):
        return -1
    if math.isinf(y):
        return spec.fmt.max_code + 1
    return round_magnitude(abs(Fraction(y)), spec.fmt)


def _amax(r: F32, lead: tuple[int, ...]) -> F32:
    finite = np.where(np.isfinite(r), np.abs(r), np.float32(0))
    return np.asarray(finite.max(axis=tuple(range(len(lead), r.ndim)), initial=np.float32(0)), np.float32)


def _count(mask: Bool, lead: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.asarray(mask.sum(axis=tuple(range(len(lead), mask.ndim)), dtype=np.int64))


def _sums(x: F32, shape: tuple[int, ...]) -> Sums:
    total, exponent = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    count = np.zeros(shape, np.int64)
    for slot in np.ndindex(shape):
        span = tuple(slice(None) if size == 1 else i for i, size in zip(slot, shape, strict=True))
        column = [Fraction(float(v)) for v in np.asarray(x[span]).flat if np.isfinite(v)]
        check_count(len(column))
        k = max((_exponent(v) for v in column if v), default=LOWEST_EXPONENT)
        # Python rounds a Fraction to the nearest integer, ties to even.
        total[slot] = sum(round(v * Fraction(2) ** (FRACTION_BITS - k)) for v in column)
        exponent[slot], count[slot] = k, len(column)
    return Sums(total=total, exponent=exponent, count=count)


def _exponent(v: Fraction) -> int:
    return math.frexp(float(v))[1] - 1  # float64 holds every float32 exactly, and as a normal number
