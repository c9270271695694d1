"""The rules a trace is judged by. They read records alone: the simulator's or a real trainer's. No numbers.

Numbering and meaning follow the catalogue in docs/lifecycle.md. Built here: I1, I2, I3, I4, I5, I7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from qsim.quant import OpId
from qsim.record import Op, OperandRecord, Record, Seen, Version
from qsim.sim.presets import Cadence
from qsim.sim.scopes import Scope

TRAINING = ("f", "b")
"""Phases whose observations a commit may fold in: the forward, and a gradient's only cast."""


class Violation(NamedTuple):
    """One broken rule. invariant: "I1" ...; event: ``seq`` of the record that broke it."""

    invariant: str
    event: int
    owner: str
    because: str


class Rule(NamedTuple):
    """An invariant: its id, its name, its meaning in one line, and its judge."""

    id: str
    name: str
    meaning: str
    judge: Callable[[Sequence[Record], Scope, Cadence], Iterable[Violation]]


def _same(a: Version | None, b: Version | None) -> bool:
    """Same owner and same epoch: what pairing means. The op is not compared, it is I4's."""
    return a is not None and b is not None and (a.owner, a.epoch) == (b.owner, b.epoch)


def _show(version: Version | None) -> str:
    return "nothing" if version is None else f"{version.owner}@{version.epoch}"


@lru_cache(maxsize=65536)
def _owner_of(scope: Scope, owned: tuple[int, ...]) -> str:
    layer, site, role, worker = owned
    return str(scope(OpId(0, 0, layer, site, role, worker)))


def _owner(scope: Scope, op: Op | None) -> str:
    """The declared owner of an op: it depends on layer, site, role and worker alone."""
    assert op is not None, "the caller looks at records with an op"
    return _owner_of(scope, op[2:6])


def _operands(records: Sequence[Record]) -> Iterator[tuple[Record, OperandRecord]]:
    for record in records:
        for operand in record.operands:
            if operand.codes is not None:
                yield record, operand


