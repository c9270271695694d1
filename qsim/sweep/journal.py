"""The memory of a sweep: one SQLite file, one writer, many readers. Knows no processes and runs nothing.

Tables: sweep (what was asked for and by what software; a row for each --extend, the last one in force),
cases, attempts (one without an outcome is under way, or was when its sweep was killed), results (text and
digest).
A case is done exactly when it has a row in results, so nothing can be left "running".
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from qsim.errors import InputError, OutputError, QsimError, UsageError
from qsim.sweep.folder import FolderLock, prepare_folder
from qsim.sweep.identity import case_id, decode_cell, encode_cell, engine_of, spec_hash, text_digest
from qsim.sweep.kinds import AnyCell, kind_of, kind_of_grid
from qsim.sweep.readback import APPLICATION, BUSY_SECONDS, JOURNAL, VERSION, is_fresh, readable

RESULTS, DIGEST, STUDY = "results.jsonl", "results.sha256", "study.toml"
_TABLES = """
CREATE TABLE sweep (number INTEGER PRIMARY KEY, spec_text TEXT NOT NULL, spec_hash TEXT NOT NULL,
                    engine INTEGER NOT NULL, provenance TEXT NOT NULL);
CREATE TABLE cases (case_id TEXT PRIMARY KEY, position INTEGER NOT NULL, cell TEXT NOT NULL,
                    state TEXT NOT NULL DEFAULT 'pending', note TEXT NOT NULL DEFAULT '');
CREATE TABLE attempts (number INTEGER PRIMARY KEY, case_id TEXT NOT NULL, outcome TEXT,
                       detail TEXT NOT NULL DEFAULT '');
