"""The notebook: its two sources agree, it runs, and it prints what is stored in it. Judges no figure."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 240

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")


def stored(path):
    return nbformat.read(path, as_version=4)


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def printed(notebook):
    """What each code cell wrote to stdout."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in cells]


def pictures(notebook):
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return sum("image/png" in out.get("data", {}) for out in outputs)


def test_there_is_a_notebook_to_test():
    assert [path.name for path in NOTEBOOKS] == ["severity_tour.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_script_and_the_notebook_hold_the_same_cells(path):
    assert sources(jupytext.read(path.with_suffix(".py"))) == sources(stored(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_code_cell_was_executed_in_order_when_it_was_stored(path):
    counts = [cell.execution_count for cell in stored(path).cells if cell.cell_type == "code"]
    assert list(range(1, len(counts) + 1)) == counts


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the client's own warnings are no matter of ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_run_prints_and_draws_what_is_stored(path, monkeypatch):
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = stored(path)
    fresh = jupytext.read(path.with_suffix(".py"))
    client.NotebookClient(fresh, timeout=CELL_SECONDS, kernel_name="python3").execute()
    assert printed(kept) == printed(fresh)
    assert pictures(kept) == pictures(fresh) > 0
