"""Two 4-bit codes a byte, in the three orders that are in use. Knows no format and no value."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from qsim.checks import whole_number
from qsim.codec import packing_kernels as kernels
from qsim.codec.inputs import as_array
from qsim.errors import FormatError
from qsim.formats.names import member

if TYPE_CHECKING:
    from qsim.arrays import U8, U64, AnyArray

GGML_BLOCK = 32
"""Codes in a block of the GGML order; they take GGML_BYTES."""

GGML_BYTES = 16
"""Bytes of such a block."""


class NibbleOrder(enum.Enum):
    """Which codes share a byte, and which of the two is in the low nibble."""

    LOW_FIRST = "low_first"  # elements 2j and 2j+1, the even one low: PyTorch, CUDA, ONNX, Transformer Engine, torchao
    HIGH_FIRST = "high_first"  # elements 2j and 2j+1, the even one high: big-endian nibbles
    GGML_SPLIT = "ggml_split"  # in each block of 32: element j low and j+16 high in byte j: GGML (llama.cpp)


def nibble_order(order: str | NibbleOrder) -> NibbleOrder:
    """The order of this name (any case); a NibbleOrder is returned as it is. Else FormatError."""
    return member(NibbleOrder, order, what="nibble order")


def packed_length(length: int, order: str | NibbleOrder = NibbleOrder.LOW_FIRST) -> int:
    """Bytes that ``length`` 4-bit codes take: (length + 1) // 2, or 16 * ceil(length / 32) in the GGML order."""
    if nibble_order(order) is NibbleOrder.GGML_SPLIT:
        return GGML_BYTES * -(-length // GGML_BLOCK)
    return (length + 1) // 2


def pack(codes: U8, *, order: str | NibbleOrder = NibbleOrder.LOW_FIRST, out: U8 | None = None) -> U8:
    """uint8 [..., L] codes 0..15 -> uint8 [..., packed_length(L, order)].

    Along the last axis, in any strides. "low_first" (PyTorch, CUDA, ONNX, Transformer Engine): the even
    element is in the low nibble; "high_first": in the high one; "ggml_split" (GGML): in each block of 32,
    byte j holds element j low and element j + 16 high. The nibbles that L leaves over are 0.
    ``out``: uint8 of the result's shape, any strides; it is filled and returned (undefined after an error).
    FormatError for another dtype, no axis, a code above 15, an unknown order or a wrong ``out``.
    """
    order = nibble_order(order)
    codes = _checked(codes, "codes")
    length = codes.shape[-1]
    packed = _room((*codes.shape[:-1], packed_length(length, order)), out, codes)
    if codes.size:
        seen = np.zeros(1, np.uint8)
        if order is NibbleOrder.GGML_SPLIT:
            kernels.pack_ggml_split(_words(_in_blocks(codes), GGML_BLOCK), _words(packed, GGML_BYTES), seen)
        else:
            to_bytes = kernels.pack_high_first if order is NibbleOrder.HIGH_FIRST else kernels.pack_low_first
            to_bytes(_rows(codes, length), _rows(packed, length), seen)
        if seen[0] > 15:
            raise FormatError(f"code {int(codes.max())} is outside 0..15: only 4-bit codes are packed")
    return _deliver(packed, out)


def unpack(packed: U8, length: int, *, order: str | NibbleOrder = NibbleOrder.LOW_FIRST, out: U8 | None = None) -> U8:
    """Inverse of ``pack``: uint8 [..., packed_length(length, order)] -> uint8 [..., length].

    The padding nibbles are not read. ``out`` as in ``pack``. FormatError where ``length`` does not fit the
    last axis, for another dtype, an unknown order or a wrong ``out``.
    """
    order, length = nibble_order(order), whole_number("length", length)
    packed = _checked(packed, "packed codes")
    width = packed.shape[-1]
    if length < 0 or packed_length(length, order) != width:
        raise FormatError(f"length {length} does not fit a last axis of {width} bytes, {_capacity(width, order)}")
    codes = _room((*packed.shape[:-1], length), out, packed)
    if codes.size and order is NibbleOrder.GGML_SPLIT:
        whole = codes if length == 2 * width else np.empty((*packed.shape[:-1], 2 * width), np.uint8)
        kernels.unpack_ggml_split(_words(_readable(packed), GGML_BYTES), _words(whole, GGML_BLOCK))
        if whole is not codes:
            codes[...] = whole[..., :length]
    elif codes.size:
        to_codes = kernels.unpack_high_first if order is NibbleOrder.HIGH_FIRST else kernels.unpack
        to_codes(_rows(packed, length), _rows(codes, length))
    return _deliver(codes, out)


def _checked(array: AnyArray, what: str) -> U8:
    array = as_array(array, what)
    if array.dtype != np.uint8 or array.ndim == 0:
        raise FormatError(f"{what} are {array.dtype} of shape {array.shape}; packing needs uint8 with an axis")
    return array


def _capacity(width: int, order: NibbleOrder) -> str:
    """What ``width`` bytes hold, for a message."""
    if order is not NibbleOrder.GGML_SPLIT:
        return f"which holds {max(2 * width - 1, 0)} or {2 * width} codes"
    if width % GGML_BYTES:
        return f"which is no whole number of {order.value} blocks of {GGML_BYTES} bytes"
    return f"which holds {max(2 * width - GGML_BLOCK + 1, 0)} to {2 * width} codes"


def _room(shape: tuple[int, ...], out: U8 | None, source: U8) -> U8:
    """Contiguous words to write the result into: ``out`` itself where it is that and apart from ``source``."""
    if out is None:
        return np.empty(shape, np.uint8)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != np.uint8:
        found = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise FormatError(f"out is {found}; it must be uint8 of shape {shape}")
    if not out.flags.writeable:
        raise FormatError("out is read-only; pass a writable array")
    direct = out.flags.c_contiguous and _on_a_word(out) and not np.may_share_memory(out, source)
    return out if direct else np.empty(shape, np.uint8)


def _deliver(result: U8, out: U8 | None) -> U8:
    if out is None:
        return result
    if out is not result:
        out[...] = result
    return out


def _rows(array: U8, length: int) -> U8:
    """[rows, bytes] of codes or their pairs; with an even ``length`` no pair spans two rows, so one long row."""
    return np.ascontiguousarray(array).reshape((1, -1) if length % 2 == 0 else (-1, array.shape[-1]))


def _in_blocks(codes: U8) -> U8:
    """Readable ``codes`` with whole blocks along the last axis, filled up with 0."""
    length = codes.shape[-1]
    if length % GGML_BLOCK == 0:
        return _readable(codes)
    whole = np.zeros((*codes.shape[:-1], GGML_BLOCK * -(-length // GGML_BLOCK)), np.uint8)
    whole[..., :length] = codes
    return whole


def _on_a_word(array: U8) -> bool:
    return array.ctypes.data % 8 == 0


def _readable(array: U8) -> U8:
    """Contiguous, and on a word: ``array`` itself or a copy."""
    array = np.ascontiguousarray(array)
    return array if _on_a_word(array) else array.copy()


def _words(array: U8, block_bytes: int) -> U64:
    """uint64 [blocks, words] of the same memory, in blocks of ``block_bytes``."""
    return array.reshape(-1, block_bytes).view(np.uint64)
