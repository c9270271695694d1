"""Study files: what they may say, and every error at once."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from qsim import _paths
from qsim.errors import InputError, StudyError
from qsim.sweep.cell import ScheduleParams, WorkloadParams
from qsim.sweep.config import Known, SweepConfig, load_study
from qsim.sweep.schema import ScheduleTable, WorkloadTable

GRID = """
schema = 1
[grid]
defects = ["correct", "high_precision", "D01"]
formats = ["e4m3", "float8_e5m2"]
recipes = ["delayed", "current"]
windows = [16, 1]
"""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    fakes: ModuleType = importlib.import_module("fake_cells")
    found: Known = fakes.known()
    return found


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    path = tmp_path / "capture.safetensors"
    path.write_bytes(b"bytes")
    return path


def _errors(text: str, known: Known, *overrides: str) -> list[str]:
    with pytest.raises(StudyError) as caught:
        load_study(text, known, list(overrides))
    head, *lines = str(caught.value).split("\n")
    assert head == f"study: {len(lines)} error{'s' if len(lines) > 1 else ''}"
    return [line.removeprefix("  ") for line in lines]


def _load(known: Known, tensors: Path, *overrides: str, text: str = GRID) -> SweepConfig:
    return load_study(text, known, [f"workload.tensors={tensors}", *overrides])


def test_cells_come_in_a_fixed_order_with_neighbours_that_share_a_setting(known: Known, tensors: Path) -> None:
    cells = _load(known, tensors, "grid.mean_shift=[0, 2.5]").cells()
    seen = [(c.workload.mean_shift, c.fmt, c.recipe, c.window, c.defect) for c in cells]
    one_shift = [("float32", "none", 1, "high_precision")]
    for fmt in ("float8_e4m3fn", "float8_e5m2"):
        for recipe, window in (("delayed", 16), ("delayed", 1), ("current", 1)):
            one_shift += [(fmt, recipe, window, defect) for defect in ("correct", "D01")]
    assert seen == [(shift, *rest) for shift in (0.0, 2.5) for rest in one_shift]
    assert len(set(cells)) == len(cells)


def test_cells_carry_everything_the_study_says(known: Known, tensors: Path) -> None:
    config = _load(
        known,
        tensors,
        "replicas.seed=7",
        "replicas.count=3",
        "measure.skip_steps=2",
        "run.preset=te_fused",
        "run.backend=oracle",
        "run.reproducible=false",
        "schedule.steps=9",
        "schedule.workers=2",
        "schedule.microbatches=2",
        "workload.mean_shift=-0.5",
        "workload.outlier_steps=[3]",
        "workload.layer_spread=[0, -2]",
    )
    cell = config.cells()[-1]
    assert (cell.defect, cell.seed, cell.replicas, cell.skip_steps) == ("D01", 7, 3, 2)
    assert (cell.preset, cell.backend, cell.reproducible) == ("te_fused", "oracle", False)
    assert cell.schedule == ScheduleParams(steps=9, workers=2, microbatches=2)
    assert cell.workload == WorkloadParams(
        tensors=str(tensors),
        tensors_digest=hashlib.sha256(b"bytes").hexdigest(),
        mean_shift=-0.5,
        outlier_steps=(3,),
        layer_spread=(0, -2),
    )


def test_the_tables_have_the_fields_and_defaults_of_the_cell(known: Known, tensors: Path) -> None:
    assert set(ScheduleTable.model_fields) == set(ScheduleParams.__struct_fields__)
    assert set(WorkloadTable.model_fields) | {"tensors_digest"} == set(WorkloadParams.__struct_fields__)
    cell = _load(known, tensors).cells()[0]
    digest = hashlib.sha256(b"bytes").hexdigest()
    assert cell.schedule == ScheduleParams()
    assert cell.workload == WorkloadParams(tensors=str(tensors), tensors_digest=digest)


def test_every_error_is_reported_at_once_with_place_value_and_hint(known: Known) -> None:
    lines = _errors(
        """
