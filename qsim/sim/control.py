"""The control half of a world: which version lies where. Identities and counters alone; holds no tensor.

``apply`` moves it by one event, in place, and says what the event did; ``control_step`` is the same on a copy.
Neither knows a defect: a torn, stale or foreign read is a version that differs from the one it is compared with,
later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from qsim.errors import CaseError
from qsim.quant import MergeRule, OpId, StateKey
from qsim.record import FoldRecord, ModeRecord, OperandRecord, Record, Saved, Seen, Version
from qsim.sim.events import (
    DEFAULT_FOLD,
    PLAIN,
    Allocate,
    Begin,
    Commit,
    Compute,
    Consume,
    Drop,
    Event,
    Fetch,
    Fold,
    Load,
    LoadState,
    Mode,
    Observe,
    Operand,
    Optimize,
    Part,
    Phase,
    Quantize,
    Reduce,
    Restart,
    Restore,
    SaveState,
    Slot,
    Stash,
    Store,
    Take,
    Wait,
)


class Epochs(NamedTuple):
    """The version of one cell: commits so far, and the commit that its descale belongs to."""

    state: int
    descale: int


class Checkpoint(NamedTuple):
    """What a save wrote down."""

    cells: tuple[tuple[StateKey, Epochs], ...]
    weights: int
    queues: tuple[tuple[str, tuple[Entry, ...]], ...]


class Held(NamedTuple):
    """What a slot holds: who filled it, when, under which version.

    seen: of an observation. weights: version of the weights that it was made of, -1 for no weight. content: of a
    tensor. checkpoint: of a save.
    """

    op: OpId | None
    phase: Phase
    version: Version | None = None
    seen: tuple[Seen, ...] = ()
    weights: int = -1
    content: str = ""
    checkpoint: Checkpoint | None = None


Entry = tuple[OpId, Held]
_START = Epochs(0, 0)


class Control:
    """cells: epochs by cell (absent: 0). slots: what each holds. queues: stashes, oldest first. mail: reductions
    under way, with the number of waits served. weights: optimizer steps so far. pc: events done.
    """

    __slots__ = ("cells", "mail", "pc", "queues", "slots", "weights")

    def __init__(self) -> None:
        """Every cell at epoch 0, every slot empty."""
        self.cells: dict[StateKey, Epochs] = {}
        self.slots: dict[Slot, Held] = {}
        self.queues: dict[str, tuple[Entry, ...]] = {}
        self.mail: dict[str, tuple[tuple[Seen, ...], int]] = {}
        self.weights = 0
        self.pc = 0

    def copy(self) -> Control:
        """Another control in the same state; all that they share is immutable."""
        made = Control()
        made.cells, made.slots = self.cells.copy(), self.slots.copy()
        made.queues, made.mail = self.queues.copy(), self.mail.copy()
        made.weights, made.pc = self.weights, self.pc
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Control) and all(getattr(self, n) == getattr(other, n) for n in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def epoch(self, cell: StateKey) -> int:
        """Commits of ``cell`` so far."""
        return self.cells.get(cell, _START).state

    def held(self, name: Slot) -> Held:
        """What a slot holds; CaseError for an empty one."""
        found = self.slots.get(name)
        if found is None:
            raise CaseError(f"event {self.pc} reads slot {name}, which nothing has filled")
        return found


owner_name = lru_cache(maxsize=65536)(str)
"""The name of a cell's owner."""


def control_step(control: Control, event: Event) -> Control:
    """The control state after ``event``; the old one stays as it was. CaseError where it reads an empty slot."""
    after = control.copy()
    apply(after, event)
    return after


def witness(before: Control, event: Event) -> Record:
    """What ``event`` does, in the words that a recorder of a real trainer also uses."""
    return apply(before.copy(), event)


def apply(control: Control, event: Event) -> Record:
    """Move ``control`` by one event, in place, and say what it did. CaseError where it reads an empty slot."""
    record = _APPLY[type(event)](control, event)
    control.pc += 1
    return record


def _load(c: Control, e: Load) -> Record:
    weights = c.weights if e.key.role_id == 1 else -1
    c.slots[e.out] = Held(e.key, e.phase, weights=weights, content=e.content.value)
    return Record(c.pc, "load", e.phase.value, e.key, content=e.content.value, weights=weights)


def _compute(c: Control, e: Compute) -> Record:
    for name in e.ins:
        c.held(name)
    made = Held(e.at, e.phase, weights=c.weights if e.at.role_id == 1 else -1)
    for name in e.outs:
        c.slots[name] = made
    return Record(c.pc, "compute", e.phase.value, e.at)


def _version(c: Control, cell: StateKey, op: OpId | None) -> Version:
    state, descale = c.cells.get(cell, _START)
    return Version(owner_name(cell), state, op, None if descale == state else descale, cell.copy)


