"""Conformance of a codec: anyone's encode and decode held against the oracle, code by code.

A subject is two functions and what they claim; ``check_codec`` raises at the first bit that differs. The inputs
are every representable value, every midpoint of neighbours, the overflow threshold, and both float32 neighbours
of each, with both signs, and the float32 specials.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsim.arrays import F32, FLT_MAX, U8
from qsim.codec.oracle import decode_scalar, encode_by_policy
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.formats import CastPolicy, FloatFormat
from qsim.philox import RandomStream

_SPECIAL = (0x00000000, 0x00000001, 0x00400000, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001,
            0x7FC00000, 0x7FFFFFFF, 0x3F800000, 0x3F7FFFFF, 0x3F800001)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSubject:
    """A codec under test.

    encode: float32 [n] -> uint8 codes [n], one code a byte. decode: uint8 codes [n] -> float32 [n], or None for
    a codec without one. policy: the rounding, overflow and NaN rules that the subject claims to follow; what it
    refuses is left out of the inputs. stream: for stochastic rounding, element i takes word i.
    """

    name: str
    fmt: FloatFormat
    policy: CastPolicy
    encode: Callable[[F32], U8]
    decode: Callable[[U8], F32] | None = None
    stream: RandomStream | None = None


def critical_values(fmt: FloatFormat) -> F32:
    """Where an encoder can go wrong: values, midpoints, the overflow threshold, their float32 neighbours, specials."""
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    beyond = _next_magnitude(fmt)
    grid = [*values, beyond, 2 * beyond]
    points = np.array([*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid))])
    points = points[points <= float(FLT_MAX)]
    assert (points.astype(np.float32) == points).all(), "values and midpoints of these formats are float32 numbers"
    bits = points.astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.unique(np.clip(np.concatenate([bits - 1, bits, bits + 1]), 0, 0x7F800000)).astype(np.uint32)
    magnitudes = np.concatenate([near, np.array(_SPECIAL, np.uint32)])
    return np.concatenate([magnitudes, magnitudes | np.uint32(0x80000000)]).view(np.float32)


def _next_magnitude(fmt: FloatFormat) -> float:
    """What would follow ``fmt.max`` if the exponent were unbounded."""
    field, mantissa = divmod(fmt.max_code + 1, 1 << fmt.mantissa_bits)
    return (1 + mantissa / (1 << fmt.mantissa_bits)) * 2.0 ** (field - fmt.bias)


def _accepted(x: F32, fmt: FloatFormat, policy: CastPolicy) -> F32:
    """Those of ``x`` that no word could make the policy refuse."""
    codes = policy.codes(fmt)
    no_number = np.isnan(x) | ((x < 0) & (not fmt.signed))
    beyond = ~no_number & (np.abs(x) > fmt.max)
    return x[~((no_number & codes.refuses_nan) | (beyond & codes.refuses_overflow))]


def check_codec(subject: CodecSubject) -> int:
    """Hold a subject against the oracle; the number of comparisons made.

    AssertionError names the first input whose code differs, with both codes and values. A NaN may decode to any
    NaN; every other code must decode to its exact float32, -0 included.
    """
    fmt, policy = subject.fmt, subject.policy
    x = _accepted(critical_values(fmt), fmt, policy)
    words = np.zeros(x.size, np.uint32) if subject.stream is None else subject.stream.words(x.size)
    expected = np.array(
        [encode_by_policy(float(v), fmt, policy, word=int(word)) for v, word in zip(x, words, strict=True)], np.uint8
    )
    assert_codes_equal(expected, np.asarray(subject.encode(x)), fmt, inputs=x)
    if subject.decode is None:
        return x.size
    codes = np.arange(fmt.code_count, dtype=np.uint8)
    values = np.array([decode_scalar(int(code), fmt) for code in codes], np.float32)
    actual = np.asarray(subject.decode(codes))
    numbers = ~np.isnan(values)
    assert_bits_equal(values[numbers], actual[numbers], what=f"values of {subject.name}")
    if not np.isnan(actual[~numbers]).all():
        raise AssertionError(f"{subject.name}: a NaN code of {fmt.name} decodes to a number")
    return x.size + codes.size
