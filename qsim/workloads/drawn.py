"""Operands of a product drawn from a seed: ones, positive, both signs. Knows no model and no sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from qsim.arrays import F32, U8
from qsim.codec import encode
from qsim.formats import FloatFormat
from qsim.philox import Purpose, random_bell


def _ones(bell: F32) -> F32:
    return np.ones_like(bell)


def _positive(bell: F32) -> F32:
    return np.abs(bell)


def _normal(bell: F32) -> F32:
    return bell


DATA: Mapping[str, Callable[[F32], F32]] = MappingProxyType({"ones": _ones, "positive": _positive, "normal": _normal})
"""Kind -> what becomes of bell-shaped numbers of mean 0 and variance 1; |x| < 3.47, so no format needs a scale."""


def draw_operands(
    data: str, fmt: FloatFormat, *, depth: int, rows: int, columns: int, seed: int
) -> tuple[U8, U8]:  # fmt: skip
    """Codes [rows, K] and [columns, K]: the two sides of a product of ``depth`` k, encoded to nearest even.

    A pure function of (seed, data, format): the operands of a smaller depth are the beginning of those of a larger.
    """
    sides = ((Purpose.ROWS, rows), (Purpose.WEIGHTS, columns))
    a, b = (DATA[data](random_bell(seed, purpose, (depth, count))).T for purpose, count in sides)
    return encode(np.ascontiguousarray(a), fmt), encode(np.ascontiguousarray(b), fmt)
