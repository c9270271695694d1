"""Commands about one lifecycle: the catalogue, one case. They write no file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.cli.options import FeatureOption, OrderOption, StagesOption, one_cell_study, schedule_sets

ARTICLE = "article"
"""What stands for a defect in ``run``: the training run in which the article's defect was isolated."""
FigureOption = Annotated[
    Path | None, typer.Option("--figure", help='Of "article": a PNG of what makes its gradients spike.')
]
ControlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--control",
        help='Of "article", as often as you like: accumulation, low_precision_off, high_precision_attention, '
        "matched_points.",
    ),
]


@app.command()
def defects(
    matrix: Annotated[bool, typer.Option("--matrix", help="Try each defect on families of schedules.")] = False,
    strength: Annotated[int, typer.Option(min=1, max=4, help="Features that meet in some family.")] = 2,
    numbers: Annotated[bool, typer.Option("--numbers", help="With tensors too: minutes.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the defects, the invariants that each breaks, and the fixes that silence it."""
    if matrix:
        _matrix(strength, numbers, json)
        return
    from qsim.report.registries import defects_data, defects_tables
    from qsim.report.scenario import scenarios_table

    if json:
        print_json(defects_data())
        return
    out = console()
    for table in (*defects_tables(), scenarios_table()):
        out.print(table, "")


def _matrix(strength: int, with_numbers: bool, json: bool) -> None:
    from qsim.errors import CaseError
    from qsim.matrix import build_matrix, families, measure, vacuity
    from qsim.report.matrix_table import blind_table, catch_table, matrix_data, notes, rows_of
    from qsim.sim import DEFECTS

    every, found = list(DEFECTS.values()), families(strength)
    result = build_matrix(every, found, strength=strength)
    seen, numbers = [], []
    for family in found:
        still, correct = vacuity(family)
        seen.append(still)
        measured = {}
        for defect, variant in rows_of(every) if with_numbers else ():
            try:
                measured[defect.id, variant] = measure(defect, family, correct=correct, variant=variant)
            except CaseError:
                continue  # the matrix says why it is not hosted
        numbers.append(measured)
    numbers = numbers if with_numbers else []
    if json:
        print_json(matrix_data(result, every, seen, numbers))
    else:
        out = console()
        out.print(catch_table(result, every, numbers), "", blind_table(result, seen), "")
        for note in notes(result, every, numbers):
            out.print(note)
    raise typer.Exit(0 if all(cell.as_expected for cell in result.cells) else 1)


@app.command()
def run(
    context: typer.Context,
    defect: Annotated[
        str, typer.Argument(help='A defect or a public report (see "defects"), "correct", or "article".')
    ] = "correct",
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
    controls: ControlOption = None,
    figure: FigureOption = None,
) -> None:
    """Replay one case and show what it breaks and costs, step by step.

    "article" trains instead, 20 steps on 2 seeds where --steps and --replicas do not say otherwise: see --control.
    """
    from qsim.backends import resolve_backend
    from qsim.errors import CaseError
    from qsim.report.one_case import case_report
    from qsim.scenarios import SCENARIOS
    from qsim.sim import FIXES
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries
    from qsim.sweep.run import replay_cell

    if defect.lower() == ARTICLE:
        _run_article(controls or [], replicas if _typed(context, "replicas") else 2, backend, figure, context)
    for option, given in (("--control", controls), ("--figure", figure)):
        if given:
            raise typer.BadParameter(f'only "run {ARTICLE}" has it; leave {option} out', param_hint=option)
    if fix and fix not in FIXES:
        raise typer.BadParameter(f'"{fix}" is unknown; known: {", ".join(FIXES)}', param_hint="--fix")
    if defect.lower() in SCENARIOS:
        _run_scenario(defect.lower(), fix, context)
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


def _run_article(
    controls: list[str], replicas: int, backend: str, figure: Path | None, context: typer.Context
) -> NoReturn:
    """Train under the article's defect, then under each control, and say what each rules out."""
    import msgspec

    from qsim.backends import resolve_backend
    from qsim.errors import UsageError
    from qsim.report.article import walk_lines, walk_table
    from qsim.training.article import SUSPECT, mechanism, named_controls, walk

    allowed = ("defect", "controls", "replicas", "backend", "steps", "figure")
    given = [p for p in context.params if p not in allowed and _typed(context, p)]
    if given:
        option = next(p.opts[0] for p in context.command.params if p.name == given[0])
        raise typer.BadParameter(f"{ARTICLE} is a training run of its own; leave {option} out")
    steps = context.params["steps"] if _typed(context, "steps") else SUSPECT.loop.steps
    matched = tuple(range(min(steps, len(SUSPECT.loop.matched))))
    loop = msgspec.structs.replace(SUSPECT.loop, steps=steps, matched=matched)
    config = msgspec.structs.replace(SUSPECT, loop=loop, backend=resolve_backend(backend))
    seeds = tuple(range(replicas))
    try:
        named = named_controls(controls)
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--control") from None
    if figure is not None and not (figure.suffix == ".png" and figure.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{figure}: give a .png in a folder that exists", param_hint="--figure")
    found = walk(config, seeds, named)
    out = console()
    out.print(walk_table(found, seeds), "")
    for line in walk_lines(found):
        out.print(line)
    if figure is not None:
        from qsim.report.mechanism import mechanism_figure
        from qsim.report.pictures import write_picture

        write_picture(mechanism_figure(mechanism(config, seeds[0])), figure, mark="")
        print(f"figure: {figure}")
    raise typer.Exit(0)


def _run_scenario(name: str, fix: str, context: typer.Context) -> NoReturn:
    """Play a public report, which brings its own schedule, recipe and tensors."""
    from qsim.report.scenario import scenario_report
    from qsim.scenarios import get_scenario, play_scenario

    given = [p for p in context.params if p not in ("defect", "fix") and _typed(context, p)]
    if given:
        raise typer.BadParameter(f"{name} is a public report with a schedule of its own; leave --{given[0]} out")
    scenario = get_scenario(name)
    outcome = play_scenario(replace(scenario, repair=fix) if fix else scenario)
    out = console()
    for part in scenario_report(outcome):
        out.print(part)
    raise typer.Exit(0 if outcome.as_expected else 1)


def _typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
