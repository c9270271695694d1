"""Randomness as a pure function of identity: Philox4x32-10. Keeps no state and draws nothing in order.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from qsim.arrays import F32, I64, U32
from qsim.checks import whole_number
from qsim.errors import UsageError

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
ROUNDS = 10
MAX_WORDS = 4 << 32
"""Words of one stream: four for each value of the 32-bit block counter."""


class Purpose(IntEnum):
    """What a stream of random words is for; streams of different purposes never meet."""

    WEIGHTS = 1
    ROWS = 2
    ORDER = 3
    ROUNDING = 4
    HADAMARD = 5
    SCHEDULE = 6
    DATA = 7
    MAGNITUDE = 8
    BATCHES = 9


def philox4x32(counter: U32, key: tuple[int, int]) -> U32:
    """Ten rounds of Philox on every counter: uint32 [..., 4] -> uint32 [..., 4]; key is two 32-bit words."""
    c = counter.astype(np.uint64)
    c0, c1, c2, c3 = (c[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT32) ^ c1 ^ np.uint64(k0),
            p1 & _MASK32,
            (p0 >> _SHIFT32) ^ c3 ^ np.uint64(k1),
            p0 & _MASK32,
        )
        k0 = (k0 + _W0) & 0xFFFFFFFF
        k1 = (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


_FIELDS = (  # name, bits: the layout of DESIGN section 5
    ("step", 32),
    ("microbatch", 16),
    ("worker", 16),
    ("purpose", 8),
    ("layer", 12),
    ("site", 4),
    ("role", 8),
)


def _whole(name: str, value: object) -> int:
    return whole_number(f"{name} of a random stream:", value)


def _key(seed: int) -> tuple[int, int]:
    seed = _whole("seed", seed)
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed {seed} is outside 0..2^64-1; choose a smaller non-negative integer")
    return seed & 0xFFFFFFFF, seed >> 32


class RandomStream(NamedTuple):
    """The words of one purpose in one place: word e is word e % 4 of the block with the counter e // 4.

    key = seed (low word, high word); counter = (element // 4, step, microbatch << 16 | worker,
    purpose << 24 | layer << 12 | site << 8 | role). A field that does not fit raises UsageError where it is used.
    """

    seed: int
    purpose: Purpose = Purpose.ROUNDING
    step: int = 0
    microbatch: int = 0
    worker: int = 0
    layer: int = 0
    site: int = 0
    role: int = 0

    def key(self) -> tuple[int, int]:
        """The two key words."""
        return _key(self.seed)

    def counter(self) -> tuple[int, int, int]:
        """The counter without its first word, the number of the block."""
        given = (self.step, self.microbatch, self.worker, self.purpose, self.layer, self.site, self.role)
        values = [_whole(name, value) for (name, _), value in zip(_FIELDS, given, strict=True)]
        for (name, bits), value in zip(_FIELDS, values, strict=True):
            if not 0 <= value < 1 << bits:
                raise UsageError(f"{name} {value} does not fit its {bits} bits of the random counter")
        step, microbatch, worker, purpose, layer, site, role = values
        return step, microbatch << 16 | worker, purpose << 24 | layer << 12 | site << 8 | role

    def words(self, count: int) -> U32:
        """The first ``count`` words."""
        count = _whole("count", count)
        upper = self.counter()
        if not 0 <= count <= MAX_WORDS:
            raise UsageError(f"count {count} is outside 0..2^34, the words of one stream; use another step or purpose")
        blocks = -(-count // 4)
        counter = np.empty((blocks, 4), np.uint32)
        counter[:, 0] = np.arange(blocks, dtype=np.uint32)
        counter[:, 1:] = upper
        return philox4x32(counter, self.key()).reshape(-1)[:count]

    def word(self, element: int) -> int:
        """The word of one element."""
        element = _whole("element", element)
        if not 0 <= element < MAX_WORDS:
            raise UsageError(f"element {element} is outside 0..2^34-1, the words of one stream; use another step")
        counter = np.array((element // 4, *self.counter()), np.uint32)
        return int(philox4x32(counter, self.key())[element % 4])


def random_words(
    seed: int,
    purpose: Purpose,
    *,
    count: int,
    step: int = 0,
    microbatch: int = 0,
    worker: int = 0,
    layer: int = 0,
    site: int = 0,
    role: int = 0,
) -> U32:
    """``count`` random uint32 words of one stream: the words of ``RandomStream``."""
    return RandomStream(seed, purpose, step, microbatch, worker, layer, site, role).words(count)


def random_bell(
    seed: int,
    purpose: Purpose,
    shape: Sequence[int],
    *,
    step: int = 0,
    microbatch: int = 0,
    worker: int = 0,
    layer: int = 0,
    site: int = 0,
    role: int = 0,
) -> F32:
    """Bell-shaped float32 values of mean 0 and variance 1: the sum of four uniform words (Irwin-Hall, n = 4).

    The sum is an exact integer and is rounded twice in all (scaling in float64, then float32), so it needs no
    transcendental function and is the same on every machine. |value| < 3.47.
    """
    count = int(np.prod(shape, dtype=np.int64))
    stream = RandomStream(seed, purpose, step, microbatch, worker, layer, site, role)
    words = stream.words(4 * count)
    centred = words.reshape(count, 4).astype(np.int64).sum(axis=1) - np.int64(2 * (2**32 - 1))
    sigma = np.sqrt(np.float64(2**64 - 1) / 3.0)  # 4 * variance of a uniform integer in 0..2^32-1
    bell: F32 = (centred.astype(np.float64) / sigma).astype(np.float32).reshape(tuple(shape))
    return bell


def random_order(seed: int, purpose: Purpose, count: int) -> I64:
    """A permutation of 0..count-1: the order of ``count`` random words (ties by index)."""
    return np.argsort(random_words(seed, purpose, count=count), kind="stable").astype(np.int64)
