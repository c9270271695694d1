"""Random Hadamard rotation of blocks of 16 or 32 along the last axis, and back. Knows no format and no scale.

The definition, for a block x of n and signs d, every step one correctly rounded float32 operation (subnormals kept,
nothing contracted), the same on every processor:

1. v_j = x_j * d_j, exact.
2. log2(n) stages of butterflies, distance h = 1, 2, 4 ... n / 2: for every i without bit h
   (v_i, v_{i+h}) becomes (RN(v_i + v_{i+h}), RN(v_i - v_{i+h})). Unrounded this is H v, H_ij = (-1)^popcount(i & j).
3. y_i = RN(v_i * f), f = 0.25 for 16 (exact above the subnormals), f = RN(1 / sqrt(32)) for 32.
4. y_i = y_i + 0: a zero is always +0, or the signs would show as -0 in a block of zeros, and in its FP4 codes.

Back: stages, the factor, the signs, then + 0. H is symmetric and H H = n I, so x returns up to rounding, and to the
bit where all steps are exact and no zero was negative. NaN anywhere makes the whole block NaN, always as 0x7FC00000;
an infinity makes it infinite, or NaN where two of them meet with opposite signs. |x| <= FLT_MAX / n never overflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.arrays import frozen
from qsim.checks import whole_number
from qsim.codec import hadamard_kernels as kernels
from qsim.codec.inputs import as_array
from qsim.errors import FormatError, UsageError
from qsim.philox import Purpose, random_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qsim.arrays import F32, AnyArray

FACTORS = {16: np.float32(0.25), 32: np.uint32(0x3E3504F3).view(np.float32)}
"""Size of a block -> RN(1 / sqrt(size)) in float32."""

_KERNELS = {16: kernels.hadamard_16, 32: kernels.hadamard_32}
_ZERO = np.float32(0)
_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)


def hadamard_signs(seed: int, *, size: int = 16, step: int = 0, layer: int = 0, site: int = 0, role: int = 0) -> F32:
    """Signs of one rotation: read-only float32 [size] of +-1; size 16 or 32.

    Sign j is bit 31 of word j of the stream (seed, Purpose.HADAMARD, step, layer, site, role): 1 means -1.
    The two operands of a product must be rotated by the same signs along K, so leave ``role`` out there; a
    ``step`` draws anew. UsageError for another size, or a field that does not fit.
    """
    size = whole_number("size", size)
    if size not in FACTORS:
        raise UsageError(f"a Hadamard rotation of size {size}; known sizes: {', '.join(map(str, FACTORS))}")
    words = random_words(seed, Purpose.HADAMARD, count=size, step=step, layer=layer, site=site, role=role)
    return frozen(np.where(words >> np.uint32(31) == 1, np.float32(-1), np.float32(1)).astype(np.float32))


def rotate(x: F32, signs: F32, *, out: F32 | None = None) -> F32:
    """y = H (d * x) / sqrt(n) on every block of n = signs.size along the last axis: float32 of the same shape.

    x: float32, any strides, last axis a multiple of n; ``signs``: float32 [16] or [32] of +-1. ``out``: float32
    of that shape, any strides, x itself included; it is filled and returned. Exact order: see the module.
    FormatError for another dtype or a wrong ``out``; UsageError for a last axis or signs that do not fit.
    """
    signs = checked_signs(signs)
    return _apply(x, signs, np.full(signs.size, FACTORS[signs.size], np.float32), out)


def rotate_back(y: F32, signs: F32, *, out: F32 | None = None) -> F32:
    """x = d * (H y / sqrt(n)), the inverse of ``rotate`` up to rounding; arguments and errors as there."""
    signs = checked_signs(signs)
    # RN(v * f) * d is RN(v * (f * d)): a sign changes no rounding.
    return _apply(y, np.ones(signs.size, np.float32), FACTORS[signs.size] * signs, out)


def rotate_block(block: Iterable[np.float32], signs: Iterable[np.float32]) -> list[np.float32]:
    """The definition of ``rotate`` for one block, one float32 operation at a time: the oracle."""
    with np.errstate(all="ignore"):
        v = _stages([np.float32(x) * np.float32(d) for x, d in zip(block, signs, strict=True)])
        return [_one_nan(x * FACTORS[len(v)] + _ZERO) for x in v]


def rotate_block_back(block: Iterable[np.float32], signs: Iterable[np.float32]) -> list[np.float32]:
    """The definition of ``rotate_back`` for one block: the oracle."""
    with np.errstate(all="ignore"):
        v = _stages([np.float32(y) for y in block])
        return [_one_nan(y * FACTORS[len(v)] * np.float32(d) + _ZERO) for y, d in zip(v, signs, strict=True)]


def _stages(v: list[np.float32]) -> list[np.float32]:
    distance = 1
    while distance < len(v):
        for i in range(len(v)):
            if not i & distance:
                v[i], v[i + distance] = v[i] + v[i + distance], v[i] - v[i + distance]
        distance *= 2
    return v


def _one_nan(value: np.float32) -> np.float32:
    return _QUIET_NAN if np.isnan(value) else value


def _apply(x: F32, before: F32, after: F32, out: F32 | None) -> F32:
    x, size = as_array(x, "x"), before.size
    if x.dtype != np.float32:
        raise FormatError(f"x is {x.dtype}; a rotation takes float32: round to it once, before")
    if x.ndim == 0 or x.shape[-1] % size:
        raise UsageError(
            f"x of shape {x.shape} cannot be rotated in blocks of {size}: its last axis must be a multiple of {size}; "
            "pad it with zeros, and drop nothing before rotating back"
        )
    direct = out is None or _takes(out, x)
    target = np.empty(x.shape, np.float32) if out is None or not direct else out
    if x.size:
        blocks = np.require(x, requirements=("C", "A")).reshape(-1, size)
        _KERNELS[size](blocks, before, after, target.reshape(-1, size))
    if out is None:
        return target
    if not direct:
        out[...] = target
    return out


def _takes(out: F32, x: F32) -> bool:
    """Whether a kernel may write into ``out`` while it reads ``x``; FormatError where nothing may."""
    if not isinstance(out, np.ndarray) or out.shape != x.shape or out.dtype != np.float32:
        found = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise FormatError(f"out is {found}; it must be float32 of shape {x.shape}")
    if not out.flags.writeable:
        raise FormatError("out is read-only; pass a writable array")
    return out.flags.c_contiguous and out.flags.aligned and (out is x or not np.may_share_memory(out, x))


def checked_signs(signs: AnyArray) -> F32:
    """A copy of ``signs``, which may share memory with a result."""
    signs = np.array(as_array(signs, "signs"))
    if signs.dtype != np.float32 or signs.shape not in {(size,) for size in FACTORS}:
        raise UsageError(
            f"signs are {signs.dtype} of shape {signs.shape}; pass float32 of shape (16,) or (32,), "
            "as hadamard_signs draws them"
        )
    if not bool((np.abs(signs) == 1).all()):
        raise UsageError(f"sign {signs[np.abs(signs) != 1][0]} is neither 1 nor -1; hadamard_signs draws them")
    return signs
