"""Commands that print and judge schedules. They replay no tensor and write no file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.cli.options import FeatureOption, OrderOption, StagesOption, schedule_sets

if TYPE_CHECKING:
    from qsim.sweep.cell import Cell
    from qsim.sweep.plan import Plan

STEPS, LAYERS = 1, 1
"""Of a schedule that is printed without a study."""


@app.command()
def schedule(
    study: Annotated[Path | None, typer.Argument(help="A study file; without one, the options below.")] = None,
    preset: Annotated[str, typer.Option(help="How the system orders its events.")] = "",
    recipe: Annotated[str, typer.Option(help="delayed, centred or current.")] = "",
    defect: Annotated[str, typer.Option(help="A defect by id or name; of a study: which of its cells.")] = "",
    order: OrderOption = "",
    stages: StagesOption = None,
    features: FeatureOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"Training steps; {STEPS} by default.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches a step; 1 by default.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help=f"Layers; {LAYERS} by default.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; 1 by default.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the notation, which a study can hold.")] = False,
    json: JsonFlag = False,
) -> None:
    """Print one schedule as a table, and what it breaks; exit 1 where it breaks anything."""
    from qsim.errors import CaseError
    from qsim.report.schedule_table import schedule_rows, schedule_table, verdict_lines
    from qsim.sim.notation import declared_by, write_schedule
    from qsim.sweep.plan import plan_of_cell

    if text and json:
        raise typer.BadParameter("choose one of the two", param_hint="--text, --json")
    sizes = {"steps": steps, "microbatches": microbatches, "layers": layers, "workers": workers}
    sets = schedule_sets(sizes, order, stages, features)
    sets += [f"run.preset={preset}"] if preset else []
    sets += [f'grid.recipes=["{recipe}"]'] if recipe else []
    cell = _cell_of_study(study, defect, sets) if study else _cell_of_words(defect, sets)
    try:
        plan = plan_of_cell(cell)
    except CaseError as error:
        print(f"qsim: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if text:
        breaks = frozenset(plan.broken)
        print(write_schedule(plan.case.schedule, declared_by(plan.case.context, breaks)), end="")
    elif json:
        print_json(_data(plan, schedule_rows(plan.case, plan.records)))
    else:
        console().print(schedule_table(schedule_rows(plan.case, plan.records)))
        print()
        for line in verdict_lines(plan.violations, plan.expected):
            print(line)
    raise typer.Exit(1 if plan.violations else 0)


def _data(plan: Plan, rows: list[dict[str, object]]) -> dict[str, object]:
    from qsim.sim import in_order

    found = [violation._asdict() for violation in plan.violations]
    return {"events": rows, "broken": plan.broken, "expected": list(in_order(plan.expected)), "violations": found}


def _cell_of_words(defect: str, sets: list[str]) -> Cell:
    """The options as a study of one cell, so that they are checked in one place."""
    from qsim.cli.options import one_cell_study
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries

    first = [f"schedule.steps={STEPS}", f"schedule.layers={LAYERS}", "measure.skip_steps=0"]
    recipe = "current" if "run.preset=current" in sets else "delayed"
    study = one_cell_study(defect or "correct", recipe=recipe)
    return load_study(study, registries(), [*first, *sets]).cells()[0]


def _cell_of_study(study: Path, defect: str, sets: list[str]) -> Cell:
    """The first cell of a study with this defect; without one, the first of its text or of its first defect."""
    from qsim.cli.options import defect_id
    from qsim.errors import UsageError
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries

    cells = load_study(study, registries(), sets).cells()
    own = [cell.defect for cell in cells if cell.defect not in ("high_precision",)]
    wanted = defect_id(defect) or ("written" if "written" in own else (own or ["high_precision"])[0])
    for cell in cells:
        if cell.defect == wanted:
            return cell
    there = ", ".join(dict.fromkeys(cell.defect for cell in cells))
    raise UsageError(f'--defect "{defect}" is in no cell of {study}; there are: {there}')


@app.command()
def lint(
    study: Annotated[Path, typer.Argument(help="A study file (TOML).")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    json: JsonFlag = False,
) -> None:
    """Judge every distinct schedule of a study without replaying a tensor; exit 1 at an unexpected verdict."""
    from qsim.sim import in_order
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries
    from qsim.sweep.plan import lint_cells

    odd, data = 0, list[dict[str, object]]()
    for cell, plan, why in lint_cells(load_study(study, registries(), list(sets or [])).cells()):
        name = f"{cell.defect} {cell.recipe} {cell.preset}"
        if plan is None:
            data.append({"schedule": name, "status": "not_applicable", "note": why})
            line = f"{name}: not applicable: {why}"
        else:
            broken, expected = list(plan.broken), list(in_order(plan.expected))
            fine = broken == expected
            odd += not fine
            count = len(plan.violations)
            data.append({"schedule": name, "status": "ok", "events": len(plan.records), "broken": broken,
                         "expected": expected, "violations": count, "as_expected": fine})  # fmt: skip
            verdict = "as expected" if fine else f"(!) expected {' '.join(expected) or 'none'}"
            line = f"{name}: {len(plan.records)} events, breaks {' '.join(broken) or 'none'}, {verdict}"
        if not json:
            print(line)
    if json:
        print_json(data)
    raise typer.Exit(1 if odd else 0)
