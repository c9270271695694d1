"""Threads as integer instructions on one flat tuple of small integers. Knows no event and searches nothing.

A version is one integer: the first number of its cell plus the epoch, so that versions of different cells differ;
0 stands for nothing. A state holds, for each worker, the pieces done and the versions that it still needs (a
version that nothing will compare again is 0: states that differ only in it are one), then shared cells, shared
slots and the verdict flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsim.explore.result import Kind
from qsim.explore.waiting import Needs, ready

State = tuple[int, ...]
"""The fields of a state, padding included."""


class Set(NamedTuple):
    """field := value."""

    field: int
    value: int


class Move(NamedTuple):
    """field := source + add."""

    field: int
    source: int
    add: int = 0


class Queue(NamedTuple):
    """Where a queue lies: a version and an op that go in or came out, then ``size`` ops, then their versions."""

    out: int
    size: int

    @property
    def ops(self) -> int:
        """The field of the oldest entry's op; 0 where there is none."""
        return self.out + 2

    @property
    def versions(self) -> int:
        """The field of the oldest entry's version."""
        return self.out + 2 + self.size


class Push(NamedTuple):
    """Put what lies in ``out`` at the end of the queue."""

    queue: Queue


class Pop(NamedTuple):
    """Take an entry from the queue into ``out``: the oldest, or the newest."""

    queue: Queue
    newest: bool


class Differ(NamedTuple):
    """Raise ``kind`` where left is not right. at: events of the piece up to and with the one that is judged."""

    left: int
    right: int
    kind: Kind
    at: int


class Outside(NamedTuple):
    """Raise ``kind`` where the field is not in least..below-1."""

    field: int
    least: int
    below: int
    kind: Kind
    at: int


class Foreign(NamedTuple):
    """Raise ``kind`` where the field is none of ``allowed``."""

    field: int
    allowed: tuple[int, ...]
    kind: Kind
    at: int


class Term(NamedTuple):
    """What a field holds; a number where the field is None."""

    field: int | None
    number: int = 0


class Mixed(NamedTuple):
    """Raise ``kind`` where both versions are one, and it was frozen for two operations. 0 is no version and no op."""

    versions: tuple[Term, Term]
    ops: tuple[Term, Term]
    kind: Kind
    at: int


class After(NamedTuple):
    """Raise ``kind`` where another worker has done more than ``first`` pieces: pairs of worker and first."""

    first: tuple[tuple[int, int], ...]
    kind: Kind
    at: int


class Raise(NamedTuple):
    """Raise ``kind`` whatever the state."""

    kind: Kind
    at: int


