"""Batches as a pure function of seed, step and microbatch. Keeps no place in the text and trains nothing.

A window is ``context`` bytes and the byte after them. Its start is drawn, with replacement, by multiply-shift: of the
64-bit word w and n possible starts, start = floor(w * n / 2^64). Each start is drawn by floor or ceil(2^64 / n) of the
2^64 words, so no probability is off from 1/n by more than 2^-64, and with n < 2^32 by no more than 2^-32 of itself; a
rejection would take a number of words that depends on the words.

Sequence i of a batch is drawn with words 2i (high) and 2i + 1 (low) of the stream (seed, BATCHES, step, microbatch,
worker, site = part): it depends neither on the batch size nor on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from qsim.arrays import I64, U32, U64, frozen
from qsim.checks import whole_number
from qsim.errors import InputError, UsageError
from qsim.philox import Purpose, RandomStream
from qsim.training.text import MAX_BYTES, Text

HELD_OUT_SHARE = 10
"""One byte in this many is held out, at the end of the text."""

MAX_BATCH = 1 << 24


class Part(StrEnum):
    """The part of the text that windows lie in. No byte belongs to both, and no window crosses the border."""

    TRAIN = "train"
    HELD_OUT = "held_out"


_STREAM = {Part.TRAIN: 0, Part.HELD_OUT: 1}


def bounds(text: Text, part: Part | str) -> tuple[int, int]:
    """First byte of a part and the one after its last: the last floor(bytes / 10) are held out."""
    try:
        chosen = Part(part)
    except ValueError:
        raise UsageError(f'part "{part}" of a text is unknown; use one of {", ".join(Part)}') from None
    size = text.data.size
    border = size - size // HELD_OUT_SHARE
    return (0, border) if chosen is Part.TRAIN else (border, size)


def bytes_needed(context: int) -> int:
    """The shortest text whose two parts both hold a window of ``context`` bytes and the byte after them."""
    return HELD_OUT_SHARE * (whole_number("context", context, least=1) + 1)


def window_starts(words: U32, count: int) -> I64:
    """Places 0..count-1, one for each pair of words: floor(w * count / 2^64), w the pair read high word first.

    words: uint32 [2 B]; count: 1..2^32-1, so that no uint64 product overflows.
    """
    assert 1 <= count <= MAX_BYTES
    high, low = (words[half::2].astype(np.uint64) for half in (0, 1))
    n = np.uint64(count)
    shift = np.uint64(32)
    # w n / 2^64 = (high n + low n / 2^32) / 2^32, and a fraction dropped within never changes the floor of the whole
    starts: U64 = (high * n + (low * n >> shift)) >> shift
    return starts.astype(np.int64)


def batches(
    text: Text,
    seeds: Sequence[int],
    *,
    step: int,
    microbatch: int = 0,
    batch: int,
    context: int,
    worker: int = 0,
    part: Part | str = Part.TRAIN,
) -> tuple[I64, I64]:
    """Tokens and targets of R seeds, int64 [R, batch, context] each, read-only; targets are the next bytes.

    Replica r is ``batch(text, seed=seeds[r], ...)``. Raises UsageError for a number that is no integer or does not fit
    the random counter (step 32 bits, microbatch and worker 16), InputError for a part shorter than a window.
    """
    batch = whole_number("batch", batch, least=1)
    context = whole_number("context", context, least=1)
    if batch > MAX_BATCH:
        raise UsageError(f"batch {batch} is above {MAX_BATCH}; use more microbatches")
    first, end = bounds(text, part)
    count = end - first - context
    if count < 1:
        raise InputError(
            f"text {text.name}: its part {part!s} has {end - first} bytes, and a window of context {context} takes "
            f"{context + 1}; a text of {bytes_needed(context)} bytes is enough"
        )
    site = _STREAM[Part(part)]
    streams = [RandomStream(seed, Purpose.BATCHES, step, microbatch, worker, site=site) for seed in seeds]
    starts = np.empty((len(streams), batch), np.int64)
    for row, stream in zip(starts, streams, strict=True):
        row[:] = first + window_starts(stream.words(2 * batch), count)
    windows = text.data[starts[..., None] + np.arange(context + 1)].astype(np.int64)
    tokens, targets = (np.ascontiguousarray(windows[..., cut]) for cut in (slice(None, -1), slice(1, None)))
    return frozen(tokens), frozen(targets)


def batch(
    text: Text,
    *,
    seed: int,
    step: int,
    microbatch: int = 0,
    batch: int,
    context: int,
    worker: int = 0,
    part: Part | str = Part.TRAIN,
) -> tuple[I64, I64]:
    """Tokens and targets of one seed, int64 [batch, context] each, read-only; see ``batches``."""
    tokens, targets = batches(
        text, (seed,), step=step, microbatch=microbatch, batch=batch, context=context, worker=worker, part=part
    )
    return tokens[0], targets[0]
