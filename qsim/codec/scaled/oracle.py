"""The definition of every scale recipe, block by block and element by element. Knows no kernels and no speed.

Formulas said to be exact are ``Fraction``s with one rounding at the end; the others are chains of single,
correctly rounded float32 operations. The formulas themselves stand in the scale rules' docstrings.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from qsim.arrays import FLT_MAX
from qsim.codec.inputs import check_stream
from qsim.codec.oracle import decode_scalar, encode_by_codes, encode_by_policy, round_magnitude
from qsim.codec.scaled.recipes import (
    MAX_SCALE_CODE,
    NAN_SCALE_CODE,
    POISON_SCALE_CODE,
    BlockError,
    ExponentRule,
    Float32Scale,
    PowerOfTwoScale,
    ScaleOrder,
    ScaleRecipe,
    TwoLevelScale,
    get_scale_recipe,
)
from qsim.codec.scaled.refusals import check
from qsim.codec.scaled.result import BlockCounts, ScaledCodes
from qsim.errors import UsageError
from qsim.formats import E2M1FN, E4M3FN, E8M0FNU, CastPolicy, FloatFormat, get_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qsim.arrays import F32, U8
    from qsim.philox import RandomStream

Number: TypeAlias = Fraction | np.floating
"""A scaled element: exact, or a float32."""

_ONE = np.float32(1)
_SIX = np.float32(E2M1FN.max)
_NAN = np.uint32(0x7FC00000).view(np.float32)
_NEAREST = get_policy("ocp")  # how a block scale is rounded, and how four over six tries its maps: even, saturating


class _Block(NamedTuple):
    """A block before its elements are encoded: the stored scale and y, in row-major order."""

    scale: np.float32 | int
    y: list[Number]


def quantize_oracle(
    x: F32,
    recipe: str | ScaleRecipe,
    *,
    policy: str | CastPolicy = "ocp",
    stream: RandomStream | None = None,
    tensor_amax: np.float32 | None = None,
) -> ScaledCodes:
    """Scales and codes of the matrix x [M, K], float32; either side may be 0.

    The policy decides rounding, overflow and NaN of the elements' codes; scales do not depend on it. stream: the
    words of stochastic rounding, element i in C order takes word i. tensor_amax: the g of a two-level scale.
    UsageError: another shape or dtype, a stream that is missing or not drawn from. FormatError: an unknown recipe or
    policy; RefusedError, which is one, for an overflow or a NaN that the policy refuses: the first element that is
    itself to blame, not one beside it in its block.
    """
    recipe, policy = get_scale_recipe(recipe), get_policy(policy)
    _check(x, np.dtype(np.float32), "x")
    check_stream(policy, stream, x.size)
    fmt, grid = recipe.fmt, recipe.block.grid(_shape(x))
    scales = np.zeros(grid, np.float32 if isinstance(recipe.scale, Float32Scale) else np.uint8)
    codes = np.zeros(x.shape, np.uint8)
    amax = _amax(x.flat)
    g = amax if tensor_amax is None else np.float32(tensor_amax)
    numbers, beyond = np.arange(x.size).reshape(x.shape), np.zeros(x.shape, np.bool_)
    resolved = policy.codes(fmt)
    lenient = resolved._replace(refuses_overflow=False, refuses_nan=False)  # what is refused is judged at the end
    flushed = zero_scale = 0
    with np.errstate(all="ignore"):
        for index, where in _blocks(recipe, _shape(x)):
            block = [np.float32(v) for v in x[where].flat]
            scale, y = _scaled(block, g, recipe)
            words = [0 if stream is None else stream.word(int(i)) for i in numbers[where].flat]
            own = [
                encode_by_codes(v, fmt, lenient, rounding=policy.rounding, word=word, random_bits=policy.random_bits)
                for v, word in zip(y, words, strict=True)
            ]
            scales[index] = scale
            codes[where] = np.array(own, np.uint8).reshape(x[where].shape)
            for u, v, code, word, i in zip(block, y, own, words, numbers[where].flat, strict=True):
                if np.isfinite(u) and not math.isnan(v):
                    beyond.flat[i] = _overflows(v, fmt, policy, word)
                    flushed += u != 0 and decode_scalar(code, fmt) == 0
            zeros = all(u == 0 for u in block)
            zero_scale += zeros or (isinstance(recipe.scale, TwoLevelScale) and scale == 0)
    check(x, fmt=fmt, codes=resolved, two_level=isinstance(recipe.scale, TwoLevelScale), beyond=beyond)
    return ScaledCodes(
        codes=codes,
        scales=scales,
        tensor_scale=np.asarray(g) if isinstance(recipe.scale, TwoLevelScale) else None,
        amax=np.asarray(amax),
        counts=BlockCounts(
            saturated=int(beyond.sum()),
            flushed=int(flushed),
            nan=int(np.isnan(x).sum()),
            inf=int(np.isinf(x).sum()),
            zero_scale=int(zero_scale),
        ),
    )


def dequantize_oracle(scaled: ScaledCodes, recipe: str | ScaleRecipe) -> F32:
    """The float32 matrix [M, K] that the codes and scales stand for; NaN is always the bits 0x7FC00000.

    UsageError: codes or scales of another dtype, scales that do not fit the codes, a two-level recipe without
    its tensor scale. FormatError: a code outside the format.
    """
    recipe = get_scale_recipe(recipe)
    two_level = isinstance(recipe.scale, TwoLevelScale)
    _check(scaled.codes, np.dtype(np.uint8), "codes")
    _check(scaled.scales, np.dtype(np.float32 if isinstance(recipe.scale, Float32Scale) else np.uint8), "scales")
    shape = _shape(scaled.codes)
    if scaled.scales.shape != recipe.block.grid(shape):
        raise UsageError(
            f"scales of shape {scaled.scales.shape} do not fit codes of shape {shape}: {recipe.name} "
            f"needs {recipe.block.grid(shape)}"
        )
    if two_level and scaled.tensor_scale is None:
        raise UsageError(f"tensor_scale is None: {recipe.name} needs the amax of the whole matrix there")
    g = np.float32(0 if scaled.tensor_scale is None else scaled.tensor_scale)
    out = np.zeros(shape, np.float32)
    with np.errstate(all="ignore"):
        for index, where in _blocks(recipe, shape):
            q = [decode_scalar(int(code), recipe.fmt) for code in scaled.codes[where].flat]
            values = [_decoded(v, scaled.scales[index], g, recipe) for v in q]
            out[where] = np.array(values, np.float32).reshape(out[where].shape)
    return np.where(np.isnan(out), _NAN, out)


def _scaled(block: Sequence[np.float32], g: np.float32, recipe: ScaleRecipe) -> _Block:
    match recipe.scale:
        case Float32Scale():
            return _float32_block(block, recipe.fmt)
        case PowerOfTwoScale(rule=rule):
            return _mx_block(block, recipe.fmt, rule)
        case TwoLevelScale() as rule:
            return _two_level_block(block, g, rule)


def _decoded(q: float, scale: np.float32 | np.uint8, g: np.float32, recipe: ScaleRecipe) -> np.float32:
    match recipe.scale:
        case Float32Scale():
            return np.float32(q) * (_ONE / np.float32(scale))
        case PowerOfTwoScale():
            return np.float32(q) * np.float32(decode_scalar(int(scale), E8M0FNU))
        case TwoLevelScale() as rule:
            return _two_level_value(q, decode_scalar(int(scale), E4M3FN), g, rule)


# ---- float32 scales ------------------------------------------------------------------------------------------


def _float32_block(block: Sequence[np.float32], fmt: FloatFormat) -> _Block:
    amax = _amax(block)
    usable = amax > 0 and all(np.isfinite(v) for v in block)
    scale = min(np.float32(fmt.max) / amax, FLT_MAX) if usable else _ONE
    return _Block(scale, [_own_nan(v) if np.isnan(v) else v * scale for v in block])


# ---- power-of-two scales -------------------------------------------------------------------------------------


def _mx_block(block: Sequence[np.float32], fmt: FloatFormat, rule: ExponentRule) -> _Block:
    amax = _amax(block)
    if any(np.isnan(v) for v in block):
        return _Block(NAN_SCALE_CODE, [_own_nan(v) for v in block])
    if any(np.isinf(v) for v in block):
        code = MAX_SCALE_CODE
    elif amax == 0:
        code = 0
    else:
        code = min(max(_exponent(_exact(amax), fmt, rule) + E8M0FNU.bias, 0), MAX_SCALE_CODE)
    inverse = np.float32(math.ldexp(1.0, E8M0FNU.bias - code))  # 2^-127 .. 2^127: each is a float32
    return _Block(code, [v * inverse for v in block])


def _exponent(amax: Fraction, fmt: FloatFormat, rule: ExponentRule) -> int:
    """The exponent by the rule's definition, not yet held in -127..127."""
    top = Fraction(fmt.max)
    emax = _floor_log2(top)
    match rule:
        case ExponentRule.FLOOR:
            return _floor_log2(amax) - emax
        case ExponentRule.CEIL:
            return _ceil_log2(amax) - emax
        case ExponentRule.EVEN:
            half_ulp = Fraction(2) ** (_floor_log2(amax) - fmt.mantissa_bits - 1)
            return _floor_log2(amax + half_ulp) - emax
        case ExponentRule.RCEIL:
            return _ceil_log2(amax / top)
        case ExponentRule.NEAREST:
            # floor(log2 v + 1/2) = floor(log2(2 v^2) / 2); log2 v is never half an odd number, v being rational
            return _floor_log2(2 * (amax / top) ** 2) // 2


