"""Rules about whose state it is: I4 ownership, I6 replica agreement."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.record import Record, Seen
from qsim.sim.invariants.commits import advances
from qsim.sim.invariants.model import Judged, Rule, Unit, Violation


def _ownership(trace: Judged) -> Iterator[Violation]:
    for record in trace.of("begin", "quantize", "commit", "fetch", "store"):
        due = trace.owner(record.op)
        if record.owner and record.owner != due:
            yield Violation(
                "I4", record.seq, due, f"{record.kind} acts on the state of {record.owner}", (record.seq,)
            )  # fmt: skip
        elif record.kind == "quantize" and record.used is not None and record.used.owner != due:
            yield Violation("I4", record.seq, due, f"encodes with the state of {record.used.owner}", (record.seq,))
    for record, operand in trace.operands():
        due = trace.owner(operand.of)
        if operand.codes_op != operand.of:
            because = f"decodes the codes of another operation: {operand.codes_op}"
            yield Violation("I4", record.seq, due, because, trace.involved(record, operand))
        elif operand.descale is not None and operand.descale.owner != due:
            because = f"decodes with the state of {operand.descale.owner}"
            yield Violation("I4", record.seq, due, because, trace.involved(record, operand))


def _replica_agreement(trace: Judged) -> Iterator[Violation]:
    if trace.ranks < 2:
        return
    yield from _same_observations(trace)
    yield from _same_values(trace)


def _same_observations(trace: Judged) -> Iterator[Violation]:
    """In one unit the ranks of a group fold in the same observations: then their scales are equal."""
    first: dict[tuple[str, int, int, int], tuple[frozenset[Seen], int]] = {}
    rounds: dict[tuple[str, int], int] = {}
    nth: dict[tuple[str, int], int] = {}  # a second commit of a unit is held against the others' second
    last: dict[tuple[str, int], Unit] = {}
    for record in trace.of("commit", "store"):
        if not advances(record) or record.op is None:
            continue
        mine = trace.owner(record.op), record.op[0]
        if last.get(mine) != trace.unit_of(record.op):  # the next of this rank's units in the step
            rounds[mine] = rounds.get(mine, -1) + 1
            last[mine] = trace.unit_of(record.op)
            nth[mine] = -1
        nth[mine] += 1
        key = trace.replica(record.op), record.op[0], rounds[mine], nth[mine]
        seen, seq = first.setdefault(key, (frozenset(record.seen), record.seq))
        if seen != frozenset(record.seen):
            yield Violation(
                "I6", record.seq, mine[0],
                f"rank {record.op[5]} folds in {len(record.seen)} observation(s) that are not those of its group: "
                "the replicas' scales part",
                (seq, record.seq),
            )  # fmt: skip


def _same_values(trace: Judged) -> Iterator[Violation]:
    """A weight is decoded on every rank of its group, or on none."""
    first: dict[tuple[object, ...], tuple[bool, Record]] = {}
    for record in trace.of("consume"):
        for operand in record.operands:
            of = operand.of
            if of[4] != 1:  # weights alone are replicated
                continue
            cast = operand.descale is not None  # of codes, or of a buffer where codes are due
            seen, where = first.setdefault((of[0], *of[2:5], record.gemm, record.phase), (cast, record))
            if seen != cast:
                yield Violation(
                    "I6", record.seq, trace.owner(of),
                    f"rank {of[5]} multiplies {'decoded codes' if cast else 'the tensor itself'}, another rank of its "
                    f"group {'the tensor itself' if cast else 'decoded codes'}",
                    (where.seq, record.seq),
                )  # fmt: skip


OWNERSHIP = Rule("I4", "ownership", "state, codes and consumer belong to one operation's owner", _ownership)
REPLICA_AGREEMENT = Rule(
    "I6", "replica_agreement", "the ranks of a group have equal scales and equal values", _replica_agreement
)