Judging = Differ | Outside | Foreign | Mixed | After | Raise
Instruction = Set | Move | Push | Pop | Judging
Code = tuple[tuple[Instruction, ...], ...]
"""The instructions of a thread, by piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All threads of a space, compiled.

    code: by worker. numbers: by worker and piece, which pieces have equal instructions; -1 for a worker that has
    ended. ends: by worker and number of pieces done, the events done. touches: by worker and piece, what
    the piece touches that others could see; needs: what must be done before it. block: fields of one worker; worker w
    has fields block * w ... , the first of them its number of pieces done. flags: the field of the verdict, bit i for
    kinds[i]. largest: no field exceeds it. symmetric: all workers run the same code, so states that differ in their
    numbers alone are alike.
    """

    code: tuple[Code, ...]
    numbers: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    touches: tuple[tuple[frozenset[tuple[object, bool]], ...], ...]
    needs: tuple[tuple[Needs, ...], ...]
    kinds: tuple[Kind, ...]
    start: State
    block: int
    flags: int
    largest: int
    symmetric: bool

    @property
    def workers(self) -> int:
        """How many threads there are."""
        return len(self.code)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of pieces, by worker."""
        return tuple(len(code) for code in self.code)

    @property
    def private(self) -> bool:
        """True where no two workers share anything that one of them writes."""
        return not any(touched for thread in self.touches for touched in thread)

    def done(self, worker: int) -> int:
        """The field that counts the pieces of ``worker``."""
        return self.block * worker

    def place(self, state: State) -> tuple[int, ...]:
        """The pieces done, by worker."""
        return tuple(state[self.block * w] for w in range(self.workers))

    def ready(self, place: Sequence[int]) -> list[int]:
        """Workers that can run their next piece: they have not ended, and wait for nobody."""
        return ready(self.needs, place)

    def left(self, state: State) -> list[int]:
        """The workers that are ready in a state."""
        return ready(self.needs, self.place(state))

    def bit(self, kind: Kind) -> int:
        """The flag of ``kind``."""
        return 1 << self.kinds.index(kind)

    def kinds_of(self, flags: int) -> frozenset[Kind]:
        """The kinds that ``flags`` stands for."""
        return frozenset(kind for at, kind in enumerate(self.kinds) if flags >> at & 1)

    def events(self, state: State) -> int:
        """Events done, by all workers."""
        return sum(ends[state[self.block * w]] for w, ends in enumerate(self.ends))


def advance(program: Program, state: State, worker: int) -> State:
    """The state after the next piece of ``worker``: the slow twin of ``vectors.advance_rows``."""
    return traced(program, state, worker)[0]


def traced(program: Program, state: State, worker: int) -> tuple[State, list[tuple[Kind, int]]]:
    """``advance``, and each kind that the piece raises with the events of the piece up to then."""
    fields, raised = list(state), list[tuple[Kind, int]]()
    done = program.block * worker
    for do in program.code[worker][state[done]]:
        match do:
            case Set(field, value):
                fields[field] = value
            case Move(field, source, add):
                fields[field] = fields[source] + add
            case Push(queue):
                _push(fields, queue)
            case Pop(queue, newest):
                _pop(fields, queue, -1 if newest else 0)
            case judging if _raises(judging, fields, worker, program.block):
                raised.append((judging.kind, judging.at))
    for kind, _ in raised:
        fields[program.flags] |= program.bit(kind)
    fields[done] += 1
    return tuple(fields), raised


def _entries(fields: list[int], queue: Queue) -> list[tuple[int, int]]:
    ops, versions = queue.ops, queue.versions
    return [(fields[ops + k], fields[versions + k]) for k in range(queue.size) if fields[ops + k]]


def _push(fields: list[int], queue: Queue) -> None:
    at = len(_entries(fields, queue))
    fields[queue.versions + at], fields[queue.ops + at] = fields[queue.out : queue.out + 2]


def _pop(fields: list[int], queue: Queue, at: int) -> None:
    entries = _entries(fields, queue)
    op, version = entries.pop(at)
    fields[queue.out : queue.out + 2] = version, op
    entries += [(0, 0)] * (queue.size - len(entries))
    fields[queue.ops : queue.versions] = [op for op, _ in entries]
    fields[queue.versions : queue.versions + queue.size] = [version for _, version in entries]


def _raises(do: Judging, fields: list[int], worker: int, block: int) -> bool:
    match do:
        case Differ(left, right):
            return fields[left] != fields[right]
        case Outside(field, least, below):
            return not least <= fields[field] < below
        case Foreign(field, allowed):
            return fields[field] not in allowed
        case Mixed(versions, ops):
            left, right = (t.number if t.field is None else fields[t.field] for t in versions)
            one, other = (t.number if t.field is None else fields[t.field] for t in ops)
            return left == right != 0 and one != other and one != 0 and other != 0
        case After(first):
            return any(fields[block * w] > count for w, count in first if w != worker)
        case Raise():
            return True


def independent(a: frozenset[tuple[object, bool]], b: frozenset[tuple[object, bool]]) -> bool:
    """True where two pieces commute: nothing that both touch is written by either."""
    return not any(name == other and (write or writes) for name, write in a for other, writes in b)


def flags_of(program: Program, choices: tuple[int, ...]) -> int:
    """The verdict flags of a run."""
    state = program.start
    for worker in choices:
        state = advance(program, state, worker)
    return state[program.flags]


class First(NamedTuple):
    """The first time that a run raises a kind: after so many pieces, with so many events up to the one judged."""

    pieces: int
    events: int


def first_raises(program: Program, choices: tuple[int, ...]) -> dict[Kind, First]:
    """What a run raises, and when first."""
    state, found = program.start, dict[Kind, First]()
    for count, worker in enumerate(choices, 1):
        before = program.events(state)
        state, raised = traced(program, state, worker)
        for kind, at in raised:
            found.setdefault(kind, First(count, before + at))
    return found
