"""Fixed-point sums of rows by Numba kernels, on one thread or several. Knows no mean and no centre."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from qsim.arrays import F32, F64, I64, U32
from qsim.backends.checks import mean_shape, rows_of
from qsim.backends.parts import on_one_thread
from qsim.codec import sums_kernels
from qsim.codec.means import MAX_COUNT, Sums, check_count
from qsim.codec.threads import run_spans, spans

SHORT_ROW = 4096
"""Elements of a piece of a long row, so that several threads find work in it."""

Found = TypeVar("Found")


def sums_of(x: F32, lead: int, axes: tuple[int, ...]) -> Sums:
    """Sums of the finite elements of contiguous x over ``axes``; see ``Backend.sums``."""
    shape = mean_shape(x.shape, lead, axes)
    rows = rows_of(x.shape, lead, shape)
    slots = rows.partner
    flat = x.reshape(-1, rows.shape[2]) if x.size else x.reshape(0, rows.shape[2])
    parts = _pieces(flat) if slots == (1, 1) and flat.shape[0] == 1 and not on_one_thread(x.size) else [flat]

    def measure(part: F32, slot_of: I64) -> tuple[U32, I64]:
        top, count = np.zeros(slots, np.uint32), np.zeros(slots, np.int64)
        sums_kernels.sums_amax(part.view(np.uint32), slot_of, top, count)
        return top, count

    measured = _over_rows(measure, parts, rows.row_of)
    top, count = measured[0]
    for other_top, other_count in measured[1:]:
        np.maximum(top, other_top, out=top)
        count += other_count
    if x.size > MAX_COUNT:  # no mean is over more than there is
        check_count(int(count.max()))
    exponent, unit = np.empty(slots, np.int32), np.empty(slots, np.float64)
    sums_kernels.sums_scale(top, exponent, unit)
    total = _total(parts, rows.row_of, unit)
    return Sums(total=total.reshape(shape), exponent=exponent.reshape(shape), count=count.reshape(shape))


def _total(parts: list[F32], row_of: I64, unit: F64) -> I64:
    def add(part: F32, slot_of: I64) -> I64:
        total = np.zeros(unit.shape, np.int64)
        sums_kernels.sums_total(part, slot_of, unit, total)
        return total

    totals = _over_rows(add, parts, row_of)
    return totals[0] if len(totals) == 1 else np.sum(totals, axis=0, dtype=np.int64)


def _pieces(row: F32) -> list[F32]:
    """One long row [1, L] cut up into many, and what is left of it."""
    whole = row.shape[1] // SHORT_ROW * SHORT_ROW
    return [row[:, :whole].reshape(-1, SHORT_ROW), row[:, whole:]]


def _over_rows(work: Callable[[Any, I64], Found], parts: list[F32], row_of: I64) -> list[Found]:
    """``work(rows, their slots)`` of every part, its rows spread over the threads."""
    found: list[Found] = []
    for part in parts:
        own = row_of if part.shape[0] == row_of.size else np.zeros(part.shape[0], np.int64)

        def span(start: int, stop: int, part: F32 = part, own: I64 = own) -> None:
            found.append(work(part[start:stop], own[start:stop]))

        if on_one_thread(part.size):
            found.append(work(part, own))
        else:
            run_spans(span, spans(part.shape[0], cost=part.shape[1]))
    return found
