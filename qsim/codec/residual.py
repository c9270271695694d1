"""What is left of numbers when a centre is taken off, and the sign of a NaN. Knows no format and no scale."""

from __future__ import annotations

import numpy as np

from qsim.arrays import F32

QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)


def signed_residual(x: F32, center: F32) -> F32:
    """RN(x - center), float32; NaN is quiet and has the sign of x where x is NaN, else none.

    The sign of a NaN made by arithmetic (Inf - Inf) differs between processors.
    """
    with np.errstate(all="ignore"):
        return with_signs_of(np.asarray(x - center, np.float32), x)


def with_signs_of(y: F32, x: F32) -> F32:
    """y, made from x element by element; a NaN of it is quiet and has the sign of x where x is NaN, else none."""
    own = np.where(np.isnan(x), np.copysign(QUIET_NAN, x), QUIET_NAN)
    return np.asarray(np.where(np.isnan(y), own, y), np.float32)
