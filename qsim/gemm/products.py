"""Accumulators of scaled products: exact, exact per block, or as a tensor core makes them. Knows no epilogue."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from qsim.arrays import F32, F64, U8
from qsim.checks import whole_number
from qsim.errors import UsageError
from qsim.formats import FORMATS
from qsim.gemm.block_dot import NAN_F32, accumulators, chain_product, check_formats, cuts, finished, side, transposed
from qsim.gemm.epilogue import fma32
from qsim.gemm.exact_scaled import ProductReport, exact_product
from qsim.gemm.models import MODELS, TensorCoreModel, get_model
from qsim.gemm.operands import operand_format
from qsim.gemm.scaled import ScaledOperand, check_depths

QUIET_NAN: Final = np.uint32(0x7FC00000).view(np.float32)

EXACT: Final = ("exact", "exact_per_block")
"""Ways to accumulate that are no tensor core's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """acc float32 [M, N]; ``holds_factors`` where row and tensor factors are in it already."""

    acc: F32
    report: ProductReport
    holds_factors: bool


def accumulate(
    a: ScaledOperand, b: ScaledOperand, how: str | TensorCoreModel, *, promote_every: int | None = None,
    split_k: int = 1, factors: bool = True,
) -> Accumulator:  # fmt: skip
    """The accumulator of a [M, K] and b [N, K].

    how: "exact", one rounding of the exact sum, row and tensor factors included where ``factors``; "exact_per_block",
    the exact partial of every block of k (scales of blocks included) rounded to float32, partials added in float32 in
    ascending k; or a model. A model's chain begins with +0; block scales of float32, or of a model without scales, end
    it: acc = RN(partial RN(s_a s_b) + acc), one rounding, in ascending k. promote_every: k after which a chain ends and
    is added to the sum so far in float32; split_k: parts of K with sums of their own, added in float32 in ascending k.
    UsageError: an unknown ``how``, operands it does not take, promote_every or split_k that do not fit.
    """
    depth = check_depths(a, b)
    how = way_of(how, promote_every, split_k)
    if how == "exact":
        acc, report = exact_product(a, b, factors=factors)
        return Accumulator(acc=acc, report=report, holds_factors=factors)
    if isinstance(how, str):
        return _per_block(a, b, depth)
    return _by_model(a, b, how, depth, promote_every, split_k)


def way_of(how: str | TensorCoreModel, promote_every: int | None, split_k: int) -> str | TensorCoreModel:
    """One of EXACT, or the model meant; UsageError as ``accumulate`` has it."""
    split_k = whole_number("split_k", split_k, least=1)
    if promote_every is not None:
        promote_every = whole_number("promote_every", promote_every, least=1)
    if isinstance(how, str) and how in EXACT:
        if promote_every is not None or split_k != 1:
            raise UsageError(
                f"accumulate {how!r} has no chains: promote_every and split_k belong to a tensor-core model"
            )
        return how
    if isinstance(how, str) and how not in MODELS:
        serving = [name for name, model in MODELS.items() if set(model.formats) & set(FORMATS)]
        close = [name for name in (*EXACT, *serving) if str(how).lower() in name]
        close = close or difflib.get_close_matches(how.lower(), (*EXACT, *serving), n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, close[:3]))}? " if how and close else ""
        raise UsageError(f"accumulate {how!r} is unknown: {hint}known: {', '.join((*EXACT, *serving))}")
    return get_model(how)


def _per_block(a: ScaledOperand, b: ScaledOperand, depth: int) -> Accumulator:
    width = block_width(a, b, depth)
    acc, path = np.zeros((a.codes.shape[0], b.codes.shape[0]), np.float32), "no products"
    counts = {"on_grid": 0, "split": 0, "in_integers": 0, "rational": 0}
    for start in range(0, depth, width):
        stop = min(start + width, depth)
        partial, report = exact_product(part(a, start, stop), part(b, start, stop), factors=False)
        with np.errstate(all="ignore"):
            acc = (acc + partial).astype(np.float32)
        path = report.path
        counts = {name: counts[name] + getattr(report, name) for name in counts}
    return Accumulator(
        acc=canonical(acc, QUIET_NAN),
        report=ProductReport(path=f"{path}, block by block", outputs=acc.size, **counts),
        holds_factors=False,
    )


def block_width(a: ScaledOperand, b: ScaledOperand, depth: int) -> int:
    """k of a block: the smaller of the two, which must divide the other; K without blocks."""
    widths = sorted({x.extent[1] for x in (a, b) if x.block is not None})
    if len(widths) == 2 and widths[1] % widths[0]:
        raise UsageError(f"blocks of {widths[0]} and of {widths[1]} along K do not fit each other")
    return widths[0] if widths else max(depth, 1)


