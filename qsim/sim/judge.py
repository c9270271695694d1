"""A case held against what its context declares. Replays no tensor."""

from __future__ import annotations

from collections.abc import Sequence

from qsim.record import Record
from qsim.sim.case import Case
from qsim.sim.invariants import Violation, check
from qsim.sim.step import records_of


def judge(case: Case, records: Sequence[Record] | None = None) -> tuple[Violation, ...]:
    """All violations of a case, from its records (made here where they are not given), in order of event."""
    context = case.context
    seen = records_of(case) if records is None else records
    return check(seen, scope=context.scope, unit=context.unit, ranks=context.ranks)
