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
# A non-zero product lies in [2^-316, 2^288): of two float32 numbers in [2^-298, 2^256), of a code and a float32 scale
# each in [2^-316, 2^272), of a code and an E8M0 scale each in [2^-286, 2^286). So it, and what float64 rounds off it
# (a multiple of 2^-316), is a normal float64 with an exponent e in -316..287 and a 53-bit significand whose last bit
# stands for 2^(e-52): position e - 52 + UNIT in 16..619, digit 0..19. Shifted by up to 31 it is 84 bits wide and
# reaches two digits further, 0..21; carries of 2 * MAX_DEPTH numbers need one digit more. A digit takes less than 2^33
# of one number, so int64 holds them.
UNIT = np.int64(384)
DIGITS = 23
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


@cached
def _round_odd(digits: I64) -> Any:
    """(the accumulator as float64 rounded to odd, whether that is exact)."""
    _carry(digits)
    negative = digits[DIGITS - 1] < ZERO
    if negative:
        for i in range(DIGITS):
            digits[i] = -digits[i]
        _carry(digits)
    top = DIGITS - 1
    while top >= 0 and digits[top] == ZERO:
        top -= 1
    if top < 0:
        return 0.0, True
    width = ZERO
    while (digits[top] >> width) > ZERO:
        width += ONE
    last = max(np.int64(top) * DIGIT_BITS + width - np.int64(53), ZERO)  # position of the last bit kept
    at = last >> np.int64(5)
    shift = last & np.int64(31)
    kept = digits[at] >> shift
    if at + ONE < DIGITS:
        kept |= digits[at + ONE] << (DIGIT_BITS - shift)
    if at + np.int64(2) < DIGITS and shift > ZERO:
        kept |= digits[at + np.int64(2)] << (np.int64(64) - shift)
    sticky = (digits[at] & ((ONE << shift) - ONE)) != ZERO
    for i in range(at):
        sticky = sticky or digits[i] != ZERO
    if sticky:
        kept |= ONE
    value = np.ldexp(np.float64(kept), np.int32(last - UNIT))
    return -value if negative else value, not sticky


SPLITTER = 134217729.0  # 2^27 + 1


@cached
def _rest_of_product(a: float, b: float, product: float) -> float:
    """a * b - product, exact (Veltkamp, Dekker); product is the float64 nearest a * b."""
    t = SPLITTER * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = SPLITTER * b
    b_high = t - (t - b)
    b_low = b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@cached
def exact_dots(rows: F64, columns: F64, at_row: I64, at_column: I64, sums: F64, exact: Bool) -> None:
    """sums [n] = the exact sum of products of rows[at_row[n]] and columns[at_column[n]], rounded to odd.

    exact [n]: whether nothing was cut off. NaN and Inf as IEEE gives them, any order; they count as exact.
    """
    digits = np.empty(DIGITS, np.int64)
    for n in range(at_row.size):
        row, column = rows[at_row[n]], columns[at_column[n]]
        digits[:] = ZERO
        special = 0.0
        for k in range(row.size):
            product = row[k] * column[k]
            if product - product != 0.0:
                special += product
            elif product != 0.0:
                _add(np.float64(product).view(np.int64), digits)
                rest = _rest_of_product(row[k], column[k], product)
                if rest != 0.0:
                    _add(np.float64(rest).view(np.int64), digits)
        if special != 0.0:
            sums[n], exact[n] = special, True
        else:
            sums[n], exact[n] = _round_odd(digits)


@cached
def exact_quads(parts: F64, sums: F64, exact: Bool) -> None:
    """``exact_dots`` of four numbers: sums [n] of parts [n, 4], rounded to odd."""
    digits = np.empty(DIGITS, np.int64)
    for n in range(parts.shape[0]):
        digits[:] = ZERO
        for k in range(parts.shape[1]):
            if parts[n, k] != 0.0:
                _add(np.float64(parts[n, k]).view(np.int64), digits)
        sums[n], exact[n] = _round_odd(digits)
