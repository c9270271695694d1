"""Rules about commits: I3 single commit, I5 observation set, I11 state algebra, I12 liveness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from qsim.quant import OpId
from qsim.record import FoldRecord, Record, Seen
from qsim.sim.invariants.model import TRAINING, Judged, Rule, Unit, Violation
from qsim.sim.presets import Cadence

_DEFAULT = FoldRecord()
_POISONED = ("latch", "propagate", "invert")
Key = tuple[str, Unit]


def advances(record: Record) -> bool:
    """True for a commit, and for the half of a torn one that moves the epoch."""
    return record.kind == "commit" or (record.kind == "store" and record.part != "descale")


class _Ledger:
    """The commits that are in force: what a restored state takes back is struck out."""

    def __init__(self) -> None:
        self.live: dict[tuple[str, int], int] = {}  # epoch by storage
        self.done: dict[str, list[tuple[int, Key, Record]]] = {}  # by storage's owner: epoch after, unit, record

    def add(self, record: Record, key: Key) -> None:
        self.live[record.owner, record.storage] = record.epoch_after
        self.done.setdefault(record.owner, []).append((record.epoch_after, key, record))

    def restore(self, record: Record) -> list[tuple[Key, Record]]:
        """Strike out what is newer than the state that was read back."""
        gone = []
        for saved in record.now:
            entries = self.done.get(saved.owner, [])
            gone += [(key, made) for epoch, key, made in entries if epoch > saved.epoch]
            self.done[saved.owner] = [entry for entry in entries if entry[0] <= saved.epoch]
            self.live[saved.owner, 0] = saved.epoch
        return gone


def _single_commit(trace: Judged) -> Iterator[Violation]:
    commits: Counter[Key] = Counter()
    made: dict[Key, list[int]] = {}
    ledger = _Ledger()
    for record in trace.of("commit", "store", "restore_state"):
        if record.kind == "restore_state":
            commits.subtract(key for key, _ in ledger.restore(record))
            continue
        if not advances(record):
            continue
        owner = trace.owner(record.op)
        base = record.epoch_before if record.used is None else record.used.epoch
        live = ledger.live.get((record.owner, record.storage), record.epoch_before)
        if base != live:
            yield Violation(
                "I3", record.seq, owner,
                f"a commit on base epoch {base} overwrites epoch {live}: a commit is lost", (record.seq,),
            )  # fmt: skip
        key = owner, trace.unit_of(record.op)
        ledger.add(record, key)
        commits[key] += 1
        made.setdefault(key, []).append(record.seq)
        if trace.unit is Cadence.NEVER or commits[key] > 1:
            expected = "none" if trace.unit is Cadence.NEVER else "one"
            yield Violation(
                "I3", record.seq, owner, f"commit {commits[key]} in unit {key[1]}; {expected} is due", tuple(made[key])
            )  # fmt: skip
    # An owner that never commits is a matter of liveness (I12); one that skips units breaks this rule.
    alive = {owner for owner, _ in made}
    for key, seq in _trained_units(trace).items():
        if key[0] in alive and key not in made:
            yield Violation("I3", seq, key[0], f"no commit in unit {key[1]}; one is due", (seq,))


def _trained_units(trace: Judged) -> dict[Key, int]:
    """Every (owner, unit) with a training observation of some tokens, and the seq of its last one."""
    return {
        (trace.owner(r.op), trace.unit_of(r.op)): r.seq
        for r in trace.of("observe")
        if r.phase in TRAINING and r.content != "empty"
    }


def _folded(record: Record) -> tuple[Seen, ...]:
    """The observations that move the window: none that the zero rule passes over."""
    fold = record.fold or _DEFAULT
    return tuple(s for s in record.seen if s.content != "empty" or fold.zero != "skip")


def _observation_set(trace: Judged) -> Iterator[Violation]:
    due: dict[Key, set[Seen]] = {}
    group: dict[tuple[str, int], set[Seen]] = {}  # what the ranks of one group observed, by step
    got: dict[Key, list[Record]] = {}
    ledger = _Ledger()
    for record in trace.of("observe", "commit", "store", "restore_state"):
        if record.kind == "restore_state":
            for key, undone in ledger.restore(record):
                got[key].remove(undone)
            continue
        key = trace.owner(record.op), trace.unit_of(record.op)
        if record.kind == "observe":
            if record.phase in TRAINING and record.content != "empty":
                assert record.op is not None, "owner() has looked at it"
                seen = Seen(record.op, record.phase, record.content)
                due.setdefault(key, set()).add(seen)
                group.setdefault((trace.replica(record.op), record.op[0]), set()).add(seen)
        elif advances(record):
            ledger.add(record, key)
            got.setdefault(key, []).append(record)
    for key, records in got.items():
        if records:
            yield from _compared(trace, key, records, due.get(key, set()), group)


def _compared(
    trace: Judged, key: Key, records: list[Record], due: set[Seen], group: dict[tuple[str, int], set[Seen]]
) -> Iterator[Violation]:
    """One owner's unit: what its commits folded in against what was due. Ranks may fold in what their group saw."""
    last = records[-1]
    folded = [_folded(record) for record in records]
    seen = {one for part in folded for one in part}
    twice = [one for part in folded for one, times in Counter(part).items() if times > 1]
    allowed = due
    if trace.ranks > 1 and last.op is not None:
        allowed = due | group.get((trace.replica(last.op), last.op[0]), set())
    extra, missing = seen - allowed, due - seen
    because = [f"folds in {_list(extra)} that is no training observation of the unit"] if extra else []
    because += [f"leaves out {_list(missing)}"] if missing else []
    because += [f"folds in {_list(twice)} twice in one commit"] if twice else []
    if because:
        seqs = tuple(record.seq for record in records)
        yield Violation("I5", last.seq, key[0], " and ".join(because) + f" (unit {key[1]})", seqs)


