"""The rules a trace is judged by. They read records alone: the simulator's or a real trainer's. No numbers.

Numbering and meaning follow the catalogue in docs/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from qsim.record import Record
from qsim.sim.invariants.commits import LIVENESS, OBSERVATION_SET, SINGLE_COMMIT, STATE_ALGEBRA
from qsim.sim.invariants.keeping import PERSISTENCE, STASH_DISCIPLINE
from qsim.sim.invariants.model import Judged, Rule, Violation, unit_of
from qsim.sim.invariants.owners import OWNERSHIP, REPLICA_AGREEMENT
from qsim.sim.invariants.reads import ATOMIC_READ, CACHE_VALIDITY, CONTEXT_EQUALITY, PAIRING, REPLAY_EQUALITY
from qsim.sim.presets import Cadence
from qsim.sim.scopes import Scope

__all__ = ["RULES", "Rule", "Violation", "broken", "check", "in_order", "unit_of"]

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.id: rule
        for rule in (
            PAIRING,
            REPLAY_EQUALITY,
            SINGLE_COMMIT,
            OWNERSHIP,
            OBSERVATION_SET,
            REPLICA_AGREEMENT,
            ATOMIC_READ,
            PERSISTENCE,
            CACHE_VALIDITY,
            STASH_DISCIPLINE,
            STATE_ALGEBRA,
            LIVENESS,
            CONTEXT_EQUALITY,
        )
    }
)


def check(records: Sequence[Record], *, scope: Scope, unit: Cadence, ranks: int = 1) -> tuple[Violation, ...]:
    """All violations, in order of event.

    scope: the declared owners; unit: the declared unit of a commit; ranks: workers of one group whose states are
    replicas, 1 where workers are no ranks.
    """
    trace = Judged(records, scope=scope, unit=unit, ranks=ranks)
    found = [violation for rule in RULES.values() for violation in rule.judge(trace)]
    return tuple(sorted(found, key=lambda v: (v.event, v.invariant)))


def in_order(ids: Iterable[str]) -> tuple[str, ...]:
    """Ids of invariants by number: I2 before I10."""
    return tuple(sorted(ids, key=lambda one: int(one[1:])))


def broken(violations: Iterable[Violation]) -> frozenset[str]:
    """The ids of the invariants that were broken."""
    return frozenset(v.invariant for v in violations)
