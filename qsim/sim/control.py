"""The control half of a world: which version lies where. Packed integers, hashable; holds no tensor.

``control_step`` moves it by one event; ``witness`` says what the event did. Neither knows a defect: a torn,
stale or foreign read is a version that differs from the one it is compared with, later and elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from qsim.errors import CaseError
from qsim.quant import OpId, StateKey
from qsim.record import OperandRecord, Record, Seen, Version
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
    Schedule,
    Slot,
    Store,
)

_PHASES = tuple(Phase)
# A tag is one integer: what a slot holds. Fields from the low end, each +1 so that 0 means "none":
#   phase 4 bits | op 24 (the op that filled the slot) | version op 24 | epoch 32 | cell 16
_OP, _VOP, _EPOCH, _CELL = 4, 28, 52, 84
_MASK24, _MASK32, _MASK16 = (1 << 24) - 1, (1 << 32) - 1, (1 << 16) - 1


class Control(NamedTuple):
    """epochs: commits so far, by cell. tags: what each slot holds, 0 for nothing. pc: events done."""

    epochs: tuple[int, ...]
    tags: tuple[int, ...]
    pc: int


class Index(NamedTuple):
    """The names of a schedule as small integers."""

    cells: tuple[StateKey, ...]
    owners: tuple[str, ...]
    slots: tuple[Slot, ...]
    ops: tuple[OpId, ...]
    cell_of: dict[StateKey, int]
    slot_of: dict[Slot, int]
    op_of: dict[OpId, int]

    def start(self) -> Control:
        """Every cell at epoch 0, every slot empty."""
        return Control((0,) * len(self.cells), (0,) * len(self.slots), 0)


def index_of(schedule: Schedule) -> Index:
    """Collect the cells, slots and ops of a schedule, in order of appearance."""
    cells: dict[StateKey, int] = {}
    slots: dict[Slot, int] = {}
    ops: dict[OpId, int] = {}
    for event in schedule:
        cell, names, own = _names(event)
        if cell is not None:
            cells.setdefault(cell, len(cells))
        for name in names:
            slots.setdefault(name, len(slots))
        for op in own:
            ops.setdefault(op, len(ops))
    return Index(tuple(cells), tuple(map(str, cells)), tuple(slots), tuple(ops), cells, slots, ops)


def _names(event: Event) -> tuple[StateKey | None, tuple[Slot, ...], tuple[OpId, ...]]:
    match event:
        case Load(_, key, out):
            return None, (out,), (key,)
        case Begin(_, op, cell, into, obs):
            return cell, (into,) if obs is None else (obs, into), (op,)
        case Quantize(_, op, src, by, out):
            return None, (src, by, out), (op,)
        case Observe(_, op, src, by, into):
            return None, (src, into) if by is None else (src, by, into), (op,)
        case Commit(_, op, cell, obs):
            return cell, obs, (op,)
        case Fetch(_, op, cell, into):
            return cell, (into,), (op,)
        case Store(_, op, cell, base, obs):
            return cell, (base, *obs), (op,)
        case Consume(_, op, _, operands, out):
            names = tuple(n for o in operands for n in (o.codes, o.descale, o.center, o.version) if n is not None)
            return None, (*names, out), (op, *(o.of for o in operands))
        case Drop(_, gone):
            return None, gone, ()


def _tag(op: int, phase: Phase, version: int = 0) -> int:
    return version | (op + 1) << _OP | (_PHASES.index(phase) + 1)


def _version(cell: int, epoch: int, op: int) -> int:
    """The version fields of a tag: ``cell`` at ``epoch``, frozen for ``op`` (-1: for none, a live read)."""
    return (cell + 1) << _CELL | (epoch + 1) << _EPOCH | (op + 1) << _VOP


def _version_bits(tag: int) -> int:
    return tag >> _VOP << _VOP


def _put(control: Control, index: Index, name: Slot, tag: int) -> Control:
    at = index.slot_of[name]
    return Control(control.epochs, (*control.tags[:at], tag, *control.tags[at + 1 :]), control.pc + 1)


def _get(control: Control, index: Index, name: Slot) -> int:
    tag = control.tags[index.slot_of[name]]
    if tag == 0:
        raise CaseError(f"event {control.pc} reads slot {name}, which nothing has filled")
    return tag


def _commit(control: Control, index: Index, cell: StateKey, epoch: int) -> Control:
    at = index.cell_of[cell]
    return Control((*control.epochs[:at], epoch, *control.epochs[at + 1 :]), control.tags, control.pc + 1)


def control_step(control: Control, event: Event, index: Index) -> Control:
    """The control state after ``event``. Raises CaseError where it reads an empty slot."""
    match event:
        case Load(phase, key, out):
            return _put(control, index, out, _tag(index.op_of[key], phase))
        case Begin(phase, op, cell, into, obs):
            if obs is not None:
                _get(control, index, obs)
            at, k = index.cell_of[cell], index.op_of[op]
            return _put(control, index, into, _tag(k, phase, _version(at, control.epochs[at], k)))
        case Quantize(phase, op, src, by, out):
            _get(control, index, src)
            version = _version_bits(_get(control, index, by))
            return _put(control, index, out, _tag(index.op_of[op], phase, version))
        case Observe(phase, op, src, by, into):
            _get(control, index, src)
            version = 0 if by is None else _version_bits(_get(control, index, by))
            return _put(control, index, into, _tag(index.op_of[op], phase, version))
        case Commit(_, _, cell, obs):
            for seen in obs:
                _get(control, index, seen)
            return _commit(control, index, cell, control.epochs[index.cell_of[cell]] + 1)
        case Fetch(phase, op, cell, into):
            at = index.cell_of[cell]
            return _put(control, index, into, _tag(index.op_of[op], phase, _version(at, control.epochs[at], -1)))
        case Store(_, _, cell, base, obs):
            for seen in obs:
                _get(control, index, seen)
            fetched = _get(control, index, base)
            return _commit(control, index, cell, fetched >> _EPOCH & _MASK32)  # the field is epoch + 1
        case Consume(phase, op, _, operands, out):
            for operand in operands:
                for name in (operand.codes, operand.descale, operand.center, operand.version):
                    if name is not None:  # a tensor that was never cast has no metadata
                        _get(control, index, name)
            return _put(control, index, out, _tag(index.op_of[op], phase))
        case Drop(_, gone):
            empty = {index.slot_of[name] for name in gone}
            tags = tuple(0 if i in empty else tag for i, tag in enumerate(control.tags))
            return Control(control.epochs, tags, control.pc + 1)


def _read_version(tag: int, index: Index) -> Version | None:
    cell, epoch, op = tag >> _CELL & _MASK16, tag >> _EPOCH & _MASK32, tag >> _VOP & _MASK24
    if cell == 0:
        return None
    return Version(index.owners[cell - 1], epoch - 1, index.ops[op - 1] if op else None)


def _read_op(tag: int, index: Index) -> OpId:
    return index.ops[(tag >> _OP & _MASK24) - 1]


def _seen(names: tuple[Slot, ...], control: Control, index: Index) -> tuple[Seen, ...]:
    tags = [_get(control, index, name) for name in names]
    return tuple(Seen(_read_op(tag, index), _PHASES[(tag & 15) - 1].value) for tag in tags)


def _operand(operand: Operand, control: Control, index: Index) -> OperandRecord:
    def version(name: Slot | None) -> Version | None:
        return None if name is None else _read_version(_get(control, index, name), index)

    codes = _get(control, index, operand.codes)
    cast = operand.descale is not None
    return OperandRecord(
        of=operand.of,
        codes_op=_read_op(codes, index) if cast else None,
        codes=_read_version(codes, index),
        descale=version(operand.descale),
        center=version(operand.center),
        version=version(operand.version),
    )


def witness(before: Control, event: Event, after: Control, index: Index) -> Record:
    """What ``event`` did, in the words that a recorder of a real trainer also uses."""
    seq = before.pc
    match event:
        case Load(phase, key, _):
            return Record(seq, "load", phase.value, key)
        case Drop(phase, _):
            return Record(seq, "drop", phase.value, None)
        case Observe(phase, op, _, by, _):
            used = None if by is None else _read_version(_get(before, index, by), index)
            return Record(seq, "observe", phase.value, op, used=used)
        case Quantize(phase, op, _, _, out):
            return Record(seq, "quantize", phase.value, op, used=_read_version(_get(after, index, out), index))
        case Begin(phase, op, cell, into, _) | Fetch(phase, op, cell, into):
            at = index.cell_of[cell]
            epoch = before.epochs[at]
            used = _read_version(_get(after, index, into), index)
            kind = "begin" if isinstance(event, Begin) else "fetch"
            return Record(seq, kind, phase.value, op, index.owners[at], epoch, epoch, used)
        case Commit(phase, op, cell, obs):
            at = index.cell_of[cell]
            epochs = before.epochs[at], after.epochs[at]
            return Record(
                seq, "commit", phase.value, op, index.owners[at], *epochs, seen=_seen(obs, before, index)
            )  # fmt: skip
        case Store(phase, op, cell, base, obs):
            at = index.cell_of[cell]
            epochs = before.epochs[at], after.epochs[at]
            used = _read_version(_get(before, index, base), index)
            return Record(seq, "store", phase.value, op, index.owners[at], *epochs, used, _seen(obs, before, index))
        case Consume(phase, op, gemm, operands, _):
            seen = tuple(_operand(o, before, index) for o in operands)
            return Record(seq, "consume", phase.value, op, operands=seen, gemm=gemm)
