"""Edits that several rewrites make: other cells, other rules of a commit, who wrote a slot. Holds no defect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from qsim.errors import CaseError
from qsim.quant import StateKey
from qsim.sim.case import Case
from qsim.sim.defects.model import rewritten
from qsim.sim.events import (
    Begin,
    Commit,
    Event,
    Fetch,
    LoadState,
    Observe,
    Phase,
    Restart,
    Restore,
    SaveState,
    Slot,
    Store,
    Wait,
)
from qsim.sim.invariants import broken, in_order, unit_of
from qsim.sim.judge import judge

TRAINED = (Phase.FORWARD, Phase.BACKWARD)
"""Phases whose observations a commit may fold in."""


def unlike(case: Case, made: Case, missing: str) -> Case:
    """``made``, which must differ from ``case``; CaseError that says what the schedule has none of."""
    if made.schedule == case.schedule:
        raise CaseError(f"nothing to rewrite: the schedule has no {missing}")
    return made


def with_cells(case: Case, rename: Callable[[StateKey], StateKey]) -> Case:
    """Every cell renamed, wherever it is read, advanced or saved."""

    def edited(event: Event) -> Event:
        if isinstance(event, (Begin, Commit, Fetch, Store, Restore)):
            return event._replace(cell=rename(event.cell))
        if isinstance(event, SaveState):
            return event._replace(cells=tuple(dict.fromkeys(rename(cell) for cell in event.cells)))
        return event

    return rewritten(case, [edited(event) for event in case.schedule])


def with_fold(case: Case, **rules: Any) -> Case:
    """Every commit with other rules."""
    return rewritten(
        case,
        [e._replace(fold=e.fold._replace(**rules)) if isinstance(e, (Commit, Store)) else e for e in case.schedule],
    )


def require_rule(case: Case, name: str, due: Enum) -> None:
    """CaseError where the commits of the host follow another rule than the one that the defect replaces."""
    found: Enum = getattr(case.context.fold, name)
    if found is not due:
        raise CaseError(
            f"the commits of the host have {name} rule {found.name}; this defect replaces {due.name}: take a preset "
            "that has it"
        )


def require_correct(case: Case) -> None:
    """CaseError where the host breaks a rule by itself: a state that never moves would hide that."""
    found = broken(judge(case))
    if found:
        raise CaseError(
            f"the host breaks {', '.join(in_order(found))} by itself, and a state that never moves hides it: take a "
            "preset, order or feature that breaks nothing"
        )


def require_one_unit_a_commit(case: Case) -> None:
    """CaseError where one commit merges the observations of several units."""
    for _, event, written in writers_of(case):
        if isinstance(event, Commit):
            units = {unit_of(written[name][1].op, case.context.unit) for name in event.obs}
            if len(units) > 1:
                raise CaseError(
                    f"the host merges {len(units)} units in the commit of {event.op}: take a preset that commits in "
                    "every cast"
                )


def writers_of(case: Case) -> Iterator[tuple[int, Event, dict[Slot, tuple[int, Observe | Wait]]]]:
    """Every event with its place, and who wrote each observation slot last before it."""
    written: dict[Slot, tuple[int, Observe | Wait]] = {}
    for at, event in enumerate(case.schedule):
        yield at, event, written
        if isinstance(event, (Observe, Wait)):
            written[event.into] = at, event
        elif isinstance(event, Restart):
            written = {name: by for name, by in written.items() if name in event.keep}


def lives_of(case: Case) -> Iterator[tuple[int, int]]:
    """(start, stop) of the parts of a schedule that a checkpoint read back, or a new process, tells apart."""
    start = 0
    for at, event in enumerate(case.schedule):
        if isinstance(event, (LoadState, Restart)):
            yield start, at
            start = at
    yield start, len(case.schedule)
