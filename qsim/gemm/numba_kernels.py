"""Inner loops of the exact matrix product: certificate, grids, exact sums. Knows no shapes but its own.

Every kernel is serial and deterministic. Arrays are C-contiguous and writable; float64 operands hold float32
values exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.codec.jit import cached

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, I64, Bool

# Fields of a float64.
FRACTION = np.int64((1 << 52) - 1)
HIDDEN = np.int64(1 << 52)
FIELD = np.int64(0x7FF)
FIELD_BIAS = np.int64(1023)

# The exact accumulator: DIGITS digits of 32 bits, least significant first, in units of 2^-UNIT.
# A non-zero product of two float32 numbers lies in [2^-298, 2^256), so it is a normal float64 with exponent e
# in -298..255 and a 53-bit significand whose last bit stands for 2^(e-52): position e - 52 + UNIT in 2..555,
# digit 0..17. Shifted by up to 31 it is 84 bits wide and reaches two digits further, 0..19; carries of
# MAX_DEPTH products need one digit more. A digit takes less than 2^33 of one product, so int64 holds them.
UNIT = np.int64(352)
DIGITS = 21
DIGIT = np.int64(0xFFFFFFFF)
DIGIT_BITS = np.int64(32)
MAX_DEPTH = 1 << 28

# Float32: its last subnormal bit, as an exponent and as a position in the accumulator; its fraction bits.
TINY = np.int64(-149)
FRACTION32 = np.int64(23)
INF32 = np.int64(0x7F800000)
NAN32 = np.int64(0x7FC00000)
SIGN32 = np.int64(0x80000000)

ZERO = np.int64(0)
ONE = np.int64(1)


@cached
def certify(S: F64, row_bound: F64, column_norm: F64, out: F32, undecided: Bool) -> int:
    """Round S [N, T, O] float64 to out float32; mark in ``undecided`` (bool) what that does not prove.

    |S - exact| <= d = row_bound [N, T] * column_norm [N, O]. Returns how many outputs are undecided.
    """
    count = 0
    for n in range(S.shape[0]):
        for t in range(S.shape[1]):
            bound = row_bound[n, t]
            for o in range(S.shape[2]):
                s = S[n, t, o]
                d = bound * column_norm[n, o]
                # + 0.0 turns a -0 into +0: d = 0 means an exact zero, which is +0 by definition.
                out[n, t, o] = np.float32(s + 0.0)
                # Equal and of one sign on both ends: every real between them rounds to the same bits.
                # Any NaN or Inf in the row or the column makes d NaN or Inf, and every comparison fails.
                same = np.float32(s - d) == np.float32(s + d)
                proven = same and (abs(s) > d or d == 0.0)
                undecided[n, t, o] = not proven
                count += not proven
    return count


@cached
def column_norms(x: F64, norms: F64) -> None:
    """norms [N, O] = the Euclidean norm of each column of x [N, K, O]."""
    for n in range(x.shape[0]):
        norm = norms[n]
        norm[:] = 0.0
        for k in range(x.shape[1]):
            row = x[n, k]
            for o in range(x.shape[2]):
                norm[o] += row[o] * row[o]
        for o in range(x.shape[2]):
            norm[o] = np.sqrt(norm[o])


@cached
def _lowest_bit(x: Any) -> Any:
    """The largest power of two of which the finite float64 ``x`` is a multiple; Inf for 0."""
    if x == 0.0:
        return np.inf
    word = np.float64(x).view(np.int64)
    if word & FRACTION == ZERO:
        return abs(x)
    # word & (word - 1) clears the lowest set bit, one of the fraction; the difference is that bit, exactly.
    return abs(x - np.int64(word & (word - ONE)).view(np.float64))


@cached
def row_grids(x: F64, grids: F64) -> None:
    """grids [N] = the smallest lowest bit of each row of x [N, K]: every element is a multiple of it."""
    for n in range(x.shape[0]):
        low = np.inf
        for k in range(x.shape[1]):
            low = min(low, _lowest_bit(x[n, k]))
        grids[n] = low


@cached
def column_grids(x: F64, grids: F64) -> None:
    """grids [N, O] = the smallest lowest bit of each column of x [N, K, O]."""
    for n in range(x.shape[0]):
        for o in range(x.shape[2]):
            grids[n, o] = np.inf
        for k in range(x.shape[1]):
            for o in range(x.shape[2]):
                grids[n, o] = min(grids[n, o], _lowest_bit(x[n, k, o]))


@cached
def _add(word: Any, digits: I64) -> None:
    """Add the finite, non-zero float64 product with bits ``word`` to the accumulator."""
    position = ((word >> np.int64(52)) & FIELD) - FIELD_BIAS - np.int64(52) + UNIT
    significand = (word & FRACTION) | HIDDEN
    at = position >> np.int64(5)
    shift = position & np.int64(31)
    low = (significand & DIGIT) << shift
    high = (significand >> DIGIT_BITS) << shift
    middle = (low >> DIGIT_BITS) + (high & DIGIT)
    sign = word >> np.int64(63)  # 0 or -1: (x ^ sign) - sign is x or -x, without a branch that no one can predict
    digits[at] += ((low & DIGIT) ^ sign) - sign
    digits[at + ONE] += (middle ^ sign) - sign
    digits[at + np.int64(2)] += ((high >> DIGIT_BITS) ^ sign) - sign


@cached
def _carry(digits: I64) -> None:
    """Bring every digit but the last into 0..2^32-1; the last keeps the sign of the whole."""
    for i in range(DIGITS - 1):
        carry = digits[i] >> DIGIT_BITS  # arithmetic: floor
        digits[i] -= carry << DIGIT_BITS
        digits[i + 1] += carry


@cached
def _round(digits: I64) -> Any:
    """The accumulator rounded once to float32, ties to even, as an int64 that holds the 32 bits."""
    _carry(digits)
    sign = ZERO
    if digits[DIGITS - 1] < ZERO:
        sign = SIGN32
        for i in range(DIGITS):
            digits[i] = -digits[i]
        _carry(digits)
    top = DIGITS - 1
    while top >= 0 and digits[top] == ZERO:
        top -= 1
    if top < 0:
        return ZERO
    width = ZERO
    while (digits[top] >> width) > ZERO:
        width += ONE
    leading = np.int64(top) * DIGIT_BITS + width - ONE  # position of the leading bit
    last = max(leading - FRACTION32, TINY + UNIT)  # position of the last bit that float32 keeps
    at = last >> np.int64(5)
    shift = last & np.int64(31)
    # At most 24 bits from position ``last`` on: they span two digits, and the upper one is below 2^23 there.
    kept = digits[at] >> shift
    if at + ONE < DIGITS:
        kept |= digits[at + ONE] << (DIGIT_BITS - shift)
    before = last - ONE
    at = before >> np.int64(5)
    below = digits[at] & ((ONE << ((before & np.int64(31)) + ONE)) - ONE)  # the half bit and what follows in its digit
    half = ONE << (before & np.int64(31))
    sticky = below > half
    for i in range(at):
        sticky = sticky or digits[i] != ZERO
    if below >= half and (sticky or (kept & ONE) == ONE):
        kept += ONE  # may carry into the exponent below: that is the rounding we want
    # kept < 2^23 only where last is the subnormal position: the field stays 0. Else the hidden bit adds 1.
    word = ((last - UNIT - TINY) << FRACTION32) + kept
    return min(word, INF32) | sign


@cached
def exact_sums(products: I64, out: I64) -> int:
    """Sum each row of products [N, K] exactly, rounded once to float32; returns how many are not finite.

    products: bits (int64) of float64 products of float32 numbers; out: bits (int64) of the float32 results.
    NaN where a product is NaN or both infinities occur, else the infinity, else the sum; an exact zero is +0.
    """
    digits = np.empty(DIGITS, np.int64)
    not_finite = 0
    for n in range(products.shape[0]):
        digits[:] = ZERO
        nan = False
        up = False
        down = False
        for k in range(products.shape[1]):
            word = products[n, k]
            field = (word >> np.int64(52)) & FIELD
            if field == FIELD:
                nan = nan or (word & FRACTION) != ZERO
                up = up or word > ZERO
                down = down or word < ZERO
            elif field != ZERO:  # a zero; there are no subnormal products
                _add(word, digits)
        if nan or (up and down):
            out[n] = NAN32
        elif up:
            out[n] = INF32
        elif down:
            out[n] = INF32 | SIGN32
        else:
            out[n] = _round(digits)
        not_finite += nan or up or down
    return not_finite
