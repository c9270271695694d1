"""What each event means to the invariants, as instructions: the compiled twin of ``qsim.sim``'s control and check.

A version that is read stands for itself until it is compared: where both sides are known, so is the verdict, and no
instruction is left. Knows no search.
"""

from __future__ import annotations

from qsim.errors import CaseError
from qsim.explore.names import Key, Names, Rounds, advances, others, speaking
from qsim.explore.program import (
    After,
    Differ,
    Foreign,
    Instruction,
    Judging,
    Mixed,
    Move,
    Outside,
    Pop,
    Push,
    Raise,
    Set,
    Term,
)
from qsim.explore.result import Kind
from qsim.explore.threads import Thread
from qsim.explore.versions import Content, Known, Read, Version
from qsim.quant import OpId, StateKey
from qsim.sim import Cadence
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
    Optimize,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restore,
    Slot,
    Stash,
    Store,
    Take,
    Wait,
)
from qsim.sim.invariants import unit_of


class Lowering:
    """Lowers one thread, event by event. ``last_use`` is empty on the first of two passes, which fills it."""

    def __init__(self, thread: Thread, names: Names, last_use: dict[Read, int]) -> None:
        self._thread, self._names, self._last_use = thread, names, last_use
        self._slots: dict[Slot, Content] = {}
        self._epochs: dict[StateKey, tuple[int, int]] = {}  # of the state and of its descale
        self._queues: dict[str, list[tuple[OpId, Content]]] = {}
        self._forward: dict[OpId, tuple[Version | None, int]] = {}  # and the random bits drawn
        self._rounds = Rounds(names.declared)
        self._commits: set[Key] = set()
        self._registers: dict[Read, int] = {}
        self.uses: dict[Read, int] = {}
        self.registers = 0
        self._code: list[Instruction] = []
        self._spent: list[int] = []  # fields to clear at the end of a piece
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
            case Load(_, op, out):
                self._put(out, Content(op, None))
            case Consume(_, op, _, operands, out):
                for operand in operands:
                    self._decode(operand)
                self._put(out, Content(op, None))
            case Begin(_, op, cell, into):
                self._owned(op, cell)
                self._whole(cell)
                self._put(into, Content(op, self._read_cell(cell), op))
            case Fetch(_, op, cell, into):
                self._owned(op, cell)
                self._put(into, Content(op, self._read_cell(cell)))
            case Quantize(phase, op, _, by, out, mode):
                used = self._take(by)
                self._encode(phase, op, used.version, mode.bits)
                self._put(out, Content(op, used.version, used.frozen))
            case Observe(phase, op, _, by, into):
                used = Content(op, None) if by is None else self._take(by)
                self._put(into, Content(op, used.version, used.frozen, frozenset({(op, phase)})))
            case Commit() | Store():
                self._advance(event)
            case Stash() | Restore():
                self._queue(event)
            case Reduce(_, _, _, obs):
                self._take(obs)
            case Wait(_, op, group, into):
                self._put(into, Content(op, None, seen=self._names.mail[group.name]))
            case Drop(_, gone):
                for name in gone:
                    if name in self._names.slots:
                        raise CaseError(f"slot {name} is shared by workers and freed by one; leave it filled")
                    self._slots.pop(name, None)
            case Optimize():
                pass  # only a cached cast depends on the version of the weights, and those are refused
            case _:
                raise CaseError(f"{type(event).__name__} is no event that the explorer follows")

    # What is judged

    def _owned(self, op: OpId, cell: StateKey) -> None:
        if cell._replace(copy=0) != self._names.declared.scope(op):  # a copy has the name of its owner
            self._raise(Kind.OWNERSHIP)

    def _whole(self, cell: StateKey) -> None:
        """A begin that reads a scale and the descale of another version reads a torn pair."""
        if cell in self._names.descales:
            self._judge(Differ(self._names.cells[cell], self._names.descales[cell], Kind.TORN_READ, self._at))
        elif cell not in self._names.cells:
            state, descale = self._epochs.get(cell, (0, 0))
            if state != descale:
                self._raise(Kind.TORN_READ)

    def _encode(self, phase: Phase, op: OpId, version: Version | None, bits: int) -> None:
        if version is not None:
            self._owner(version, op)
        if phase is Phase.FORWARD:
            self._forward[op] = version, bits
        elif phase is Phase.RECOMPUTE:
            first, drawn = self._forward.get(op, (None, bits))
            self._same(first, version, Kind.REPLAY)
            if drawn != bits:
                self._raise(Kind.REPLAY)

    def _decode(self, operand: Operand) -> None:
        if operand.cached:
            raise CaseError(f"{operand.of} is read from a weight cache; the explorer follows none")
        codes = self._take(operand.codes)
        if operand.descale is None or codes.version is None:
            return
        used = self._take(operand.descale)
        descale = used.version
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
            self._one_cast(codes, used)

    def _one_cast(self, codes: Content, used: Content) -> None:
        """Codes and metadata of one version must be of one cast as well."""
        a, b, one, other = codes.version, used.version, codes.frozen, used.frozen
        if a is None or b is None or one is None or other is None or one == other:
            return
        if a != b:
            cells = a.cell, b.cell
            known = isinstance(a, Known) and isinstance(b, Known)
            if known or (None not in cells and a.cell != b.cell):
                return
        elif isinstance(one, OpId) and isinstance(other, OpId):
            self._raise(Kind.TORN_READ)
            return
        versions = (Term(None, 1), Term(None, 1)) if a == b else (self._version_term(a), self._version_term(b))
        if isinstance(one, OpId) and isinstance(other, OpId):
            ops = Term(None, 1), Term(None, 2)
        else:
            ops = self._op_term(one), self._op_term(other)
        self._judge(Mixed(versions, ops, Kind.TORN_READ, self._at))

    def _version_term(self, version: Version) -> Term:
        if isinstance(version, Known):
            return Term(None, self._names.number(version.cell, version.epoch))
        return Term(self._field(version))

    def _op_term(self, op: OpId | Read) -> Term:
        if isinstance(op, Read):
            return Term(self._field(op))
        return Term(None, self._names.writers.get(op, self._names.stranger()))

    def _advance(self, event: Commit | Store) -> None:
        op, cell, part = event.op, event.cell, event.part if isinstance(event, Store) else Part.ALL
        self._owned(op, cell)
        if advances(event):
            self._count(op)
            self._agree(event)
        self._write(cell, self._take(event.base).version if isinstance(event, Store) else None, part)

    def _agree(self, event: Commit | Store) -> None:
        """Ranks fold in the same: other ranks' commits are those whose pieces are done."""
        if self._names.declared.ranks < 2:
            return
        folded = frozenset().union(*(self._take(name).seen for name in speaking(event.obs, event.fold)))
        differ = {
            worker: piece
            for worker, parts in self._names.folded[self._rounds.of(event.op)].items()
            if (piece := others(parts, folded)) is not None
        }
        mine = differ.pop(self._thread.worker, self._piece)
        if mine < self._piece:
            self._raise(Kind.REPLICAS)
        elif differ:
            differ[self._thread.worker] = self._piece  # of itself it is not asked: ranks alike have equal code
            self._judge(After(tuple(sorted(differ.items())), Kind.REPLICAS, self._at))

    def _count(self, op: OpId) -> None:
        """One commit for each owner and unit: of other workers' commits the pieces that they have done tell."""
        names, declared = self._names, self._names.declared
        key: Key = declared.scope(op), unit_of(op, declared.unit)
        if declared.unit is Cadence.NEVER or key in self._commits:
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
                number = self._names.number(known.cell, known.epoch)
                self._judge(Outside(self._field(read), number, number + 1, kind, self._at))
            case Read(), Read():
                if a != b:  # versions of two cells have different numbers
                    self._judge(Differ(self._field(a), self._field(b), kind, self._at))

    def _owner(self, version: Version, op: OpId) -> None:
        due = self._names.declared.scope(op)
        if version.cell is not None:
            if version.cell._replace(copy=0) != due:
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
        return Known(cell, self._epochs.get(cell, (0, 0))[0])

    def _take(self, name: Slot) -> Content:
        if name in self._names.slots:
            field = self._names.slots[name]
            version, frozen = (Read(None, at, self._piece, self._event) for at in (field, field + 2))
            return Content(field + 1, version, frozen)
        if name not in self._slots:
            raise CaseError(f"worker {self._thread.worker}, event {self._event} reads slot {name}, which is empty")
        return self._slots[name]

    def _put(self, name: Slot, content: Content) -> None:
        if name not in self._names.slots:
            self._slots[name] = content
            return
        assert isinstance(content.by, OpId), "an event fills a slot for an operation"
        field = self._names.slots[name]
        self._copy(field, content.version)
        self._code.append(Set(field + 1, self._names.writers[content.by]))
        frozen = content.frozen
        if isinstance(frozen, OpId):
            self._code.append(Set(field + 2, self._names.writers.get(frozen, self._names.stranger())))
        else:
            self._copy(field + 2, frozen)

    def _copy(self, field: int, version: Version | None) -> None:
        match version:
            case None:
                self._code.append(Set(field, 0))
            case Known(cell, epoch):
                self._code.append(Set(field, self._names.number(cell, epoch)))
            case Read():
                self._code.append(Move(field, self._field(version)))

    def _queue(self, event: Stash | Restore) -> None:
        if event.queue in self._names.queues:
            self._shared_queue(event)
        elif isinstance(event, Stash):
            self._queues.setdefault(event.queue, []).append((event.op, self._take(event.slot)))
        else:
            self._restore(event, self._queues.get(event.queue, []))

    def _restore(self, event: Restore, entries: list[tuple[OpId, Content]]) -> None:
        """Take from a queue of this worker alone."""
        keys = [key for key, _ in entries]
        match event.take:
            case Take.KEYED:
                at = keys.index(event.op) if event.op in keys else -1
            case Take.FIFO:
                at = 0 if keys else -1
            case Take.LIFO:
                at = len(keys) - 1
        key, content = (None, Content(event.op, self._read_cell(event.cell), event.op)) if at < 0 else entries.pop(at)
        if key != event.op:
            self._raise(Kind.MISPAIRED)
        self._put(event.into, content)

    def _shared_queue(self, event: Stash | Restore) -> None:
        queue, own = self._names.queues[event.queue], self._names.writers.get(event.op, self._names.stranger())
        self._spent += [queue.out, queue.out + 1]
        if isinstance(event, Restore):
            self._code.append(Pop(queue, event.take is Take.LIFO))
            self._judge(Foreign(queue.out + 1, (own,), Kind.MISPAIRED, self._at))
            version, frozen = (Read(None, at, self._piece, self._event) for at in (queue.out, queue.out + 1))
            self._put(event.into, Content(event.op, version, frozen))
            return
        content = self._take(event.slot)
        if content.frozen != event.op:
            raise CaseError(f"{event.op} puts what was frozen for another operation into {event.queue}")
        self._copy(queue.out, content.version)
        self._code += [Set(queue.out + 1, own), Push(queue)]

    def _write(self, cell: StateKey, base: Version | None, part: Part) -> None:
        """Advance ``cell`` or a part of it: from what it is, or from the version ``base`` that was read before."""
        if base is not None and base.cell != cell:
            raise CaseError(f"a store to {cell} is based on a read of {base.cell}; the explorer follows one cell only")
        if cell not in self._names.cells:
            state, descale = self._epochs.get(cell, (0, 0))
            new = 1 + (base.epoch if isinstance(base, Known) else state)
            if new != state + 1 and part is not Part.DESCALE:
                self._raise(Kind.LOST_COMMIT)
            self._epochs[cell] = (state if part is Part.DESCALE else new), (descale if part is Part.SCALE else new)
            return
        field, descales = self._names.cells[cell], self._names.descales.get(cell)
        source = self._field(base) if isinstance(base, Read) else field
        if part is not Part.SCALE and descales is not None:
            self._code.append(Move(descales, source, 1))
        if part is not Part.DESCALE:
            if isinstance(base, Read):
                self._judge(Differ(source, field, Kind.LOST_COMMIT, self._at))
            self._code.append(Move(field, source, 1))

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
        self._code += [Set(field, 0) for field in dict.fromkeys(self._spent)]
        self._spent.clear()
