"""The shared things of all threads as numbers: cells, slots, queues, who fills them, who commits. Lowers nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from qsim.errors import CaseError
from qsim.explore.footprints import footprint
from qsim.explore.program import Queue
from qsim.explore.threads import Thread, reduces_of, shared_names
from qsim.quant import MergeRule, OpId, StateKey
from qsim.sim import Cadence, Scope
from qsim.sim.events import Commit, Event, Fold, Observe, Part, Phase, Restore, Schedule, Slot, Stash, Store, Take, Wait
from qsim.sim.invariants import unit_of

Key = tuple[StateKey, tuple[int, ...]]
"""A declared owner and a unit: what one commit is due for."""
Group = tuple[StateKey, int, int, int]
"""What replicas agree on: an owner without its rank, a step, which of the rank's units in it, which commit of that."""
Seen = frozenset[tuple[OpId, Phase]]

NOTHING: Seen = frozenset()


class Declared(NamedTuple):
    """What a search holds its runs against."""

    scope: Scope
    unit: Cadence
    ranks: int = 1


class Names(NamedTuple):
    """first: each cell's first version number; versions: how many it has. cells, slots, queues: the fields of what is
    shared (of a slot its version, who filled it, and for whom the version was frozen); descales: the field of the
    descale's version, of cells that are written in parts. writers: ops that fill a shared slot or queue.
    first_commit: by key, worker and piece of each worker's first commit. folded: by group, worker, the pieces of its
    commits and what they fold in. mail: what a reduction brings together.
    """

    first: Mapping[StateKey, int]
    versions: Mapping[StateKey, int]
    cells: Mapping[StateKey, int]
    descales: Mapping[StateKey, int]
    slots: Mapping[Slot, int]
    queues: Mapping[str, Queue]
    writers: Mapping[OpId, int]
    first_commit: Mapping[Key, Mapping[int, int]]
    folded: Mapping[Group, Mapping[int, tuple[tuple[int, Seen], ...]]]
    mail: Mapping[str, Seen]
    declared: Declared
    fields: int

    def number(self, cell: StateKey, epoch: int) -> int:
        """The number of a version."""
        return self.first[cell] + epoch

    def stranger(self) -> int:
        """A number that stands for an op that fills nothing shared."""
        return len(self.writers) + 1


def advances(event: Event) -> bool:
    """True for a commit, and for the half of a torn one that moves the epoch."""
    return isinstance(event, Commit) or (isinstance(event, Store) and event.part is not Part.DESCALE)


def speaking(obs: tuple[Slot, ...], fold: Fold) -> tuple[Slot, ...]:
    """The observations that a commit folds in: the last alone, where it overwrites those before it."""
    return obs[-1:] if fold.merge is MergeRule.LAST else obs


def names_of(workers: Sequence[Thread], declared: Declared) -> Names:
    """Names and numbers for the threads. Raises CaseError for what the explorer cannot follow."""
    programs = [thread.events for thread in workers]
    shared = shared_names(programs)
    _require_private_observations(programs, shared)
    writes: dict[StateKey, int] = {}
    slots: dict[Slot, None] = {}
    writers: dict[OpId, int] = {}
    torn: dict[StateKey, None] = {}
    for event in (event for events in programs for event in events):
        mark = footprint(event)
        if mark.cell is not None:
            writes[mark.cell] = writes.get(mark.cell, 0) + mark.writes_cell
        slots.update(dict.fromkeys(name for name in (*mark.puts, *mark.takes) if name in shared))
        fills = any(name in shared for name in mark.puts) or (isinstance(event, Stash) and mark.place in shared)
        if mark.op is not None and fills:
            writers.setdefault(mark.op, len(writers) + 1)
        if isinstance(event, Store) and event.part is not Part.ALL:
            torn[event.cell] = None
    first, number = dict[StateKey, int](), 1
    for cell, count in writes.items():
        first[cell], number = number, number + count + 1
    fields = iter(range(1, 1 << 30))
    cells = {cell: next(fields) for cell in writes if cell in shared}
    descales = {cell: next(fields) for cell in cells if cell in torn}
    slot_fields = {name: min(next(fields) for _ in range(3)) for name in slots}
    queues = dict(_queues(programs, shared, fields))
    return Names(
        first=first,
        versions={cell: count + 1 for cell, count in writes.items()},
        cells=cells,
        descales=descales,
        slots=slot_fields,
        queues=queues,
        writers=writers,
        first_commit=_first_commits(workers, declared),
        folded=_folded(workers, declared) if declared.ranks > 1 else {},
        mail={name: frozenset().union(*map(_sent, parts)) for name, parts in reduces_of(programs).items()},
        declared=declared,
        fields=next(fields),
    )


