"""One scaled cast on several threads: which kernel sees which part of x. Knows no recipe by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from qsim.arrays import F32, F64, I64, U8, U32, A, AnyArray
from qsim.codec.general import encode_flat
from qsim.codec.scaled import kernels, measure_kernels
from qsim.codec.scaled.refusals import check, rounds_beyond
from qsim.codec.scaled.rules import Rule, constants_of
from qsim.codec.threads import in_chunks
from qsim.formats import CastPolicy, FloatFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qsim.philox import RandomStream

LINE = 4096
"""Elements that are measured, scaled and encoded together where blocks lie one after another: 16 KiB, in the cache."""

Parts = tuple[I64, np.float32]
"""Counts [5] and the largest finite magnitude of a part of a matrix."""

Steps = tuple[bool, bool, bool]
"""Measure, scale, encode: what a call of the kernel does."""

EVERY_STEP, SCALE_ONLY, ENCODE_ONLY = (True, True, True), (False, True, False), (False, False, True)

_NAN = np.uint32(0x7FC00000).view(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCast:
    """One cast: what its threads share. It fills codes, and scales [gm, gk] or scale_codes [gm, gk].

    center [1 or M, 1 or K], or [0, 0] for none: what follows is of RN(x - center).
    """

    x: F32
    center: F32
    bm: int
    bk: int
    rule: Rule
    fmt: FloatFormat
    policy: CastPolicy
    packed: bool
    counting: bool
    codes: U8
    scales: F32
    scale_codes: U8

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks down, blocks across."""
        return (self.scale_codes.shape[0], max(self.scales.shape[1], self.scale_codes.shape[1]))

    def in_tiles(self) -> Parts:
        """Measured, scaled and encoded band by band, in the cache; the threads share the bands out."""
        return _merged([part for job in self._in_lines() for part in job._in_bands()])

    def _in_lines(self) -> Iterator[BlockCast]:
        """The same cast over rows of some LINE elements, where blocks lie one after another; and its tail."""
        unit = int(np.lcm(self.bk, 2))  # whole blocks, whole bytes
        rows, columns = self.x.shape
        if self.center.size > 1 or (rows != 1 and (self.bm != 1 or columns % unit)):
            yield self
            return
        width = max(LINE // unit, 1) * unit
        lines = self.x.size // width
        yield self._lines(0, lines, width)
        if self.x.size % width:
            yield self._lines(lines * width, 1, self.x.size - lines * width)

    def _lines(self, start: int, count: int, width: int) -> BlockCast:
        """The cast of ``count`` rows of ``width`` elements from element ``start`` on."""

        def part(array: A, per: int) -> A:
            """What belongs to them in an array with an entry for every ``per`` elements."""
            each = -(-width // per) if array.size else 0
            first = start // per if array.size else 0
            return cast("A", array.reshape(-1)[first : first + count * each].reshape(count, each))

        return replace(
            self,
            bm=1,
            x=part(self.x, 1),
            codes=part(self.codes, 2 if self.packed else 1),
            scales=part(self.scales, self.bk),
            scale_codes=part(self.scale_codes, self.bk),
        )

    def _in_bands(self) -> list[Parts]:
        """Rows of blocks; what only the next step needs is kept for one of them."""
        bm, line = self.bm, (1, self.grid[1])
        parts: list[Parts] = []

        def work(start: int, stop: int) -> None:
            band = slice(start // bm, -(-stop // bm))
            scales = self.scales[band] if self.scales.size else np.empty(line, np.float32)
            scratch = np.empty(line, np.uint32), np.empty(line, np.uint32), scales, self._divisors(line)
            own = self._centers(slice(start, stop))
            parts.append(
                self._run(EVERY_STEP, self.x[start:stop], own, bm, self.bk, *scratch, self.scale_codes[band],
                          self.codes[start:stop])
            )  # fmt: skip

        if self.x.size:
            in_chunks(work, self.x.shape[0], cost=self.x.shape[1], align=bm)
        return parts

    def _centers(self, rows: slice, columns: slice = slice(None)) -> F32:
        """The centres of a part of x."""
        down = slice(None) if self.center.shape[0] <= 1 else rows
        across = slice(None) if self.center.shape[1] <= 1 else columns
        return np.ascontiguousarray(self.center[down, across])

    def _divisors(self, grid: tuple[int, int]) -> F64:
        return np.empty((grid[0], grid[1] if self.rule.exact else 0), np.float64)

    def in_phases(self) -> Parts:
        """Measured, then scaled, then encoded: for blocks that reach over all rows."""
        multiplier, divisor, parts = self._scaled()
        x = self.x
        tensor = self.grid == (1, 1)
        across = tensor and x.shape[0] == 1
        unused = np.empty((1, 1), np.uint32)

        def work(start: int, stop: int) -> None:
            here = (slice(None), slice(start, stop)) if across else (slice(start, stop), slice(None))
            part = x[here]
            bk = part.shape[1] if tensor else self.bk
            parts.append(
                self._run(ENCODE_ONLY, part, self._centers(*here), part.shape[0], bk, unused, unused, multiplier,
                          divisor, self.scale_codes, self._codes(*here))
            )  # fmt: skip

        if x.size:
            size, cost = (x.shape[1], 1) if across else (x.shape[0], x.shape[1])
            in_chunks(work, size, cost=cost, align=2 if across else 1)
        return _merged(parts)

    def _run(
        self, steps: Steps, part: F32, center: F32, bm: int, bk: int, top: U32, bad: U32, multiplier: F32, divisor: F64,
        scale_codes: U8, codes: U8,
    ) -> Parts:  # fmt: skip
        """The kernel, for some ``steps``; counts and amax of the part."""
        counts, amax = np.zeros(5, np.int64), np.zeros(1, np.uint32)
        kernels.cast_blocks(
            part, center, bm, bk, *steps, self.rule.number, self.rule.floats, self.rule.steps,
            constants_of(self.fmt, self.policy), self.packed, self.counting, top, bad, multiplier, divisor,
            scale_codes, codes, amax, counts,
        )  # fmt: skip
        return counts, amax.view(np.float32)[0]

    def generally(self, stream: RandomStream | None) -> Parts:
        """Any rounding and any refusal: the scaled elements by numpy, then the general kernels. ``codes`` unpacked.

        RefusedError (a FormatError): what the policy refuses.
        """
        multiplier, divisor, parts = self._scaled()
        x = self.x
        with np.errstate(all="ignore"):
            m = self._spread(multiplier)
            y = np.asarray(x * m, np.float32)
            y = np.where(np.isinf(m) & (x == 0), x, np.where(m == 0, np.float32(0), y))
            y = np.where(np.isnan(x), np.copysign(_NAN, x), np.where(np.isnan(y), _NAN, y))
            if self.rule.exact:
                d = self._spread(divisor)
                quotient = _odd_quotient(
                    x.astype(np.float64) * np.float64(self.rule.floats[5]), np.where(d > 0, d, 1.0)
                )
                y = np.where(d > 0, quotient, y.astype(np.float64))
        flat: F32 | F64 = np.ascontiguousarray(y).reshape(-1)
        counts = encode_flat(flat, self.codes.reshape(-1), fmt=self.fmt, policy=self.policy, stream=stream)
        beyond = None
        if counts[-1]:
            beyond = rounds_beyond(flat, fmt=self.fmt, policy=self.policy, stream=stream).reshape(x.shape)
        check(x, fmt=self.fmt, codes=self.policy.codes(self.fmt), two_level=self.rule.two_level, beyond=beyond)
        assert not counts[-1], "what a kernel refuses has an element to blame"
        # The kernel saw y, not x: a product that became Inf or 0 is saturated or flushed too.
        counts[0] += np.count_nonzero(np.isinf(y) & np.isfinite(x))
        counts[1] += np.count_nonzero((y == 0) & (x != 0))
        counts[2:] = np.count_nonzero(np.isnan(x)), np.count_nonzero(np.isinf(x)), 0
        return _merged([*parts, (counts, np.float32(0))])

    def _codes(self, rows: slice, columns: slice) -> U8:
        """The codes of a part of x."""
        if self.packed and columns.start is not None:
            columns = slice(columns.start // 2, (columns.stop + 1) // 2)
        return self.codes[rows, columns]

    def _spread(self, grid: AnyArray) -> AnyArray:
        """A number a block as a number an element."""
        rows, columns = self.x.shape
        return np.repeat(np.repeat(grid, self.bm, axis=0)[:rows], self.bk, axis=1)[:, :columns]

    def _scaled(self) -> tuple[F32, F64, list[Parts]]:
        """Multiplier and divisor of every block; the stored scales are filled in."""
        top, bad = self._measured()
        multiplier = self.scales if self.scales.size else np.empty(self.grid, np.float32)
        divisor, counts = self._divisors(self.grid), np.zeros(5, np.int64)
        if self.x.size:
            counts, _ = self._run(SCALE_ONLY, self.x, self.center, self.bm, self.bk, top, bad, multiplier, divisor,
                                  self.scale_codes, self.codes)  # fmt: skip
        return multiplier, divisor, [(counts, np.uint32(top.max(initial=0)).view(np.float32))]

    def _measured(self) -> tuple[U32, U32]:
        """Bits of the largest finite magnitude of every block, and 0 | 1 (Inf) | 2 (NaN) beside it."""
        x, bm, bk = self.x, self.bm, self.bk
        top, bad = np.zeros(self.grid, np.uint32), np.zeros(self.grid, np.uint32)
        whole = self.grid[0] <= 1  # blocks reach over all rows: parts of them are merged
        flat = self.grid == (1, 1) and self.center.size <= 1
        source = x.reshape(1, -1) if flat else x
        found: list[tuple[U32, U32]] = []

        def work(start: int, stop: int) -> None:
            part = source[:, start:stop] if flat else source[start:stop]
            band = slice(None) if whole else slice(start // bm, -(-stop // bm))
            mine = np.zeros_like(top[band]), np.zeros_like(bad[band])
            center = self.center if flat else self._centers(slice(start, stop))
            measure_kernels.measure(part, center, part.shape[0] if whole else bm, part.shape[1] if flat else bk, *mine)
            found.append(mine)
            if not whole:
                top[band], bad[band] = mine

        if x.size:
            size, cost = (source.shape[1], 1) if flat else (source.shape[0], source.shape[1])
            in_chunks(work, size, cost=cost, align=1 if whole else bm)
        if whole:
            for part_top, part_bad in found:
                np.maximum(top, part_top, out=top)
                np.maximum(bad, part_bad, out=bad)
        return top, bad


def _odd_quotient(a: F64, b: F64) -> F64:
    """a / b rounded to odd, b > 0: exact, or the neighbour with an odd last bit, so that one rounding is left.

    a and b have at most 29 bits. q is cut into parts of at most 24 bits, whose products with b are exact; what is
    left of a after each has few bits, as q was near a / b, and is exact too.
    """
    q = a / b
    first = _top_24_bits(q)
    second = _top_24_bits(q - first)
    rest = ((a - first * b) - second * b) - (q - first - second) * b
    away = (rest != 0) & ((rest < 0) != (q < 0))  # |q| is above |a / b|
    bits = (q.view(np.int64) - away) | (rest != 0)
    return np.asarray(bits, np.int64).view(np.float64)


def _top_24_bits(v: F64) -> F64:
    return (v.view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64)


def _merged(parts: list[Parts]) -> Parts:
    counts = np.sum([np.zeros(5, np.int64), *(c for c, _ in parts)], axis=0, dtype=np.int64)
    return np.asarray(counts, np.int64), np.float32(max((a for _, a in parts), default=0))
