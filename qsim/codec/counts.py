"""What a cast did, in numbers. Counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.arrays import I64


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCounts:
    """What a cast did, per replica: int64 [lead]; a plain ``encode`` has no replica, so [].

    saturated: elements of finite x whose magnitude after scaling rounds beyond ``fmt.max`` (they were clipped, or
               became Inf or NaN, as mode and policy say), a product that is Inf included;
    flushed:   elements with a non-zero residual that round to zero (a NaN never does, whatever its code);
    nan, inf:  NaN and infinite inputs (of x, before centring and scaling).
    """

    saturated: I64
    flushed: I64
    nan: I64
    inf: I64
