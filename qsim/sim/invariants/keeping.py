"""Rules about what is kept for later: I8 persistence, I10 stash discipline."""

from __future__ import annotations

from collections.abc import Iterator

from qsim.record import Op, Record
from qsim.sim.invariants.model import Judged, Rule, Violation


def _persistence(trace: Judged) -> Iterator[Violation]:
    epochs: dict[str, int] = {}
    gone: Record | None = None  # a restart after which nothing was read back yet
    for record in trace.of("commit", "store", "save", "restart", "restore_state", "begin"):
        if record.kind in ("commit", "store"):
            epochs[record.owner] = record.epoch_after
        elif record.kind == "save":
            named = {saved.owner for saved in record.saved}
            for owner in (owner for owner, epoch in epochs.items() if epoch and owner not in named):
                yield Violation(
                    "I8", record.seq, owner, f"epoch {epochs[owner]} is left out of the checkpoint", (record.seq,)
                )
        elif record.kind == "restart":
            gone = record
        elif record.kind == "restore_state":
            gone = None
            yield from _restored(record)
        elif gone is not None:
            yield Violation(
                "I8", record.seq, record.owner, "a restarted process begins without its checkpoint",
                (gone.seq, record.seq),
            )  # fmt: skip
            gone = None


def _restored(record: Record) -> Iterator[Violation]:
    for saved, now in zip(record.saved, record.now, strict=True):
        if saved != now:
            yield Violation(
                "I8", record.seq, saved.owner,
                f"saved at epoch {saved.epoch} with the descale of {saved.descale}, read back as epoch {now.epoch} "
                f"with the descale of {now.descale}",
                (record.seq,),
            )  # fmt: skip
    for what, wrote, read in (
        ("weight version", record.weights_due, record.weights),
        ("stashed entries", record.pending, record.now_pending),
    ):
        if wrote != read:
            yield Violation("I8", record.seq, "", f"{what}: {wrote} saved, {read} read back", (record.seq,))


def _stash_discipline(trace: Judged) -> Iterator[Violation]:
    waiting: dict[str, list[tuple[Op, int]]] = {}
    for record in trace.of("stash", "restore", "restore_state", "restart"):
        assert record.op is not None or record.kind in ("restore_state", "restart"), "a stash is of an operation"
        if record.op is None:
            waiting.clear()  # the process is another one; what it lost is I8's
            continue
        for queue, entries in waiting.items():
            # another worker may be a step ahead: each ends its own
            for entry in [e for e in entries if e[0][0] < record.op[0] and e[0][5] == record.op[5]]:
                entries.remove(entry)
                yield _left(trace, queue, entry)
        entries = waiting.setdefault(record.queue, [])
        if record.kind == "stash":
            entries.append((record.op, record.seq))
            continue
        if record.got is None:
            because = f"takes from {record.queue}, where nothing was put"
            yield Violation("I10", record.seq, trace.owner(record.op), because, (record.seq,))
            continue
        pushed = next((seq for key, seq in entries if key == record.got), record.seq)
        entries[:] = [entry for entry in entries if entry[0] != record.got]
        if record.got != record.op:
            yield Violation(
                "I10", record.seq, trace.owner(record.op),
                f"takes the entry of another operation out of {record.queue}: {record.got}", (pushed, record.seq),
            )  # fmt: skip
    for queue, entries in waiting.items():
        for entry in entries:
            yield _left(trace, queue, entry)


def _left(trace: Judged, queue: str, entry: tuple[Op, int]) -> Violation:
    op, seq = entry
    return Violation("I10", seq, trace.owner(op), f"left in {queue} at the end of its step", (seq,))


PERSISTENCE = Rule(
    "I8", "persistence", "what was saved is what is read back, derived and queued parts too", _persistence
)
STASH_DISCIPLINE = Rule(
    "I10", "stash_discipline", "what is put into a stash is taken once, by its own operation, in its own step",
    _stash_discipline,
)  # fmt: skip
