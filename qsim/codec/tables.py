"""Constant arrays of a format, built from the oracle once. Knows no tensors."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qsim.arrays import F32, U32, frozen
from qsim.codec.decode_kernels import decoder_constants
from qsim.codec.numba_kernels import encoder_constants
from qsim.codec.oracle import decode_scalar
from qsim.formats import CastPolicy, FloatFormat, RoundMode


@lru_cache(maxsize=64)
def decode_table(fmt: FloatFormat) -> F32:
    """Value of every code, float32 [256], exact; NaN keeps its sign, and codes outside the format are NaN."""
    table = np.full(256, np.nan, np.float32)
    table[: fmt.code_count] = [decode_scalar(code, fmt) for code in range(fmt.code_count)]
    return frozen(table)


@lru_cache(maxsize=256)
def has_fast_kernel(fmt: FloatFormat, policy: CastPolicy) -> bool:
    """True where ``numba_kernels`` serve: elements rather than scales, nearest even, nothing refused.

    They count units of a binade, and with no mantissa bit a unit's parity is not that of its code.
    """
    codes = policy.codes(fmt)
    elements = fmt.signed and fmt.has_zero and fmt.mantissa_bits > 0
    usual = policy.rounding is RoundMode.TIES_TO_EVEN and not (codes.refuses_nan or codes.refuses_overflow)
    return elements and usual


@lru_cache(maxsize=256)
def encoder_table(fmt: FloatFormat, policy: CastPolicy) -> U32:
    """What the encoding kernels read: format and policy as uint32 words."""
    return frozen(encoder_constants(fmt.params(), policy.codes(fmt)))


@lru_cache(maxsize=256)
def fast_encoder_table(fmt: FloatFormat, policy: CastPolicy) -> U32 | None:
    """``encoder_table`` where ``has_fast_kernel``, else None: one look-up a cast."""
    return encoder_table(fmt, policy) if has_fast_kernel(fmt, policy) else None


@lru_cache(maxsize=64)
def decoder_table(fmt: FloatFormat) -> tuple[U32, F32]:
    """What ``decode_kernels.decode`` reads: a format as uint32 words, and the value of every code."""
    params = fmt.params() if fmt.signed and fmt.has_zero else None
    return frozen(decoder_constants(params, fmt.code_count)), decode_table(fmt)
