"""Scaled casts at memory speed: equal to ``oracle`` bit for bit. Knows no axis, no centre and no layout but rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import F32, F64, FLT_MAX, I64, U8, U32, AnyArray
from qsim.codec.general import check_stream, encode_flat, first_refused
from qsim.codec.oracle import place, refusal
from qsim.codec.packing import pack
from qsim.codec.scaled import decode_kernels, kernels, measure_kernels, scale_kernels
from qsim.codec.scaled.recipes import (
    BlockError,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    ScaleRecipe,
    TwoLevelScale,
    exponent_rule,
)
from qsim.codec.scaled.result import BlockCounts, ScaledCodes
from qsim.codec.tables import decode_table, encoder_table
from qsim.codec.threads import in_chunks
from qsim.errors import FormatError
from qsim.formats import E4M3FN, E8M0FNU, POLICIES, CastPolicy, FloatFormat, RoundMode

if TYPE_CHECKING:
    from qsim.philox import RandomStream

TILE = 1 << 18
"""Elements that are measured, scaled and encoded together: 1 MiB of float32, read twice but once from memory."""

Parts = tuple[I64, np.float32]
"""Counts [5] and the largest finite magnitude of a part of a matrix."""

RULES = {ScaleOrder.EXACT: 2, ScaleOrder.TE: 3, ScaleOrder.TORCHAO: 4, ScaleOrder.FOUR_OVER_SIX: 5}
_ONE, _SIXTH = np.float32(1), np.float32(1) / np.float32(6)
_NAN = np.uint32(0x7FC00000).view(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A scale rule as ``scale_kernels`` takes it."""

    number: int
    floats: F32
    steps: I64

    @property
    def exact(self) -> bool:
        return self.number == scale_kernels.EXACT_RULE


def _rule_of(recipe: ScaleRecipe, g: np.float32) -> _Rule:
    floats, steps = np.zeros(9, np.float32), np.zeros(3, np.int64)
    match recipe.scale:
        case Float32Scale():
            number, floats[0] = 0, recipe.fmt.max
        case PowerOfTwoScale(rule=rule):
            number, steps[:2] = 1, exponent_rule(recipe.fmt, rule)
        case TwoLevelScale(order=order, scale_max=scale_max, error=error) as scale:
            full = np.float32(scale.full_range)
            with np.errstate(divide="ignore", over="ignore", under="ignore"):
                s_enc = np.minimum(full / g, FLT_MAX) if g > 0 else _ONE
                s_enc = s_enc if s_enc > 0 else _ONE
                pt = g / full
                floats[:] = (recipe.fmt.max, s_enc, _ONE / s_enc, s_enc * _SIXTH, pt, full, g, _ONE / pt, scale_max)
            number, steps[2] = RULES[order], error is BlockError.ABSOLUTE
    return _Rule(number=number, floats=floats, steps=steps)


def _scale_constants() -> U32:
    return encoder_table(E4M3FN, POLICIES["ocp"])


def amax_of(x: F32) -> np.float32:
    """The largest finite |x| of a matrix; 0.0 where there is none."""
    flat = x.reshape(-1)
    found: list[int] = []

    def work(start: int, stop: int) -> None:
        top, bad = np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.uint32)
        measure_kernels.measure(flat[start:stop].reshape(1, -1), 1, max(stop - start, 1), top, bad)
        found.append(int(top[0, 0]))

    in_chunks(work, flat.size)
    return np.uint32(max(found, default=0)).view(np.float32)


