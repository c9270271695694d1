"""Scale recipes as data: block shape, scale rule, element format, name. Knows no arrays.

Terms: x is the matrix [M, K]; a block tiles it from the top left, and a tail block is simply smaller. amax is
the largest finite |x| of a block, amax_t that of the matrix; NaN and Inf are beside it, and each scale rule
says what they do. fl(a) is a rounded to float32; every operation in a formula is one correctly rounded float32
operation, subnormals kept, unless the rule says "exact".
"""

from __future__ import annotations

import difflib
import enum
import math
import operator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from qsim.errors import FormatError
from qsim.formats import (
    ALIASES,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E4M3,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    FloatFormat,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MANTISSA_BITS = 23  # of float32
MAX_SCALE_CODE = 254  # E8M0 FE, 2^127: the largest scale that is a number
NAN_SCALE_CODE = 255  # E8M0 FF
POISON_SCALE_CODE = 127  # E4M3FN 7F, NaN: the scale of a two-level block that holds NaN or Inf


class Block(NamedTuple):
    """Elements that share a scale: ``rows`` x ``cols`` of them, 0 meaning the whole extent."""

    rows: int
    cols: int

    def extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a full block of a matrix of this shape, which may be smaller; at least 1."""
        return self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)

    def within(self, shape: tuple[int, int]) -> tuple[int, int]:
        """``extent``, cut to the matrix: what may be repeated or allocated. It tiles alike; at least 1."""
        rows, cols = self.extent(shape)
        return min(rows, max(shape[0], 1)), min(cols, max(shape[1], 1))

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales of a matrix of this shape: blocks down, blocks across, tails included."""
        rows, cols = self.extent(shape)
        return -(-shape[0] // rows), -(-shape[1] // cols)


TENSOR: Final = Block(0, 0)
ROW: Final = Block(1, 0)
COLUMN: Final = Block(0, 1)
ROW_128: Final = Block(1, 128)
SQUARE_128: Final = Block(128, 128)
MX_BLOCK: Final = Block(1, 32)
NV_BLOCK: Final = Block(1, 16)
NV_SQUARE: Final = Block(16, 16)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Scale:
    """A float32 scale that multiplies before encode.

    scale = min(fmt.max / amax, FLT_MAX); y = x * scale; decode = value(code) * (1 / scale).
    Degenerate: amax 0, or any NaN or Inf in the block: scale 1 (the element policy then decides about NaN and
    Inf). A tiny amax gives FLT_MAX, finite codes and decode value * 2^-128. Decode of finite x never overflows.
    Source: Transformer Engine, current and block scaling.
    """


class ExponentRule(enum.Enum):
    """How an MX block gets its exponent e (scale 2^e) from amax; emax is floor(log2 fmt.max).

    Exact for every amax; e is then held in -127..127. Source: OCP MX 1.0 (floor), torchao's names.
    """

    FLOOR = "floor"  # floor(log2 amax) - emax; may clip
    CEIL = "ceil"  # ceil(log2 amax) - emax
    EVEN = "even"  # floor(log2(amax + half an element ulp of amax's binade)) - emax
    RCEIL = "rceil"  # ceil(log2(amax / fmt.max)); never clips
    NEAREST = "nearest"  # rint(log2(amax / fmt.max)); may clip by up to 29%


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOfTwoScale:
    """An E8M0 scale 2^e that multiplies after decode (MX). Stored code: e + 127.

    y = x * 2^-e (exact, but for results below 2^-126, far below half the least element);
    decode = value(code) * 2^e, exact, but Inf from 2^128 on: an element just below 2^128 that rounds up to it
    (CEIL, EVEN, RCEIL: FLT_MAX itself does), or scale FE.
    Degenerate: NaN in the block: scale FF, y = NaN for every element (codes by the policy: the sign of x where
    x itself is NaN, else positive), decode NaN. Else Inf in the block: scale FE (2^127), finite elements
    encoded with it, Inf by the policy. amax 0: scale 00 (2^-127), codes and decode +-0. A subnormal amax: scale 00.
    Source: OCP MX 1.0; FE for Inf and FF for NaN as CUDA's saturating E8M0 conversion and torchao's RCEIL.
    """

    rule: ExponentRule


class ScaleOrder(enum.Enum):
    """The order of operations of a two-level scale: it changes bits, so each has a name."""

    EXACT = "exact"
    TE = "te"
    TORCHAO = "torchao"
    FOUR_OVER_SIX = "four_over_six"


class BlockError(enum.Enum):
    """How four over six compares its two maps: the sum over a block, in float32, in ascending order."""

    SQUARED = "squared"  # of diff * diff
    ABSOLUTE = "absolute"  # of |diff|


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelScale:
    """An E4M3FN scale a block, relative to g = amax_t (NVFP4). d8 is the value of the stored scale code.

    E4M3(v) rounds to nearest even and saturates. q is the E2M1 element of y, by the policy (the clamp to +-6 is
    the saturation of E2M1: the policy may refuse it). F = 6 * scale_max (2688, or 1536).
    EXACT: d8 = E4M3(amax * scale_max / g), y = x * F / (g * d8), both exact before their one rounding;
        decode = fl(q * d8 * g / F), the exact value rounded once.
    TE: s_enc = min(F / g, FLT_MAX), 1 where g = 0 or s_enc = 0; s_dec = 1 / s_enc; k = s_enc * fl(1/6);
        d8 = E4M3(min(amax * k, 448)); y = x * min(1 / (d8 * s_dec), FLT_MAX), clamped to +-6;
        decode = (q * d8) * s_dec. Below g = F / FLT_MAX (7.9e-36) the caps bind and the decode is too small.
    TORCHAO: pt = g / F; d8 = E4M3(clamp((amax / 6) / pt, 2^-6, 448)); y = x * ((1 / pt) / d8), clamped to +-6;
        decode = q * (pt * d8). Where pt is tiny 0 / 0 is 0 (so d8 = 2^-6, as for any block of zeros) and a zero
        x has y = x, whatever it is multiplied by (the library gives NaN for both); where 1 / pt is Inf the
        other elements saturate, as in the library, and where pt is 0 they decode to 0.
    FOUR_OVER_SIX: s_enc, s_dec as TE; base = (amax / 6) * s_enc; d8 = E4M3(min(base, 448)) maps amax to 6,
        d8 = E4M3(min(base * 1.5, 448)) to 4; y = x * min(1 / (d8 * s_dec), FLT_MAX), clamped to +-6;
        decode = ((q * d8) * g) / F, and diff = decode - x; the map with the smaller ``error`` (q to nearest
        even, whatever the policy) wins, a tie goes to 6 (Inf against Inf is a tie). Above g = FLT_MAX / F the
        decode may be Inf.
    d8 = 0 (EXACT, TE, FOUR_OVER_SIX): every code of the block is 0, without sign, and decodes to 0; so does a
    matrix of zeros (g = 0, scale codes 00). NaN or Inf in a block: scale 7F (NaN), y = NaN for every element
    (codes by the policy: the sign of x where x itself is NaN, else positive), decode NaN; g is of the finite
    elements, those of such a block included. A policy that refuses overflow refuses every Inf of x; one that refuses
    NaN refuses Inf too, as it makes NaN of a block. Source: Transformer Engine; torchao; arXiv 2512.02010.
    """

    order: ScaleOrder
    scale_max: int = 448
    error: BlockError | None = None

    def __post_init__(self) -> None:
        """Refuse a literal that contradicts itself."""
        if self.scale_max not in (256, 448):
            raise FormatError(f"scale_max {self.scale_max} of a two-level scale: choose 256 or 448")
        if (self.error is not None) != (self.order is ScaleOrder.FOUR_OVER_SIX):
            raise FormatError(f"order {self.order.value!r}: a block error belongs to four over six, and it needs one")

    @property
    def full_range(self) -> int:
        """6 * scale_max: the largest product of an element and a block scale."""
        return int(E2M1FN.max) * self.scale_max


ScaleRule: TypeAlias = Float32Scale | PowerOfTwoScale | TwoLevelScale


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRecipe:
    """How a matrix gets its scales from itself alone: one literal. ``block`` may be given as a pair (rows, cols)."""

    name: str
    fmt: FloatFormat
    block: Block
    scale: ScaleRule

    def __post_init__(self) -> None:
        """Refuse a recipe that has no meaning."""
        self.fmt.params()  # refuses a format that holds no elements
        object.__setattr__(self, "block", _block(self.block, self.name))
        if min(self.block) < 0:
            raise FormatError(f"{self.name}: block {tuple(self.block)} has a negative side; 0 is the whole extent")
        if isinstance(self.scale, TwoLevelScale) and self.fmt != E2M1FN:
            raise FormatError(f"{self.name}: a two-level scale is defined for {E2M1FN.name}, not {self.fmt.name}")


def _block(given: object, name: str) -> Block:
    """``given`` as a Block of Python integers (NumPy's are narrow)."""
    try:
        if isinstance(given, tuple):
            rows, cols = given
            return Block(int(operator.index(rows)), int(operator.index(cols)))
    except (TypeError, ValueError):
        pass
    raise FormatError(f"{name}: block {given!r} is no pair of integers; pass Block(rows, cols), 0 is the whole extent")


class ExponentSteps(NamedTuple):
    """An exponent rule as two integers: code = ((bits(amax) + carry) >> 23) + offset, held in 0..254."""

    carry: int
    offset: int


def exponent_rule(fmt: FloatFormat, rule: ExponentRule) -> ExponentSteps:
    """The two integers of ``rule`` for elements in ``fmt``; bits are those of the float32 amax, which is finite.

    Proof. A normal amax is f * 2^(E-127) with E its exponent field and 1 <= f < 2; write the maximum as
    m * 2^emax, 1 <= m < 2. Every rule below is code = E - emax + h, where h steps up by one at one threshold
    of f, and adding 2^23 - (mantissa bits of the first f that steps) carries into the exponent field exactly
    from that f on.
      FLOOR: no step. CEIL: steps above f = 1, so from mantissa 1 on. EVEN: f + 2^-(mantissa_bits + 1) >= 2.
      RCEIL: log2(f / m) lies in (-1, 1), its ceiling is 0 up to f = m and 1 above.
      NEAREST: log2(f / m) rounds to 0 from 1/sqrt(2) to sqrt(2), else to -1 or +1. f = m / sqrt(2) is a step
      inside [1, 2) if m > sqrt(2), else f = m * sqrt(2) is. With F = f * 2^23 and M = m * 2^23 the steps are
      2 F^2 > M^2 and F^2 > 2 M^2: integers, and never equal, as sqrt(2) is irrational. So there are no ties.
    A subnormal amax has bits and carry below 2^23, so (bits + carry) >> 23 is at most 1; the offset is at most
    -2 (emax >= 2; checked), so the code is held at 0. By definition amax < 2^-126 gives e <= -126 - 2 under
    every rule, which is held at -127: code 0 too. From above no code exceeds 254 + 1 - 2 = 253.
    """
    mantissa, exponent = math.frexp(fmt.max)
    emax, top = exponent - 1, int(math.ldexp(mantissa, MANTISSA_BITS + 1))  # fmt.max = top * 2^(emax - 23)
    if emax < 2:
        raise FormatError(f"{fmt.name}: exponent rules are proved for a maximum of 4 or more, not {fmt.max}")
    one, two = 1 << MANTISSA_BITS, 2 << MANTISSA_BITS
    match rule:
        case ExponentRule.FLOOR:
            return ExponentSteps(0, -emax)
        case ExponentRule.CEIL:
            return ExponentSteps(one - 1, -emax)
        case ExponentRule.EVEN:
            return ExponentSteps(1 << (MANTISSA_BITS - 1 - fmt.mantissa_bits), -emax)
        case ExponentRule.RCEIL:
            return ExponentSteps(two - (top + 1), -emax)
        case ExponentRule.NEAREST:
            low = math.isqrt(top * top // 2) + 1  # the least F with 2 F^2 > M^2
            if low > one:
                return ExponentSteps(two - low, -emax - 1)
            return ExponentSteps(two - (math.isqrt(2 * top * top) + 1), -emax)


_SHAPES: Final = (("", TENSOR), ("_row", ROW), ("_col", COLUMN), ("_1x128", ROW_128), ("_128x128", SQUARE_128))
_ELEMENTS: Final = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E4M3, E2M1FN, E2M3FN, E3M2FN)
_MX: Final = (
    ("mxfp4", E2M1FN),
    ("mxfp8", E4M3FN),
    ("mxfp8_e5m2", E5M2),
    ("mxfp6_e2m3", E2M3FN),
    ("mxfp6_e3m2", E3M2FN),
)
_EXACT: Final = TwoLevelScale(order=ScaleOrder.EXACT)
_TE: Final = TwoLevelScale(order=ScaleOrder.TE)
_TORCHAO: Final = TwoLevelScale(order=ScaleOrder.TORCHAO)
_4OVER6: Final = TwoLevelScale(order=ScaleOrder.FOUR_OVER_SIX, scale_max=256, error=BlockError.SQUARED)
_4OVER6_MAE: Final = TwoLevelScale(order=ScaleOrder.FOUR_OVER_SIX, scale_max=256, error=BlockError.ABSOLUTE)
_4OVER6_448: Final = TwoLevelScale(order=ScaleOrder.FOUR_OVER_SIX, scale_max=448, error=BlockError.SQUARED)

RECIPES: Final[tuple[ScaleRecipe, ...]] = (
    *(
        ScaleRecipe(name=fmt.name + suffix, fmt=fmt, block=block, scale=Float32Scale())
        for fmt in _ELEMENTS
        for suffix, block in _SHAPES
    ),
    *(
        ScaleRecipe(name=f"{stem}_{rule.value}", fmt=fmt, block=MX_BLOCK, scale=PowerOfTwoScale(rule=rule))
        for stem, fmt in _MX
        for rule in ExponentRule
    ),
    ScaleRecipe(name="nvfp4_exact", fmt=E2M1FN, block=NV_BLOCK, scale=_EXACT),
    ScaleRecipe(name="nvfp4_te", fmt=E2M1FN, block=NV_BLOCK, scale=_TE),
    ScaleRecipe(name="nvfp4_torchao", fmt=E2M1FN, block=NV_BLOCK, scale=_TORCHAO),
    ScaleRecipe(name="nvfp4_4over6", fmt=E2M1FN, block=NV_BLOCK, scale=_4OVER6),
    ScaleRecipe(name="nvfp4_4over6_mae", fmt=E2M1FN, block=NV_BLOCK, scale=_4OVER6_MAE),
    ScaleRecipe(name="nvfp4_4over6_448", fmt=E2M1FN, block=NV_BLOCK, scale=_4OVER6_448),
    ScaleRecipe(name="nvfp4_exact_16x16", fmt=E2M1FN, block=NV_SQUARE, scale=_EXACT),
    ScaleRecipe(name="nvfp4_te_16x16", fmt=E2M1FN, block=NV_SQUARE, scale=_TE),
)


def _by_name(recipes: Iterable[ScaleRecipe]) -> Mapping[str, ScaleRecipe]:
    return MappingProxyType({recipe.name: recipe for recipe in recipes})


SCALE_RECIPES: Final = _by_name(RECIPES)
"""Every scale recipe by its name."""

SCALE_RECIPE_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        alias + suffix: name + suffix
        for alias, name in ALIASES.items()
        for suffix, _ in _SHAPES
        if name + suffix in SCALE_RECIPES
    }
)
"""A format's alias in place of its name: ``e4m3_1x128`` is ``float8_e4m3fn_1x128``."""


def get_scale_recipe(name: str | ScaleRecipe) -> ScaleRecipe:
    """The recipe of this name or alias (any case); a ScaleRecipe is returned as it is. Else FormatError."""
    if isinstance(name, ScaleRecipe):
        return name
    key = str(name).lower()
    key = SCALE_RECIPE_ALIASES.get(key, key)
    if key in SCALE_RECIPES:
        return SCALE_RECIPES[key]
    if ALIASES.get(key, key) in FORMATS:
        raise FormatError(
            f"{str(name)!r} is no scale recipe: {FORMATS[ALIASES.get(key, key)].name} holds scales, not elements; "
            f"qsim.encode(x, {str(name)!r}) encodes a tensor of scales"
        )
    begun = [known for known in SCALE_RECIPES if known.startswith(key)] if key else []
    close = begun or difflib.get_close_matches(key, (*SCALE_RECIPES, *SCALE_RECIPE_ALIASES), n=1, cutoff=0.7)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise FormatError(
        f"unknown scale recipe {str(name)!r}: {hint}`python -m qsim formats` lists all {len(SCALE_RECIPES)}"
    )