def _pairing(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    for record, operand in _operands(records):
        for what, version in (("descale", operand.descale), ("centre", operand.center)):
            if (what == "descale" or version is not None) and not _same(operand.codes, version):
                yield Violation(
                    "I1", record.seq, _owner(scope, operand.of),
                    f"codes made with {_show(operand.codes)} are decoded with the {what} of {_show(version)}",
                )  # fmt: skip


def _replay_equality(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    forward = {r.op: r.used for r in records if r.kind == "quantize" and r.phase == "f"}
    for record in records:
        if record.kind == "quantize" and record.phase == "r" and not _same(forward.get(record.op), record.used):
            yield Violation(
                "I2", record.seq, _owner(scope, record.op),
                f"recompute encodes with {_show(record.used)}, forward used {_show(forward.get(record.op))}",
            )  # fmt: skip


def unit_of(op: Op | None, unit: Cadence) -> tuple[int, ...]:
    """The logical unit that ``op`` belongs to: its step, or its step and microbatch."""
    assert op is not None, "the caller looks at records with an op"
    return op[:1] if unit is Cadence.STEP else op[:2]


def _single_commit(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    commits: Counter[tuple[str, tuple[int, ...]]] = Counter()
    live: dict[str, int] = {}
    for record in records:
        if record.kind not in ("commit", "store"):
            continue
        owner = _owner(scope, record.op)
        base = record.epoch_before if record.used is None else record.used.epoch
        if base != live.get(record.owner, record.epoch_before):
            yield Violation(
                "I3", record.seq, owner,
                f"a commit on base epoch {base} overwrites epoch {live[record.owner]}: a commit is lost",
            )  # fmt: skip
        live[record.owner] = record.epoch_after
        key = owner, unit_of(record.op, unit)
        commits[key] += 1
        if unit is Cadence.NEVER or commits[key] > 1:
            expected = "none" if unit is Cadence.NEVER else "one"
            yield Violation(
                "I3", record.seq, owner, f"commit {commits[key]} in unit {key[1]}; {expected} is due"
            )  # fmt: skip
    # An owner that never commits is a matter of liveness (I12); one that skips units breaks this rule.
    alive = {owner for owner, _ in commits}
    for (owner, at), seq in _trained_units(records, scope, unit).items():
        if owner in alive and commits[owner, at] == 0:
            yield Violation("I3", seq, owner, f"no commit in unit {at}; one is due")


def _trained_units(records: Sequence[Record], scope: Scope, unit: Cadence) -> dict[tuple[str, tuple[int, ...]], int]:
    """Every (owner, unit) with a training observation, and the seq of its last one."""
    return {
        (_owner(scope, r.op), unit_of(r.op, unit)): r.seq
        for r in records
        if r.kind == "observe" and r.phase in TRAINING
    }


def _ownership(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    for record in records:
        if record.op is None:
            continue
        due = _owner(scope, record.op)
        if record.owner and record.owner != due:
            yield Violation("I4", record.seq, due, f"{record.kind} acts on the state of {record.owner}")
        elif record.kind == "quantize" and record.used is not None and record.used.owner != due:
            yield Violation("I4", record.seq, due, f"encodes with the state of {record.used.owner}")
    for record, operand in _operands(records):
        due = _owner(scope, operand.of)
        if operand.codes_op != operand.of:
            yield Violation("I4", record.seq, due, f"decodes the codes of another operation: {operand.codes_op}")
        elif operand.descale is not None and operand.descale.owner != due:
            yield Violation("I4", record.seq, due, f"decodes with the state of {operand.descale.owner}")


def _observation_set(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    due: dict[tuple[str, tuple[int, ...]], Counter[Seen]] = {}
    got: dict[tuple[str, tuple[int, ...]], Counter[Seen]] = {}
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for record in records:
        if record.op is None:
            continue
        key = _owner(scope, record.op), unit_of(record.op, unit)
        if record.kind == "observe" and record.phase in TRAINING:
            due.setdefault(key, Counter())[Seen(record.op, record.phase)] += 1
        elif record.kind in ("commit", "store"):
            got.setdefault(key, Counter()).update(record.seen)
            last[key] = record.seq
    for key, seen in got.items():
        expected = due.get(key, Counter())
        if seen != expected:
            extra, missing = seen - expected, expected - seen
            because = [f"folds in {_list(extra)} that is no training observation of the unit"] if extra else []
            because += [f"leaves out {_list(missing)}"] if missing else []
            yield Violation("I5", last[key], key[0], " and ".join(because) + f" (unit {key[1]})")


def _list(seen: Counter[Seen]) -> str:
    first = next(iter(seen))
    return f"{sum(seen.values())} observation(s), first {OpId(*first.op)} in phase {first.phase}"


def _atomic_read(records: Sequence[Record], scope: Scope, unit: Cadence) -> Iterator[Violation]:
    for record, operand in _operands(records):
        parts = [v for v in (operand.descale, operand.center, operand.version) if v is not None]
        if any(not _same(parts[0], part) for part in parts[1:]):
            shown = ", ".join(_show(part) for part in parts)
            yield Violation(
                "I7", record.seq, _owner(scope, operand.of), f"one decode mixes versions: {shown}"
            )  # fmt: skip


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.id: rule
        for rule in (
            Rule("I1", "pairing", "a consumer decodes with the version that made the codes", _pairing),
            Rule("I2", "replay_equality", "recompute encodes with the version that forward used", _replay_equality),
            Rule("I3", "single_commit", "one commit per owner and logical unit, none lost", _single_commit),
            Rule("I4", "ownership", "state, codes and consumer belong to one operation's owner", _ownership),
            Rule("I5", "observation_set", "a unit folds in exactly its training observations", _observation_set),
            Rule("I7", "atomic_read", "descale, centre and epoch of one decode are one version", _atomic_read),
        )
    }
)  # fmt: skip


def check(records: Sequence[Record], *, scope: Scope, unit: Cadence) -> tuple[Violation, ...]:
    """All violations, in order of event. scope: the declared owners; unit: the declared unit of a commit."""
    found = [violation for rule in RULES.values() for violation in rule.judge(records, scope, unit)]
    return tuple(sorted(found, key=lambda v: (v.event, v.invariant)))


def broken(violations: Iterable[Violation]) -> frozenset[str]:
    """The ids of the invariants that were broken."""
    return frozenset(v.invariant for v in violations)
