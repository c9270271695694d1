"""What a reader sees of a training study: tables at any width, notes, rows for export, figures."""

from __future__ import annotations

import csv
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from qsim.errors import UsageError
from qsim.report.packing import GAP, KEY, Column, aligned, key_room, packed
from qsim.report.pictures import is_whole, write_picture
from qsim.report.training_figure import (
    CONTROL,
    FIGURES,
    PALETTE,
    TWIN,
    TWIN_NAME,
    skips_figure,
    spikes_figure,
    styles,
    traces_figure,
)
from qsim.report.training_notes import training_notes
from qsim.report.training_rows import TrainingRow, blocks, training_csv, training_rows, value_class
from qsim.report.training_table import percent, ratio_text, seeds_of, signed, spread_text, training_tables
from qsim.severity.seeds import resampled_mean, spread
from qsim.severity.training import measure_training
from qsim.training.log import TrainLog
from tests.unit.training_logs import log, point, run, step_log

INF, NAN = math.inf, math.nan
SEEDS, STEPS = 5, 20
SKIPS = (18, 19, 19, 20, 20)


def norms(bad: tuple[int, ...] = (0,) * SEEDS, *, spike: float = 1.0) -> list[list[float]]:
    """A row a seed: ``bad`` steps that are inf, then ones; the last step is ``spike``, where it is not bad."""
    rows = [[INF] * n + [1.0] * (STEPS - n) for n in bad]
    return [[*row[:-1], row[-1] * spike] for row in rows]


def twin() -> TrainLog:
    return run(
        norms(),
        scales={"L0": [1.0] * SEEDS, "L1": [2.0] * SEEDS},
        commits={"L0": 20, "L1": 20},
        final_loss=[1.5] * SEEDS,
        matched=[point(s, f"p{p}", [True] * SEEDS) for s in range(2) for p in range(4)],
    )


def naive() -> TrainLog:
    """Shared state with a naive fix: the skips of the article, every point differs, one rule that was not foretold."""
    return run(
        norms(SKIPS),
        digest=["n"] * SEEDS,
        scales={"shared": [1.0] * SEEDS},
        commits={"shared": 40, "other": 0},
        final_loss=[NAN, 1.75, 1.75, INF, 1.625],
        matched=[point(s, f"p{p}", [False] * SEEDS) for s in range(2) for p in range(4)],
        broken=["I1", "I4"],
        expected=["I4"],
    )


def spiky() -> TrainLog:
    """A timing defect: no skip, a spike of 8 in the last step, some points differ, a scale a power of two off."""
    return run(
        norms(spike=8.0),
        digest=["s"] * SEEDS,
        scales={"L0": [1.0] * SEEDS, "L1": [2.0, 2.0, 2.0, 1.0, 2.0]},
        commits={"L0": 20, "L1": 40},
        final_loss=[1.5, 1.5, 1.25, 1.75, 1.75],
        matched=[point(s, f"p{p}", [p > 0, p > s, True, True, True]) for s in range(2) for p in range(4)],
        broken=["I1"],
        expected=["I1"],
    )


def study(setting: str = "FP4, H = 1") -> list[TrainingRow]:
    base = twin()
    runs = {"correct protocol": base, "D05 whole_model_state + naive snapshot": naive(), "D01 [timing]": spiky()}
    return [TrainingRow(name, setting, measure_training(each, base)) for name, each in runs.items()]


def shown(tables: Any, width: int) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    for table in tables:
        out.print(table, "")
    file = out.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def cells(width: int = 126, rows: list[TrainingRow] | None = None) -> dict[tuple[str, str], str]:
    """(protocol, heading) -> cell of the tables with a row a protocol."""
    found = {}
    for table in training_tables(rows if rows is not None else study(), width=width):
        first, *columns = table.columns
        names = [str(cell) for cell in first._cells]
        if str(columns[0].header).strip() == "seed":
            continue
        for column in columns:
            for name, cell in zip(names, column._cells, strict=True):
                found[name, " ".join(str(column.header).split())] = str(cell)
    return found