def _floor_log2(v: Fraction) -> int:
    """The greatest e with 2^e <= v."""
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if Fraction(2) ** e <= v else e - 1


def _ceil_log2(v: Fraction) -> int:
    """The least e with v <= 2^e."""
    return -_floor_log2(1 / v)


# ---- two-level scales ----------------------------------------------------------------------------------------


def _two_level_block(block: Sequence[np.float32], g: np.float32, rule: TwoLevelScale) -> _Block:
    if not all(np.isfinite(v) for v in block):
        return _Block(POISON_SCALE_CODE, [_own_nan(v) for v in block])
    amax = _amax(block)
    match rule.order:
        case ScaleOrder.EXACT:
            code = _scale_code(_exact(amax) * rule.scale_max / _exact(g)) if g else 0
            return _Block(code, _exact_y(block, code, g, rule))
        case ScaleOrder.TE:
            s_enc, _ = _te_levels(g, rule)
            code = _scale_code(min(amax * (s_enc * (_ONE / _SIX)), np.float32(E4M3FN.max)))
            return _Block(code, _te_y(block, code, g, rule))
        case ScaleOrder.TORCHAO:
            return _torchao_block(block, amax, g, rule)
        case ScaleOrder.FOUR_OVER_SIX:
            s_enc, _ = _te_levels(g, rule)
            base = amax / _SIX * s_enc
            codes = [_scale_code(min(v, np.float32(E4M3FN.max))) for v in (base, base * np.float32(1.5))]
            to_six, to_four = (_Block(code, _te_y(block, code, g, rule)) for code in codes)
            six_error, four_error = (_block_error(block, cast, g, rule) for cast in (to_six, to_four))
            return to_four if four_error < six_error else to_six


