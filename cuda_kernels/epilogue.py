"""Launcher of ``epilogue.cu``: scales, alpha, beta, bias, amax and output format of an accumulator. Names no recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous
from cuda_kernels._place import Place, check_array
from cuda_kernels.cast import RULES

EPILOGUE = Kernel("epilogue.cu", "qsim_epilogue", prelude=("codec.cuh",))
EPILOGUE_CODES = Kernel("epilogue.cu", "qsim_epilogue_codes", prelude=("codec.cuh",))
ORDERS = ("exact", "product", "rows_first", "columns_first")
"""When row and column factors are applied, as ``epilogue.cu`` numbers them."""
OUTPUTS = {"float32": "float32", "float16": "uint16", "bfloat16": "float32"}
"""Outputs that take no rules, in the kernel's order, and the dtype that their array has."""
QUIET_NAN = 0x7FC00000
_ROWS = 8  # of a thread: fewer blocks that end in one atomic maximum


class Finished(NamedTuple):
    """out [M, N]; top uint32 [], bits of the largest finite |y|; refused uint64 [], codes that the policy refuses."""

    out: Any
    top: Any
    refused: Any


def epilogue(
    place: Place, acc: Any, *, row: Any = None, column: Any = None, order: str, alpha: float = 1.0, beta: float = 0.0,
    c: Any = None, correction: Any = None, bias: Any = None, out: str = "float32", scale_d: float = 1.0,
    rules: Any = None, nan: int = QUIET_NAN,
) -> Finished:  # fmt: skip
    """D of an accumulator, in the steps of ``epilogue.cu``.

    acc float32 [M, N]; row float32 [M] and column float32 [N], or None for ones; order: one of ``ORDERS``, and "exact"
    reads neither. c (read where beta is not 0), correction and bias: float32 that broadcast to [M, N], or None. alpha,
    beta, scale_d: float32 numbers. out: "float32"; "float16", uint16 bits; "bfloat16", its values in float32, NaN
    7fc00000; or "codes", uint8 of RN(y scale_d) by rules uint32 [21]. nan: the bits of every NaN of y. Any strides.
    TypeError or ValueError for other dtypes, shapes, orders or outputs, or a scale_d or rules that the output lacks.
    """
    _check(place, out, rules, scale_d, order)
    check_array(place, "acc", acc, "float32")
    if acc.ndim != 2:
        raise ValueError(f"acc of shape {tuple(acc.shape)} is not [M, N]")
    rows, columns = (int(size) for size in acc.shape)
    for name, factor, size in (("row", row, rows), ("column", column, columns)):
        check_array(place, name, factor, "float32", optional=True)
        if factor is not None and tuple(factor.shape) != (size,):
            raise ValueError(f"{name} of shape {tuple(factor.shape)}; acc {(rows, columns)} has {size} such factors")
    if beta != 0 and c is None:
        raise ValueError(f"beta {beta} has nothing to scale: pass c")
    planes = [_plane(place, name, array, (rows, columns)) for name, array in
              (("c", c if beta != 0 else None), ("correction", correction), ("bias", bias))]  # fmt: skip
    xp = place.xp
    result = place.empty((rows, columns), OUTPUTS.get(out, "uint8"))
    top, refused = xp.zeros((), xp.uint32), xp.zeros((), xp.uint64)
    if result.size:
        inputs = [None if x is None else contiguous(xp, x) for x in (acc, row, column)]
        arrays = (*inputs, *(array for array, _ in planes), result, top)
        sizes = (np.int64(size) for size in (rows, columns, *(step for _, steps in planes for step in steps)))
        steps = (np.int32(ORDERS.index(order)), np.float32(alpha), np.float32(beta), np.uint32(nan))
        args, items = (*arrays, *sizes, *steps), (-(-columns // 4), -(-rows // _ROWS))
        if out == "codes":
            place.spread(EPILOGUE_CODES, *items, (*args, np.float32(scale_d), contiguous(xp, rules), refused))
        else:
            place.spread(EPILOGUE, *items, (*args, np.int32(list(OUTPUTS).index(out))))
    return Finished(result, top, refused)


def _check(place: Place, out: str, rules: Any, scale_d: float, order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order {order!r}; known: {', '.join(ORDERS)}")
    if out != "codes" and out not in OUTPUTS:
        raise ValueError(f"out {out!r}; known: {', '.join(OUTPUTS)}, codes")
    check_array(place, "rules", rules, "uint32", optional=out != "codes")
    if out == "codes" and tuple(rules.shape) != (RULES,):
        raise ValueError(f"rules take {RULES} numbers, not {tuple(rules.shape)}")
    if out != "codes" and (rules is not None or scale_d != 1):
        raise ValueError(f"rules and scale_d belong to codes; out is {out!r}")


def _plane(place: Place, name: str, array: Any, shape: tuple[int, int]) -> tuple[Any, tuple[int, int]]:
    """(contiguous array or None, steps down and across) of what broadcasts to ``shape``, else ValueError."""
    check_array(place, name, array, "float32", optional=True)
    if array is None:
        return None, (0, 0)
    own = (1,) * (2 - array.ndim) + tuple(array.shape)
    if len(own) != 2 or any(size not in (1, full) for size, full in zip(own, shape, strict=True)):
        raise ValueError(f"{name} of shape {tuple(array.shape)} does not broadcast to {shape}")
    return contiguous(place.xp, array), (own[1] if own[0] > 1 else 0, 1 if own[1] > 1 else 0)
