"""The tables of the pages hold what the registries hold: row by row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qsim.scenarios import SCENARIOS
from qsim.sim import DEFECTS, PRESETS, RULES, Feature, Order, in_order

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEFECTS_PAGE, LIFECYCLE, SCHEDULES = (
    (DOCS / f"{name}.md").read_text() for name in ("defects", "lifecycle", "schedules")
)


def rows(page: str) -> list[list[str]]:
    """The cells of every table row."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|.*\|$", page, re.M)]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_row_of_the_catalogue_is_the_registry(name: str) -> None:
    d = DEFECTS[name]
    (row,) = [row for row in rows(DEFECTS_PAGE) if row[0] == name and row[1] == d.name]
    assert [d.kind, d.tier, " ".join(in_order(d.breaks))] == row[2:5]
    assert set(d.needs) <= set(row[5].split(", "))
    assert [", ".join(d.fixes), f"*{', '.join(d.wrong_fixes)}*"] == row[6:8]


def test_every_variant_has_its_row_and_no_other_is_there() -> None:
    due = {(d.id, v.name, " ".join(in_order(v.breaks))) for d in DEFECTS.values() for v in d.variants}
    table = DEFECTS_PAGE.split("## Variants")[1].split("\n## ")[0]
    assert due == {tuple(row) for row in rows(table)[2:]}


def test_every_public_report_has_its_row_and_no_other_is_there() -> None:
    due = {
        (f"`{s.name}`", s.report, s.defect + (f"/{s.variant}" if s.variant else ""), s.repair)
        for s in SCENARIOS.values()
    }
    table = DEFECTS_PAGE.split("## Public reports")[1].split("\n## ")[0]
    assert due == {tuple(row) for row in rows(table)[2:]}


def test_every_invariant_preset_order_and_feature_has_its_row() -> None:
    assert {(r.id, r.name, r.meaning) for r in RULES.values()} <= {tuple(row) for row in rows(LIFECYCLE)}
    presets = {row[0]: row for row in rows(LIFECYCLE) if row[0] in PRESETS}
    assert presets.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        assert [preset.trigger.value, preset.cadence.value] == presets[name][1:3]
        assert all(" ".join(in_order(f.breaks)) in presets[name][7] for f in preset.faults)
    named = {row[0].strip("`") for row in rows(SCHEDULES)}
    assert {order.value for order in Order} | {feature.value for feature in Feature} <= named
