"""How a running sweep shows itself: one bar on a terminal, else a log line now and then. Knows no cells."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from qsim.sweep.executor import Tally

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LOG_SECONDS = 5.0


class SweepProgress:
    """Give it to run_sweep as ``progress``, inside a ``with``. The parent alone draws; workers never do."""

    def __init__(
        self,
        *,
        title: str = "sweep",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_seconds: float = LOG_SECONDS,
    ) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._log_seconds = log_seconds
        self._bar: tuple[Progress, TaskID] | None = None
        self._started = clock()
        self._logged = self._started
        self._last: Tally | None = None
        self._said = ""

    def __enter__(self) -> SweepProgress:
        self._started = self._logged = self._clock()
        return self

    def __call__(self, tally: Tally) -> None:
        """Show this state: the bar at once, a log line at most each ``log_seconds``."""
        self._last = tally
        if self._stream.isatty():
            self._draw(tally)
        elif self._clock() - self._logged >= self._log_seconds:
            self._log(tally)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        elif self._last is not None:
            self._log(self._last)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._started

    def line(self, tally: Tally) -> str:
        """``sweep: 12/340 cells, 1 failed, 3.1 cells/s, about 106 s left``."""
        parts = [f"{self._title}: {tally.ended}/{tally.total} cells"]
        parts += [f"{n} {what}" for n, what in ((tally.failed, "failed"), (tally.crashed, "crashed")) if n]
        now = tally.ended - tally.done_before
        seconds = self.seconds
        if now and seconds > 0:
            rate = now / seconds
            parts.append(f"{rate:.2g} cells/s")
            if tally.ended < tally.total:
                parts.append(f"about {(tally.total - tally.ended) / rate:.0f} s left")
        return ", ".join(parts)

    def _log(self, tally: Tally) -> None:
        self._logged = self._clock()
        if (line := self.line(tally)) != self._said:
            print(line, file=self._stream, flush=True)
            self._said = line

    def _draw(self, tally: Tally) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[trouble]}"),
                console=Console(file=self._stream),
                get_time=self._clock,
            )
            task = bar.add_task(self._title, total=tally.total, completed=tally.done_before, trouble="")
            bar.start()
            self._bar = (bar, task)
        bar, task = self._bar
        counts = ((tally.failed, "failed"), (tally.crashed, "crashed"))
        bar.update(task, completed=tally.ended, trouble=", ".join(f"{n} {what}" for n, what in counts if n))
