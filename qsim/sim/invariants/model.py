"""What a rule is, and a trace as its judges read it. Judges nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from qsim.quant import OpId
from qsim.record import Op, OperandRecord, Record, Version
from qsim.sim.presets import Cadence
from qsim.sim.scopes import Scope

TRAINING = ("f", "b")
"""Phases whose observations a commit may fold in: the forward, and a gradient's only cast."""

Unit = tuple[int, ...]
_SEQ = itemgetter(0)


class Violation(NamedTuple):
    """One broken rule.

    invariant: "I1" ...; event: ``seq`` of the record that broke it; events: all that are involved, ascending, as far as
    the rule knows them; ``event`` is among them.
    """

    invariant: str
    event: int
    owner: str
    because: str
    events: tuple[int, ...] = ()


@lru_cache(maxsize=65536)
def _owner_of(scope: Scope, owned: tuple[int, ...]) -> str:
    layer, site, role, worker = owned
    return str(scope(OpId(0, 0, layer, site, role, worker)))


def unit_of(op: Op | None, unit: Cadence) -> Unit:
    """The logical unit that ``op`` belongs to: its step, or its step and microbatch."""
    assert op is not None, "the caller looks at records with an op"
    return op[:1] if unit is Cadence.STEP else op[:2]


class Judged:
    """The records of a trace by kind, and what was declared: scope of owners, unit of a commit, number of ranks.

    ranks above 1: workers are ranks of one group, whose states are replicas and must agree.
    """

    def __init__(self, records: Sequence[Record], *, scope: Scope, unit: Cadence, ranks: int) -> None:
        self.records, self.scope, self.unit, self.ranks = records, scope, unit, ranks
        self._fields = 1 if unit is Cadence.STEP else 2
        self._owners: dict[tuple[int, ...], str] = {}
        self._operands: list[tuple[Record, OperandRecord]] | None = None
        self._kinds: dict[str, list[Record]] = {}
        for record in records:
            self._kinds.setdefault(record.kind, []).append(record)
        self._merged: dict[tuple[str, ...], list[Record]] = {}
        self._casts: dict[Op, list[int]] | None = None

    def of(self, *kinds: str) -> list[Record]:
        """The records of these kinds, in order."""
        if len(kinds) == 1:
            return self._kinds.get(kinds[0], [])
        if kinds not in self._merged:
            found = [record for kind in kinds for record in self._kinds.get(kind, ())]
            self._merged[kinds] = sorted(found, key=_SEQ)
        return self._merged[kinds]

    def owner(self, op: Op | None) -> str:
        """The declared owner of an op: it depends on layer, site, role and worker alone."""
        assert op is not None, "the caller looks at records with an op"
        owned = op[2:6]
        found = self._owners.get(owned)
        if found is None:
            found = self._owners[owned] = _owner_of(self.scope, owned)
        return found

    def replica(self, op: Op | None) -> str:
        """The owner without its rank: what the replicas of one state have in common."""
        assert op is not None, "the caller looks at records with an op"
        return _owner_of(self.scope, (*op[2:5], 0))

    def unit_of(self, op: Op | None) -> Unit:
        """The declared unit of an op, as ``unit_of`` says: a step has one field, a microbatch two."""
        assert op is not None, "the caller looks at records with an op"
        return op[: self._fields]

    def operands(self) -> list[tuple[Record, OperandRecord]]:
        """Every operand that was cast, with its consumer."""
        if self._operands is None:
            self._operands = [
                (record, operand)
                for record in self.of("consume")
                for operand in record.operands
                if operand.codes is not None
            ]
        return self._operands

    def involved(self, record: Record, operand: OperandRecord) -> tuple[int, ...]:
        """The quantize that made an operand's codes, where the trace has it, and the consumer."""
        if self._casts is None:  # asked for a violation alone
            self._casts = {}
            for cast in self.of("quantize"):
                if cast.op is not None:
                    self._casts.setdefault(cast.op, []).append(cast.seq)
        made = self._casts.get(operand.codes_op, []) if operand.codes_op is not None else []
        before = bisect_left(made, record.seq)
        return (made[before - 1], record.seq) if before else (record.seq,)


Judge = Callable[[Judged], Iterable[Violation]]


class Rule(NamedTuple):
    """An invariant: its id, its name, its meaning in one line, and its judge."""

    id: str
    name: str
    meaning: str
    judge: Judge


def same(a: Version | None, b: Version | None) -> bool:
    """Same owner and same epoch: what pairing means. The op is not compared, it is I4's."""
    return a is not None and b is not None and (a.owner, a.epoch) == (b.owner, b.epoch)


def show(version: Version | None) -> str:
    """A version as a reader writes it."""
    if version is None:
        return "nothing"
    torn = "" if version.descale is None else f" with the descale of {version.descale}"
    return f"{version.owner}@{version.epoch}{torn}"