def _require_private_observations(programs: Sequence[Schedule], shared: frozenset[object]) -> None:
    for event in (event for events in programs for event in events):
        if isinstance(event, (Commit, Store)) and any(name in shared for name in event.obs):
            raise CaseError("workers share an observation; the explorer follows shared states, codes and snapshots")


def _queues(
    programs: Sequence[Schedule], shared: frozenset[object], fields: Iterator[int]
) -> Iterator[tuple[str, Queue]]:
    """The fields of each shared queue: one entry for each that can be in it at a time."""
    events = [[e for e in program if isinstance(e, (Stash, Restore))] for program in programs]
    steps = {event.op.logical_step for program in events for event in program}
    if len(steps) > 1 and sum(map(bool, events)) > 1:
        raise CaseError(
            f"{len(steps)} steps with a queue: I10 ends a step for all workers at once, and here each goes on when it "
            "likes; explore 1 step, or a preset without a queue"
        )
    for name in dict.fromkeys(e.queue for program in events for e in program if e.queue in shared):
        size = 0
        for program in events:
            held = most = 0
            for event in (e for e in program if e.queue == name):
                held += 1 if isinstance(event, Stash) else -1
                most = max(most, held)
                if held < 0 or (isinstance(event, Restore) and event.take is Take.KEYED):
                    raise CaseError(
                        f"queue {name} is shared, and a worker takes by key or more than it put; the explorer follows "
                        "shared queues from which each worker takes the oldest or newest, after a put of its own"
                    )
            size += most
        yield name, Queue(next(fields), size)
        for _ in range(1 + 2 * size):
            next(fields)


def _first_commits(workers: Sequence[Thread], declared: Declared) -> Mapping[Key, Mapping[int, int]]:
    first: dict[Key, dict[int, int]] = {}
    for thread in workers:
        for number, event in _numbered(thread):
            if advances(event) and isinstance(event, (Commit, Store)):
                key = declared.scope(event.op), unit_of(event.op, declared.unit)
                first.setdefault(key, {}).setdefault(thread.worker, number)
    return first


def _numbered(thread: Thread) -> Iterator[tuple[int, Event]]:
    for number, piece in enumerate(thread.pieces):
        for event in thread.events[piece.start : piece.stop]:
            yield number, event


def _folded(
    workers: Sequence[Thread], declared: Declared
) -> Mapping[Group, Mapping[int, tuple[tuple[int, Seen], ...]]]:
    """What each rank's commits fold in, by what the ranks agree on."""
    mail = reduces_of([thread.events for thread in workers])
    found: dict[Group, dict[int, tuple[tuple[int, Seen], ...]]] = {}
    for thread in workers:
        seen: dict[Slot, Seen] = {}
        groups = Rounds(declared)
        for number, event in _numbered(thread):
            if isinstance(event, Observe):
                seen[event.into] = frozenset({(event.op, event.phase)})
            elif isinstance(event, Wait):
                seen[event.into] = frozenset().union(*map(_sent, mail[event.group.name]))
            elif isinstance(event, (Commit, Store)) and advances(event):
                folded = frozenset().union(*(seen[name] for name in speaking(event.obs, event.fold)))
                mine = found.setdefault(groups.of(event.op), {})
                mine[thread.worker] = (*mine.get(thread.worker, ()), (number, folded))
    return found


def _sent(observe: Observe) -> Seen:
    return frozenset({(observe.op, observe.phase)})


class Rounds:
    """Which of a rank's units in a step a commit belongs to, and which of its commits it is, asked for one after the
    other."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._last: dict[tuple[StateKey, int], tuple[int, ...]] = {}
        self._rounds: dict[tuple[StateKey, int], int] = {}
        self._nth: dict[tuple[StateKey, int], int] = {}

    def of(self, op: OpId) -> Group:
        """The group of the next commit, which is of ``op``."""
        mine, unit = (self._declared.scope(op), op.logical_step), unit_of(op, self._declared.unit)
        if self._last.get(mine) != unit:
            self._rounds[mine] = self._rounds.get(mine, -1) + 1
            self._last[mine] = unit
            self._nth[mine] = -1
        self._nth[mine] += 1
        return self._declared.scope(op._replace(worker_id=0)), op.logical_step, self._rounds[mine], self._nth[mine]


def others(parts: Iterable[tuple[int, Seen]], seen: Seen) -> int | None:
    """The first piece that folds in something else than ``seen``; None where none does."""
    return next((piece for piece, folded in parts if folded != seen), None)