schema = 2
titel = "x"
[grid]
defects = ["correct", "d01"]
formats = ["e4m3", "float8_e4m3fn", "e4m4"]
recipes = "delayed"
window = [1]
windows = [0, 1.5, true, "1"]
mean_shift = [nan, -0.0, inf]
[schedule]
steps = 0
seed = 3
[run]
preset = "seed_corect"
reproducible = 1
""",
        known,
        "replica.count=4",
    )
    expected = {
        "--set replica.count=4": 'unknown key; known: schema, .*; did you mean "replicas.count"?',
        "schema": "2 is refused; give 1",
        "titel": 'unknown key; known: schema, title, .*; did you mean "title"?',
        "grid.defects[1]": '"d01" is refused; unknown name; known: correct, .*; did you mean "D01"?',
        "grid.formats[1]": '"float8_e4m3fn" is refused; the same as grid.formats[0]; keep one',
        "grid.formats[2]": '"e4m4" is refused; unknown name; known: e4m3, .*; did you mean "e4m3"?',
        "grid.recipes": '"delayed" is refused; give a list, like .*',
        "grid.window": 'unknown key; known: defects, .*; did you mean "windows"?',
        "grid.windows[0]": "0 is refused; give an integer from 1 to 65536",
        "grid.windows[1]": "1.5 is refused; give an integer from 1 to 65536",
        "grid.windows[2]": "true is refused; give an integer from 1 to 65536",
        "grid.windows[3]": '"1" is refused; give an integer from 1 to 65536',
        "grid.mean_shift[0]": "nan is refused; give a finite number (0.0, not -0.0)",
        "grid.mean_shift[1]": "-0.0 is refused; give a finite number (0.0, not -0.0)",
        "grid.mean_shift[2]": "inf is refused; give a finite number (0.0, not -0.0)",
        "schedule.steps": "0 is refused; give an integer from 1 to 4294967295",
        "schedule.seed": 'unknown key; known: steps, .*; did you mean "replicas.seed"?',
        "run.preset": '"seed_corect" is refused; .*; did you mean "seed_correct"?',
        "run.reproducible": "1 is refused; give true or false",
    }
    found = dict(line.split(": ", 1) for line in lines)
    assert set(expected) == set(found)
    for place, text in expected.items():
        assert re.fullmatch(re.escape(text).replace(r"\.\*", ".*"), found[place]), found[place]


def test_hints_do_not_mind_the_case_of_letters(known: Known) -> None:
    (line,) = _errors(GRID, known, 'grid.formats=["E4M3"]')
    assert line.endswith('did you mean "e4m3"?')
    (line,) = _errors(GRID, known, "REPLICAS.COUNT=3")
    assert line.endswith('did you mean "replicas.count"?')


def test_a_missing_table_and_a_missing_schema_are_named(known: Known) -> None:
    assert _errors('title = "x"\n', known) == [
        "schema: is missing; write schema = 1",
        "grid: is missing, a table with the keys defects, formats, recipes, windows, mean_shift",
    ]
    assert _errors("schema = 1\ngrid = 3\n", known) == ["grid: 3 is refused; give a table"]
    assert _errors(GRID.replace("[16, 1]", "[]"), known) == ["grid.windows: [] is refused; give at least one value"]


def test_one_number_in_three_spellings_is_one_value(known: Known, tensors: Path) -> None:
    same = [_load(known, tensors, f"replicas.seed={v}").cells() for v in ("3e6", "3000000", "3000000.0")]
    assert same[0] == same[1] == same[2]
    assert type(same[0][0].seed) is int
    assert [type(v) for v in _load(known, tensors, "grid.mean_shift=[1]").mean_shifts] == [float]
    assert _errors(GRID, known, "grid.windows=[4, 4.0]") == [
        "grid.windows[1]: 4.0 is refused; the same as grid.windows[0]; keep one"
    ]
    assert _errors(GRID, known, "grid.mean_shift=[0, 0.0]") == [
        "grid.mean_shift[1]: 0.0 is refused; the same as grid.mean_shift[0]; keep one"
    ]


def test_a_float_that_names_no_single_integer_is_refused(known: Known) -> None:
    (line,) = _errors(GRID, known, "replicas.seed=1e19")
    assert line.startswith("replicas.seed: 1e+19 is refused; give an integer from 0 to 18446744073709551615")


def test_settings_that_do_not_fit_together_are_errors(known: Known) -> None:
    lines = _errors(
        GRID,
        known,
        "schedule.steps=4",
        "measure.skip_steps=4",
        "workload.outlier_steps=[3, 4]",
        "replicas.seed=18446744073709551615",
        "replicas.count=2",
        "grid.mean_shift=[1.0]",
        "workload.mean_shift=2.0",
    )
    assert [line.split(":")[0] for line in lines] == [
        "measure.skip_steps",
        "workload.outlier_steps[1]",
        "replicas.seed",
        "workload.mean_shift",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("replicas.cuont=4", 'did you mean "replicas.count"?'),
        ("replicas", "give key=value, like replicas.count=4"),
        ("grid=[1]", "grid is a table; set one of grid.defects, grid.formats"),
        ("=4", "unknown key"),
        ("workload.tensors_digest=ab", 'did you mean "workload.tensors"?'),
        ("title=2", "title: 2 is refused; give a text in quotes"),
        ("grid.windows=[1,", 'grid.windows: "[1," is refused; give a list'),
        ("replicas.count=1\nseed=2", "replicas.count: "),
    ],
)
def test_a_wrong_override_is_an_error(known: Known, override: str, line: str) -> None:
    (found,) = _errors(GRID, known, override)
    assert line in found


def test_overrides_take_toml_values_and_bare_words(known: Known, tensors: Path) -> None:
    config = _load(known, tensors, "replicas.count = 4", "grid.windows=[2]", "title=a b", 'run.preset="te_fused"')
    assert (config.replicas.count, config.grid.windows, config.title) == (4, (2,), "a b")
    assert config.run.preset == "te_fused"


def test_a_study_read_back_from_its_effective_text_has_the_same_cells(known: Known, tensors: Path) -> None:
    title = 'a "b" \\ \t ü \x7f'
    for extra in ("workload.mean_shift=1e-7", "grid.mean_shift=[0, 1e300]"):
        config = _load(known, tensors, extra, text=GRID.replace("[grid]", f"title = '''{title[:-1]}'''\n[grid]"))
        again = load_study(config.to_toml(), known)
        assert again.cells() == config.cells()
        assert again.title == title[:-1]
        assert again.to_toml() == config.to_toml()


def test_relative_tensors_start_at_the_study_and_in_an_override_here(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "t.bin").write_bytes(folder.name.encode())
    (there / "study.toml").write_text(GRID + "[workload]\ntensors = 't.bin'\n")
    monkeypatch.chdir(here)
    path = Path("..") / "there" / "study.toml"
    assert load_study(path, known).tensors_digest == hashlib.sha256(b"there").hexdigest()
    explicit = load_study(str(path), known, ["workload.tensors=t.bin"])
    assert explicit.tensors_digest == hashlib.sha256(b"here").hexdigest()
    assert explicit.cells()[0].workload.tensors == str((here / "t.bin").resolve())


def test_builtin_tensors_keep_their_name_and_get_a_digest(
    known: Known, tensors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_paths, "sample_capture", lambda: tensors)
    workload = load_study(GRID, known).cells()[0].workload
    assert (workload.tensors, workload.tensors_digest) == ("builtin", hashlib.sha256(b"bytes").hexdigest())


def test_missing_tensors_are_unreadable_input(known: Known, tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(InputError, match=r"workload\.tensors: .* cannot be read") as caught:
            load_study(GRID, known, [f"workload.tensors={path}"])
        assert caught.value.exit_code == 3


def test_a_study_that_cannot_be_read_says_where(known: Known, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    with pytest.raises(InputError, match="no study at"):
        load_study(bad, known)
    with pytest.raises(InputError, match="cannot be read"):
        load_study(tmp_path, known)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        load_study(bad, known)
    bad.write_text("schema = 1\nwindows [1]\n")
    with pytest.raises(StudyError, match=r"bad\.toml is no TOML: .*line 2"):
        load_study(bad, known)
    bad.write_text("schema = 1\n")
    with pytest.raises(StudyError, match=r"bad\.toml: 1 error\n"):
        load_study(bad, known)


def test_a_study_cannot_be_changed(known: Known, tensors: Path) -> None:
    config = _load(known, tensors)
    with pytest.raises(ValueError, match="frozen"):
        config.title = "other"
