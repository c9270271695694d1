"""Rules about what is read: I1 pairing, I2 replay equality, I7 atomic read, I9 cache validity, I13 context equality."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.record import ModeRecord, Op, OperandRecord, Record
from qsim.sim.invariants.model import Judged, Rule, Violation, same, show


def _pairing(trace: Judged) -> Iterator[Violation]:
    for record, operand in trace.operands():
        for what, version in (("descale", operand.descale), ("centre", operand.center)):
            if (what == "descale" or version is not None) and not same(operand.codes, version):
                yield Violation(
                    "I1", record.seq, trace.owner(operand.of),
                    f"codes made with {show(operand.codes)} are decoded with the {what} of {show(version)}",
                    trace.involved(record, operand),
                )  # fmt: skip


def _bits(record: Record) -> int:
    return 0 if record.mode is None else record.mode.bits


def _replay_equality(trace: Judged) -> Iterator[Violation]:
    forward: dict[Op | None, Record] = {}
    for record in trace.of("quantize"):
        if record.phase == "f":
            forward[record.op] = record
        elif record.phase == "r":
            first = forward.get(record.op)
            used = None if first is None else first.used
            involved = (record.seq,) if first is None else (first.seq, record.seq)
            if not same(used, record.used):
                yield Violation(
                    "I2", record.seq, trace.owner(record.op),
                    f"recompute encodes with {show(record.used)}, forward used {show(used)}", involved,
                )  # fmt: skip
            elif first is not None and _bits(first) != _bits(record):
                yield Violation(
                    "I2", record.seq, trace.owner(record.op),
                    f"recompute draws random bits {_bits(record)}, forward drew {_bits(first)}", involved,
                )  # fmt: skip


def _atomic_read(trace: Judged) -> Iterator[Violation]:
    for record in trace.of("begin"):
        if record.used is not None and record.used.descale is not None:
            yield Violation(
                "I7", record.seq, trace.owner(record.op), f"a torn pair is read: {show(record.used)}", (record.seq,)
            )
    for record, operand in trace.operands():
        parts = [v for v in (operand.descale, operand.center, operand.version) if v is not None]
        shown = ", ".join(show(part) for part in parts)
        if any(not same(parts[0], part) for part in parts[1:]):
            yield Violation(
                "I7", record.seq, trace.owner(operand.of), f"one decode mixes versions: {shown}",
                trace.involved(record, operand),
            )  # fmt: skip
        elif _of_two_casts(operand):
            yield Violation(
                "I7", record.seq, trace.owner(operand.of),
                f"codes of one cast are decoded with the metadata of another: {show(operand.codes)}, {shown}",
                trace.involved(record, operand),
            )  # fmt: skip


def _of_two_casts(operand: OperandRecord) -> bool:
    """Codes and metadata were frozen for two operations, at one epoch of one owner."""
    codes, descale = operand.codes, operand.descale
    if codes is None or descale is None or codes.op is None or descale.op is None:
        return False
    return same(codes, descale) and codes.op != descale.op


def _cache_validity(trace: Judged) -> Iterator[Violation]:
    for record in trace.of("consume"):
        for operand in record.operands:
            if not operand.cached:
                continue
            owner = trace.owner(operand.of)
            if operand.codes_op is None:
                because = "the cache is read, and nothing was written to it"
            elif operand.weights != record.weights:
                because = f"a cast of weight version {operand.weights} is read at version {record.weights}"
            elif not same(operand.codes, operand.descale):
                because = f"a cast made with {show(operand.codes)} is read with the descale of {show(operand.descale)}"
            else:
                continue
            yield Violation("I9", record.seq, owner, because, trace.involved(record, operand))


_CONTEXT = ("enabled", "fmt", "grad", "train", "cache", "group", "bits")
_PLAIN = ModeRecord()


def _context_equality(trace: Judged) -> Iterator[Violation]:
    forward: dict[Op | None, Record] = {}
    for record in trace.of("quantize"):
        mode = record.mode or _PLAIN
        if mode.detected and mode.detected != record.phase:
            yield Violation(
                "I13", record.seq, trace.owner(record.op),
                f"the quantizer takes phase {record.phase} for phase {mode.detected}", (record.seq,),
            )  # fmt: skip
        if record.phase == "f":
            forward[record.op] = record
        elif record.phase == "r" and record.op in forward:
            first = forward[record.op]
            then = first.mode or _PLAIN
            changed = [name for name in _CONTEXT if getattr(then, name) != getattr(mode, name)]
            if changed:
                listed = ", ".join(f"{n} {getattr(then, n)!r} then {getattr(mode, n)!r}" for n in changed)
                yield Violation(
                    "I13", record.seq, trace.owner(record.op),
                    f"recompute runs in another context than forward: {listed}", (first.seq, record.seq),
                )  # fmt: skip


PAIRING = Rule("I1", "pairing", "a consumer decodes with the version that made the codes", _pairing)
REPLAY_EQUALITY = Rule(
    "I2", "replay_equality", "recompute encodes with the version that forward used", _replay_equality
)
ATOMIC_READ = Rule("I7", "atomic_read", "codes, descale, centre and epoch of one decode are one version", _atomic_read)
CACHE_VALIDITY = Rule(
    "I9", "cache_validity", "a cached cast is of the live weights and carries its own descale", _cache_validity
)
CONTEXT_EQUALITY = Rule(
    "I13", "context_equality", "recompute runs in the context that forward ran in", _context_equality
)
