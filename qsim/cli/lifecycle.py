"""Commands about one lifecycle: the catalogue, one case. They write no file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.cli.options import FeatureOption, OrderOption, StagesOption, one_cell_study, schedule_sets


@app.command()
def defects(json: JsonFlag = False) -> None:
    """List the defects, the invariants that each breaks, and the fixes that silence it."""
    from qsim.report.registries import defects_data, defects_tables

    if json:
        print_json(defects_data())
        return
    out = console()
    for table in defects_tables():
        out.print(table, "")


@app.command()
def run(
    defect: Annotated[str, typer.Argument(help='A defect by id or name (see "defects"), or "correct".')] = "correct",
    fmt: Annotated[str, typer.Option("--format", help="Number format.")] = "e4m3",
    recipe: Annotated[str, typer.Option(help="delayed, centred or current.")] = "delayed",
    window: Annotated[int, typer.Option(min=1, help="Length of the amax history.")] = 1,
    preset: Annotated[str, typer.Option(help="How the system orders its events.")] = "seed_correct",
    fix: Annotated[str, typer.Option(help="A fix to put on top of the defect.")] = "",
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Number of seeds.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches a step.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
    order: OrderOption = "",
    stages: StagesOption = None,
    features: FeatureOption = None,
    guarded: Annotated[bool, typer.Option("--guarded", help="Fail closed: stop at the first broken rule.")] = False,
    backend: Annotated[str, typer.Option(help="numba, oracle, emulated, cuda or auto.")] = "numba",
    tensors: Annotated[str, typer.Option(help="A capture file of your own.")] = "builtin",
) -> None:
    """Replay one case and show what it breaks and costs, step by step."""
    from qsim.backends import resolve_backend
    from qsim.errors import CaseError
    from qsim.report.one_case import case_report
    from qsim.sim import FIXES
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries
    from qsim.sweep.run import replay_cell

    if fix and fix not in FIXES:
        raise typer.BadParameter(f'"{fix}" is unknown; known: {", ".join(FIXES)}', param_hint="--fix")
    study = one_cell_study(defect, fmt, recipe, window, preset, resolve_backend(backend))
    sizes = {"steps": steps, "microbatches": microbatches, "layers": layers, "workers": workers}
    sets = schedule_sets(sizes, order, stages, features)
    sets += [f"replicas.count={replicas}", f"workload.tensors={tensors}"]
    (cell,) = load_study(study, registries(), sets).cells()
    try:
        outcome = replay_cell(cell, fix=fix, guarded=guarded)
    except CaseError as error:
        print(f"qsim: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    out = console()
    for part in case_report(cell, outcome, fix=fix):
        out.print(part)
    raise typer.Exit(0 if outcome.record.as_expected else 1)
