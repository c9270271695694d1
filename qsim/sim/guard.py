"""Fail-closed replays: the first broken rule refuses the case before a tensor moves. Adds nothing to a correct one.

Control depends on no number, so what a replay would break is known from its records. On top of the invariants every
consumer asserts the epoch identity of what it decodes: logical_step, layer_id and role_id of the quantize that it
names, on the codes and on each piece of metadata, and one epoch for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qsim.errors import ProtocolViolation
from qsim.quant import OpId
from qsim.record import OperandRecord, Record, Version
from qsim.sim.case import Case
from qsim.sim.env import Env
from qsim.sim.invariants import Violation
from qsim.sim.judge import judge
from qsim.sim.step import Trace, records_of, replay

IDENTITY = "epoch identity"
"""What an assertion of a consumer is called beside the ids of the invariants."""


def run_guarded(case: Case, env: Env) -> Trace:
    """``run``, failing closed: equal to it in every record and bit, or ProtocolViolation and no output at all."""
    return replay_guarded(case, env, records_of(case))


def replay_guarded(case: Case, env: Env, records: tuple[Record, ...]) -> Trace:
    """``replay``, failing closed; ProtocolViolation names the owner, the event and the reason."""
    wrong = first_refusal(case, records)
    if wrong is not None:
        raise ProtocolViolation(
            f"event {wrong.event}, owner {wrong.owner or 'none'}: {wrong.invariant} is broken: {wrong.because}; the "
            "replay fails closed and gives no output. Mend the schedule, or replay it unguarded to price the defect"
        )
    return replay(case, env, records)


def first_refusal(case: Case, records: Sequence[Record]) -> Violation | None:
    """The first event that breaks an invariant or a consumer's assertion; None for a correct case."""
    found = (*identity_violations(case, records), *judge(case, records))
    return min(found, key=lambda violation: violation.event, default=None)


def identity_violations(case: Case, records: Sequence[Record]) -> Iterator[Violation]:
    """Every operand whose codes or metadata are not those of the quantize that its consumer names."""
    for record in records:
        if record.kind == "consume":
            for operand in record.operands:
                because = _mistaken(operand)
                if because:
                    owner = str(case.context.scope(OpId(*operand.of)))
                    yield Violation(IDENTITY, record.seq, owner, because, (record.seq,))


def _mistaken(operand: OperandRecord) -> str:
    """Why an operand is not what its consumer names, "" where it is. A tensor that was never cast has no epoch."""
    if operand.codes is None or operand.codes_op is None:
        return "the codes were made by no quantize" if operand.descale is not None else ""
    due = _identity(operand.of)
    if _identity(operand.codes_op) != due:
        return f"the codes are of {OpId(*operand.codes_op)}, the consumer means {OpId(*operand.of)}"
    for what, version in (("descale", operand.descale), ("centre", operand.center), ("version", operand.version)):
        because = _unpaired(what, version, operand.codes.epoch, due, needed=what != "centre")
        if because:
            return because
    return ""


def _unpaired(what: str, version: Version | None, epoch: int, due: tuple[int, int, int], *, needed: bool) -> str:
    if version is None:
        return f"the {what} is named by nothing" if needed else ""
    if version.op is None:
        return f"the {what} is read from the live state of {version.owner}, which names no operation; read a snapshot"
    if _identity(version.op) != due:
        return f"the {what} was frozen for {OpId(*version.op)}, the codes for another step, layer or role"
    if version.epoch != epoch:
        return f"codes of epoch {epoch} meet the {what} of epoch {version.epoch}"
    return ""


def _identity(op: Sequence[int]) -> tuple[int, int, int]:
    """logical_step, layer_id, role_id."""
    return op[0], op[2], op[4]