def _two_level_value(q: float, d8: float, g: np.float32, rule: TwoLevelScale) -> np.float32:
    if math.isnan(d8):
        return _NAN
    full, product = np.float32(rule.full_range), np.float32(q) * np.float32(d8)  # the product is exact
    match rule.order:
        case ScaleOrder.EXACT:
            exact = Fraction(q) * Fraction(d8) * _exact(g) / rule.full_range
            return np.float32(np.copysign(_nearest_float32(abs(exact)), product))
        case ScaleOrder.TE:
            return product * _te_levels(g, rule)[1]
        case ScaleOrder.TORCHAO:
            return np.float32(q) * (g / full * np.float32(d8))
        case ScaleOrder.FOUR_OVER_SIX:
            return product * g / full


def _scale_code(v: Number) -> int:
    """The E4M3FN code of a block scale."""
    return encode_by_policy(v, E4M3FN, _NEAREST)


def _exact_y(block: Sequence[np.float32], code: int, g: np.float32, rule: TwoLevelScale) -> list[Number]:
    if code == 0:
        return [np.float32(0)] * len(block)
    gain = Fraction(rule.full_range) / (_exact(g) * Fraction(decode_scalar(code, E4M3FN)))
    return [_exact(v) * gain if v != 0 else v for v in block]  # a Fraction has no -0


