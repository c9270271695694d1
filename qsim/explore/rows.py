"""A run as a table: one row an event that is a scheduling point or changes a state, and what it changed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qsim.explore.footprints import Footprint, footprint
from qsim.explore.notation import label, sign
from qsim.explore.space import Space
from qsim.explore.threads import threads
from qsim.explore.waiting import ready
from qsim.quant import StateKey
from qsim.record import Op, Record, Version
from qsim.sim import Violation
from qsim.sim.events import Event, Slot


class Walked(NamedTuple):
    """One event of a run: whose it is, and whether it starts a piece that leaves another worker that could go on."""

    worker: int
    event: Event
    preempts: bool


class Row(NamedTuple):
    """seq: of the record. preempts: another worker was left that could go on, to run this one.

    cells, snapshots: what the event changed, as "L0/qkv/input 0 -> 1" and "snap w0 @0"; verdicts: ids of the
    invariants that it breaks.
    """

    seq: int
    worker: int
    preempts: bool
    event: str
    cells: tuple[str, ...]
    snapshots: tuple[str, ...]
    verdicts: tuple[str, ...]


def walked(space: Space, choices: Sequence[int]) -> Iterator[Walked]:
    """The events of a run in order, as ``interleaved`` has them. The choices must fit the space."""
    workers = threads(space)
    needs = [[piece.needs for piece in thread.pieces] for thread in workers]
    done, last = [0] * len(workers), -1
    for worker in choices:
        thread = workers[worker]
        left = last not in (-1, worker) and last in ready(needs, done)
        piece = thread.pieces[done[worker]]
        for at, event in enumerate(thread.events[piece.start : piece.stop]):
            yield Walked(worker, event, left and at == 0)
        done[worker] += 1
        last = worker


def rows_of(
    space: Space, choices: Sequence[int], records: Sequence[Record], violations: Sequence[Violation], *, until: int
) -> tuple[Row, ...]:
    """The table of a run up to and with event ``until``. Slots that are freed are left out: nobody reads them again."""
    shared = {name for thread in threads(space) for piece in thread.pieces for name, _ in piece.touches}
    writer = _Changes(records[: until + 1])
    rows, preempted = [], False
    for seq, (step, record) in enumerate(zip(walked(space, choices), records, strict=True)):
        if seq > until:
            break
        mark = footprint(step.event)
        preempted |= step.preempts
        verdicts = tuple(dict.fromkeys(v.invariant for v in violations if v.event == seq))
        cells, snapshots = writer.cells(record, mark), writer.snapshots(record, mark, shared)
        point = not shared.isdisjoint((mark.cell, mark.place, *mark.puts, *mark.takes))
        if mark.op is not None and (point or cells or snapshots or verdicts):
            rows.append(Row(seq, step.worker, preempted, sign(record), cells, snapshots, verdicts))
            preempted = False  # the mark stands at the first row of the piece
    return tuple(rows)


class _Changes:
    """Follows what slots hold, and words what an event changed."""

    def __init__(self, records: Sequence[Record]) -> None:
        owners = {r.owner for r in records if r.owner}
        self._one_owner = len(owners) < 2
        self._one_label = len({label(r.op) for r in records if r.op and r.owner}) < 2
        self._held: dict[Slot, str] = {}

    def cells(self, record: Record, mark: Footprint) -> tuple[str, ...]:
        """The epoch of a cell that was written; "1 -> 1" where a write did not count."""
        if not mark.writes_cell:
            return ()
        if record.part == "descale" and record.used is not None:
            return (f"{record.owner} descale -> {record.used.epoch + 1}",)
        return (f"{record.owner} {record.epoch_before} -> {record.epoch_after}",)

    def snapshots(self, record: Record, mark: Footprint, shared: set[StateKey | Slot]) -> tuple[str, ...]:
        """Versions that were frozen or fetched, and codes in a buffer that workers share."""
        frozen = mark.cell is not None
        return tuple(
            self._put(name, record)
            for name in mark.puts
            if (frozen or name in shared) and self._held.get(name) != self._now(record)
        )

    def _put(self, name: Slot, record: Record) -> str:
        before = self._held.get(name)
        self._held[name] = now = self._now(record)
        return f"{self._called(name, record)} {now if before is None else f'{before} -> {now}'}"

    def _now(self, record: Record) -> str:
        if record.got is not None:
            return f"entry of worker {record.got[5]}"
        held = self._version(record.used, record.op)
        return f"{held} of worker {record.op[5]}" if record.kind == "quantize" and record.op else held

    def _called(self, name: Slot, record: Record) -> str:
        kind = name.split("/", 1)[0]
        assert record.op is not None, "a drop fills nothing"
        if record.kind == "quantize":
            return kind
        return f"{kind} w{record.op[5]}" + ("" if self._one_label else f" {label(record.op)}")

    def _version(self, version: Version | None, op: Op | None) -> str:
        """The epoch, and the owner where it is not the one that the slot's name tells."""
        if version is None:
            return "filled"
        told = self._one_owner or (op is not None and version.owner == label(op))
        return f"@{version.epoch}" if told else f"{version.owner}@{version.epoch}"
