"""Chunks of an array on several threads. Knows no format; results never depend on the number of threads.

Kernels release the interpreter's lock, so ordinary threads run them side by side. Numba's own layers are not used:
one aborts when two Python threads call it, another kills children that were forked after its first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from qsim.checks import whole_number
from qsim.errors import UsageError

GRAIN = 1 << 18
"""Least number of elements that is worth a thread of its own: some 100 microseconds of work."""

Work = Callable[[int, int], None]

_chosen: int | None = None
_pool: ThreadPoolExecutor | None = None


def thread_count() -> int:
    """Threads that a large array is spread over: ``set_threads``, else QSIM_THREADS, else every usable core."""
    if _chosen is not None:
        return _chosen
    named = os.environ.get("QSIM_THREADS", "")
    if not named:
        return _usable_cores()
    if not named.isdecimal() or int(named) < 1:
        raise UsageError(f"QSIM_THREADS is {named!r}; set it to a positive integer, or unset it")
    return int(named)


def set_threads(count: int | None) -> None:
    """Use ``count`` threads from now on; None goes back to QSIM_THREADS or every usable core."""
    global _chosen
    _chosen = None if count is None else whole_number("number of threads", count, least=1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """``set_threads(count)`` for a while."""
    before = _chosen
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def spans(size: int, *, cost: int = 1, align: int = 1) -> list[tuple[int, int]]:
    """0..size cut into one span a thread, at multiples of ``align``; one span where that is not worth it.

    ``cost`` is the number of elements behind one step of 0..size.
    """
    count = min(thread_count(), max(size * cost // GRAIN, 1))
    step = -(-size // (count * align)) * align if size else 1
    return [(start, min(start + step, size)) for start in range(0, size, step)] or [(0, 0)]


def run_spans(work: Work, cuts: list[tuple[int, int]]) -> None:
    """``work(start, stop)`` for every span: the first on this thread, the others on a pool."""
    if len(cuts) == 1:
        work(*cuts[0])
        return
    others = [_executor().submit(work, *cut) for cut in cuts[1:]]
    try:
        work(*cuts[0])
    finally:
        for other in others:
            other.result()


def in_chunks(work: Work, size: int, *, cost: int = 1, align: int = 1) -> None:
    """``work(start, stop)`` over 0..size, spread over the threads."""
    run_spans(work, spans(size, cost=cost, align=align))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(_usable_cores(), 2), thread_name_prefix="qsim")
    return _pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
