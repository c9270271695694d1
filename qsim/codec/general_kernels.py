"""Numba kernels for every rounding and every format: bits in, codes and counts out. Knows no array layout.

Slower than ``numba_kernels`` and without exceptions: any FloatFormat, E8M0 included, any rounding, float64 as it is.
All arithmetic is on unsigned integers as wide as the input, and every step is wrapped, for Numba would widen it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write
from qsim.formats import RoundMode
from qsim.philox import ROUNDS

if TYPE_CHECKING:
    from qsim.arrays import I64, U8, U32, U64
    from qsim.formats import CastPolicy, FloatFormat

COUNTS = 5
"""What the kernels count: saturated, flushed, NaN, Inf (as in ``CastCounts``), and elements that the policy refuses."""

_NO_WORD = np.uint32(0)
_NO_TALLY = (_NO_WORD,) * COUNTS

_REBIAS = 127  # Rules.lowest is an exponent as float32 would store it

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)


class Rules(NamedTuple):
    """A format and a policy as the unsigned integers that ``encode_one`` reads; flags are 0 or 1."""

    mantissa_bits: int
    lowest: int  # exponent of the lowest binade, plus 127
    first: int  # place of the least value in units of that binade's last place: 0, or 2^m without a zero
    max_code: int
    sign_bit: int
    signed: int
    flushes: int  # the format has a zero
    zero_sign: int  # the sign bit that code 0 keeps
    overflow: int
    nan: int
    negative_nan: int
    refuses_overflow: int
    refuses_nan: int
    nearest: int  # half of the distance is added before cutting
    even: int  # and a tie goes to the even code
    up_positive: int  # a positive number with a rest goes to the larger magnitude
    up_negative: int
    to_odd: int
    clip_positive: int  # a positive number is rounded towards zero, so a finite one ends at max_code
    clip_negative: int
    random_bits: int


def rules_of(fmt: FloatFormat, policy: CastPolicy, word: type[np.uint32 | np.uint64]) -> Rules:
    """What a kernel reads of a format and a policy, in unsigned integers of the width of its numbers."""
    mode, codes = policy.rounding, policy.codes(fmt)
    keeps_sign = fmt.has_negative_zero or not fmt.has_zero
    rules = Rules(
        mantissa_bits=fmt.mantissa_bits,
        lowest=fmt.min_exponent + _REBIAS,
        first=0 if fmt.has_zero else 1 << fmt.mantissa_bits,
        max_code=fmt.max_code,
        sign_bit=fmt.sign_bit,
        signed=int(fmt.signed),
        flushes=int(fmt.has_zero),
        zero_sign=fmt.sign_bit if keeps_sign else 0,
        overflow=codes.overflow,
        nan=codes.nan,
        negative_nan=codes.negative_nan,
        refuses_overflow=int(codes.refuses_overflow),
        refuses_nan=int(codes.refuses_nan),
        nearest=int(mode in (RoundMode.TIES_TO_EVEN, RoundMode.TIES_TO_AWAY)),
        even=int(mode is RoundMode.TIES_TO_EVEN),
        up_positive=int(mode is RoundMode.UP),
        up_negative=int(mode is RoundMode.DOWN),
        to_odd=int(mode is RoundMode.TO_ODD),
        clip_positive=int(mode in (RoundMode.TOWARD_ZERO, RoundMode.DOWN)),
        clip_negative=int(mode in (RoundMode.TOWARD_ZERO, RoundMode.UP)),
        random_bits=policy.random_bits,
    )
    typed: Any = map(word, rules)  # numpy scalars: Numba converts nothing inside a tuple
    return Rules(*typed)


@helper
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds of Philox4x32 on words held in uint64; equals ``qsim.philox.philox4x32``."""
    for _ in range(ROUNDS):
        p0 = np.uint64(_M0 * c0)  # the 64-bit product of two words is wanted here
        p1 = np.uint64(_M1 * c2)
        c0, c1, c2, c3 = (
            np.uint64(np.uint64(np.uint64(p1 >> _HALF_WORD) ^ c1) ^ k0),
            np.uint64(p1 & _LOW),
            np.uint64(np.uint64(np.uint64(p0 >> _HALF_WORD) ^ c3) ^ k1),
            np.uint64(p0 & _LOW),
        )
        k0 = np.uint64(np.uint64(k0 + _W0) & _LOW)
        k1 = np.uint64(np.uint64(k1 + _W1) & _LOW)
    return c0, c1, c2, c3