CREATE TABLE results (case_id TEXT PRIMARY KEY, digest TEXT NOT NULL, body TEXT NOT NULL);
"""


class DeterminismError(QsimError):
    """A case gave two different results. Exit code 1."""

    exit_code = 1


class Journal:
    """The writing side. Use it as a context manager; it holds the lock of its folder until it is closed."""

    def __init__(self, out: Path, connection: sqlite3.Connection, lock: FolderLock) -> None:
        self.out = out
        self._db = connection
        self._lock = lock

    @classmethod
    def open(
        cls,
        out: Path | str,
        cells: Sequence[AnyCell],
        *,
        spec_text: str,
        provenance: Mapping[str, str],
        extend: bool = False,
    ) -> Journal:
        """Create the journal of these cells in ``out``, or resume it.

        OutputError where the folder cannot be written or is in use; InputError where its journal is none;
        UsageError where it holds another grid and ``extend`` is false. Nothing has run then.
        """
        folder = prepare_folder(Path(out), taken=(JOURNAL, RESULTS, DIGEST, STUDY))
        lock = FolderLock.acquire(folder)
        try:
            with readable(folder / JOURNAL, writing=True):
                db = sqlite3.connect(folder / JOURNAL, timeout=BUSY_SECONDS, isolation_level=None)
                try:
                    fresh = is_fresh(db, folder / JOURNAL)
                    db.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
                    db.execute("PRAGMA synchronous = NORMAL")  # safe against kill -9; power loss costs the last rows
                    journal = cls(folder, db, lock)
                    journal._adopt(cells, fresh, extend, spec_text, dict(provenance))
                except BaseException:
                    db.close()
                    raise
        except BaseException:
            lock.release()
            raise
        return journal

    def _adopt(
        self, cells: Sequence[AnyCell], fresh: bool, extend: bool, text: str, provenance: dict[str, str]
    ) -> None:
        """Take the cells as the grid of this folder; refuse another grid."""
        ids = [case_id(cell) for cell in cells]
        wanted = spec_hash(ids)
        with self._transaction():
            if fresh:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {APPLICATION}")
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            else:
                held = self._one("SELECT spec_hash FROM sweep ORDER BY number DESC LIMIT 1")
                if held is None:
                    raise InputError("the journal in this folder is damaged: it names no study; choose another --out")
                self._db.execute("UPDATE attempts SET outcome = 'interrupted' WHERE outcome IS NULL")
                if held == wanted:
                    self._db.executemany(  # what is no part of a case may differ: a label, where the tensors lie
                        "UPDATE cases SET cell = ?2 WHERE case_id = ?1 AND cell <> ?2",
                        [(name, encode_cell(cell)) for name, cell in zip(ids, cells, strict=True)],
                    )
                    return
                if not extend:
                    raise UsageError(self._refusal(held, wanted, ids))
                self._require_kind(cells)
            self._db.execute(
                "INSERT INTO sweep (spec_text, spec_hash, engine, provenance) VALUES (?, ?, ?, ?)",
                (text, wanted, engine_of(kind_of_grid(cells)), json.dumps(provenance, sort_keys=True)),
            )
            # finished cases that the grid no longer has are kept behind it; unfinished ones are not wanted
            self._db.execute("DELETE FROM cases WHERE case_id NOT IN (SELECT case_id FROM results)")
            self._db.execute("UPDATE cases SET position = position + ?", (len(ids),))
            self._db.executemany(
                "INSERT INTO cases (case_id, position, cell) VALUES (?, ?, ?) "
                "ON CONFLICT (case_id) DO UPDATE SET position = excluded.position, cell = excluded.cell",
                [(name, i, encode_cell(cell)) for i, (name, cell) in enumerate(zip(ids, cells, strict=True))],
            )

    def _require_kind(self, cells: Sequence[AnyCell]) -> None:
        """One folder, one kind of study: its table and figure have room for no other."""
        text = self._one("SELECT cell FROM cases LIMIT 1")
        held, wanted = None if text is None else kind_of(decode_cell(text)), kind_of_grid(cells)
        if held is not None and held is not wanted:
            raise UsageError(
                f"{str(self.out / JOURNAL)!r} holds a study of kind {held.name}, and this one is of kind "
                f"{wanted.name}: --extend cannot add it; give another --out"
            )

    def _refusal(self, held: str, wanted: str, ids: list[str]) -> str:
        path = str(self.out / JOURNAL)
        known = {row[0] for row in self._db.execute("SELECT case_id FROM cases")}
        done = self._one("SELECT count(*) FROM results")
        return (
            f"{path!r} holds another sweep (spec {held[:12]}, {len(known)} cells, {done} done); "
            f"this study is spec {wanted[:12]} ({len(ids)} cells, {len(set(ids) - known)} not in there). "
            "Next: give another --out, or --extend to add its cells and keep what is done"
        )

    def done(self) -> set[str]:
        """The ids of the cases with a result."""
        return {row[0] for row in self._db.execute("SELECT case_id FROM results")}

    def begin(self, name: str) -> None:
        """An attempt at a case starts; what an earlier run of the sweep said about the case is forgotten."""
        with self._transaction():
            self._db.execute("INSERT INTO attempts (case_id) VALUES (?)", (name,))
            self._db.execute(
                "UPDATE cases SET state = 'pending', note = '' WHERE case_id = ? AND state <> 'done'", (name,)
            )

    def finish(self, name: str, body: str) -> None:
        """Keep a result. The same result again is fine; a different one raises DeterminismError."""
        digest = text_digest(body)
        with self._transaction():
            held = self._one("SELECT digest FROM results WHERE case_id = ?", name)
            if held is not None and held != digest:
                raise DeterminismError(
                    f"case {name} gave two results: digest {held[:12]} is in {str(self.out / JOURNAL)!r}, "
                    f"{digest[:12]} came now. Its run is not deterministic: run the cell twice and compare"
                )
            self._close_attempt(name, "done", "")
            self._db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?)", (name, digest, body))
            self._db.execute("UPDATE cases SET state = 'done', note = '' WHERE case_id = ?", (name,))

    def fail(self, name: str, error: str, detail: str = "") -> None:
        """The cell raised: keep the one-line error with the case, the traceback with the attempt."""
        self._end(name, "failed", error, detail)

    def crash(self, name: str, error: str) -> None:
        """The cell killed its process as often as it may."""
        self._end(name, "crashed", error, error)

    def died(self, name: str) -> None:
        """A process died while it had this cell; the cell is tried again."""
        with self._transaction():
            self._close_attempt(name, "worker died", "")

    def _end(self, name: str, state: str, error: str, detail: str) -> None:
        with self._transaction():
            self._close_attempt(name, state, detail)
            self._db.execute(
                "UPDATE cases SET state = ?, note = ? WHERE case_id = ? AND state <> 'done'",
                (state, error, name),
            )

    def _close_attempt(self, name: str, outcome: str, detail: str) -> None:
        self._db.execute(
            "UPDATE attempts SET outcome = ?, detail = ? WHERE case_id = ? AND outcome IS NULL",
            (outcome, detail, name),
        )

    def _one(self, query: str, *values: str) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, also for a Ctrl-C in the middle."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"{str(self.out / JOURNAL)!r} cannot be written: {error}; what is in it is kept"
            ) from error

    def close(self) -> None:
        """Close the file, then let the next sweep have the folder."""
        self._db.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