def _te_levels(g: np.float32, rule: TwoLevelScale) -> tuple[np.float32, np.float32]:
    """s_enc and s_dec."""
    s_enc = _ONE if g == 0 else min(np.float32(rule.full_range) / g, FLT_MAX)
    if s_enc == 0:
        s_enc = _ONE
    return s_enc, _ONE / s_enc


def _te_y(block: Sequence[np.float32], code: int, g: np.float32, rule: TwoLevelScale) -> list[Number]:
    if code == 0:
        return [np.float32(0)] * len(block)
    _, s_dec = _te_levels(g, rule)
    gain = min(_ONE / (np.float32(decode_scalar(code, E4M3FN)) * s_dec), FLT_MAX)
    return [v * gain for v in block]  # the clamp to +-6 is the saturation of E2M1


def _torchao_block(block: Sequence[np.float32], amax: np.float32, g: np.float32, rule: TwoLevelScale) -> _Block:
    pt = g / np.float32(rule.full_range)
    sixth = amax / _SIX
    relative = sixth / pt if sixth else sixth  # 0 / 0 is 0
    code = _scale_code(min(max(relative, np.float32(E4M3FN.min_normal)), np.float32(E4M3FN.max)))
    gain = _ONE / pt / np.float32(decode_scalar(code, E4M3FN))  # Inf for a tiny pt
    return _Block(code, [v * gain if v != 0 else v for v in block])


def _block_error(block: Sequence[np.float32], cast: _Block, g: np.float32, rule: TwoLevelScale) -> np.float32:
    """How far the decoded block is from the block, summed in ascending order."""
    d8 = decode_scalar(int(cast.scale), E4M3FN)
    total = np.float32(0)
    for v, y in zip(block, cast.y, strict=True):
        q = decode_scalar(encode_by_policy(y, E2M1FN, _NEAREST), E2M1FN)
        diff = _two_level_value(q, d8, g, rule) - v
        total = total + (diff * diff if rule.error is BlockError.SQUARED else abs(diff))
    return total


# ---- elements ------------------------------------------------------------------------------------------------


def _overflows(y: Number, fmt: FloatFormat, policy: CastPolicy, word: int) -> bool:
    """True where |y| rounds beyond ``fmt.max``."""
    if math.isinf(y):
        return True
    exact = _exact(y)
    rounded = round_magnitude(
        abs(exact), fmt, rounding=policy.rounding, negative=exact < 0, word=word, random_bits=policy.random_bits
    )
    return abs(exact) > fmt.max and rounded > fmt.max_code


def _own_nan(v: np.float32) -> np.float32:
    """NaN with the sign of ``v`` where that is a NaN, else positive: processors differ on a NaN they make."""
    return np.copysign(_NAN, v) if np.isnan(v) else _NAN


def _exact(v: Number) -> Fraction:
    return v if isinstance(v, Fraction) else Fraction(float(v))


def _nearest_float32(v: Fraction) -> np.float32:
    """The float32 nearest to v >= 0, ties to even."""
    if v == 0:
        return np.float32(0)
    last = max(_floor_log2(v), -126) - 23  # exponent of the last place; the lowest binade is the subnormals'
    return np.float32(float(round(v / Fraction(2) ** last) * Fraction(2) ** last))  # round() takes ties to even


def _amax(values: Sequence[np.float32] | np.flatiter[F32]) -> np.float32:
    """The largest finite magnitude; 0.0 where there is none."""
    return max((abs(np.float32(v)) for v in values if np.isfinite(v)), default=np.float32(0))


# ---- matrices ------------------------------------------------------------------------------------------------


def _blocks(recipe: ScaleRecipe, shape: tuple[int, int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, slice]]]:
    """Index into the scales and slices of the matrix, block by block."""
    rows, cols = recipe.block.within(shape)
    for i, j in np.ndindex(recipe.block.grid(shape)):
        yield (i, j), (slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))


def _shape(matrix: F32 | U8) -> tuple[int, int]:
    rows, cols = matrix.shape
    return rows, cols


def _check(matrix: object, dtype: np.dtype[np.generic], what: str) -> None:
    if isinstance(matrix, np.ndarray) and matrix.ndim == 2 and matrix.dtype == dtype:
        return
    found = f"{matrix.dtype} of shape {matrix.shape}" if isinstance(matrix, np.ndarray) else type(matrix).__name__
    raise UsageError(f"{what} is {found}; pass a {dtype} matrix [M, K]: reshape and widen it first")
