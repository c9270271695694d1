"""Numba kernel of scaled decode: codes and what a block multiplies by, back to float32. Knows no recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.codec.numba_kernels import QUIET_NAN

if TYPE_CHECKING:
    from qsim.arrays import F32, U8

_F4, _F8, _U1, _I8 = numba.float32, numba.float64, numba.uint8, numba.int64


@helper
def _value(v: Any, a: Any, b: Any, c: Any) -> Any:
    """((v * a) * b) / c, one float32 rounding an operation; the NaN 0x7FC00000 for every NaN."""
    y = np.float32(np.float32(np.float32(np.float32(v * a)) * b) / c)
    return y if y == y else np.uint32(QUIET_NAN).view(np.float32)


@helper
def _exact_value(v: Any, a: Any, b: Any, c: Any) -> Any:
    """v * a * b / c rounded once to float32.

    v * a * b has at most 2 + 4 + 24 bits: exact in float64. The quotient by c = 21 * 2^7 is a tie between two
    float32 numbers (25 bits) or differs from it by 2^-31 of it or more; float64 keeps either apart.
    """
    y = np.float32(np.float64(np.float64(np.float64(np.float64(v) * np.float64(a)) * np.float64(b)) / np.float64(c)))
    return y if y == y else np.uint32(QUIET_NAN).view(np.float32)


@kernel(read(_U1, 2), _I8, _I8, read(_F4, 1), read(_F4, 2), _F4, _F4, numba.boolean, write(_F4, 2))
def decode_blocks(
    codes: U8, bm: int, bk: int, table: F32, a: F32, b: np.float32, c: np.float32, exact: bool, out: F32
) -> None:
    """out = ((table[code] * a of its block) * b) / c; with ``exact`` the exact value of that rounded once.

    codes, out [M, K]; blocks of bm x bk, a [gm, gk]; table [number of codes].
    """
    product = np.empty(table.size, np.float32)
    for row in range(codes.shape[0]):
        source, target, scales = codes[row], out[row], a[row // bm]
        for block in range(scales.size):
            first, last = block * bk, min((block + 1) * bk, source.size)
            own = scales[block]
            if last - first >= table.size:
                for code in range(table.size):
                    value = table[code]
                    product[code] = _exact_value(value, own, b, c) if exact else _value(value, own, b, c)
                for j in range(first, last):
                    target[j] = product[source[j]]
            elif exact:
                for j in range(first, last):
                    target[j] = _exact_value(table[source[j]], own, b, c)
            else:
                for j in range(first, last):
                    target[j] = _value(table[source[j]], own, b, c)
