"""A schedule for a reader: one row an event, with the epochs that its records name. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qsim.quant import OpId, Site, TensorRole
from qsim.record import OperandRecord, Record
from qsim.sim import Case, Violation, in_order
from qsim.sim.events import Consume, Drop, Event
from qsim.sim.notation import BY_KIND, Here, arguments_of, declared_by, op_of

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("seq", "phase", "step", "microbatch", "worker", "layer", "site", "role", "visit", "event", "owner")
_HEADS = {"seq": "seq", "phase": "ph", "step": "t", "microbatch": "m", "worker": "w", "layer": "L", "visit": "v"}
SHOWN = 10
"""Violations shown of each invariant in a table; JSON has all."""


def schedule_rows(case: Case, records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row an event; None where an event has no operation."""
    declared = declared_by(case.context)
    rows = []
    for event, record in zip(case.schedule, records, strict=True):
        op = op_of(event)
        here = Here(event.phase, OpId(0) if op is None else op, declared)
        owner = record.owner or ("" if op is None else str(case.context.scope(op)))
        where = (None,) * 7 if op is None else _where(op)
        values = (record.seq, event.phase.value, *where, event_text(event, record, here), owner)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _where(op: OpId) -> tuple[object, ...]:
    sites, roles = {int(site) for site in Site}, {int(role) for role in TensorRole}
    site = Site(op.site).name.lower() if op.site in sites else f"s{op.site}"
    role = TensorRole(op.role_id).name.lower() if op.role_id in roles else f"r{op.role_id}"
    return op.logical_step, op.microbatch, op.worker_id, op.layer_id, site, role, op.visit


def event_text(event: Event, record: Record, here: Here) -> str:
    """An event in the notation, with epochs: ``Q@3``, ``C@3>4``, ``U(dgrad) grad_output@1 weight@1/2``.

    a/b: codes of epoch a are decoded with the descale of epoch b.
    """
    letters = BY_KIND[type(event)].letters
    if isinstance(event, Drop):
        return f"{letters} {len(event.slots)} slot{'s' * (len(event.slots) != 1)}"
    if isinstance(event, Consume):
        operands = (_operand(operand, here.op) for operand in record.operands)
        return f"{letters}({event.gemm}) {' '.join(operands)}"
    if record.kind in ("commit", "store"):
        letters += f"@{record.epoch_before}>{record.epoch_after}"
    elif record.used is not None and record.kind in ("begin", "fetch", "quantize"):
        letters += f"@{record.used.epoch}"
    if record.kind == "restore" and record.got != record.op:
        letters += " takes nothing" if record.got is None else f" takes that of {OpId(*record.got)}"
    arguments = arguments_of(event, here)
    return letters + (f"({', '.join(arguments)})" if arguments else "")


def _operand(operand: OperandRecord, base: OpId) -> str:
    role = _where(OpId(*operand.of))[5]
    if operand.codes is None:
        return f"{role} raw"
    if operand.descale is None or operand.descale.epoch == operand.codes.epoch:
        return f"{role}@{operand.codes.epoch}"
    return f"{role}@{operand.codes.epoch}/{operand.descale.epoch}"


def schedule_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows."""
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        number = name in _HEADS and name != "phase"
        table.add_column(_HEADS.get(name, name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if row[name] is None else _plain(str(row[name])) for name in COLUMNS))
    return table


def _plain(text: str) -> str:
    """Square brackets of the notation are no markup of the table."""
    from rich.markup import escape

    return escape(text)


def verdict_lines(violations: Sequence[Violation], expected: frozenset[str]) -> Iterator[str]:
    """The verdict, then the first violations of each invariant."""
    from qsim.sim import RULES

    by_rule: dict[str, list[Violation]] = {}
    for violation in violations:
        by_rule.setdefault(violation.invariant, []).append(violation)
    told = f" (expected {' '.join(in_order(expected)) or 'none'})" if set(by_rule) != expected else ""
    yield f"invariants broken: {' '.join(sorted(by_rule)) or 'none'}{told}; {len(violations)} violations"
    for rule, found in sorted(by_rule.items()):
        yield f"{rule} {RULES[rule].name} ({RULES[rule].meaning})"
        yield from (f"  event {v.event}, owner {v.owner or 'none'}: {v.because}" for v in found[:SHOWN])
        if len(found) > SHOWN:
            yield f"  ... and {len(found) - SHOWN} more"
