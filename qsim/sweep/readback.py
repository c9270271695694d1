"""The reading side of a journal: no lock, no writing, also while a sweep runs. Knows no processes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qsim.errors import InputError, OutputError
from qsim.sweep.identity import decode_cell, decode_record_of, text_digest
from qsim.sweep.kinds import AnyCell, AnyRecord

JOURNAL = "journal.sqlite"
APPLICATION = 0x7173696D  # "qsim": tells our file from any other SQLite file
VERSION = 1
BUSY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case as the journal has it. state: pending, done, failed, crashed; note: the error of the last two.

    record and body (its canonical text) are there exactly when the state is done.
    """

    case_id: str
    cell: AnyCell
    state: str
    note: str
    record: AnyRecord | None
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalView:
    """What a journal holds at one moment, in cell order; provenance is that of the first run."""

    spec_text: str
    spec_hash: str
    provenance: Mapping[str, str]
    cases: tuple[Case, ...]


def read_journal(out: Path | str) -> JournalView:
    """Everything in the journal of a folder; InputError where there is none or it is damaged."""
    path = Path(out) / JOURNAL
    if not path.is_file():
        raise InputError(f"{str(path.parent)!r} holds no sweep: there is no {JOURNAL}; give the --out of a sweep")
    with readable(path), closing(_connect(path)) as db:
        if is_fresh(db, path):
            raise InputError(f"{str(path)!r} holds no sweep yet; run it again in a moment")
        db.execute("BEGIN")  # one moment for all queries
        newest = db.execute("SELECT spec_text, spec_hash FROM sweep ORDER BY number DESC LIMIT 1").fetchone()
        oldest = db.execute("SELECT provenance FROM sweep ORDER BY number LIMIT 1").fetchone()
        if newest is None or oldest is None:
            raise InputError(f"{str(path)!r} is damaged: it names no study; choose another --out")
        (text, spec), (provenance,) = newest, oldest
        rows = db.execute(
            "SELECT c.case_id, c.cell, c.state, c.note, r.digest, r.body "
            "FROM cases c LEFT JOIN results r ON r.case_id = c.case_id ORDER BY c.position"
        ).fetchall()
        cases = tuple(_case(row, path) for row in rows)
    try:
        return JournalView(spec_text=text, spec_hash=spec, provenance=json.loads(provenance), cases=cases)
    except ValueError as error:
        raise InputError(f"{str(path)!r} is damaged: its provenance is no JSON; choose another --out") from error


def _case(row: tuple[str, str, str, str, str | None, str | None], path: Path) -> Case:
    name, cell_text, state, note, digest, body = row
    if body is not None and text_digest(body) != digest:
        raise InputError(f"{str(path)!r} is damaged: the result of case {name} does not match its digest; restore it")
    cell = decode_cell(cell_text)
    return Case(
        case_id=name,
        cell=cell,
        state=state,
        note=note,
        record=None if body is None else decode_record_of(cell, body),
        body=body or "",
    )


def _connect(path: Path) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        # a finished journal in a read-only folder: SQLite cannot make its side files there, and needs none
        return sqlite3.connect(f"{uri}?immutable=1", uri=True, isolation_level=None)
    except BaseException:
        db.close()
        raise
    return db


def is_fresh(db: sqlite3.Connection, path: Path) -> bool:
    """True for an empty database, False for a sound journal of ours; else InputError."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if tables == 0 and application == 0:
        return True
    if application != APPLICATION:
        raise InputError(f"{str(path)!r} is a database of something else; give another --out")
    if version != VERSION:
        raise InputError(
            f"{str(path)!r} has journal version {version}, this qsim reads {VERSION}; "
            "use the qsim that wrote it, or give another --out"
        )
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    return False


@contextmanager
def readable(path: Path, *, writing: bool = False) -> Iterator[None]:
    """SQLite's errors as ours: InputError, or OutputError where the file is sound but cannot be written."""
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = OutputError if writing else InputError
        raise kind(f"{str(path)!r} cannot be opened: {error}; give another --out") from error
    except sqlite3.DatabaseError as error:
        raise InputError(f"{str(path)!r} is no journal, or a damaged one: {error}; give another --out") from error
