"""Numba kernels of decode: codes in, float32 out. Knows no policy, no shape rule, no error message.

The contract of ``numba_kernels`` holds here too. A table of 256 values is right for every format, but a processor
reads it one value at a time; a code with a sign and a zero becomes its value by three integer steps and one float32
subtraction, sixteen at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, read_only, stretch, write
from qsim.codec.numba_kernels import LOW5, MAGNITUDE, QUIET_NAN, SIGN, ZERO, is_finite
from qsim.codec.rows_kernels import SPAN, centers_of, rows_together, spread_centers

if TYPE_CHECKING:
    from qsim.arrays import F32, I64, U8, U32
    from qsim.formats import FormatParams

EVERY_BYTE = np.uint32(256)
"""Codes of a format of eight bits: none is outside it."""

_F4, _U1, _U4 = numba.float32, numba.uint8, numba.uint32
_I8 = numba.int64


def decoder_constants(params: FormatParams | None, code_count: int) -> U32:
    """A format as the uint32 words that ``decode`` reads; None for a format that only its table decodes."""
    if params is None or not params.negative_zero:
        return np.array([0, 0, 0, 0, 0, 0, code_count], np.uint32)
    return np.array(
        [
            23 - params.mantissa_bits,
            (127 - params.bias) << 23,  # the exponent field of float32 less that of the format
            1 << 23,  # the least normal code, moved to its place in float32
            params.sign_bit,
            32 - params.sign_bit.bit_length(),
            params.max_code,
            code_count,
        ],
        np.uint32,
    )


@kernel(read(_U1, 1), read(_F4, 1), write(_F4, 1))
def look_up(codes: U8, table: F32, out: F32) -> None:
    """out[i] = table[codes[i]], table [256]."""
    for i in range(codes.size):
        out[i] = table[codes[i]]


@helper
def load_decoder(k: U32) -> Any:
    """The constants as a tuple of scalars."""
    return k[0], k[1], k[2], k[3], k[4], k[5], k[6]


@helper
def _value(code: Any, k: Any) -> Any:
    """The value of a finite code, exact, and the code without its sign.

    A normal code is moved to the fields of float32 and given its bias. A subnormal one is given the field of the lowest
    binade, hidden bit included, which is then taken off: a difference of two multiples of the format's unit, below
    2^24 of them, and so a float32 number.
    """
    own = np.uint32(code & np.uint32(~k[3]))
    moved = np.uint32(own << np.uint32(k[0] & LOW5))
    subnormal = np.int32(moved) < np.int32(k[2])
    lifted = np.uint32(moved + k[1])
    bits = np.uint32(lifted + k[2]) if subnormal else lifted
    anchor = np.uint32(k[1] + k[2]).view(np.float32)
    normal = np.uint32(bits).view(np.float32)
    magnitude = np.float32(normal - anchor) if subnormal else normal
    sign = np.uint32(np.uint32(code << np.uint32(k[4] & LOW5)) & SIGN)
    return np.uint32(np.uint32(np.float32(magnitude).view(np.uint32)) | sign).view(np.float32), own


@helper
def decode_block(source: Any, centers: Any, d: Any, k: Any, product: Any, target: Any) -> Any:
    """One block into ``target``; the largest code where one is outside the format, else 0.

    The plain loops are right where every code is a finite number and descale is finite, and with one centre where that
    is finite too: then no NaN can arise. Elsewhere the block is gone over again by the table.
    """
    nan = np.uint32(QUIET_NAN).view(np.float32)
    one = centers.size == 1
    top = MAGNITUDE
    if is_finite(d) and k[5] != ZERO:
        if one and is_finite(centers[0]):
            c, top = centers[0], ZERO
            for i in range(source.size):
                value, own = _value(np.uint32(source[i]), k)
                target[i] = np.float32(np.float32(value * d) + c)
                top = np.uint32(max(np.int32(top), np.int32(own)))
        elif not one:
            top = ZERO
            for i in range(source.size):
                value, own = _value(np.uint32(source[i]), k)
                v = np.float32(np.float32(value * d) + centers[i])
                target[i] = v if v == v else nan
                top = np.uint32(max(np.int32(top), np.int32(own)))
    last = ZERO
    if np.int32(top) > np.int32(k[5]):
        for i in range(source.size if k[6] < EVERY_BYTE else 0):
            last = np.uint32(max(np.int32(last), np.int32(source[i])))
        if one:
            c = centers[0]
            for i in range(source.size):
                v = np.float32(product[source[i]] + c)
                target[i] = v if v == v else nan
        else:
            for i in range(source.size):
                v = np.float32(product[source[i]] + centers[i])
                target[i] = v if v == v else nan
    return last if last >= k[6] else ZERO


@kernel(
    read(_U1, 3), read(_U4, 1), read(_F4, 1), read(_F4, 1), read(_F4, 2), read(_I8, 1), write(_F4, 3), write(_U4, 1)
)
def decode(codes: U8, constants: U32, table: F32, descale: F32, center: F32, row_of: I64, out: F32, stray: U32) -> None:
    """out = RN(RN(value(code) * descale) + center), NaN always as 0x7FC00000.

    codes, out [R, P, L]; table [256]; descale [R]; stray [1]: the largest code where one is outside the format, else 0.
    No centre is a centre of -0: v + (-0) is v in every bit, for v = +0 and v = -0 too.
    """
    k = load_decoder(constants)
    replicas, rows, length = codes.shape
    group = rows_together(rows, length)
    beside, owners = np.empty(group * length if group > 1 else 0, np.float32), np.full(group, -1, np.int64)
    largest, product = ZERO, np.empty(table.size, np.float32)
    for replica in range(replicas):
        for code in range(table.size):
            product[code] = np.float32(table[code] * descale[replica])
        for row in range(replica * rows, (replica + 1) * rows, group):
            size = min(group, (replica + 1) * rows - row) * length
            if group > 1:
                spread_centers(center, row_of, row, owners, length, beside)
            for start in range(0, size, SPAN):
                at, many = row * length + start, min(SPAN, size - start)
                here = read_only(beside[:many]) if group > 1 else centers_of(center, row_of[row], start, many)
                own, into = stretch(codes, at, many), stretch(out, at, many)
                largest = max(largest, decode_block(own, here, descale[replica], k, product, into))
    stray[0] = largest
