"""A study into results, in one call that can be killed and called again. Knows no events and no bits.

An output folder holds ``journal.sqlite`` (the memory: read it with read_sweep at any time) and, once a sweep
has ended, ``results.jsonl``: one canonical line a case in cell order, the same for any number of workers;
``results.sha256``: its digest, which sha256sum -c reads; ``study.toml``: the study with overrides and defaults.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qsim.errors import OutputError
from qsim.sweep.executor import Tally, run_cells
from qsim.sweep.identity import canonical_json, parameters, text_digest
from qsim.sweep.journal import DIGEST, RESULTS, STUDY, Journal
from qsim.sweep.kinds import AnyCell, AnyRecord, Kind, kind_of_grid
from qsim.sweep.readback import Case, JournalView, read_journal
from qsim.sweep.worker import Run

if TYPE_CHECKING:  # reading results needs no pydantic
    from qsim.sweep.config import Study


ON_A_DEVICE = ("cuda",)
"""Backends whose cells run one after another unless the caller says otherwise: their replicas fill the device."""


class Finished(NamedTuple):
    """A cell and what came out of it."""

    case_id: str
    cell: AnyCell
    record: AnyRecord


class Unfinished(NamedTuple):
    """A cell without a record, and why: one line."""

    case_id: str
    cell: AnyCell
    error: str


@dataclass(frozen=True, kw_only=True)
class SweepView:
    """What an output folder holds, each list in cell order. pending: not ended yet, run the sweep again."""

    out: Path
    spec_text: str
    spec_hash: str
    provenance: Mapping[str, str]
    finished: tuple[Finished, ...]
    failed: tuple[Unfinished, ...]
    crashed: tuple[Unfinished, ...]
    pending: tuple[AnyCell, ...]

    @property
    def total(self) -> int:
        """All cells."""
        return len(self.finished) + len(self.failed) + len(self.crashed) + len(self.pending)

    @property
    def kind(self) -> Kind:
        """The kind of study."""
        ended = [f.cell for f in self.finished] + [u.cell for u in (*self.failed, *self.crashed)]
        return kind_of_grid([*ended, *self.pending])

    @property
    def complete(self) -> bool:
        """True where every cell has a record."""
        return len(self.finished) == self.total

    @property
    def results_path(self) -> Path:
        """Where the results go when a sweep ends."""
        return self.out / RESULTS


@dataclass(frozen=True, kw_only=True)
class SweepOutcome(SweepView):
    """A sweep that has ended: what is there, and how much of it is from this call. digest: sha256 of the results."""

    digest: str
    done_before: int
    done_now: int

    @property
    def summary(self) -> str:
        """One line for the user."""
        if self.complete and self.done_now == 0:
            return f"nothing to run: all {self.total} cells were done before; results in {self.results_path}"
        parts = [f"{self.done_now} cells done now", f"{self.done_before} before"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.crashed)} crashed"] if self.crashed else []
        return f"{', '.join(parts)}; results in {self.results_path}"


def run_sweep(
    config: Study,
    *,
    out: Path | str,
    workers: int | None = None,
    run: Run | None = None,
    extend: bool = False,
    progress: Callable[[Tally], None] | None = None,
) -> SweepOutcome:
    """Run what is missing of a study in a folder, and export the results.

    Cells that failed or crashed in an earlier call are tried again. extend: take the cells of another study
    into the same folder and keep what is done. workers: processes, by default one a core (one in all where a device
    computes). run: by default what runs cells of this kind. Errors before any
    work: OutputError (folder), InputError (journal), UsageError (another study is in there). Ctrl-C is raised again;
    call it anew to go on.
    """
    cells = config.cells()
    with Journal.open(out, cells, spec_text=config.to_toml(), provenance=_provenance(), extend=extend) as journal:
        if workers is None and any(getattr(cell, "backend", "") in ON_A_DEVICE for cell in cells):
            workers = 1
        tally = run_cells(cells, journal, workers=workers, run=run or kind_of_grid(cells).run, on_progress=progress)
        view = read_journal(out)
        digest = _export(view, Path(out))
    seen = _view(Path(out), view)
    return SweepOutcome(**vars(seen), digest=digest, done_before=tally.done_before, done_now=tally.done_now)


def read_sweep(out: Path | str) -> SweepView:
    """What a folder holds now, also while a sweep runs in it. InputError where there is no sweep."""
    return _view(Path(out), read_journal(out))


def _view(out: Path, view: JournalView) -> SweepView:
    def ended(state: str) -> tuple[Unfinished, ...]:
        return tuple(Unfinished(c.case_id, c.cell, c.note) for c in view.cases if c.state == state)

    return SweepView(
        out=out,
        spec_text=view.spec_text,
        spec_hash=view.spec_hash,
        provenance=view.provenance,
        finished=tuple(Finished(c.case_id, c.cell, c.record) for c in view.cases if c.record is not None),
        failed=ended("failed"),
        crashed=ended("crashed"),
        pending=tuple(c.cell for c in view.cases if c.state == "pending"),
    )


def _export(view: JournalView, out: Path) -> str:
    """Write the results, their digest and the study; the digest."""
    text = "".join(_line(case) + "\n" for case in view.cases)
    _replace(out / RESULTS, text)
    digest = text_digest(text)
    _replace(out / DIGEST, f"{digest}  {RESULTS}\n")
    _replace(out / STUDY, view.spec_text)
    return digest


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.part")  # one name is enough: the sweep has the folder for itself
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{str(path)!r} cannot be written: {error.strerror}; the journal beside it is whole"
        ) from error


def _line(case: Case) -> str:
    """One case, without anything that depends on where or when it ran."""
    line = {"case": case.case_id, "cell": parameters(case.cell), "state": case.state}
    return canonical_json(line | ({"record": json.loads(case.body)} if case.body else {"error": case.note}))


def _provenance() -> dict[str, str]:
    """The software and the machine: kept beside the results, never part of a case."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "qsim": _version("qsim"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