# ---- tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 126, 300])
def test_tables_fit_the_width_and_cut_nothing(width: int) -> None:
    text = shown(training_tables(study(), width=width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    joined = " ".join(text.split())
    for words in ("D01 [timing]", "18 19 19 20 20", "inf inf inf inf inf", "whole_model_state", "(!) expected"):
        assert words in joined
    assert (width < 300) == ("(1 of" in joined)


def test_a_wider_terminal_needs_fewer_tables() -> None:
    counts = [len(list(training_tables(study(), width=width))) for width in (60, 80, 100, 126, 300)]
    assert counts == sorted(counts, reverse=True)
    assert 5 == counts[-1]  # four themes, and every seed
    assert counts[0] > counts[-1]


def test_a_row_holds_what_the_seeds_of_a_protocol_came_to() -> None:
    found = cells()
    bad = "D05 whole_model_state + naive snapshot"
    assert (18.6, 19.8) == resampled_mean(SKIPS)
    expected = {
        "breaks": "I1 I4 (!) expected I4",
        "non-finite seeds": "5/5 [48, 100%]",
        "skipping seeds": "5/5 [48, 100%]",
        "first bad step a seed": " 0  0  0  0  0",
        "steps skipped a seed": "18 19 19 20 20",
        "share skipped": "96% [93, 99%]",
        "log2 ratio of steps": "0 [0, 0] (3/5)",
        "left out": "96%",
        "spike ratio median": "inf [inf, inf]",
        "spike ratio a seed": " inf  inf  inf  inf  inf",
        "p90": "inf",
        "steps > 3x run, twin": "96, 0 of 100",
        "held out median gap": "+0.25 [+0.12, +inf]",
        "held out worse seeds": "5/5 [48, 100%]",
        "last quarter median gap": "0 [0, 0]",
        "last quarter worse seeds": "0/5 [0, 52%], 5 tied",
        "replay differs in steps": "100% of 2",
        "differing points": "4 of 4",
        "log2 drift median": "-",
        "log2 drift largest": "-",
        "commits made/due": "40/40",
        "owners off": "3 of 4",
        "tokens applied": "2,048 of 51,200",
    }
    assert expected == {heading: cell for (name, heading), cell in found.items() if name == bad}


def test_a_row_of_a_run_that_stays_finite() -> None:
    found = cells()
    expected = {
        "breaks": "I1",
        "non-finite seeds": "0/5 [0, 52%]",
        "first bad step a seed": "19 19 19 19 19",
        "steps skipped a seed": " 0  0  0  0  0",
        "share skipped": "0% [0, 0%]",
        "spike ratio median": "8.00 [8.00, 8.00]",
        "steps > 3x run, twin": "5, 0 of 100",
        "held out median gap": "0 [-0.25, +0.25]",
        "held out worse seeds": "2/5 [5, 85%], 2 tied",
        "replay differs in steps": "0% of 2",
        "differing points": "0..2 of 4",
        "log2 drift median": "0",
        "log2 drift largest": "-1 L1, seed 3",
        "commits made/due": "60/40",
        "owners off": "1 of 2",
    }
    assert expected == {heading: found["D01 [timing]", heading] for heading in expected}
    twin_row = [found["correct protocol", heading] for heading in ("first bad step a seed", "spike ratio a seed")]
    assert [" -  -  -  -  -", "1.00 1.00 1.00 1.00 1.00"] == twin_row


def seed_columns(rows: list[TrainingRow]) -> dict[str, list[str]]:
    tables = [t for t in training_tables(rows, width=300) if str(t.title).endswith("every seed")]
    return {" ".join(str(c.header).split()): [str(cell) for cell in c._cells] for c in tables[0].columns}


def test_every_seed_has_a_line_and_a_protocol_is_named_once() -> None:
    columns = seed_columns(study())
    assert ["0", "1", "2", "3", "4"] * 3 == columns["seed"]
    assert ["0"] * 5 + list(map(str, SKIPS)) + ["0"] * 5 == columns["skipped"]
    assert ["correct protocol", "", "", "", ""] == columns["protocol"][:5]
    assert "D05 whole_model_state + naive snapshot" == " ".join(columns["protocol"][5:10]).strip()
    assert ["yes"] * 5 + ["no"] * 10 == columns["same bits"]


def test_the_line_of_a_seed_holds_what_that_seed_came_to() -> None:
    base = log(
        [step_log(i, norm, loss=[1.0, 1.0]) for i, norm in enumerate([[1.0, 1.0], [1.0, 4.0], [1.0, 1.0], [1.0, 1.0]])],
        scales={"L0": [0.0, 0.0], "L1": [0.0, 0.0]},
        final_loss=[1.0, 1.0],
    )
    bad = log(
        [
            step_log(0, [2.0, 0.25], loss=[1.0, 1.0]),
            step_log(1, [6.0, INF], loss=[1.0, 1.0]),
            step_log(2, [2.0, INF], loss=[1.0, NAN], skipped=[True, True]),
            step_log(3, [1.0, 32.0], loss=[1.5, 1.25], tokens=100),
        ],
        scales={"L0": [1.0, -0.5], "L1": [-3.0, 0.25]},
        final_loss=[1.125, 0.5],
        matched=[point(0, f"p{p}", [p > 2, True]) for p in range(8)] + [point(1, "p0", [True, True])],
        digest=["x", "digest 1"],
    )
    assert {
        "protocol": ["p", ""],
        "seed": ["0", "1"],
        "non- finite": ["0", "2"],
        "skipped": ["1", "2"],
        "first bad": ["1", "1"],
        "log2 ratio": ["+1", "-2"],
        "left out": ["0%", "50%"],
        "spike ratio": ["6.00", "inf"],
        ">3x": ["1", "3"],
        "twin >3x": ["0", "1"],
        "held-out gap": ["+0.12", "-0.5"],
        "last quarter": ["+0.5", "+0.25"],
        "replay differs": ["50%", "0%"],
        "most points": ["3", "0"],
        "largest drift": ["3.0", "0.50"],
        "tokens applied": ["1,124", "612"],
        "same bits": ["no", "yes"],
    } == seed_columns([TrainingRow("p", "", measure_training(bad, base))])


def test_a_long_name_stands_beside_its_seeds_and_leaves_no_empty_lines() -> None:
    text = shown([t for t in training_tables(study(), width=60) if "every seed" in str(t.title)][:1], 60)
    lines = [line for line in text.splitlines() if line.strip()]
    assert 15 == sum(line[22:26].strip().isdigit() for line in lines[2:])
    assert 1 + 3 + 15 >= len(lines)  # title and headings


def test_brackets_hold_the_interval_and_not_the_range() -> None:
    nine = spread([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 90.0])
    assert "5.00 [2.00, 8.00]" == spread_text(nine, 9, ratio_text)
    assert "5.00 [2.00, 8.00] (9/10)" == spread_text(nine, 10, ratio_text)
    assert "-" == spread_text(spread([NAN]), 1, ratio_text)
    assert "3.00" == spread_text(spread([3.0]), 1, ratio_text)


def test_brackets_in_words_are_no_markup() -> None:
    rows = [row._replace(setting="spread 2^2 [bold] [red]") for row in study()]
    text = " ".join(shown(training_tables(rows, width=126), 126).split())
    assert "spread 2^2 [bold] [red]: losses" in text
    assert "D01 [timing]" in text
    assert "inf [inf, inf]" in text


def test_seeds_or_steps_of_another_study_are_no_row_of_the_same_table() -> None:
    other = run([[1.0] * 3] * 2, seeds=[7, 9])
    rows = [*study(), TrainingRow("short", "FP4, H = 1", measure_training(other, other))]
    assert [3, 1] == [len(group) for _, group in blocks(rows)]
    titles = [str(table.title) for table in training_tables(rows, width=300)]
    assert "FP4, H = 1: rules and steps, of 20, seeds 0..4" == titles[0]
    assert "FP4, H = 1: rules and steps, of 3, seeds 7 9" == titles[5]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [((0, 1, 2), "0..2"), ((3, 4), "3 4"), ((5,), "5"), ((0, 2, 4), "0 2 4"), ((2, 1, 0), "2 1 0")],
)
def test_seeds_that_follow_each_other_are_named_by_their_ends(seeds: tuple[int, ...], expected: str) -> None:
    logs = run([[1.0]] * len(seeds), seeds=seeds)
    assert expected == seeds_of(measure_training(logs, logs))


@pytest.mark.parametrize(
    ("value", "as_gap", "as_ratio", "as_share"),
    [
        (0.0, "0", "0", "0%"),
        (0.0004, "+4e-04", "4.0e-04", "0.040%"),
        (0.004, "+0.004", "0.00400", "0.40%"),
        (0.5, "+0.5", "0.50", "50%"),
        (0.996, "+1", "1.00", "99.6%"),
        (1.0, "+1", "1.00", "100%"),
        (12.34, "+12", "12.3", "1234%"),
        (345.6, "+346", "346", "34560%"),
        (-0.25, "-0.25", "-0.250", "-25%"),
        (INF, "+inf", "inf", "inf%"),
        (-INF, "-inf", "inf", "-inf%"),
        (NAN, "-", "-", "-"),
    ],
)
def test_numbers_keep_what_tells_them_apart(value: float, as_gap: str, as_ratio: str, as_share: str) -> None:
    assert (as_gap, as_ratio, as_share) == (signed(value), ratio_text(value), percent(value))


# ---- packing ----------------------------------------------------------------------------------------------


def made(table: Table) -> list[str]:
    return [" ".join(str(column.header).split()) for column in table.columns]


def test_columns_go_below_where_they_do_not_fit_and_every_table_has_the_keys() -> None:
    keys = [Column("key", ["a" * 8, "b"], left=True)]
    columns = [Column(name, ["x" * 8, "y"]) for name in "ABCDE"]
    exact = 8 + 2 * (GAP + 8)
    assert [["key", "A", "B"], ["key", "C", "D"], ["key", "E"]] == [
        made(t) for t in packed("t", keys, columns, width=exact)
    ]
    assert [["key", n] for n in "ABCDE"] == [made(t) for t in packed("t", keys, columns, width=exact - 1)]
    assert ["t (1 of 3)", "t (2 of 3)", "t (3 of 3)"] == [str(t.title) for t in packed("t", keys, columns, width=exact)]
    assert ["t"] == [str(t.title) for t in packed("t", keys, columns, width=100)]


def test_a_column_too_wide_for_any_table_is_wrapped_and_whole() -> None:
    words = [str(n) for n in range(100, 160)]
    text = shown(packed("t", [Column("key", ["k"])], [Column("list", [" ".join(words)])], width=40), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert words == [word for word in text.split() if word.isdigit()]
    long = "V" * 30 + "W" * 30 + "X" * 30
    text = shown(packed("t", [Column("key", ["k"])], [Column("", [long])], width=40), 40)
    assert long == "".join(c for c in text if c in "VWX")


def test_a_key_takes_a_third_at_most() -> None:
    assert (20, KEY, KEY, 8) == (key_room(60), key_room(96), key_room(300), key_room(3))
    name = "a protocol whose name is longer than any table would like"
    text = shown(packed("t", [Column("key", [name], left=True)], [Column("n", ["1"])], width=60), 60)
    lines = [line[:20].strip() for line in text.splitlines()[2:] if line.strip()]
    assert 3 == len(lines)
    assert name == " ".join(lines)


def test_words_of_seeds_stand_below_each_other() -> None:
    assert [" 1   -", "18 inf", " 7"] == aligned([["1", "-"], ["18", "inf"], ["7"]])
    assert [] == aligned([])


# ---- notes ------------------------------------------------------------------------------------------------


def test_notes_say_what_was_done_and_what_it_is_conditional_on() -> None:
    lines = training_notes(study(), mechanism="a decoder of 8 layers from the shipped checkpoint")
    assert ["Aims", "Data", "Estimands", "Methods", "Performance"] == [line.split(":")[0] for line in lines[:5]]
    assert "Data: a decoder of 8 layers from the shipped checkpoint; a run and its twin draw" in lines[1]
    assert (
        "Performance: 5 seeds (0..4), each reported. An interval of a median covers 94% at least; what no seed shows "
        "may still happen in 52% of seeds." == lines[4]
    )
    assert "no" not in training_notes(study())[1].split(";")[0]
    assert lines[5].startswith("Conditional on")
    assert (
        "Controls (FP4, H = 1): of 100 steps of the twin 0 are above 3 times its median norm and 0 are skipped; the "
        "same to the bit as the twin in every seed: correct protocol." == lines[6]
    )
    assert [
        "Other invariants than the catalogue names: D05 whole_model_state + naive snapshot (FP4, H = 1).",
        "D05 whole_model_state + naive snapshot (FP4, H = 1): 3 owners are of this run or of the twin alone, 0 of "
        "both; drift is of the latter.",
    ] == lines[7:]
    assert ["no run has an outcome"] == training_notes([])


def test_notes_count_what_the_twin_does_itself() -> None:
    base = run([[1.0, 1.0, 4.0, INF], [1.0, 1.0, 1.0, INF]])
    row = TrainingRow("p", "", measure_training(run([[1.0] * 4] * 2, digest=["a", "b"]), base))
    assert (
        "Controls: of 8 steps of the twin 3 are above 3 times its median norm and 2 are skipped; the same to the bit "
        "as the twin in every seed: no run." in training_notes([row])
    )


# ---- rows for export --------------------------------------------------------------------------------------


def test_there_is_a_flat_row_for_each_protocol_setting_and_seed() -> None:
    rows = [*study(), *study("FP8")]
    flat = training_rows(rows)
    assert [(p, s, i) for s in ("FP4, H = 1", "FP8") for p in [r.protocol for r in study()] for i in range(5)] == [
        (row["protocol"], row["setting"], row["seed"]) for row in flat
    ]
    assert 1 == len({tuple(row) for row in flat})
    fifth = flat[9]  # naive, seed 4
    expected = {
        "steps": 20, "broken": "I1 I4", "expected": "I4", "as_expected": False, "violations": 2, "identical": False,
        "nonfinite_steps": 20, "skipped_steps": 20, "skipped_share": 1.0, "first_bad_step": 0,
        "norm_ratio_left_out": 1.0, "spike_ratio": INF, "spike_ratio_class": "+inf", "steps_above": 20,
        "twin_steps_above": 0, "final_gap": 0.125, "final_gap_class": "finite", "late_gap": 0.0,
        "late_gap_class": "finite", "matched_steps": 2, "replay_share": 1.0, "replay_points": 4,
        "replay_points_most": 4, "drift_owner": None, "owners_unmatched": 3, "commits": 40, "commits_expected": 40,
        "commit_owners_off": 3, "tokens": 10240, "tokens_applied": 0,
    }  # fmt: skip
    assert expected == {key: fifth[key] for key in expected}
    rest = set(fifth) - set(expected) - {"protocol", "setting", "seed"}
    assert {"norm_ratio_median", "norm_ratio_p90", "drift_log2_largest"} == rest
    assert all(math.isnan(float(str(fifth[key]))) for key in rest)
    assert ("L1", 1.0, None, 2) == (
        flat[13]["drift_owner"],
        flat[13]["drift_log2_largest"],
        flat[0]["first_bad_step"],
        flat[11]["replay_points_most"],
    )


def test_the_csv_reads_back_to_the_same_bits() -> None:
    awkward = run([[0.1, 0.3, 1e-45], [1.0, 3.0, 7.0]], final_loss=[0.1, 5e-324], digest=["a", "b"])
    base = run([[0.7, 0.7, 0.7], [3.0, 7.0, 9.0]], final_loss=[0.3, 0.0])
    rows = [*study(), TrainingRow("p, q", 'a "setting"', measure_training(awkward, base))]
    lines = list(csv.DictReader(io.StringIO(training_csv(rows))))
    for line, row in zip(lines, training_rows(rows), strict=True):
        for key, value in row.items():
            if isinstance(value, float):
                assert np.float64(value).tobytes() == np.float64(line[key]).tobytes()
            else:
                assert line[key] == ("" if value is None else str(value))
    assert "" == training_csv([])


def test_a_class_stands_beside_each_value_that_may_be_no_number() -> None:
    assert ["finite", "+inf", "-inf", "not_measured"] == [value_class(v) for v in (0.0, INF, -INF, NAN)]


# ---- figures ----------------------------------------------------------------------------------------------


def drawn(rows: list[TrainingRow], figure: Any) -> Any:
    pytest.importorskip("matplotlib")
    fig = figure(rows, title="a study")
    fig.canvas.draw()
    return fig


def panel(rows: list[TrainingRow]) -> tuple[Any, Any, Any]:
    """Body, strip of non-finite steps and rug of skipped steps of the first setting."""
    body, strip, rug = drawn(rows, traces_figure).axes[:3]
    assert ("gradient norm", "non-finite", "skipped") == tuple(ax.get_ylabel() for ax in (body, strip, rug))
    return body, strip, rug


def marks(ax: Any) -> list[tuple[float, float, int, str]]:
    """step, height, row and colour of every mark."""
    from matplotlib.colors import to_hex

    return [
        (
            bar.get_x() + bar.get_width() / 2,
            round(bar.get_height() / 0.9, 6),
            int(bar.get_y()),
            to_hex(bar.get_facecolor()),
        )
        for bar in ax.patches
    ]


def test_traces_show_every_nonfinite_and_skipped_step_with_its_share_of_seeds() -> None:
    _, strip, rug = panel(study())
    shares = [sum(step < n for n in SKIPS) / 5 for step in range(STEPS)]
    assert [(s, share, 0, PALETTE[0]) for s, share in enumerate(shares) if share] == marks(strip) == marks(rug)
    assert (0, 1) == strip.get_ylim() == rug.get_ylim()


def test_a_run_that_is_the_twin_to_the_bit_is_drawn_once_and_named() -> None:
    fig = drawn(study(), traces_figure)
    drawn_lines = [line.get_color() for line in fig.axes[0].lines if len(line.get_xdata()) == STEPS]
    assert [TWIN, PALETTE[0], PALETTE[1]] == drawn_lines
    names = [text.get_text().replace("\n", " ") for text in fig.legends[0].get_texts()]
    assert ["correct twin, correct protocol", "D05 whole_model_state + naive snapshot", "D01 [timing]"] == names


def test_each_protocol_has_a_row_of_its_own_in_the_strips_and_none_is_said() -> None:
    base = run([[1.0] * 3] * 2)
    runs = [run([[INF, 1.0, 1.0], [1.0] * 3], digest=["a"] * 2), run([[1.0] * 3, [1.0, NAN, INF]], digest=["b"] * 2)]
    rows = [TrainingRow(f"p{i}", "", measure_training(each, base)) for i, each in enumerate(runs)]
    _, strip, _ = panel(rows)
    assert [(0, 0.5, 1, PALETTE[0]), (1, 0.5, 0, PALETTE[1]), (2, 0.5, 0, PALETTE[1])] == marks(strip)
    calm = [TrainingRow("p", "", measure_training(base, base))]
    _, strip, rug = panel(calm)
    assert ["none"] == [text.get_text() for text in strip.texts] == [text.get_text() for text in rug.texts]


def test_a_median_is_over_all_seeds_and_a_band_over_the_finite_ones() -> None:
    base = run([[1.0] * 4] * 3)
    bad = run([[1.0, 2.0, INF, INF], [1.0, 4.0, 8.0, INF], [1.0, 3.0, NAN, INF]], digest=["a"] * 3)
    body, strip, _ = panel([TrainingRow("p", "", measure_training(bad, base))])
    twin_line, twin_alone, line, alone = body.lines
    assert [1.0] * 4 == list(twin_line.get_ydata())
    assert [1.0, 3.0] == list(line.get_ydata())[:2]
    assert np.isnan(list(line.get_ydata())[2:]).all()  # two of three are not finite: the median has left
    assert 0 == len(twin_alone.get_ydata()) + len(alone.get_ydata())
    low, high = body.get_ylim()
    assert low < 1.0 < 8.0 < high
    bands = [patch.get_data() for patch in body.patches if patch.get_fill()]
    assert [[1.0, 4.0, 8.0], [1.0, 2.0, 8.0]] == [list(bands[1].values[:3]), list(bands[1].baseline[:3])]
    assert np.isnan([bands[1].values[3], bands[1].baseline[3]]).all()
    assert [-0.5, 0.5, 1.5, 2.5, 3.5] == list(bands[1].edges)
    assert [2 / 3, 1.0] == pytest.approx([height for _, height, _, _ in marks(strip)])


def test_a_median_between_gaps_is_a_point() -> None:
    base = run([[1.0] * 5])
    bad = run([[1.0, 1.0, INF, 5.0, INF]], digest=["a"])
    body, _, _ = panel([TrainingRow("p", "", measure_training(bad, base))])
    alone = body.lines[3]
    assert ([3], [5.0]) == (list(alone.get_xdata()), list(alone.get_ydata()))
    assert "o" == alone.get_marker()


def test_a_run_of_nothing_finite_and_a_norm_of_zero_are_drawn() -> None:
    base = run([[0.0, 1.0]])
    body, strip, _ = panel([TrainingRow("p", "", measure_training(run([[INF, INF]], digest=["a"]), base))])
    assert [1.0, 1.0] == [height for _, height, _, _ in marks(strip)]
    assert [body.get_ylim()[0], 1.0] == list(body.lines[0].get_ydata())
    nothing = measure_training(run([[INF]], digest=["a"]), run([[INF]]))
    body, strip, _ = panel([TrainingRow("p", "", nothing)])
    assert [(1.0, TWIN), (1.0, PALETTE[0])] == [(height, colour) for _, height, _, colour in marks(strip)]
    assert (0.1, 10.0) == body.get_ylim()


def steps_of(fig: Any, protocol: str, look: Any, ax: int = 0) -> list[tuple[float, float]]:
    colour = look[protocol].colour
    (line,) = [line for line in fig.axes[ax].lines if line.get_color() == colour and line.get_drawstyle() != "default"]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_spike_ratios_step_up_by_a_seed_and_what_is_not_finite_beyond_the_line() -> None:
    base = run([[1.0]] * 4)
    rows = [
        TrainingRow("p", "s", measure_training(run([[2.0], [INF], [8.0], [2.0]], digest=["a"] * 4), base)),
        TrainingRow("q", "s", measure_training(run([[INF]] * 4, digest=["b"] * 4), base)),
    ]
    fig = drawn(rows, spikes_figure)
    look = styles(rows)
    edge = next(line.get_xdata()[0] for line in fig.axes[0].lines if line.get_drawstyle() == "default")
    assert edge > 8.0
    p, q = (steps_of(fig, name, look) for name in "pq")
    assert [(2.0, 0.25), (2.0, 0.5), (8.0, 0.75)] == p[1:4]
    assert (0.0, 0.0, 1.0) == (p[0][1], q[0][1], p[-1][1])
    assert p[0][0] < 1.0
    assert 1.0 == p[4][1] == q[4][1]
    places = {x for x, _ in (p[4], q[1], q[4])}
    assert all(edge < x < fig.axes[0].get_xlim()[1] for x in places)
    assert p[4][0] != q[4][0]  # neither hides the other
    assert (1.0, 1.0) == steps_of(fig, TWIN_NAME, look)[1]
    assert ["non-\nfinite"] == [text.get_text() for text in fig.axes[0].texts]


def test_ratios_of_zero_and_seeds_without_one_are_told() -> None:
    base = run([[INF], [INF], [1.0]])
    rows = [TrainingRow("p", "s", measure_training(run([[1.0], [INF], [1.0]], digest=["a"] * 3), base))]
    fig = drawn(rows, spikes_figure)
    ax = fig.axes[0]
    ticks = dict(zip([t.get_text() for t in ax.get_xticklabels()], ax.get_xticks(), strict=True))
    (_, first, second, _) = steps_of(fig, "p", styles(rows))
    assert (ticks["0"], 0.5) == first
    assert (1.0, 1.0) == second
    assert ax.get_xlim()[0] < ticks["0"] < 1.0
    words = " ".join(ax.get_xlabel().split())
    assert "spike ratio seeds without a ratio, for the twin is not finite either: p 1" == words


def test_the_heatmap_names_the_skips_of_every_seed_and_hatches_what_was_not_finite() -> None:
    both = [*study(), *study("FP8")[:1]]
    fig = drawn(both, skips_figure)
    ax = fig.axes[0]
    texts = {(t.get_position()[0] - 0.5, t.get_position()[1] - 0.5): t.get_text() for t in ax.texts}
    none = "0 0 0 0 0\nof 20"
    assert {(0, 0): none, (0, 1): "18 19 19 20 20\nof 20", (0, 2): none, (1, 0): none} == texts
    assert [(0, 1)] == [patch.get_xy() for patch in ax.patches if patch.get_hatch()]
    values = ax.collections[0].get_array()
    assert [[0.0, 0.0], [0.96, None], [0.0, None]] == values.tolist()
    assert (0.0, 1.0) == ax.collections[0].get_clim()
    assert 3.0 == ax.get_ylim()[0]  # first protocol on top
    assert "D05 whole_model_state + naive\nsnapshot" == ax.get_yticklabels()[1].get_text()
    assert ["FP4, H = 1", "FP8"] == [label.get_text() for label in ax.get_xticklabels()]


def test_the_heatmap_leaves_out_no_seed_and_wraps_its_settings() -> None:
    base = run([[1.0] * 3] * 7)
    bad = run([[INF] * n + [1.0] * (3 - n) for n in (0, 1, 2, 3, 0, 1, 2)], digest=["a"] * 7)
    setting = "mean-centred along channels, spread 2^2"
    ax = drawn([TrainingRow("p", setting, measure_training(bad, base))], skips_figure).axes[0]
    assert ["0 1 2 3 0\n1 2\nof 3"] == [text.get_text() for text in ax.texts]
    assert "mean-centred along\nchannels, spread 2^2" == ax.get_xticklabels()[0].get_text()


@pytest.mark.parametrize(
    ("name", "settings"), [("traces.png", 1), ("traces.png", 3), ("spikes.png", 3), ("skips.png", 3)]
)
def test_figures_hold_all_their_words(name: str, settings: int) -> None:
    rows = [row for i in range(settings) for row in study(f"setting {i} with a rather long name, spread 2^2 [1, 1, 0]")]
    fig = drawn(rows, FIGURES[name])
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_figure_drawn_again_is_the_same_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file in ("a.png", "b.png"):
        write_picture(FIGURES[name](study(), title="a study"), tmp_path / file, mark="m")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert is_whole(tmp_path / "a.png", "m")


@pytest.mark.parametrize("figure", list(FIGURES.values()))
def test_without_rows_or_matplotlib_there_is_a_hint(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        figure([], title="t")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r'needs .*; install "qsim\[plot\]"'):
        figure(study(), title="t")


# ---- colours ----------------------------------------------------------------------------------------------


def test_a_protocol_looks_the_same_in_every_figure_and_the_twin_is_grey() -> None:
    found = styles(study())
    assert (TWIN, TWIN, PALETTE[0], PALETTE[1]) == tuple(style.colour for style in found.values())
    assert [TWIN_NAME, *[row.protocol for row in study()]] == list(found)
    partly = run(norms(), digest=["digest 0", *"abcd"])  # the twin in one seed of five is not the twin
    assert PALETTE[0] == styles([TrainingRow("p", "", measure_training(partly, twin()))])["p"].colour
    many = [TrainingRow(f"p{i}", "", measure_training(spiky(), twin())) for i in range(14)]
    more = [styles(many)[f"p{i}"] for i in range(14)]
    assert 14 == len({(style.colour, style.dash) for style in more})
    assert [more[0].colour, "-"] == [more[6].colour, more[5].dash]
    high = [TrainingRow("high precision", "", measure_training(spiky(), twin())), *study()]
    assert (CONTROL, PALETTE[0]) == (
        styles(high)["high precision"].colour, styles(high)["D05 whole_model_state + naive snapshot"].colour
    )  # fmt: skip


# Full dichromacy: G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A physiologically-based model for simulation of
# color vision deficiency", IEEE Transactions on Visualization and Computer Graphics 15, 2009. On linear RGB.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]
    ],
}  # fmt: skip


def lab(colour: str, vision: str) -> Any:
    """CIE L*a*b* (D65) of an sRGB colour as it is seen."""
    code = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", list(VISION))
def test_colours_of_protocols_keep_apart_for_every_eye(vision: str) -> None:
    apart = [
        float(np.linalg.norm(lab(a, vision) - lab(b, vision)))
        for a, b in itertools.combinations((*PALETTE, TWIN, CONTROL), 2)
    ]
    assert min(apart) > 15.0
