"""Launcher of ``decode.cu``: codes back to float32. Knows no format: its values are a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous, replicas
from cuda_kernels._place import Place, check_array

DECODE = Kernel("decode.cu", "qsim_decode", prelude=("groups.cuh",))


def decode(place: Place, codes: Any, table: Any, *, descale: Any = None, center: Any = None) -> Any:
    """float32 of the codes' shape: RN(RN(table[code] * descale) + center).

    codes uint8 [lead + rest], any strides, below the table's size: a code outside it is the caller's to refuse, and
    decodes to NaN; table float32 [codes of the format]; descale float32 [lead] (zero or one axis) or None; center
    float32 that broadcasts to codes, or None. TypeError or ValueError for other dtypes or shapes.
    """
    xp = place.xp
    check_array(place, "codes", codes, "uint8")
    check_array(place, "table", table, "float32")
    check_array(place, "descale", descale, "float32", optional=True)
    check_array(place, "center", center, "float32", optional=True)
    own = replicas(xp, "codes", codes, "descale", descale, center)
    if table.ndim != 1 or not 1 <= table.size <= 256:
        raise ValueError(f"table of shape {tuple(table.shape)}; it has one value a code, at most 256")
    out = place.empty(tuple(codes.shape), "float32")
    if codes.size:
        inputs = [None if a is None else contiguous(xp, a) for a in (codes, table, descale, own.center)]
        place.spread(DECODE, -(-own.each // 16), own.number, (*inputs, out, *own.sizes, np.int64(table.size)))
    return out
