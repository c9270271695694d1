"""What happens inside a worker process: run one cell, die with the parent. Knows no journal and no pool."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from qsim.sweep.identity import encode_record
from qsim.sweep.kinds import AnyCell, AnyRecord, kind_of

Run = str | Callable[[Any], AnyRecord]  # "module:function", or a callable that can be pickled
_ERROR_LENGTH = 500


class Answer(NamedTuple):
    """What comes back: the canonical text of a record, or a one-line error and its traceback."""

    body: str
    error: str = ""
    detail: str = ""


def start(lifeline: Connection) -> None:
    """Begin a worker: deaf to Ctrl-C (the parent decides), and gone as soon as the parent is or lets go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: Connection) -> None:
    parent = multiprocessing.parent_process()
    multiprocessing.connection.wait([lifeline] if parent is None else [lifeline, parent.sentinel])
    os._exit(1)  # from a thread sys.exit would end only the thread, and the cell may be deep in compiled code


@cache
def resolve(run: Run) -> Callable[[Any], AnyRecord]:
    """The callable itself."""
    if not isinstance(run, str):
        return run
    module, _, name = run.partition(":")
    found: Callable[[Any], AnyRecord] = getattr(importlib.import_module(module), name)
    return found


def ready(run: Run) -> int:
    """The process id, after the run function was imported: proof that workers can start at all."""
    resolve(run)
    return os.getpid()


def work(run: Run, cell: AnyCell) -> Answer:
    """Run one cell. Whatever it raises is an answer; only a dead process has none."""
    try:
        record, due = resolve(run)(cell), kind_of(cell).record
        if not isinstance(record, due):
            raise TypeError(f"{run} returned {type(record).__name__}, not a {due.__name__}")
        return Answer(encode_record(record))
    except BaseException as error:  # SystemExit too: it must not pass for a crash
        return Answer("", one_line(error), traceback.format_exc())


def one_line(error: BaseException) -> str:
    """``ValueError: what it says``, without line breaks."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_ERROR_LENGTH]