def _begin(c: Control, e: Begin) -> Record:
    if e.obs is not None:
        c.held(e.obs)
    version = _version(c, e.cell, e.op)
    c.slots[e.into] = Held(e.op, e.phase, version)
    return Record(
        c.pc, "begin", e.phase.value, e.op, version.owner, version.epoch, version.epoch, version, storage=e.cell.copy
    )


def _fetch(c: Control, e: Fetch) -> Record:
    version = _version(c, e.cell, None)
    c.slots[e.into] = Held(e.op, e.phase, version)
    return Record(
        c.pc, "fetch", e.phase.value, e.op, version.owner, version.epoch, version.epoch, version, storage=e.cell.copy
    )


@lru_cache(maxsize=1024)
def _mode(mode: Mode) -> ModeRecord | None:
    if mode == PLAIN:
        return None
    return ModeRecord(*mode[:-1], detected="" if mode.detected is None else mode.detected.value)


@lru_cache(maxsize=1024)
def _fold(fold: Fold) -> FoldRecord | None:
    if fold == DEFAULT_FOLD:
        return None
    return FoldRecord(fold.merge.value, fold.zero.name.lower(), fold.nonfinite.name.lower())


def _quantize(c: Control, e: Quantize) -> Record:
    src, version = c.held(e.src), c.held(e.by).version
    c.slots[e.out] = Held(e.op, e.phase, version, weights=src.weights)
    return Record(c.pc, "quantize", e.phase.value, e.op, used=version, weights=src.weights, mode=_mode(e.mode))


def _observe(c: Control, e: Observe) -> Record:
    src = c.held(e.src)
    used = None if e.by is None else c.held(e.by).version
    c.slots[e.into] = Held(e.op, e.phase, used, (Seen(e.op, e.phase.value, src.content),))
    return Record(c.pc, "observe", e.phase.value, e.op, used=used, content=src.content)


def _seen(c: Control, names: tuple[Slot, ...], fold: Fold) -> tuple[Seen, ...]:
    """The observations that speak in the next state: where the last one wins, those of the last slot."""
    if len(names) > 1 and fold.merge is MergeRule.LAST:
        for name in names:
            c.held(name)
        names = names[-1:]
    if len(names) == 1:
        return c.held(names[0]).seen
    return tuple(seen for name in names for seen in c.held(name).seen)


def _commit(c: Control, e: Commit) -> Record:
    seen, cell = _seen(c, e.obs, e.fold), e.cell
    before = c.epoch(cell)
    c.cells[cell] = Epochs(before + 1, before + 1)
    return Record(
        c.pc, "commit", e.phase.value, e.op, owner_name(cell), before, before + 1,
        seen=seen, fold=_fold(e.fold), storage=cell.copy,
    )  # fmt: skip


def _store(c: Control, e: Store) -> Record:
    seen, base, cell = _seen(c, e.obs, e.fold), c.held(e.base).version, e.cell
    assert base is not None, "a base is fetched, so it has a version"
    before = c.cells.get(cell, _START)
    new = base.epoch + 1
    match e.part:
        case Part.ALL:
            after = Epochs(new, new)
        case Part.SCALE:
            after = Epochs(new, before.descale)
        case Part.DESCALE:
            after = Epochs(before.state, new)
    c.cells[cell] = after
    return Record(
        c.pc, "store", e.phase.value, e.op, owner_name(cell), before.state, after.state, base, seen,
        fold=_fold(e.fold), part=e.part.value, storage=cell.copy,
    )  # fmt: skip


def _operand(c: Control, o: Operand) -> OperandRecord:
    codes = c.held(o.codes)
    if o.descale is None:
        return OperandRecord(o.of, None, None, None, None, None, o.cached, codes.weights)
    descale = c.held(o.descale).version
    center = None if o.center is None else c.held(o.center).version
    version = None if o.version is None else c.held(o.version).version
    return OperandRecord(o.of, codes.op, codes.version, descale, center, version, o.cached, codes.weights)


def _consume(c: Control, e: Consume) -> Record:
    left, right = e.operands
    seen = _operand(c, left), _operand(c, right)
    c.slots[e.out] = Held(e.op, e.phase)
    return Record(c.pc, "consume", e.phase.value, e.op, operands=seen, gemm=e.gemm, weights=c.weights)


def _stash(c: Control, e: Stash) -> Record:
    c.queues[e.queue] = (*c.queues.get(e.queue, ()), (e.op, c.held(e.slot)))
    return Record(c.pc, "stash", e.phase.value, e.op, queue=e.queue, got=e.op)


def entry_of(keys: list[OpId], op: OpId, take: Take) -> int:
    """Which entry of a queue with these keys a restore takes; -1 for none."""
    match take:
        case Take.KEYED:
            return keys.index(op) if op in keys else -1
        case Take.FIFO:
            return 0 if keys else -1
        case Take.LIFO:
            return len(keys) - 1