def _list(seen: Iterable[Seen]) -> str:
    ordered = sorted(seen)
    first = ordered[0]
    return f"{len(ordered)} observation(s), first {OpId(*first.op)} in phase {first.phase}"


def _state_algebra(trace: Judged) -> Iterator[Violation]:
    for record in trace.of("commit", "store"):
        if record.fold is not None and record.fold.merge not in ("max", "last"):
            yield Violation(
                "I11", record.seq, trace.owner(record.op),
                f"{len(record.seen)} observation(s) are merged by {record.fold.merge}; amaxes merge by max",
                (record.seq,),
            )  # fmt: skip


def _liveness(trace: Judged) -> Iterator[Violation]:
    yield from _frozen(trace)
    yield from _latched(trace)
    yield from _collectives(trace)


def _frozen(trace: Judged) -> Iterator[Violation]:
    """Owners that were observed and never left their initial state."""
    if trace.unit is Cadence.NEVER:
        return
    moved = {trace.owner(r.op) for r in trace.of("commit", "store") if r.storage == 0}
    elsewhere = {trace.owner(r.op) for r in trace.of("commit", "store")}
    seen: dict[str, int] = {}
    for (owner, _), seq in _trained_units(trace).items():
        seen[owner] = seq
    for owner, seq in seen.items():
        if owner not in moved:
            because = "its commits go to a copy that nobody reads" if owner in elsewhere else "no commit ever follows"
            yield Violation("I12", seq, owner, f"observed, and still in its initial state: {because}", (seq,))


def _latched(trace: Judged) -> Iterator[Violation]:
    for record in trace.of("commit", "store"):
        fold = record.fold or _DEFAULT
        if fold.nonfinite in _POISONED and any(seen.content == "nonfinite" for seen in record.seen):
            yield Violation(
                "I12", record.seq, trace.owner(record.op),
                f"Inf or NaN enters the window by rule {fold.nonfinite}: while it is there, no tensor moves the scale",
                (record.seq,),
            )  # fmt: skip


def _collectives(trace: Judged) -> Iterator[Violation]:
    sent: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for record in trace.of("reduce", "wait"):
        if record.kind == "reduce":
            sent[record.group] += 1
            continue
        if sent[record.group] != record.size:
            yield Violation(
                "I12", record.seq, trace.owner(record.op),
                f"reduction {record.group} waits for {record.size} rank(s) and {sent[record.group]} take part: a hang "
                "or a mismatch",
                (record.seq,),
            )  # fmt: skip
        served[record.group] += 1
        if served[record.group] >= record.size:  # the round is over; a rerun may use its name again
            sent[record.group] = served[record.group] = 0


SINGLE_COMMIT = Rule("I3", "single_commit", "one commit per owner and logical unit, none lost", _single_commit)
OBSERVATION_SET = Rule("I5", "observation_set", "a unit folds in exactly its training observations", _observation_set)
STATE_ALGEBRA = Rule("I11", "state_algebra", "amaxes combine by max and nothing else", _state_algebra)
LIVENESS = Rule(
    "I12",
    "liveness",
    "an observed state leaves its initial value, and no rank waits for one that never comes",
    _liveness,
)
