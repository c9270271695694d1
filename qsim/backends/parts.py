"""Rows and their partner cut up for several threads. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsim.arrays import F32, I64
from qsim.backends.checks import Rows
from qsim.codec.threads import GRAIN, in_chunks, thread_count

ALIGN = 256
"""Elements of the kernels' inner loop: a row is cut at multiples of it."""

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of x [R, P, L] with its own partner [Q, 1 or L] and ``row_of``."""

    replicas: slice
    rows: slice
    columns: slice
    partner: F32
    row_of: I64

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Where it is in x."""
        return self.replicas, self.rows, self.columns


def on_one_thread(size: int) -> bool:
    """True where ``size`` elements are too few for a second thread, or there is none."""
    return size < 2 * GRAIN or thread_count() == 1  # the machine is asked only where its answer matters


def for_each_part(rows: Rows, partner: F32, work: Callable[[Part], None]) -> None:
    """``work`` on every part, the parts spread over several threads: by replicas, else by rows, else along a row."""
    count, height, length = rows.shape
    owner = rows.row_of.reshape(count, height)

    def part(replicas: slice, own_rows: slice, columns: slice) -> None:
        owners = owner[replicas, own_rows].reshape(-1)
        if columns == _ALL:
            work(Part(replicas, own_rows, columns, partner, np.ascontiguousarray(owners)))
            return
        row = partner[owners[0] : owners[0] + 1]
        own = np.ascontiguousarray(row[:, columns]) if partner.shape[1] > 1 else row
        work(Part(replicas, own_rows, columns, own, np.zeros(1, np.int64)))

    threads = min(thread_count(), count * height * length // GRAIN)
    if count >= threads:
        in_chunks(lambda start, stop: part(slice(start, stop), _ALL, _ALL), count, cost=height * length)
    else:
        for replica in range(count):
            _one_replica(slice(replica, replica + 1), height, length, threads, part)


def _one_replica(
    replica: slice, height: int, length: int, threads: int, part: Callable[[slice, slice, slice], None]
) -> None:
    if height >= threads:
        in_chunks(lambda start, stop: part(replica, slice(start, stop), _ALL), height, cost=length)
        return
    for row in range(height):
        own = slice(row, row + 1)
        in_chunks(lambda start, stop, own=own: part(replica, own, slice(start, stop)), length, align=ALIGN)  # type: ignore[misc]