def _restore(c: Control, e: Restore) -> Record:
    queue = c.queues.get(e.queue, ())
    at = entry_of([key for key, _ in queue], e.op, e.take)
    got = None
    if at >= 0:
        got, c.slots[e.into] = queue[at]
        c.queues[e.queue] = queue[:at] + queue[at + 1 :]
    else:
        c.slots[e.into] = Held(e.op, e.phase, _version(c, e.cell, e.op))
    return Record(c.pc, "restore", e.phase.value, e.op, queue=e.queue, got=got)


def _reduce(c: Control, e: Reduce) -> Record:
    sent = c.held(e.obs).seen
    before, served = c.mail.get(e.group.name, ((), 0))
    c.mail[e.group.name] = (*before, *sent), served
    return Record(c.pc, "reduce", e.phase.value, e.op, seen=sent, group=e.group.name, size=e.group.size)


def _wait(c: Control, e: Wait) -> Record:
    if e.group.name not in c.mail:
        raise CaseError(f"event {c.pc} waits for reduction {e.group.name}, which nobody has started")
    seen, served = c.mail[e.group.name]
    c.slots[e.into] = Held(e.op, e.phase, seen=seen)
    if served + 1 >= e.group.size:
        del c.mail[e.group.name]
    else:
        c.mail[e.group.name] = seen, served + 1
    return Record(c.pc, "wait", e.phase.value, e.op, seen=seen, group=e.group.name, size=e.group.size)


def _optimize(c: Control, e: Optimize) -> Record:
    c.weights += 1
    return Record(c.pc, "optimize", e.phase.value, e.op, weights=c.weights)


def _saved(cells: tuple[tuple[StateKey, Epochs], ...]) -> tuple[Saved, ...]:
    return tuple(Saved(owner_name(cell), epochs.state, epochs.descale) for cell, epochs in cells)


def _pending(queues: tuple[tuple[str, tuple[Entry, ...]], ...]) -> int:
    return sum(len(entries) for _, entries in queues)


def _save_state(c: Control, e: SaveState) -> Record:
    cells = tuple((cell, c.cells.get(cell, _START)) for cell in e.cells)
    made = Checkpoint(cells, c.weights, tuple(c.queues.items()))
    c.slots[e.into] = Held(None, e.phase, checkpoint=made)
    return Record(
        c.pc, "save", e.phase.value, None, saved=_saved(cells), pending=_pending(made.queues), weights=c.weights
    )


def _restart(c: Control, e: Restart) -> Record:
    c.cells, c.queues, c.mail, c.weights = {}, {}, {}, 0
    c.slots = {name: c.held(name) for name in e.keep}
    return Record(c.pc, "restart", e.phase.value, None)


def _load_state(c: Control, e: LoadState) -> Record:
    made = c.held(e.source).checkpoint
    if made is None:
        raise CaseError(f"event {c.pc} reads a checkpoint from slot {e.source}, which holds none")
    for cell, epochs in made.cells:
        live = c.cells.get(cell, _START)
        state = epochs.state if "state" in e.parts else live.state
        c.cells[cell] = Epochs(state, epochs.descale if "descale" in e.parts else live.descale)
    if "weights" in e.parts:
        c.weights = made.weights
    if "queues" in e.parts:
        c.queues = dict(made.queues)
    now = tuple((cell, c.cells[cell]) for cell, _ in made.cells)
    return Record(
        c.pc, "restore_state", e.phase.value, None, saved=_saved(made.cells), now=_saved(now),
        pending=_pending(made.queues), now_pending=_pending(tuple(c.queues.items())),
        weights=c.weights, weights_due=made.weights,
    )  # fmt: skip


def _allocate(c: Control, e: Allocate) -> Record:
    for name in e.slots:
        c.slots[name] = Held(None, e.phase)
    return Record(c.pc, "allocate", e.phase.value, None)


def _drop(c: Control, e: Drop) -> Record:
    for name in e.slots:
        c.slots.pop(name, None)
    return Record(c.pc, "drop", e.phase.value, None)


_APPLY: dict[type, Callable[[Control, Any], Record]] = {
    Load: _load,
    Compute: _compute,
    Begin: _begin,
    Quantize: _quantize,
    Observe: _observe,
    Commit: _commit,
    Fetch: _fetch,
    Store: _store,
    Consume: _consume,
    Stash: _stash,
    Restore: _restore,
    Reduce: _reduce,
    Wait: _wait,
    Optimize: _optimize,
    SaveState: _save_state,
    Restart: _restart,
    LoadState: _load_state,
    Allocate: _allocate,
    Drop: _drop,
}
