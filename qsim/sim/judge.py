"""A case held against what its context declares. Replays no tensor."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from qsim.record import Record
from qsim.sim.case import Case
from qsim.sim.invariants import Violation, check
from qsim.sim.step import records_of


class Lint(NamedTuple):
    """A schedule judged statically: one record an event, and what they break."""

    records: tuple[Record, ...]
    violations: tuple[Violation, ...]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Records are tuples that refer to no record, so there is no cycle to find; to look for some among hundreds of
    thousands of them takes longer than to judge them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def lint(case: Case) -> Lint:
    """The records of a case and its verdict, without a tensor. CaseError where it reads an empty slot."""
    with collector_paused():
        records = records_of(case)
        return Lint(records, judge(case, records))


def judge(case: Case, records: Sequence[Record] | None = None) -> tuple[Violation, ...]:
    """All violations of a case, from its records (made here where they are not given), in order of event."""
    context = case.context
    with collector_paused():
        seen = records_of(case) if records is None else records
        return check(seen, scope=context.scope, unit=context.unit, ranks=context.ranks)
