"""Numba kernels that put two 4-bit codes into a byte and take them out. Knows no format and no order by name.

Contract: arrays are C-contiguous (inputs may be read-only). Pairs of neighbours: codes [rows, L], packed
[rows, (L + 1) // 2]. Halves of a block (GGML): 32 codes are four uint64 words [blocks, 4], their 16 bytes two
words [blocks, 2]; the steps treat all bytes of a word alike, so the byte order of the machine does not matter.
Only the low nibble of a code is packed. ``seen`` [1] becomes 0 where all codes are 4-bit, else something above 15.

Speed, all of it bound by memory: a row of pairs vectorises as it stands, but short rows pay for the loop around
it, so callers pass rows of even length as one long row. A loop of 16 over slices of a block does not vectorise
(4 to 6 times slower), whole words do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from qsim.codec.jit import helper, kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import U8, U64

NIBBLE = np.uint8(15)
FOUR = np.uint8(4)
NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
HIGH_NIBBLES = np.uint64(0xF0F0F0F0F0F0F0F0)
FOUR_WIDE = np.uint64(4)

_U1, _U8 = numba.uint8, numba.uint64


@helper
def _byte(low: Any, high: Any) -> Any:
    return np.uint8(np.uint8(low & NIBBLE) | np.uint8(high << FOUR))


@helper
def _pack_pairs(codes: Any, packed: Any, first_high: Any) -> Any:
    """Pack neighbours, the first of two low (or high); an odd tail's other nibble is 0. Returns the or of all codes."""
    rows, length = codes.shape
    seen = np.uint8(0)
    for row in range(rows):
        source, target = codes[row], packed[row]
        for j in range(length // 2):
            first, second = source[2 * j], source[2 * j + 1]
            seen = np.uint8(seen | np.uint8(first | second))
            target[j] = _byte(second, first) if first_high else _byte(first, second)
        if length % 2:
            last = source[length - 1]
            seen = np.uint8(seen | last)
            target[length // 2] = _byte(np.uint8(0), last) if first_high else _byte(last, np.uint8(0))
    return seen


@helper
def _unpack_pairs(packed: Any, codes: Any, first_high: Any) -> None:
    """Inverse of ``_pack_pairs``; the length is that of ``codes``, and the other nibble of an odd tail is not used."""
    rows, length = codes.shape
    for row in range(rows):
        source, target = packed[row], codes[row]
        for j in range(length // 2):
            low, high = np.uint8(source[j] & NIBBLE), np.uint8(source[j] >> FOUR)
            target[2 * j] = high if first_high else low
            target[2 * j + 1] = low if first_high else high
        if length % 2:
            last = source[length // 2]
            target[length - 1] = np.uint8(last >> FOUR) if first_high else np.uint8(last & NIBBLE)


@kernel(read(_U1, 2), write(_U1, 2))
def pack(codes: U8, packed: U8) -> None:
    """Neighbours, the even element low; for codes that are known to be 4-bit."""
    _pack_pairs(codes, packed, False)


@kernel(read(_U1, 2), write(_U1, 2), write(_U1, 1))
def pack_low_first(codes: U8, packed: U8, seen: U8) -> None:
    """``pack`` that looks at its codes."""
    seen[0] = _pack_pairs(codes, packed, False)


@kernel(read(_U1, 2), write(_U1, 2), write(_U1, 1))
def pack_high_first(codes: U8, packed: U8, seen: U8) -> None:
    """Neighbours, the even element high."""
    seen[0] = _pack_pairs(codes, packed, True)


@kernel(read(_U1, 2), write(_U1, 2))
def unpack(packed: U8, codes: U8) -> None:
    """Inverse of ``pack``; the length is that of ``codes``."""
    _unpack_pairs(packed, codes, False)


@kernel(read(_U1, 2), write(_U1, 2))
def unpack_high_first(packed: U8, codes: U8) -> None:
    """Inverse of ``pack_high_first``."""
    _unpack_pairs(packed, codes, True)


@kernel(read(_U8, 2), write(_U8, 2), write(_U1, 1))
def pack_ggml_split(codes: U64, packed: U64, seen: U8) -> None:
    """Byte j of a block is code j low and code j + 16 high: words 0, 1 low and words 2, 3 high."""
    flat, out = codes.reshape(codes.size), packed.reshape(packed.size)
    all_codes = np.uint64(0)
    for block in range(codes.shape[0]):
        for word in range(2):
            low, high = flat[4 * block + word], flat[4 * block + 2 + word]
            all_codes = all_codes | low | high
            out[2 * block + word] = (low & NIBBLES) | ((high & NIBBLES) << FOUR_WIDE)
    seen[0] = np.uint8(255) if (all_codes & HIGH_NIBBLES) != np.uint64(0) else np.uint8(0)


@kernel(read(_U8, 2), write(_U8, 2))
def unpack_ggml_split(packed: U64, codes: U64) -> None:
    """Inverse of ``pack_ggml_split``."""
    flat, out = packed.reshape(packed.size), codes.reshape(codes.size)
    for block in range(codes.shape[0]):
        for word in range(2):
            both = flat[2 * block + word]
            out[4 * block + word] = both & NIBBLES
            out[4 * block + 2 + word] = (both >> FOUR_WIDE) & NIBBLES
