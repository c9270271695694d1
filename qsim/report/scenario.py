"""A played scenario for a reader: what broke, what it cost, what repairs it. Plays nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from qsim.report.severity_table import figure
from qsim.scenarios import SCENARIOS, Outcome
from qsim.sim import FIXES, RULES, get_defect, in_order

if TYPE_CHECKING:
    from rich.table import Table


def scenario_report(outcome: Outcome) -> Iterator[str | Table]:
    """The parts of the report, in order."""
    scenario = outcome.scenario
    defect = get_defect(scenario.defect)
    spec = scenario.spec
    variant = f", {scenario.variant}" if scenario.variant else ""
    yield f"{scenario.name}: {scenario.report}; {defect.id} {defect.name}{variant}"
    yield scenario.what
    features = " ".join(sorted(feature.value for feature in spec.features)) or "none"
    yield (
        f"\npreset {scenario.preset}, {scenario.recipe} {scenario.fmt}, window {scenario.window}; {spec.steps} steps x "
        f"{spec.microbatches} microbatches x {spec.layers} layers, {spec.workers} worker(s), order "
        f"{spec.order.value}, features: {features}; {scenario.seeds} seeds of drawn tensors"
    )
    verdict = (
        "as expected" if outcome.broken == outcome.expected else f"expected {' '.join(in_order(outcome.expected))}"
    )
    yield f"\nwhat broke: {' '.join(in_order(outcome.broken)) or 'nothing'} ({verdict})"
    for rule in in_order(outcome.broken):
        mine = [v for v in outcome.violations if v.invariant == rule]
        first = mine[0]
        yield f"  {rule} {RULES[rule].name}, {len(mine)} times; event {first.event}, {first.owner}: {first.because}"
    yield ""
    yield _table(outcome)
    yield (
        f"errors are relative, of GEMM outputs in phases {' '.join(scenario.phases)}; log2 scale ratio: of scale "
        "over the correct twin's, median of the casts at that place"
    )
    yield f"\nforward and recompute differ in {100 * outcome.replay:.0f}% of the GEMMs"
    broken, correct = outcome.over_window
    if not math.isnan(broken):
        yield (
            f"amaxes over what their scale was made for, after the first window: {100 * broken:.1f}% of the casts, "
            f"{100 * correct:.1f}% when correct"
        )
    after = " ".join(in_order(outcome.after_repair)) or "nothing"
    said = "what repairs it" if outcome.mends else "what was tried"
    yield (
        f"{said}: {scenario.repair}: {FIXES[scenario.repair].story} Broken after it: {after}; largest error "
        f"against the correct twin {figure(outcome.mended_error)}"
    )


def _table(outcome: Outcome) -> Table:
    from rich.table import Table

    table = Table(title="against the correct twin, and against high precision", title_justify="left", box=None,
                  show_edge=False)  # fmt: skip
    columns = ("error median", "largest", "to truth", "to truth if correct", "log2 scale ratio")
    for column in (outcome.scenario.view.value, *columns):
        table.add_column(column, justify="right")
    for line in outcome.lines:
        table.add_row(
            str(line.at),
            figure(line.error),
            figure(line.worst),
            figure(line.truth),
            figure(line.truth_correct),
            f"{line.scales:+.2f}",
        )
    return table


def scenarios_table() -> Table:
    """Every scenario in one line."""
    from rich.table import Table

    table = Table(title="public reports: python -m qsim run NAME", title_justify="left", box=None, show_edge=False)
    for column in ("name", "report", "defect", "repair"):
        table.add_column(column)
    for scenario in SCENARIOS.values():
        defect = scenario.defect + (f"/{scenario.variant}" if scenario.variant else "")
        table.add_row(scenario.name, scenario.report, defect, scenario.repair)
    return table
