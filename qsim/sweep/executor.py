"""Cells to results by a pool of spawned processes that survives any of them. Knows no study and no bits.

A cell that raises is ``failed``. A cell whose process dies is tried once more, alone in a fresh process; if
that one dies too it is ``crashed``. The other cells go on in either case.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

from qsim.errors import UsageError
from qsim.sweep import worker
from qsim.sweep.identity import case_id
from qsim.sweep.journal import Journal
from qsim.sweep.kinds import LIFECYCLE, AnyCell
from qsim.sweep.worker import Answer, Run, one_line

RUN_CELL = LIFECYCLE.run
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "QSIM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
CRASHED = "its process died twice, the second time with this cell alone in it"
_TICK_SECONDS = 0.5
_QUEUED_PER_WORKER = 2  # in flight: enough that no worker waits, few enough that a death costs little


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How far a sweep is; done_before: by earlier runs of it."""

    total: int
    done_before: int = 0
    done_now: int = 0
    failed: int = 0
    crashed: int = 0

    @property
    def ended(self) -> int:
        """Cells that nothing more is done about."""
        return self.done_before + self.done_now + self.failed + self.crashed


def available_cores() -> int:
    """The cores that this process may use: its affinity, not the machine's count."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_cells(
    cells: Sequence[AnyCell],
    journal: Journal,
    *,
    workers: int | None = None,
    run: Run = RUN_CELL,
    on_progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Run the cells that the journal has no result for; keep each outcome as soon as it arrives.

    workers: processes, by default one a core. run: "module:function" or a callable that can be pickled.
    Ctrl-C ends the workers and is raised again; everything that arrived before is in the journal.
    """
    count = available_cores() if workers is None else workers
    if count < 1:
        raise UsageError(f"--workers {count}: give 1 or more")
    before = journal.done()
    waiting = deque(cell for cell in cells if case_id(cell) not in before)
    job = _Job(journal, run, on_progress, total=len(cells), done_before=len(cells) - len(waiting))
    job.report()
    with thread_caps(max(1, available_cores() // count)):
        while waiting:
            for suspect in job.together(waiting, min(count, len(waiting))):
                job.alone(suspect)
    return job.tally


@dataclass(slots=True)
class _Job:
    """One call of run_cells: where outcomes go, and what has been counted."""

    journal: Journal
    run: Run
    on_progress: Callable[[Tally], None] | None
    total: int
    done_before: int
    counts: dict[str, int] = field(default_factory=lambda: {"done": 0, "failed": 0, "crashed": 0})

    @property
    def tally(self) -> Tally:
        return Tally(
            total=self.total,
            done_before=self.done_before,
            done_now=self.counts["done"],
            failed=self.counts["failed"],
            crashed=self.counts["crashed"],
        )

    def report(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.tally)

    def together(self, waiting: deque[AnyCell], workers: int) -> list[AnyCell]:
        """Empty the queue with a shared pool. If it breaks: the cells that were in it without an answer."""
        flight: dict[Future[Answer], AnyCell] = {}
        try:
            with _pool(workers, self.run) as pool:
                while waiting or flight:
                    while waiting and len(flight) < _QUEUED_PER_WORKER * workers:
                        self.submit(pool, waiting, flight)
                    for future in wait(flight, _TICK_SECONDS, FIRST_COMPLETED).done:
                        self.keep(flight[future], future.result())
                        del flight[future]
                    self.report()
        except BrokenProcessPool:
            pass
        suspects = []
        for future, cell in flight.items():  # the pool is down: every future has its answer or its error
            if not future.cancelled() and future.exception() is None:
                self.keep(cell, future.result())
            else:
                self.journal.died(case_id(cell))
                suspects.append(cell)
        return suspects

    def alone(self, cell: AnyCell) -> None:
        """One cell in a process of its own; a death here is its second."""
        flight: dict[Future[Answer], AnyCell] = {}
        try:
            with _pool(1, self.run) as pool:
                self.submit(pool, deque([cell]), flight)
                while not wait(flight, _TICK_SECONDS).done:
                    self.report()
                self.keep(cell, next(iter(flight)).result())
        except BrokenProcessPool:
            self.journal.crash(case_id(cell), CRASHED)
            self.counts["crashed"] += 1
        self.report()

    def submit(self, pool: ProcessPoolExecutor, waiting: deque[AnyCell], flight: dict[Future[Answer], AnyCell]) -> None:
        with _sigint_held():
            future = pool.submit(worker.work, self.run, waiting[0])  # raises on a broken pool: the cell stays queued
        cell = waiting.popleft()
        flight[future] = cell
        self.journal.begin(case_id(cell))

    def keep(self, cell: AnyCell, answer: Answer) -> None:
        if answer.error:
            self.journal.fail(case_id(cell), answer.error, answer.detail)
        else:
            self.journal.finish(case_id(cell), answer.body)
        self.counts["failed" if answer.error else "done"] += 1


@contextmanager
def _pool(workers: int, run: Run) -> Iterator[ProcessPoolExecutor]:
    """A pool whose workers have proved that they start; left by an error, its workers end at once."""
    context = multiprocessing.get_context("spawn")  # forked children inherit locks of BLAS and OpenMP: they hang
    lifeline, hand = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=worker.start, initargs=(lifeline,))
    try:
        _prove_start(pool, run)
        yield pool
    except BaseException:
        hand.close()  # every worker sees the end of this pipe
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=True)
        hand.close()
        lifeline.close()


def _prove_start(pool: ProcessPoolExecutor, run: Run) -> None:
    with _sigint_held():
        future = pool.submit(worker.ready, run)
    try:
        while not wait([future], _TICK_SECONDS).done:
            pass
        future.result()
    except BrokenProcessPool as error:
        raise UsageError(
            "worker processes end before they run a cell (their own message is above). In a script, start "
            'the sweep under `if __name__ == "__main__":`, for each worker imports the script'
        ) from error
    except Exception as error:
        raise UsageError(f"the run function {run!r} cannot be loaded in a worker: {one_line(error)}") from error


@contextmanager
def thread_caps(threads: int) -> Iterator[None]:
    """Cap the threads of numeric libraries in processes started meanwhile; a lower cap of the user stays."""
    before = {name: os.environ.get(name) for name in THREAD_CAPS}
    try:
        for name, old in before.items():
            asked = int(old) if old is not None and old.strip().isdecimal() else 0
            os.environ[name] = str(min(threads, asked) if asked else threads)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


@contextmanager
def _sigint_held() -> Iterator[None]:
    """Hold Ctrl-C back while a process may be starting: the child inherits that and prints no traceback."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