@kernel(read(numba.uint32, 1), numba.uint64, write(numba.uint32, 1))
def fill_words(stream: U32, block: int, words: U32) -> None:
    """The words of blocks ``block``, ``block`` + 1 ... of a stream into words [n], n a multiple of 4.

    stream [5] is the key (two words) and the upper three words of the counter.
    Source of truth: ``qsim.philox.RandomStream``.
    """
    k0, k1 = np.uint64(stream[0]), np.uint64(stream[1])
    c1, c2, c3 = np.uint64(stream[2]), np.uint64(stream[3]), np.uint64(stream[4])
    for b in range(words.size // 4):
        w0, w1, w2, w3 = _philox(np.uint64(block + np.uint64(b)), c1, c2, c3, k0, k1)
        words[4 * b] = np.uint32(w0)
        words[4 * b + 1] = np.uint32(w1)
        words[4 * b + 2] = np.uint32(w2)
        words[4 * b + 3] = np.uint32(w3)


def _encoder(U: Any, stored_bits: int, exponent_bits: int) -> Any:
    """The helper that encodes one number by its bits, in unsigned integers ``U`` as wide as the number."""
    width = 1 + exponent_bits + stored_bits
    zero, one = U(0), U(1)
    stored, hidden = U(stored_bits), U(1 << stored_bits)
    fraction_mask, magnitude_mask = U((1 << stored_bits) - 1), U((1 << (width - 1)) - 1)
    inf = U(((1 << exponent_bits) - 1) << stored_bits)
    sign_shift, shift_mask = U(width - 1), U(width - 1)
    rebias = U((1 << (exponent_bits - 1)) - 1 - _REBIAS)
    max_drop, too_far = U(width - 2), U(width)
    word_bits = U(32)

    @helper
    def encode_one(bits: Any, word: Any, drawn: Any, k: Any) -> Any:
        """Code of a number, and five flags: saturated, flushed, NaN, Inf, refused. ``drawn``: by the word."""
        negative = U(bits >> sign_shift)
        magnitude = U(bits & magnitude_mask)

        # |value| = significand * 2^(field - bias - stored). A subnormal is doubled to fit a field of 0; field 0 is
        # the exponent -127 (or -1023), and no format goes lower. The last bit kept weighs 2^(binade - m), and
        # below the lowest binade that weight stays.
        field = U(magnitude >> stored)
        fraction = U(magnitude & fraction_mask)
        significand = U(fraction | hidden) if field > zero else U(fraction << one)
        lowest = U(k.lowest + rebias)
        binade = field if field > lowest else lowest
        wanted = U(U(stored - k.mantissa_bits) + U(binade - field))
        # From stored + 2 on nothing changes: nothing is kept and the rest is below half.
        drop = U((wanted if wanted < max_drop else max_drop) & shift_mask)
        full = U(U(one << drop) - one)
        rest = U(significand & full)
        # The hidden bit adds 1 to the field, which is why binades count from 0 here.
        place = U(U(significand >> drop) + U(U(binade - lowest) << U(k.mantissa_bits & shift_mask)))
        below = place < k.first  # below the least value of a format without zero: its code, as if exact
        rest = zero if below else rest
        place = zero if below else U(place - k.first)

        if drawn:
            # f * 2^32 = rest * 2^(32 - wanted), cut to an integer and then to random_bits.
            lifted = U(rest << U(U(word_bits - wanted) & shift_mask))
            farther = U(wanted - word_bits)
            sunk = U(rest >> U(farther & shift_mask)) if farther < too_far else zero
            threshold = lifted if wanted <= word_bits else sunk
            spare = U(U(word_bits - k.random_bits) & shift_mask)
            carry = one if U(U(word) >> spare) < U(threshold >> spare) else zero
        else:
            # A rest goes up iff adding ``extra`` carries; an exact value never does, as extra < 2^drop.
            even = U(one - U(place & one))
            whole = U(U(k.up_negative if negative != zero else k.up_positive) | U(k.to_odd & even))
            half = U(U(U(full >> one) + one) - U(k.even & even))  # a tie to even: one less where the code is even
            extra = U((half if k.nearest != zero else zero) | (full if whole != zero else zero))
            carry = U(U(rest + extra) >> drop)
        code = U(place + carry)  # it may enter the next binade: that is the rounding we want

        is_nan = one if magnitude > inf else zero
        is_inf = one if magnitude == inf else zero
        clip = k.clip_negative if negative != zero else k.clip_positive
        beyond = k.max_code if (clip != zero) & (magnitude != inf) else k.overflow
        over = one if (code > k.max_code) | (magnitude == inf) else zero
        limited = beyond if over != zero else code
        sign = k.sign_bit if limited != zero else k.zero_sign
        number = U(limited | (sign if negative != zero else zero))

        unsigned = U(U(negative & U(one - k.signed)) & (one if magnitude != zero else zero))
        no_number = U(is_nan | unsigned)
        is_number = U(one - no_number)
        result = number if no_number == zero else (k.negative_nan if negative != zero else k.nan)
        over = U(over & is_number)
        zeroed = U((one if (code == zero) & (magnitude != zero) else zero) & U(is_number & k.flushes))
        refused = U(U(no_number & k.refuses_nan) | U(over & k.refuses_overflow))
        return result, (U(over & U(one - is_inf)), zeroed, is_nan, is_inf, refused)

    return encode_one


_one32 = _encoder(np.uint32, 23, 8)
_one64 = _encoder(np.uint64, 52, 11)


@helper
def _add(tally: Any, flags: Any) -> Any:
    """The tally with one element's flags."""
    return (
        np.uint32(tally[0] + np.uint32(flags[0])),
        np.uint32(tally[1] + np.uint32(flags[1])),
        np.uint32(tally[2] + np.uint32(flags[2])),
        np.uint32(tally[3] + np.uint32(flags[3])),
        np.uint32(tally[4] + np.uint32(flags[4])),
    )


@helper
def _write(tally: Any, counts: I64) -> None:
    """Put a tally into counts."""
    counts[0] = np.int64(tally[0])
    counts[1] = np.int64(tally[1])
    counts[2] = np.int64(tally[2])
    counts[3] = np.int64(tally[3])
    counts[4] = np.int64(tally[4])


def _rules(word: Any) -> Any:
    return numba.types.NamedUniTuple(word, len(Rules._fields), Rules)


_U1, _U4, _U8, _I8 = numba.uint8, numba.uint32, numba.uint64, numba.int64


@kernel(read(_U4, 1), _rules(_U4), write(_U1, 1), write(_I8, 1))
def encode32(x_bits: U32, rules: Rules, codes: U8, counts: I64) -> None:
    """codes [n] of the float32 with the bits x_bits [n], n < 2^32, by rules without chance; counts [5] are set."""
    tally = _NO_TALLY
    for i in range(x_bits.size):
        code, flags = _one32(x_bits[i], _NO_WORD, False, rules)
        codes[i] = np.uint8(code)
        tally = _add(tally, flags)
    _write(tally, counts)


@kernel(read(_U4, 1), read(_U4, 1), _rules(_U4), write(_U1, 1), write(_I8, 1))
def encode32_drawn(x_bits: U32, words: U32, rules: Rules, codes: U8, counts: I64) -> None:
    """``encode32`` by stochastic rounding: words [n] decide."""
    tally = _NO_TALLY
    for i in range(x_bits.size):
        code, flags = _one32(x_bits[i], words[i], True, rules)
        codes[i] = np.uint8(code)
        tally = _add(tally, flags)
    _write(tally, counts)


@kernel(read(_U8, 1), _rules(_U8), write(_U1, 1), write(_I8, 1))
def encode64(x_bits: U64, rules: Rules, codes: U8, counts: I64) -> None:
    """``encode32`` of float64: every bit counts, so nothing is rounded twice in any mode."""
    tally = _NO_TALLY
    for i in range(x_bits.size):
        code, flags = _one64(x_bits[i], _NO_WORD, False, rules)
        codes[i] = np.uint8(code)
        tally = _add(tally, flags)
    _write(tally, counts)


@kernel(read(_U8, 1), read(_U4, 1), _rules(_U8), write(_U1, 1), write(_I8, 1))
def encode64_drawn(x_bits: U64, words: U32, rules: Rules, codes: U8, counts: I64) -> None:
    """``encode64`` by stochastic rounding: words [n] decide."""
    tally = _NO_TALLY
    for i in range(x_bits.size):
        code, flags = _one64(x_bits[i], words[i], True, rules)
        codes[i] = np.uint8(code)
        tally = _add(tally, flags)
    _write(tally, counts)