def quantize_matrix(
    x: F32,
    recipe: ScaleRecipe,
    *,
    policy: CastPolicy,
    stream: RandomStream | None = None,
    packed: bool = False,
    counting: bool = True,
    tensor_amax: np.float32 | None = None,
) -> ScaledCodes:
    """Codes and scales of the contiguous float32 matrix x [M, K]; equal to ``quantize_oracle``.

    stream: words of stochastic rounding; element i in C order takes word i. packed: codes [M, (K + 1) // 2], even
    element in the low nibble. Without ``counting`` the counts are 0. tensor_amax: the g of a two-level scale, by
    default the amax of x. FormatError: what the policy refuses; UsageError: a stream where none is drawn from, or none.
    """
    two_level = isinstance(recipe.scale, TwoLevelScale)
    g = np.float32(0)
    if two_level:
        g = amax_of(x) if tensor_amax is None else tensor_amax
    check_stream(policy, stream, x.size)
    shape = (x.shape[0], x.shape[1])
    resolved = policy.codes(recipe.fmt)
    usual = policy.rounding is RoundMode.TIES_TO_EVEN and not (resolved.refuses_nan or resolved.refuses_overflow)
    (bm, bk), grid = recipe.block.extent(shape), recipe.block.grid(shape)
    fused = usual and packed and (bk % 2 == 0 or grid[1] <= 1)  # else two blocks share a byte
    cast = _Cast(
        x=x,
        bm=bm,
        bk=bk,
        rule=_rule_of(recipe, g),
        fmt=recipe.fmt,
        policy=policy,
        packed=fused,
        counting=counting,
        codes=np.empty((shape[0], (shape[1] + 1) // 2 if fused else shape[1]), np.uint8),
        stored=np.empty(grid, np.float32) if isinstance(recipe.scale, Float32Scale) else np.empty(grid, np.uint8),
    )
    if not usual:
        counts, amax = cast.generally(stream)
    elif recipe.block.rows == 0:
        counts, amax = cast.in_phases()
    else:
        counts, amax = cast.in_tiles()
    return ScaledCodes(
        codes=pack(cast.codes) if packed and not fused else cast.codes,
        scales=cast.stored,
        tensor_scale=np.asarray(g, np.float32) if two_level else None,
        amax=np.asarray(amax, np.float32),
        counts=BlockCounts(*(int(n) for n in counts)),
    )


def dequantize_matrix(scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
    """The float32 matrix [M, K] of unpacked codes and scales; NaN is always the bits 0x7FC00000."""
    codes = np.ascontiguousarray(scaled.codes)
    shape = (codes.shape[0], codes.shape[1])
    out = np.empty(shape, np.float32)
    a, b, c, exact = _decode_operands(scaled, recipe)
    bm, bk = recipe.block.extent(shape)
    table = decode_table(recipe.fmt)[: recipe.fmt.code_count]

    def work(start: int, stop: int) -> None:
        band = slice(start // bm, -(-stop // bm))
        decode_kernels.decode_blocks(codes[start:stop], bm, bk, table, a[band], b, c, exact, out[start:stop])

    if out.size:
        one = recipe.block.rows == 0
        in_chunks(work, shape[0], cost=shape[1], align=1 if one else bm)
    return out


def _decode_operands(scaled: ScaledCodes, recipe: ScaleRecipe) -> tuple[F32, np.float32, np.float32, bool]:
    """a, b, c, exact of ``decode_blocks``."""
    scales = np.ascontiguousarray(scaled.scales)
    match recipe.scale:
        case Float32Scale():
            return np.divide(_ONE, scales, dtype=np.float32), _ONE, _ONE, False
        case PowerOfTwoScale():
            return decode_table(E8M0FNU)[scales], _ONE, _ONE, False
        case TwoLevelScale(order=order) as scale:
            assert scaled.tensor_scale is not None, "a two-level cast keeps its tensor scale"
            g, d8 = np.float32(scaled.tensor_scale), decode_table(E4M3FN)[scales]
            rule = _rule_of(recipe, g)
            if order is ScaleOrder.TE:
                return d8, rule.floats[2], _ONE, False
            if order is ScaleOrder.TORCHAO:
                return np.asarray(rule.floats[4] * d8, np.float32), _ONE, _ONE, False
            return d8, g, np.float32(scale.full_range), order is ScaleOrder.EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """One cast: what its threads share. ``stored`` [gm, gk] is filled with scales or scale codes."""

    x: F32
    bm: int
    bk: int
    rule: _Rule
    fmt: FloatFormat
    policy: CastPolicy
    packed: bool
    counting: bool
    codes: U8
    stored: F32 | U8

    @property
    def grid(self) -> tuple[int, int]:
        return (self.stored.shape[0], self.stored.shape[1])

    @property
    def constants(self) -> U32:
        return encoder_table(self.fmt, self.policy)

    def in_tiles(self) -> Parts:
        """Measured, scaled and encoded by tiles that stay in the cache; the threads share the tiles out."""
        x, bm, bk = self.x, self.bm, self.bk
        single = x.shape[0] == 1  # one long row is cut along its columns
        align = int(np.lcm(bk, 2)) if single else bm
        step = max(TILE // (1 if single else x.shape[1] or 1) // align, 1) * align
        parts: list[Parts] = []

        def work(start: int, stop: int) -> None:
            for at in range(start, stop, step):
                end = min(at + step, stop)
                if single:
                    parts.append(
                        self._tile((slice(None), slice(at, end)), (slice(None), slice(at // bk, -(-end // bk))))
                    )
                else:
                    parts.append(
                        self._tile((slice(at, end), slice(None)), (slice(at // bm, -(-end // bm)), slice(None)))
                    )

        size, cost = (x.shape[1], 1) if single else (x.shape[0], x.shape[1])
        if x.size:
            in_chunks(work, size, cost=cost, align=align)
        return _merged(parts)

    def _tile(self, here: tuple[slice, slice], band: tuple[slice, slice]) -> Parts:
        part = self.x[here]
        top, bad = np.zeros_like(self.stored[band], np.uint32), np.zeros_like(self.stored[band], np.uint32)
        measure_kernels.measure(part, self.bm, self.bk, top, bad)
        multiplier, divisor, stored, (counts, amax) = self._scales(part, top, bad)
        self.stored[band] = stored
        self._encode(part, here, self.bk, multiplier, divisor, counts)
        return counts, amax

    def in_phases(self) -> Parts:
        """Measured, then scaled, then encoded: for blocks that reach over all rows."""
        multiplier, divisor, parts = self._scaled()
        x = self.x
        tensor = self.grid == (1, 1)
        across = tensor and x.shape[0] == 1

        def work(start: int, stop: int) -> None:
            counts = np.zeros(5, np.int64)
            here = (slice(None), slice(start, stop)) if across else (slice(start, stop), slice(None))
            part = x[here]
            self._encode(part, here, part.shape[1] if tensor else self.bk, multiplier, divisor, counts)
            parts.append((counts, np.float32(0)))

        if x.size:
            size, cost = (x.shape[1], 1) if across else (x.shape[0], x.shape[1])
            in_chunks(work, size, cost=cost, align=2 if across else 1)
        return _merged(parts)

    def _encode(
        self, part: F32, here: tuple[slice, slice], bk: int, multiplier: F32, divisor: F64, counts: I64
    ) -> None:
        kernels.encode_blocks(
            part, min(self.bm, part.shape[0]), bk, multiplier, divisor, float(self.rule.floats[5]), self.constants,
            self.packed, self.counting, self._codes(here), counts,
        )  # fmt: skip

    def generally(self, stream: RandomStream | None) -> Parts:
        """Any rounding and any refusal: the scaled elements by numpy, then the general kernels. ``codes`` unpacked."""
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
        if counts[-1]:
            first = first_refused(flat, fmt=self.fmt, policy=self.policy, stream=stream)
            raise FormatError(refusal(float(flat[first]), self.fmt, where=place("scaled x", first, x.shape)))
        # The kernel saw y, not x: a product that became Inf or 0 is saturated or flushed too.
        counts[0] += np.count_nonzero(np.isinf(y) & np.isfinite(x))
        counts[1] += np.count_nonzero((y == 0) & (x != 0))
        counts[2:] = np.count_nonzero(np.isnan(x)), np.count_nonzero(np.isinf(x)), 0
        return _merged([*parts, (counts, np.float32(0))])

    def _codes(self, here: tuple[slice, slice]) -> U8:
        """The codes of a part of x."""
        rows, columns = here
        if self.packed and columns.start is not None:
            columns = slice(columns.start // 2, (columns.stop + 1) // 2)
        return self.codes[rows, columns]

    def _spread(self, grid: AnyArray) -> AnyArray:
        """A number a block as a number an element."""
        rows, columns = self.x.shape
        return np.repeat(np.repeat(grid, self.bm, axis=0)[:rows], self.bk, axis=1)[:, :columns]

    def _scaled(self) -> tuple[F32, F64, list[Parts]]:
        """Multiplier and divisor of every block; ``stored`` is filled."""
        top, bad = self._measured()
        multiplier, divisor, stored, part = self._scales(self.x, top, bad)
        self.stored[:] = stored
        return multiplier, divisor, [part]

    def _scales(self, part: F32, top: U32, bad: U32) -> tuple[F32, F64, F32 | U8, Parts]:
        """Multiplier, divisor and stored scale of every block of a part of x."""
        rule, grid = self.rule, top.shape
        multiplier, stored = np.empty(grid, np.float32), np.empty(grid, np.uint32)
        divisor = np.empty((grid[0], grid[1] if rule.exact else 0), np.float64)
        counts = np.zeros(5, np.int64)
        if part.size:
            scale_kernels.scale_blocks(
                part, self.bm, self.bk, rule.number, top, bad, rule.floats, rule.steps, _scale_constants(), stored,
                multiplier, divisor, counts,
            )  # fmt: skip
        amax = np.uint32(top.max(initial=0)).view(np.float32)
        own = stored.view(np.float32) if rule.number == 0 else stored.astype(np.uint8)
        return multiplier, divisor, own, (counts, amax)

    def _measured(self) -> tuple[U32, U32]:
        """Bits of the largest finite magnitude of every block, and 0 | 1 (Inf) | 2 (NaN) beside it."""
        x, bm, bk = self.x, self.bm, self.bk
        top, bad = np.zeros(self.grid, np.uint32), np.zeros(self.grid, np.uint32)
        whole = self.grid[0] <= 1  # blocks reach over all rows: parts of them are merged
        flat = self.grid == (1, 1)
        source = x.reshape(1, -1) if flat else x
        found: list[tuple[U32, U32]] = []

        def work(start: int, stop: int) -> None:
            part = source[:, start:stop] if flat else source[start:stop]
            band = slice(None) if whole else slice(start // bm, -(-stop // bm))
            mine = np.zeros_like(top[band]), np.zeros_like(bad[band])
            measure_kernels.measure(part, part.shape[0] if whole else bm, part.shape[1] if flat else bk, *mine)
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
