"""Launcher of ``cast.cu``: any cast with scale, centre, amax and counts. Names no format."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda_kernels._kernel import Kernel
from cuda_kernels._layout import contiguous, replicas
from cuda_kernels._place import Place, check_array

CAST = Kernel("cast.cu", "qsim_cast", prelude=("groups.cuh", "codec.cuh"))
RULES = 21
"""Unsigned integers of a format and a policy: the fields of ``QsimRules``, in its order."""


class Casted(NamedTuple):
    """codes uint8 of x's shape; top uint32 bits of the amax, counts uint64 [lead, 5]: as ``cast.cu`` says."""

    codes: Any
    top: Any
    counts: Any


def cast(place: Place, x: Any, rules: Any, *, scale: Any = None, center: Any = None, streams: Any = None) -> Casted:
    """Codes of RN(RN(x - center) * scale), amax of the residual, counts.

    x float32 [lead + rest], any strides; scale float32 [lead] (zero or one axis) or None; center float32 that
    broadcasts to x, or None; rules uint32 [21]; streams uint32 [replicas, 5] for a stochastic rounding, else None.
    TypeError or ValueError for other dtypes or shapes.
    """
    xp = place.xp
    check_array(place, "x", x, "float32")
    check_array(place, "rules", rules, "uint32")
    check_array(place, "scale", scale, "float32", optional=True)
    check_array(place, "center", center, "float32", optional=True)
    check_array(place, "streams", streams, "uint32", optional=True)
    own = replicas(xp, "x", x, "scale", scale, center)
    if rules.shape != (RULES,) or (streams is not None and streams.shape != (own.number, 5)):
        raise ValueError(f"rules take {RULES} numbers, and streams 5 for each of {own.number} replicas")
    codes, top = place.empty(tuple(x.shape), "uint8"), xp.zeros(own.lead, xp.uint32)
    counts = xp.zeros((*own.lead, 5), xp.uint64)
    if x.size:
        inputs = [None if a is None else contiguous(xp, a) for a in (x, scale, own.center, streams, rules)]
        place.spread(CAST, -(-own.each // 4), own.number, (*inputs, codes, top, counts, *own.sizes))
    return Casted(codes, top, counts)
