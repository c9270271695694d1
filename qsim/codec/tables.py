"""Constant arrays of a format, built from the oracle once. Knows no tensors."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qsim.arrays import F32, U32, frozen
from qsim.codec.numba_kernels import encoder_constants
from qsim.codec.oracle import decode_scalar
from qsim.formats import CastPolicy, FloatFormat


@lru_cache(maxsize=64)
def decode_table(fmt: FloatFormat) -> F32:
    """Value of every code, float32 [256], exact; NaN keeps its sign, and codes outside the format are NaN."""
    table = np.full(256, np.nan, np.float32)
    table[: fmt.code_count] = [decode_scalar(code, fmt) for code in range(fmt.code_count)]
    return frozen(table)


@lru_cache(maxsize=256)
def encoder_table(fmt: FloatFormat, policy: CastPolicy) -> U32:
    """What the encoding kernels read: format and policy as uint32 words."""
    return frozen(encoder_constants(fmt.params(), policy.codes(fmt)))
