"""A text as a user's input: its sizes, its own spelling, and why it cannot be run. Knows no study and no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from qsim.errors import CaseError
from qsim.sim.control import Control, apply
from qsim.sim.events import Consume, Event, Load, Phase, Store
from qsim.sim.notation.model import NotationError, Written
from qsim.sim.notation.read import read_schedule
from qsim.sim.notation.write import op_of, write_schedule

LIMITS = {"logical_step": 2**32, "microbatch": 2**16, "worker_id": 2**16, "layer_id": 2**12, "visit": 2**8}
"""Least numbers that are too large: the fields of the random streams, and of a study's sizes."""


@lru_cache(maxsize=16)
def written(text: str) -> Written:
    """The schedule of a text; NotationError where it is none."""
    return read_schedule(text)


def sizes_of(text: str) -> dict[str, int]:
    """steps, microbatches, layers and workers that a text needs: one more than the largest number of each."""
    ops = [op for op in map(op_of, written(text).schedule) if op is not None]
    fields = {"steps": "logical_step", "microbatches": "microbatch", "layers": "layer_id", "workers": "worker_id"}
    return {name: 1 + max((getattr(op, field) for op in ops), default=0) for name, field in fields.items()}


def canonical(text: str) -> str:
    """The notation's own spelling: comments, blanks and what goes without saying are no part of a case."""
    read = written(text)
    return write_schedule(read.schedule, read.declared)


def refusals(text: str) -> Iterator[str]:
    """Why a text cannot be run, one line each with its place."""
    try:
        schedule = written(text).schedule
    except NotationError as error:
        yield from error.problems
        return
    control = Control()
    for seq, event in enumerate(schedule):
        try:
            wrong = next(_mistakes(event, control), "")
            if not wrong:
                apply(control, event)
        except CaseError as error:
            wrong = str(error).removeprefix(f"event {seq} ")
        if wrong:
            yield f"event {seq}: {wrong}"  # what follows would read what this one never wrote
            return
    if not any(isinstance(event, Consume) and event.phase is Phase.FORWARD for event in schedule):
        yield "event 0: the schedule has no GEMM in phase f; write at least one U"


def _mistakes(event: Event, control: Control) -> Iterator[str]:
    if isinstance(event, Store) and control.held(event.base).version is None:
        yield f"reads slot {event.base} as a state, which holds none; fetch it with F"
    op = op_of(event)
    if op is None:
        return
    for name, limit in LIMITS.items():
        if not 0 <= getattr(op, name) < limit:
            yield f"{name} {getattr(op, name)} of {type(event).__name__} is outside 0 to {limit - 1}"


def loaded(text: str) -> frozenset[tuple[int, int]]:
    """(site, role) of every tensor that a text brings in."""
    return frozenset((e.key.site, e.key.role_id) for e in written(text).schedule if isinstance(e, Load))
