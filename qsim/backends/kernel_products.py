"""Scaled products by the CUDA texts: which kernel makes which accumulator. Knows no epilogue and no owner.

exact          packed E2M1 without block scales: INT8 tensor cores; else float64 sums that prove themselves
exact_per_block  E2M1 under MX or NVFP4 scales: INT8 tensor cores, block by block; else as above
a model        the instruction that has its bits, on the device that has the instruction
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_kernels._place import Place, at
from cuda_kernels.exact import Operand, Summed, exact_product_summed, product_of_sums
from cuda_kernels.fp4_blocks import BLOCKS, fp4_blocks
from cuda_kernels.fp4_sums import MAX_DEPTH, fp4_sums
from cuda_kernels.fp8_mma import MODELS as MMA_MODELS
from cuda_kernels.fp8_mma import fp8_mma
from cuda_kernels.fp8_wgmma import FP8_WGMMA, fp8_wgmma
from cuda_kernels.fp8_wgmma import MODEL as WGMMA_MODEL
from cuda_kernels.pack import pack
from qsim.codec.tables import decode_table
from qsim.errors import UsageError
from qsim.formats import E2M1FN
from qsim.gemm.exact_scaled import ProductReport, factors_of
from qsim.gemm.models import MODELS, TensorCoreModel
from qsim.gemm.products import Accumulator, block_width, chain_scales, check_model, way_of
from qsim.gemm.scaled import ScaledOperand, check_depths

ARCH_OF = {WGMMA_MODEL: next(iter(FP8_WGMMA.values())).arches[0], **{model: arch for arch, model in MMA_MODELS.items()}}
"""Model -> target whose instruction adds so."""
_KINDS = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}


def accumulate(
    place_of: Callable[[str | None], Place], a: ScaledOperand, b: ScaledOperand, how: str | TensorCoreModel, *,
    promote_every: int | None, split_k: int, factors: bool,
) -> Accumulator:  # fmt: skip
    """``qsim.gemm.products.accumulate`` by kernels; acc is at the place.

    place_of: the place that has a target's instructions (None: any), UsageError where it is none. UsageError besides:
    as the CPU has it, and a model that no kernel is of.
    """
    depth = check_depths(a, b)
    how = way_of(how, promote_every, split_k)
    split_k, promote_every = int(split_k), None if promote_every is None else int(promote_every)
    if how == "exact":
        return _exact(place_of(None), a, b, depth, factors=factors)
    if isinstance(how, str):
        return _per_block(place_of(None), a, b, depth)
    return _by_instruction(place_of, a, b, how, depth, promote_every, split_k)


def _exact(place: Place, a: ScaledOperand, b: ScaledOperand, depth: int, *, factors: bool) -> Accumulator:
    row, column, divisor = factors_of(a, b) if factors else (None, None, 1.0)
    left, right = (_operand(place, x, own) for x, own in ((a, row), (b, column)))
    if a.fmt == b.fmt == E2M1FN and a.block is None and b.block is None and depth <= MAX_DEPTH:
        sums = fp4_sums(place, pack(place, left.codes), pack(place, right.codes), depth)
        summed = product_of_sums(place, sums, left, right, unit=0.25, divisor=divisor)
        path = "INT8 tensor cores"
    else:
        summed = exact_product_summed(place, left, right, divisor=divisor)
        path = "float64 sums on the device, outputs proven one by one"
    return Accumulator(acc=summed.out, report=_report(summed, path), holds_factors=factors)


def _per_block(place: Place, a: ScaledOperand, b: ScaledOperand, depth: int) -> Accumulator:
    width = block_width(a, b, depth)
    if _is_fp4_in_blocks(a) and _is_fp4_in_blocks(b) and depth <= MAX_DEPTH:
        left, right = (pack(place, at(place, x.codes)) for x in (a, b))
        acc = fp4_blocks(
            place, left, right, depth, at(place, a.scale_codes), at(place, b.scale_codes),
            kinds=(_KINDS[str(a.scale_format)], _KINDS[str(b.scale_format)]), extents=(a.extent[0], b.extent[0]),
        )  # fmt: skip
        report = ProductReport(path="INT8 tensor cores, block by block", outputs=int(acc.size))
        return Accumulator(acc=acc, report=report, holds_factors=False)
    summed = exact_product_summed(place, _operand(place, a, None), _operand(place, b, None), per_block=width)
    report = _report(summed, "float64 sums on the device, block by block")
    return Accumulator(acc=summed.out, report=report, holds_factors=False)


def _by_instruction(
    place_of: Callable[[str | None], Place], a: ScaledOperand, b: ScaledOperand, model: TensorCoreModel, depth: int,
    promote_every: int | None, split_k: int,
) -> Accumulator:  # fmt: skip
    check_model(a, b, model)
    changed = ", changed" if model.name in MODELS and MODELS[model.name] != model else ""
    if model.name not in ARCH_OF or MODELS[model.name] != model:
        raise UsageError(
            f"model {model.name}{changed} has no kernel; kernels have the bits of {', '.join(ARCH_OF)}; the numba "
            "backend computes every model"
        )
    place, scales = place_of(ARCH_OF[model.name]), None
    if chain_scales(a, b, model, depth, promote_every) is not None:
        pairs = ((None, None) if x.block is None else (_float32(place, x.block), x.extent) for x in (a, b))
        (s_a, of_a), (s_b, of_b) = pairs
        scales = (s_a, of_a, s_b, of_b)
    elif promote_every is not None and promote_every % model.step:
        raise UsageError(f"promote_every {promote_every} cuts an instruction; choose a multiple of {model.step}")
    run = fp8_wgmma if model.name == WGMMA_MODEL else fp8_mma
    acc = run(
        place, at(place, a.codes), at(place, b.codes), formats=(a.fmt.name, b.fmt.name), promote_every=promote_every,
        split_k=split_k, scales=scales,
    )  # fmt: skip
    path = f"model {model.name}, by {'wgmma' if run is fp8_wgmma else 'mma.sync'}"
    return Accumulator(acc=acc, report=ProductReport(path=path, outputs=int(acc.size)), holds_factors=False)


def _is_fp4_in_blocks(x: ScaledOperand) -> bool:
    kind = _KINDS.get(str(x.scale_format))
    return x.fmt == E2M1FN and kind is not None and x.extent[1] == BLOCKS[kind]


def _operand(place: Place, x: ScaledOperand, row: Any) -> Operand:
    block = None if x.block is None else _float32(place, x.block)
    values = at(place, decode_table(x.fmt))
    return Operand(at(place, x.codes), values, block, x.extent, None if row is None else at(place, row))


def _report(summed: Summed, path: str) -> ProductReport:
    """With the outputs that were summed again in integers."""
    return ProductReport(path=path, outputs=int(summed.out.size), in_integers=int(summed.open.sum()))


def _float32(place: Place, scales: Any) -> Any:
    """Scales of blocks, which are float32 numbers."""
    return at(place, np.asarray(scales, np.float32))
