"""Any cast of flat numbers, counted: chunks, threads, random words, the first refusal. Knows no shape and no layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import I64, U32, frozen
from qsim.codec import general_kernels as kernels
from qsim.codec.general_kernels import COUNTS
from qsim.codec.inputs import check_stream
from qsim.codec.threads import in_chunks
from qsim.formats import CastPolicy, FloatFormat
from qsim.philox import RandomStream

if TYPE_CHECKING:
    from qsim.arrays import F32, F64, U8

__all__ = ["COUNTS", "encode_flat", "first_refused", "rule_words"]

CHUNK = 1 << 16
"""Elements of one call of a kernel: their random words stay in the cache."""


_KERNELS: dict[int, tuple[type[np.uint32 | np.uint64], Callable[..., None], Callable[..., None]]] = {
    4: (np.uint32, kernels.encode32, kernels.encode32_drawn),
    8: (np.uint64, kernels.encode64, kernels.encode64_drawn),
}
"""By bytes of a number: its word, and the kernels without and with chance."""


@lru_cache(maxsize=256)
def _rules(fmt: FloatFormat, policy: CastPolicy, itemsize: int) -> kernels.Rules:
    return kernels.rules_of(fmt, policy, _KERNELS[itemsize][0])


@lru_cache(maxsize=256)
def rule_words(fmt: FloatFormat, policy: CastPolicy) -> U32:
    """The rules of a cast of float32 numbers as uint32 [21], in the order of ``Rules``: what a device takes."""
    return frozen(np.array([int(value) for value in _rules(fmt, policy, 4)], np.uint32))


def encode_flat(x: F32 | F64, codes: U8, *, fmt: FloatFormat, policy: CastPolicy, stream: RandomStream | None) -> I64:
    """Fill codes [n] with the codes of x [n], both contiguous; counts [5] as ``general_kernels`` names them.

    float64 is rounded once in every mode. Element i takes word i of ``stream``, which stochastic rounding needs
    and no other rounding takes: else UsageError. What the policy refuses is counted, not raised.
    """
    check_stream(policy, stream, x.size)
    parts: list[I64] = []

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, CHUNK):
            span = slice(at, min(at + CHUNK, stop))
            parts.append(_encode_span(x, codes, span, fmt, policy, stream))

    in_chunks(work, x.size)
    counts = np.zeros(COUNTS, np.int64)
    for part in parts:
        counts += part
    return counts


def first_refused(x: F32 | F64, *, fmt: FloatFormat, policy: CastPolicy, stream: RandomStream | None) -> int:
    """Index of the first element of x [n] that the policy refuses; there must be one. Found by halving."""
    low, high = 0, x.size
    codes = np.empty(x.size, np.uint8)
    while high - low > 1:
        middle = (low + high) // 2
        refused = _encode_span(x, codes, slice(low, middle), fmt, policy, stream)[-1]
        low, high = (low, middle) if refused else (middle, high)
    return low


def _encode_span(
    x: F32 | F64, codes: U8, span: slice, fmt: FloatFormat, policy: CastPolicy, stream: RandomStream | None
) -> I64:
    word, kernel, drawn = _KERNELS[x.dtype.itemsize]
    counts = np.empty(COUNTS, np.int64)
    bits, rules = x[span].view(word), _rules(fmt, policy, x.dtype.itemsize)
    if stream is None:
        kernel(bits, rules, codes[span], counts)
    else:
        drawn(bits, _words(stream, span.start, span.stop), rules, codes[span], counts)
    return counts


def _words(stream: RandomStream, start: int, stop: int) -> U32:
    """The words of elements start .. stop - 1."""
    block = start // 4
    words = np.empty(-(-stop // 4) * 4 - block * 4, np.uint32)
    kernels.fill_words(np.array([*stream.key(), *stream.counter()], np.uint32), block, words)
    return words[start - block * 4 : stop - block * 4]
