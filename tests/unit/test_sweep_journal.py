"""The journal of a sweep: what it keeps, whom it refuses."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from qsim.errors import InputError, OutputError, UsageError
from qsim.sweep.cell import Cell
from qsim.sweep.identity import case_id, encode_record
from qsim.sweep.journal import DeterminismError, Journal
from qsim.sweep.readback import read_journal

Open = Callable[..., Journal]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("fake_cells")


@pytest.fixture
def cells(fakes: ModuleType) -> list[Cell]:
    return [fakes.cell(d, window=w) for w in (16, 1) for d in ("correct", "D01")]


def _open(out: Path, cells: Sequence[Cell], *, extend: bool = False, text: str = "spec") -> Journal:
    return Journal.open(out, cells, spec_text=text, provenance={"python": "3"}, extend=extend)


def _finish(journal: Journal, fakes: ModuleType, *cells: Cell) -> None:
    for cell in cells:
        journal.begin(case_id(cell))
        journal.finish(case_id(cell), encode_record(fakes.record_of(cell)))


def _rows(out: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(out / "journal.sqlite")) as db:
        return db.execute(query).fetchall()


def test_what_is_finished_is_there_after_closing(tmp_path: Path, cells: list[Cell], fakes: ModuleType) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, cells[2], cells[0])
    with _open(tmp_path, cells) as journal:
        assert journal.done() == {case_id(cells[0]), case_id(cells[2])}
    view = read_journal(tmp_path)
    assert [case.cell for case in view.cases] == cells
    assert [case.state for case in view.cases] == ["done", "pending", "done", "pending"]
    assert view.cases[2].body == encode_record(fakes.record_of(cells[2]))
    assert encode_record(view.cases[2].record) == view.cases[2].body  # type: ignore[arg-type]
    assert (view.spec_text, view.provenance) == ("spec", {"python": "3"})


def test_a_reader_sees_each_result_while_the_writer_is_at_work(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    with _open(tmp_path, cells) as journal:
        for i, cell in enumerate(cells):
            assert sum(case.state == "done" for case in read_journal(tmp_path).cases) == i
            _finish(journal, fakes, cell)
            journal.begin(case_id(cell))
    assert sum(case.state == "done" for case in read_journal(tmp_path).cases) == len(cells)


def test_a_slow_reader_does_not_hold_up_the_writer(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qsim.sweep.journal.BUSY_SECONDS", 0.1)
    with _open(tmp_path, cells) as journal, closing(sqlite3.connect(tmp_path / "journal.sqlite")) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (0,)
        _finish(journal, fakes, *cells)
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (0,)  # its own moment
        assert len(journal.done()) == len(cells)


def test_the_same_result_again_is_fine_and_another_one_is_an_error(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, cells[0])
        _finish(journal, fakes, cells[0])
        with pytest.raises(DeterminismError, match=f"case {case_id(cells[0])} gave two results"):
            journal.finish(case_id(cells[0]), encode_record(fakes.record_of(cells[1])))
    case = read_journal(tmp_path).cases[0]
    assert case.body == encode_record(fakes.record_of(cells[0]))


def test_failures_are_kept_with_their_error_until_the_next_attempt(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    with _open(tmp_path, cells) as journal:
        for cell in cells[:2]:
            journal.begin(case_id(cell))
        journal.fail(case_id(cells[0]), "ValueError: no", "the traceback")
        journal.crash(case_id(cells[1]), "dead")
    seen = [(case.state, case.note) for case in read_journal(tmp_path).cases]
    assert seen[:3] == [("failed", "ValueError: no"), ("crashed", "dead"), ("pending", "")]
    with _open(tmp_path, cells) as journal:
        assert journal.done() == set()
        _finish(journal, fakes, cells[0])
    assert (read_journal(tmp_path).cases[0].state, read_journal(tmp_path).cases[0].note) == ("done", "")
    assert _rows(tmp_path, "SELECT outcome, detail FROM attempts ORDER BY number") == [
        ("failed", "the traceback"),
        ("crashed", "dead"),
        ("done", ""),
    ]


def test_an_attempt_that_was_under_way_when_its_sweep_died_is_no_zombie(tmp_path: Path, cells: list[Cell]) -> None:
    with _open(tmp_path, cells) as journal:
        journal.begin(case_id(cells[0]))
    with _open(tmp_path, cells):
        pass
    assert _rows(tmp_path, "SELECT outcome FROM attempts") == [("interrupted",)]
    assert {case.state for case in read_journal(tmp_path).cases} == {"pending"}


def test_another_grid_is_refused_with_both_hashes_and_the_next_step(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    with _open(tmp_path, cells[:3]) as journal:
        _finish(journal, fakes, cells[0])
    held = read_journal(tmp_path).spec_hash
    with pytest.raises(UsageError) as caught:
        _open(tmp_path, cells)
    text = str(caught.value)
    for part in (
        "journal.sqlite",
        held[:12],
        "3 cells, 1 done",
        "4 cells, 1 not in there",
        "--out",
        "--extend",
    ):
        assert part in text
    assert len(read_journal(tmp_path).cases) == 3
    with pytest.raises(UsageError, match="holds another sweep"):
        _open(tmp_path, [cells[1], cells[0], cells[2]])


def test_another_wording_of_the_same_grid_is_resumed(tmp_path: Path, cells: list[Cell]) -> None:
    with _open(tmp_path, cells, text="# a comment"):
        pass
    with _open(tmp_path, cells, text="# another comment"):
        pass
    assert read_journal(tmp_path).spec_text == "# a comment"


def test_extend_takes_new_cells_in_their_order_and_keeps_what_is_done(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    dropped = fakes.cell("D02")
    first, wider = [cells[0], cells[1], dropped, cells[2]], [cells[3], cells[1], cells[2]]
    with _open(tmp_path, first) as journal:
        _finish(journal, fakes, cells[0], cells[2])
    with _open(tmp_path, wider, extend=True, text="wider") as journal:
        assert journal.done() == {case_id(cells[0]), case_id(cells[2])}
    view = read_journal(tmp_path)
    assert [(case.cell, case.state) for case in view.cases] == [
        (cells[3], "pending"),
        (cells[1], "pending"),
        (cells[2], "done"),
        (cells[0], "done"),
    ]
    assert view.spec_text == "wider"
    with _open(tmp_path, wider):
        pass
    with pytest.raises(UsageError, match="holds another sweep"):
        _open(tmp_path, first)


def test_a_second_writer_is_refused_and_told_who_has_the_folder(tmp_path: Path, cells: list[Cell]) -> None:
    import os

    with (
        _open(tmp_path, cells),
        pytest.raises(OutputError, match=rf"another sweep \(process {os.getpid()}\)"),
    ):
        _open(tmp_path, cells)
    with _open(tmp_path, cells):
        pass


def test_a_refused_journal_lets_go_of_its_folder(tmp_path: Path, cells: list[Cell]) -> None:
    with _open(tmp_path, cells):
        pass
    for _ in range(2):
        with pytest.raises(UsageError, match="holds another sweep"):
            _open(tmp_path, cells[:1])
    with _open(tmp_path, cells):
        pass


@pytest.mark.parametrize(
    "content", [b"this is no database, and longer than a header" * 40, b"SQLite format 3\0abc" * 90]
)
def test_a_file_that_is_no_journal_is_unreadable_input(tmp_path: Path, cells: list[Cell], content: bytes) -> None:
    (tmp_path / "journal.sqlite").write_bytes(content)
    for action in (lambda: _open(tmp_path, cells), lambda: read_journal(tmp_path)):
        with pytest.raises(InputError, match="is no journal, or a damaged one") as caught:
            action()
        assert caught.value.exit_code == 3
    assert (tmp_path / "journal.sqlite").read_bytes() == content


def test_the_database_of_another_program_is_left_alone(tmp_path: Path, cells: list[Cell]) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("CREATE TABLE bookmarks (x)")
    for action in (lambda: _open(tmp_path, cells), lambda: read_journal(tmp_path)):
        with pytest.raises(InputError, match="a database of something else"):
            action()
    assert _rows(tmp_path, "SELECT name FROM sqlite_master") == [("bookmarks",)]


def test_a_journal_of_a_later_version_is_refused(tmp_path: Path, cells: list[Cell]) -> None:
    with _open(tmp_path, cells):
        pass
    _rows(tmp_path, "PRAGMA user_version = 9")
    with pytest.raises(InputError, match="journal version 9"):
        _open(tmp_path, cells)


def test_a_journal_cut_short_is_damaged(tmp_path: Path, cells: list[Cell], fakes: ModuleType) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, *cells)
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:-4096])
    for action in (lambda: _open(tmp_path, cells), lambda: read_journal(tmp_path)):
        with pytest.raises(InputError, match="damaged"):
            action()


def test_damage_in_a_table_that_nobody_reads_is_found_too(tmp_path: Path, cells: list[Cell], fakes: ModuleType) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, *cells)
    ((page,),) = _rows(tmp_path, "SELECT rootpage FROM sqlite_master WHERE name = 'attempts'")
    ((size,),) = _rows(tmp_path, "PRAGMA page_size")
    assert isinstance(page, int)
    assert isinstance(size, int)
    with (tmp_path / "journal.sqlite").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    with pytest.raises(InputError, match="damaged"):
        read_journal(tmp_path)


def test_a_result_that_was_altered_is_damage(tmp_path: Path, cells: list[Cell], fakes: ModuleType) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, cells[0])
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db, db:
        db.execute("UPDATE results SET body = replace(body, 'correct', 'CORRECT')")
    with pytest.raises(InputError, match=f"the result of case {case_id(cells[0])} does not match its digest"):
        read_journal(tmp_path)


def test_a_folder_without_a_sweep_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no sweep"):
        read_journal(tmp_path / "nowhere")
    (tmp_path / "journal.sqlite").touch()  # a sweep killed before its first row
    with pytest.raises(InputError, match="holds no sweep yet"):
        read_journal(tmp_path)


def test_a_sweep_killed_before_its_first_row_starts_anew(tmp_path: Path, cells: list[Cell]) -> None:
    (tmp_path / "journal.sqlite").touch()
    with _open(tmp_path, cells):
        pass
    assert [case.cell for case in read_journal(tmp_path).cases] == cells


def test_a_sweep_interrupted_while_its_journal_is_made_starts_anew(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cell: Cell) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qsim.sweep.journal.encode_cell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _open(tmp_path, cells)
    with pytest.raises(InputError, match="holds no sweep yet"):
        read_journal(tmp_path)
    with _open(tmp_path, cells):
        assert [case.cell for case in read_journal(tmp_path).cases] == cells


def test_output_that_cannot_be_written_is_found_before_any_work(tmp_path: Path, cells: list[Cell]) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "taken" / "results.jsonl").mkdir(parents=True)
    for out, text in (
        (file, "is a file, not a folder"),
        (file / "below", "cannot be written"),
        (Path("/proc/qsim"), "cannot be written"),
        (Path("/proc/1"), "cannot be written"),
        (tmp_path / "taken", "is a folder where a file has to go"),
    ):
        with pytest.raises(OutputError, match=text) as caught:
            _open(out, cells)
        assert caught.value.exit_code == 3
    assert not (tmp_path / "taken" / "journal.sqlite").exists()


def test_a_full_disk_is_an_output_error_and_the_journal_stays_whole(
    tmp_path: Path, cells: list[Cell], fakes: ModuleType
) -> None:
    with _open(tmp_path, cells) as journal:
        _finish(journal, fakes, cells[0])
        journal._db.execute("PRAGMA max_page_count = 1")  # SQLite keeps the present size: nothing may grow
        with pytest.raises(OutputError, match="full"):
            journal.fail(case_id(cells[1]), "x" * 100_000)
        assert journal.done() == {case_id(cells[0])}
    assert [case.state for case in read_journal(tmp_path).cases] == ["done", "pending", "pending", "pending"]


def test_a_journal_that_names_no_study_is_damaged(tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    from qsim.sweep.readback import read_journal

    cells = ()
    with Journal.open(tmp_path, cells, spec_text="", provenance={}):
        pass
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("delete from sweep")
        db.commit()
    with pytest.raises(InputError, match="is damaged: it names no study"):
        read_journal(tmp_path)
    with pytest.raises(InputError), Journal.open(tmp_path, cells, spec_text="", provenance={}):
        pass