def part(x: ScaledOperand, start: int, stop: int) -> ScaledOperand:
    """The operand over k start..stop-1; either end is a multiple of the block, or within one."""
    if x.block is None:
        return replace(x, codes=x.codes[:, start:stop])
    bk = x.extent[1]
    blocks = slice(start // bk, -(-stop // bk))
    scale_codes = None if x.scale_codes is None else x.scale_codes[:, blocks]
    extent = (x.extent[0], bk if start % bk == 0 else max(bk, stop - start))
    return replace(x, codes=x.codes[:, start:stop], block=x.block[:, blocks], scale_codes=scale_codes, extent=extent)


def check_model(a: ScaledOperand, b: ScaledOperand, model: TensorCoreModel) -> None:
    """UsageError for operands that no chain of the model takes."""
    if model.integer:
        raise UsageError(f"model {model.name} multiplies int8, not codes of {a.fmt.name}; qsim.gemm.block_dot has it")
    check_formats(model, operand_format(a.fmt), operand_format(b.fmt), half=False)


def _by_model(
    a: ScaledOperand, b: ScaledOperand, model: TensorCoreModel, depth: int, promote_every: int | None, split_k: int
) -> Accumulator:
    fmt_a, fmt_b = operand_format(a.fmt), operand_format(b.fmt)
    check_model(a, b, model)
    scaled = model.scale_format is not None
    left = side(a.codes, fmt_a, model, _row_scales(a, model, "a") if scaled else None, "the scales of a")
    right = transposed(side(b.codes, fmt_b, model, _row_scales(b, model, "b") if scaled else None, "the scales of b"))
    blocks = None if scaled else chain_scales(a, b, model, depth, promote_every)
    width = block_width(a, b, depth) if blocks is not None else None
    shape = (a.codes.shape[0], b.codes.shape[0])
    sums: list[F32] = []
    promoted = width if promote_every is None else promote_every
    for chains in cuts(depth, model.step, promote_every=promoted, split_k=split_k, unit=width):
        acc: F32 | None = None
        for first, last in chains:
            c = accumulators(0.0, shape, half=False)
            chain_product(left, right, c, model, half=False, first=first, last=last)
            partial = finished(c, half=False)
            if blocks is not None and width is not None:
                scale = _pair_scale(blocks, a, b, first // width)
                acc = fma32(partial, scale, np.zeros(shape, np.float32) if acc is None else acc)
            else:
                acc = partial if acc is None else _sum(acc, partial)
        sums.append(np.zeros(shape, np.float32) if acc is None else acc)
    total = sums[0] if sums else np.zeros(shape, np.float32)
    for other in sums[1:]:
        total = _sum(total, other)
    report = ProductReport(path=f"model {model.name}", outputs=total.size)
    return Accumulator(acc=canonical(total, NAN_F32), report=report, holds_factors=False)


def canonical(y: F32, nan: np.float32) -> F32:
    """y with one NaN for all: what sums and products make of two NaN differs between processors."""
    found = np.isnan(y)
    return np.where(found, nan, y) if found.any() else y


def _sum(a: F32, b: F32) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(a + b, np.float32)


def _row_scales(x: ScaledOperand, model: TensorCoreModel, name: str) -> U8:
    """Scale codes of every row, for a model that takes them."""
    if x.scale_codes is None or x.scale_format != model.scale_format or x.extent[1] != model.scale_block:
        found = "none" if x.block is None else f"blocks of {x.extent[1]} in {x.scale_format or 'float32'}"
        raise UsageError(
            f"model {model.name} needs blocks of {model.scale_block} along K with scales in {model.scale_format}; "
            f"{name} has {found}"
        )
    return np.repeat(x.scale_codes, x.extent[0], axis=0)[: x.codes.shape[0]]


def chain_scales(
    a: ScaledOperand, b: ScaledOperand, model: TensorCoreModel, depth: int, promote_every: int | None
) -> tuple[F64, F64] | None:
    """Block scales of a and of b on the finer grid along K, where either has some."""
    if a.block is None and b.block is None:
        return None
    width = block_width(a, b, depth)
    run = width if promote_every is None else promote_every
    if width % model.step:
        scaled = ", ".join(name for name, other in MODELS.items() if other.scale_block == width)
        raise UsageError(
            f"model {model.name} adds {model.step} k at a time and cannot end a chain after a block of {width}; "
            f"models with such blocks: {scaled or 'none'}"
        )
    if width % run or run % model.step:
        raise UsageError(
            f"blocks of {width} along K in model {model.name}: a chain ends where its scale does, so promote_every "
            f"must divide {width} and be a multiple of {model.step}; it is {run}"
        )
    count = -(-depth // width)
    grids = []
    for x in (a, b):
        if x.block is None:
            grids.append(np.ones((1, count)))
        else:
            grids.append(np.repeat(x.block, min(x.extent[1] // width, count), axis=1)[:, :count])
    return grids[0], grids[1]


def _pair_scale(blocks: tuple[F64, F64], a: ScaledOperand, b: ScaledOperand, at: int) -> F32:
    """RN(s_a s_b) float32 [M, N] of one block along K."""
    columns = []
    for grid, x in zip(blocks, (a, b), strict=True):
        own = grid[:, at]
        columns.append(own if own.size == 1 else np.repeat(own, x.extent[0])[: x.codes.shape[0]])
    with np.errstate(all="ignore"):
        pair = (columns[0][:, None] * columns[1]).astype(np.float32)
    return np.broadcast_to(pair, (a.codes.shape[0], b.codes.shape[0]))
