"""What each event means to the invariants, as instructions: the compiled twin of ``qsim.sim``'s control and check.

A version that is read stands for itself until it is compared: where both sides are known, so is the verdict, and no
instruction is left. Knows no search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qsim.errors import CaseError
from qsim.explore.program import After, Differ, Foreign, Instruction, Judging, Move, Outside, Raise, Set
from qsim.explore.result import Kind
from qsim.explore.threads import Thread
from qsim.quant import OpId, StateKey
from qsim.sim import Cadence, Scope
from qsim.sim.events import (
    Begin,
    Commit,
    Consume,
    Drop,
    Event,
    Fetch,
    Load,
    Observe,
    Operand,
    Phase,
    Quantize,
    Slot,
    Store,
)
from qsim.sim.invariants import unit_of

Key = tuple[StateKey, tuple[int, ...]]
"""A declared owner and a unit: what one commit is due for."""


class Known(NamedTuple):
    """A version of a cell that no other worker writes."""

    cell: StateKey
    epoch: int


class Read(NamedTuple):
    """A version that was read from a shared field at an event. cell: None where it depends on the order."""

    cell: StateKey | None
    field: int
    piece: int
    event: int


Version = Known | Read


class Content(NamedTuple):
    """What a slot holds. by: the op that filled it, or the field that says which."""

    by: OpId | int
    version: Version | None


class Names(NamedTuple):
    """The shared things of all threads as numbers.

    first: each cell's first version number; versions: how many it has. cells, slots: the fields of what is shared (of a
    slot its version, then its op). writers: ops that fill a shared slot. first_commit: by key, worker and piece of
    each worker's first commit. own registers are negative until they are placed.
    """

    first: Mapping[StateKey, int]
    versions: Mapping[StateKey, int]
    cells: Mapping[StateKey, int]
    slots: Mapping[Slot, int]
    writers: Mapping[OpId, int]
    first_commit: Mapping[Key, Mapping[int, int]]
    scope: Scope
    unit: Cadence

    def number(self, version: Known) -> int:
        """The number of a known version."""
        return self.first[version.cell] + version.epoch


class Lowering:
    """Lowers one thread, event by event. ``last_use`` is empty on the first of two passes, which fills it."""

    def __init__(self, thread: Thread, names: Names, last_use: dict[Read, int]) -> None:
        self._thread, self._names, self._last_use = thread, names, last_use
        self._slots: dict[Slot, Content] = {}
        self._epochs: dict[StateKey, int] = {}
        self._forward: dict[OpId, Version | None] = {}
        self._commits: set[Key] = set()
        self._registers: dict[Read, int] = {}
        self.uses: dict[Read, int] = {}
        self.registers = 0
        self._code: list[Instruction] = []
        self._piece = self._event = self._at = 0

    def code(self, ending: tuple[Kind, ...]) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions by piece. ending: kinds that are judged when the worker ends."""
        pieces, last = [], len(self._thread.pieces) - 1
        for number, piece in enumerate(self._thread.pieces):
            self._piece, self._code = number, []
            for at in range(piece.start, piece.stop):
                self._event, self._at = at, at - piece.start + 1
                self._lower(self._thread.events[at])
            if number == last:
                self._code += [Raise(kind, self._at) for kind in ending]
            self._free()
            pieces.append(tuple(self._code))
        return tuple(pieces)

    def _lower(self, event: Event) -> None:
        match event:
            case Load(_, op, out) | Consume(_, op, _, _, out):
                if isinstance(event, Consume):
                    for operand in event.operands:
                        self._decode(operand)
                self._put(out, op, None)
            case Begin(_, op, cell, into) | Fetch(_, op, cell, into):
                self._owned(op, cell)
                self._put(into, op, self._read_cell(cell))
            case Quantize(phase, op, _, by, out):
                version = self._take(by).version
                self._encode(phase, op, version)
                self._put(out, op, version)
            case Observe(_, op, _, by, into):
                self._put(into, op, None if by is None else self._take(by).version)
            case Commit(_, op, cell, _):
                self._owned(op, cell)
                self._count(op)
                self._write(cell, None)
            case Store(_, op, cell, base, _):
                self._owned(op, cell)
                self._count(op)
                self._write(cell, self._take(base).version)
            case Drop(_, gone):
                for name in gone:
                    if name in self._names.slots:
                        raise CaseError(f"slot {name} is shared by workers and freed by one; leave it filled")
                    self._slots.pop(name, None)

    # What is judged

    def _owned(self, op: OpId, cell: StateKey) -> None:
        if cell != self._names.scope(op):
            self._raise(Kind.OWNERSHIP)

    def _encode(self, phase: Phase, op: OpId, version: Version | None) -> None:
        if version is not None:
            self._owner(version, op)
        if phase is Phase.FORWARD:
            self._forward[op] = version
        elif phase is Phase.RECOMPUTE:
            self._same(self._forward.get(op), version, Kind.REPLAY)

    def _decode(self, operand: Operand) -> None:
        codes = self._take(operand.codes)
        if operand.descale is None or codes.version is None:
            return
        descale = self._take(operand.descale).version
        rest = [self._take(name).version for name in (operand.center, operand.version) if name is not None]
        self._same(codes.version, descale, Kind.PAIRING)
        if operand.center is not None:
            self._same(codes.version, rest[0], Kind.PAIRING)
        if isinstance(codes.by, int):
            mine = (self._names.writers[operand.of],) if operand.of in self._names.writers else ()
            self._judge(Foreign(codes.by, mine, Kind.OWNERSHIP, self._at))
        elif codes.by != operand.of:
            self._raise(Kind.OWNERSHIP)
        if descale is not None:
            self._owner(descale, operand.of)
            for part in rest:
                if part is not None:
                    self._same(descale, part, Kind.TORN_READ)

    def _count(self, op: OpId) -> None:
        """One commit for each owner and unit: of other workers' commits the pieces that they have done tell."""
        names = self._names
        key = names.scope(op), unit_of(op, names.unit)
        if names.unit is Cadence.NEVER or key in self._commits:
            self._raise(Kind.SECOND_COMMIT)
        elif len(names.first_commit[key]) > 1:
            self._judge(After(tuple(sorted(names.first_commit[key].items())), Kind.SECOND_COMMIT, self._at))
        self._commits.add(key)

    def _same(self, a: Version | None, b: Version | None, kind: Kind) -> None:
        match a, b:
            case None, _:
                self._raise(kind)
            case _, None:
                self._raise(kind)
            case Known(), Known():
                if a != b:
                    self._raise(kind)
            case (Known() as known, Read() as read) | (Read() as read, Known() as known):
                number = self._names.number(known)
                self._judge(Outside(self._field(read), number, number + 1, kind, self._at))
            case Read(), Read():
                if a != b:  # versions of two cells have different numbers
                    self._judge(Differ(self._field(a), self._field(b), kind, self._at))

    def _owner(self, version: Version, op: OpId) -> None:
        due = self._names.scope(op)
        if version.cell is not None:
            if version.cell != due:
                self._raise(Kind.OWNERSHIP)
        elif due not in self._names.first:
            self._raise(Kind.OWNERSHIP)
        else:
            assert isinstance(version, Read), "a known version has a cell"
            least = self._names.first[due]
            below = least + self._names.versions[due]
            self._judge(Outside(self._field(version), least, below, Kind.OWNERSHIP, self._at))

    def _raise(self, kind: Kind) -> None:
        self._judge(Raise(kind, self._at))

    def _judge(self, do: Judging) -> None:
        if do not in self._code:
            self._code.append(do)

    # What moves

    def _read_cell(self, cell: StateKey) -> Version:
        if cell in self._names.cells:
            return Read(cell, self._names.cells[cell], self._piece, self._event)
        return Known(cell, self._epochs.get(cell, 0))

    def _take(self, name: Slot) -> Content:
        if name in self._names.slots:
            field = self._names.slots[name]
            return Content(field + 1, Read(None, field, self._piece, self._event))
        if name not in self._slots:
            raise CaseError(f"worker {self._thread.worker}, event {self._event} reads slot {name}, which is empty")
        return self._slots[name]

    def _put(self, name: Slot, op: OpId, version: Version | None) -> None:
        if name not in self._names.slots:
            self._slots[name] = Content(op, version)
            return
        field = self._names.slots[name]
        match version:
            case None:
                self._code.append(Set(field, 0))
            case Known():
                self._code.append(Set(field, self._names.number(version)))
            case Read():
                self._code.append(Move(field, self._field(version)))
        self._code.append(Set(field + 1, self._names.writers[op]))

    def _write(self, cell: StateKey, base: Version | None) -> None:
        """Advance ``cell``: from what it is, or from the version ``base`` that was read before."""
        if base is not None and base.cell != cell:
            raise CaseError(f"a store to {cell} is based on a read of {base.cell}; the explorer follows one cell only")
        if cell not in self._names.cells:
            live = self._epochs.get(cell, 0)
            if isinstance(base, Known) and base.epoch != live:
                self._raise(Kind.LOST_COMMIT)
            self._epochs[cell] = 1 + (base.epoch if isinstance(base, Known) else live)
            return
        field = self._names.cells[cell]
        if isinstance(base, Read):
            source = self._field(base)
            self._judge(Differ(source, field, Kind.LOST_COMMIT, self._at))
            self._code.append(Move(field, source, 1))
        else:
            self._code.append(Move(field, field, 1))

    def _field(self, version: Read) -> int:
        """Where the version lies now: in the shared field itself while the piece that read it lasts."""
        self.uses[version] = self._piece
        return version.field if version.piece == self._piece else self._registers.get(version, -1)

    def _free(self) -> None:
        """Keep what was read in this piece and is used later; clear what was used for the last time."""
        for version in [v for v in self._registers if self._last_use[v] == self._piece]:
            self._code.append(Set(self._registers.pop(version), 0))
        for version, last in self._last_use.items():
            if version.piece == self._piece and last > self._piece:
                taken = set(self._registers.values())
                register = next(-1 - k for k in range(len(taken) + 1) if -1 - k not in taken)
                self._registers[version] = register
                self.registers = max(self.registers, -register)
                self._code.append(Move(register, version.field))
