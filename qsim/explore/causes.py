"""Why a violation happened: what its event read, and which writes came between. Computed from one run's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsim.explore.footprints import footprint
from qsim.explore.notation import label, sign
from qsim.explore.rows import Walked
from qsim.quant import OpId
from qsim.record import Op, Record
from qsim.sim import Context, Violation
from qsim.sim.events import Begin, Consume, Operand, Quantize, Restore, Slot, Stash, Store
from qsim.sim.invariants import unit_of


class Cause(NamedTuple):
    """read: where the state that was used had been read, None where nothing was. writes: what came between, by seq.

    because: the same as a sentence.
    """

    read: int | None
    writes: tuple[int, ...]
    because: str


def cause_of(violation: Violation, steps: Sequence[Walked], records: Sequence[Record], context: Context) -> Cause:
    """The cause of ``violation`` in the run that ``steps`` and ``records`` tell."""
    run = _Run(steps, records, context)
    event = steps[violation.event].event
    match violation.invariant, event:
        case "I3", Store() if "lost" in violation.because:
            return run.lost(violation.event, event)
        case "I1" | "I4" | "I7", Consume():
            return run.decoded(violation)
        case "I2", Quantize():
            return run.recomputed(violation.event, event)
        case "I7", Begin():
            return run.torn(violation.event, event)
        case "I10", Restore():
            return run.mispaired(violation.event)
        case "I6", _:
            return run.parted(violation)
        case "I3" | "I5", _:
            return run.counted(violation)
        case "I4", _:
            return run.owned(violation)
    return Cause(None, (), violation.because)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, and questions about it."""

    steps: Sequence[Walked]
    records: Sequence[Record]
    context: Context

    def at(self, seq: int) -> str:
        """An event in words: "event 19 (S of worker 0)"."""
        return f"event {seq} ({sign(self.records[seq])} of worker {self.steps[seq].worker})"

    def filler(self, name: Slot, before: int) -> int:
        """The last event before ``before`` that filled a slot."""
        return max(seq for seq in range(before) if name in footprint(self.steps[seq].event).puts)

    def writes(self, owner: str, start: int, stop: int) -> tuple[int, ...]:
        """Events after ``start`` and before ``stop`` that write the cell ``owner``."""
        return tuple(
            seq
            for seq in range(start + 1, stop)
            if self.records[seq].owner == owner and footprint(self.steps[seq].event).writes_cell
        )

    def between(self, writes: Sequence[int]) -> str:
        """The writes as the second half of a sentence."""
        return f"in between, {self._said(writes)}" if writes else "nothing wrote it in between"

    def _said(self, writes: Sequence[int]) -> str:
        told = ((seq, self.records[seq]) for seq in writes)
        return " and ".join(f"{self.at(seq)} wrote {r.owner} {r.epoch_before} -> {r.epoch_after}" for seq, r in told)

    def lost(self, seq: int, event: Store) -> Cause:
        """A write whose base had been read before another write."""
        read = self.filler(event.base, seq)
        writes = self.writes(self.records[seq].owner, read, seq)
        epoch = self.records[read].epoch_before
        return Cause(
            read, writes, f"its base, epoch {epoch}, was read by {self.at(read)}; {self.between(writes)}"
        )  # fmt: skip

    def decoded(self, violation: Violation) -> Cause:
        """A decode whose codes and metadata do not belong together, or to its operation."""
        seq, event = violation.event, self.steps[violation.event].event
        assert isinstance(event, Consume), "matched by the caller"
        for operand, seen in zip(event.operands, self.records[seq].operands, strict=True):
            if operand.descale is None or not self._concerns(violation, operand, seq):
                continue
            made = self.filler(operand.codes, seq)
            if violation.invariant == "I4" and seen.codes_op != seen.of:
                return self._foreign_codes(operand, made, seq)
            return self._apart(violation.invariant, operand, made, seq)
        return self.owned(violation)

    def _concerns(self, violation: Violation, operand: Operand, seq: int) -> bool:
        """Whether the violation is about this operand: the one whose versions differ, or whose owner is another's."""
        seen = next(o for o in self.records[seq].operands if o.of == operand.of)
        versions = [(v.owner, v.epoch) for v in (seen.descale, seen.center, seen.version) if v is not None]
        if violation.invariant == "I7":
            return len(set(versions)) > 1
        if violation.invariant == "I4":
            return seen.codes_op != seen.of
        codes = None if seen.codes is None else (seen.codes.owner, seen.codes.epoch)
        return any(version != codes for version in versions)

    def _apart(self, invariant: str, operand: Operand, made: int, seq: int) -> Cause:
        """Where the metadata of one decode was read, and what its codes were made with: not the same version."""
        names = [name for name in (operand.descale, operand.center, operand.version) if name is not None]
        reads = sorted({self.filler(name, seq) for name in names})
        said = f"it decodes with what {' and '.join(map(self.at, reads))} read"
        cast = self.steps[made].event
        if invariant == "I1" and isinstance(cast, Quantize):
            codes = self.filler(cast.by, made)
            said += f", its codes were made with what {self.at(codes)} read"
            reads = sorted({*reads, codes})
        owners = {self.records[read].owner for read in reads}
        if len(owners) > 1:
            return Cause(reads[-1], (), f"{said}: states of {' and '.join(sorted(owners))}")
        writes = self.writes(self.records[reads[0]].owner, reads[0], reads[-1])
        return Cause(reads[-1], writes, f"{said}; {self.between(writes)}")

    def _foreign_codes(self, operand: Operand, made: int, seq: int) -> Cause:
        own = [
            at
            for at in range(seq)
            if isinstance(e := self.steps[at].event, Quantize) and (e.op, e.out) == (operand.of, operand.codes)
        ]
        said = f"{self.at(made)} wrote the codes that it decodes"
        if not own:
            return Cause(None, (made,), f"{said}; its own were never there")
        return Cause(own[-1], (made,), f"its own codes were written by {self.at(own[-1])}; in between, {said}")

    def recomputed(self, seq: int, event: Quantize) -> Cause:
        """A recompute whose snapshot is not the forward's."""
        read, said_now = self.read_of(event.by, seq)
        same = (
            at
            for at in range(seq)
            if isinstance(e := self.steps[at].event, Quantize) and e.op == event.op and e.phase == "f"
        )
        forward = next(same, None)
        if forward is None:
            return Cause(read, (), f"it encodes with {said_now}; there was no forward")
        cast = self.steps[forward].event
        assert isinstance(cast, Quantize), "chosen above"
        first, said_then = self.read_of(cast.by, forward)
        said = f"forward encoded with {said_then}, recompute with {said_now}"
        one, other = self.records[first].owner, self.records[read].owner
        if one != other:
            return Cause(read, (), f"{said}: states of {one} and {other}")
        writes = self.writes(one, *sorted((first, read)))
        return Cause(read, writes, f"{said}; {self.between(writes)}")

    def read_of(self, name: Slot, before: int) -> tuple[int, str]:
        """Where what a slot holds was read from the state, and that in words: a queue may have carried it."""
        filled = self.filler(name, before)
        record = self.records[filled]
        if record.kind != "restore" or record.got is None:
            return filled, f"what {self.at(filled)} read"
        read, said = self.read_of(*self._stashed(record, filled))
        return read, f"{said}, as {self.at(filled)} took it"

    def _stashed(self, record: Record, before: int) -> tuple[Slot, int]:
        """The slot that was put into the queue for the entry that ``record`` took, and when."""
        at = max(s for s in range(before) if self._puts(s, record))
        event = self.steps[at].event
        assert isinstance(event, Stash), "an entry is put by a stash"
        return event.slot, at

    def _puts(self, seq: int, took: Record) -> bool:
        record = self.records[seq]
        return record.kind == "stash" and (record.queue, record.got) == (took.queue, took.got)

    def torn(self, seq: int, event: Begin) -> Cause:
        """A begin between the two writes of a commit."""
        owner = self.records[seq].owner
        writes = self.writes(owner, -1, seq)
        last = writes[-1]
        done = f"{self.at(last)} wrote the {self.records[last].part} of {owner}"
        return Cause(seq, (last,), f"{done}, and the other half of the pair is of another commit")

    def mispaired(self, seq: int) -> Cause:
        """A restore that got what another operation had put in."""
        record = self.records[seq]
        if record.got is None:
            return Cause(None, (), "the queue was empty")
        _, put = self._stashed(record, seq)
        said = f"{self.at(put)} had put it in first" if self._own(record, seq) < 0 else self._order(record, seq, put)
        return Cause(None, (put,), said)

    def _own(self, record: Record, seq: int) -> int:
        own = [at for at in range(seq) if self.records[at].kind == "stash" and self.records[at].got == record.op]
        return own[-1] if own else -1

    def _order(self, record: Record, seq: int, put: int) -> str:
        own = self._own(record, seq)
        when = "before" if put < own else "after"
        return f"{self.at(put)} put that entry into {record.queue} {when} {self.at(own)} put in its own"

    def parted(self, violation: Violation) -> Cause:
        """Ranks of a group that folded in other observations."""
        commits = tuple(at for at in violation.events if self.records[at].kind in ("commit", "store"))
        said = " and ".join(f"{self.at(at)} folded in {self._seen(at)}" for at in commits)
        waits = [at for at in range(violation.event, len(self.steps)) if self.records[at].kind == "wait"]
        mine = [at for at in waits if self.steps[at].worker == self.steps[violation.event].worker]
        late = f"; what all ranks saw comes with {self.at(mine[0])} alone" if mine else ""
        return Cause(None, commits, f"{said}{late}")

    def counted(self, violation: Violation) -> Cause:
        """A unit with another number of commits, or of observations, than are due."""
        seq, mine = violation.event, self.records[violation.event].op
        unit, scope = self.context.unit, self.context.scope

        def key(op: Op | None) -> tuple[object, object]:
            assert op is not None, "a commit has an operation"
            return scope(OpId(*op)), unit_of(op, unit)

        stop = seq + (violation.invariant == "I5")  # a set of observations is that of all commits, this one too
        writes = (at for at in range(stop) if self.records[at].kind in ("commit", "store"))
        commits = tuple(at for at in writes if key(self.records[at].op) == key(mine))
        if not commits:
            return Cause(None, (), violation.because)
        said = " and ".join(f"{self.at(at)} folded in {self._seen(at)}" for at in commits)
        return Cause(None, commits, f"in this unit, {said}")

    def _seen(self, seq: int) -> str:
        seen = self.records[seq].seen
        return ", ".join(f"worker {s.op[5]}'s {label(s.op)} of phase {s.phase}" for s in seen)

    def owned(self, violation: Violation) -> Cause:
        """A state that belongs to others as well: who else writes it."""
        seq = violation.event
        record = self.records[seq]
        cell = record.owner or (record.used.owner if record.used else "")
        writes = self.writes(cell, -1, seq) if cell else ()
        said = f"{violation.because}, which {violation.owner} does not declare"
        return Cause(None, writes, f"{said}; before it, {self._said(writes)}" if writes else said)
