"""The command that searches interleavings of workers. It writes no file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.cli.severity import print_severity, severity_data

if TYPE_CHECKING:
    from qsim.explore import Search


@app.command()
def explore(
    workers: Annotated[int, typer.Option(min=1, help="Workers, each with its own microbatch.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 1,
    scope: Annotated[str, typer.Option(help="Who shares a state: model, layer or layer_worker.")] = "layer",
    declared: Annotated[str, typer.Option(help="The owners that were declared; the scope by default.")] = "",
    commit: Annotated[str, typer.Option(help="atomic, split, torn, reduced or async.")] = "atomic",
    codes: Annotated[str, typer.Option(help="own, or scratch: one buffer of codes for all workers.")] = "own",
    preset: Annotated[str, typer.Option(help="How the system orders its events.")] = "seed_correct",
    recipe: Annotated[str, typer.Option(help="delayed, centred or current; one that fits the preset by default.")] = "",
    defect: Annotated[str, typer.Option(help='A defect by id or name (see "defects").')] = "",
    part: Annotated[str, typer.Option(help="What a layer casts: input, linear, gradients or block.")] = "input",
    unit: Annotated[str, typer.Option(help="The declared unit of a commit: microbatch or step.")] = "",
    budget: Annotated[int, typer.Option(min=1, help="States that one engine may visit.")] = 2_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Of random priorities, where the states are too many.")] = 0,
    invariant: Annotated[str, typer.Option(help="The invariant to show, as I3; the first that is broken.")] = "",
    token: Annotated[bool, typer.Option("--token", help="Print the token of the counterexample alone.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Show the run in this space: do not shrink it.")] = False,
    severity: Annotated[bool, typer.Option("--severity", help="What it costs, by real tensors.")] = False,
    json: JsonFlag = False,
) -> None:
    """Search all interleavings of workers that share quantizer state for broken invariants; show one that is broken.

    Exit code 0: none can break; 1: one can; 4: bounded, and nothing was found.
    """
    from qsim.report.exploration import exit_code, search, space_from_words

    space = space_from_words(
        (workers, steps, layers), (scope, declared), (commit, codes, unit), (preset, recipe, defect, part)
    )
    _require_rule(invariant)
    found = search(space, budget=budget, seed=seed)
    _show(found, invariant=invariant, only_token=token and not json, whole=whole, severity=severity, json=json)
    raise typer.Exit(exit_code(found))


def _require_rule(invariant: str) -> None:
    from qsim.sim import RULES

    if invariant and invariant not in RULES:
        raise typer.BadParameter(f'"{invariant}" is unknown; known: {", ".join(RULES)}', param_hint="--invariant")


def _show(found: Search, *, invariant: str, only_token: bool, whole: bool, severity: bool, json: bool) -> None:
    from qsim.explore.token import Token
    from qsim.report.counterexample import counterexample_data, counterexample_report, explored
    from qsim.report.exploration import exploration_data, exploration_report

    before, shown = explored(found, invariant, whole=whole)
    if only_token:
        print(*([] if shown is None else [shown.token.text()]), sep="", end="\n" if shown else "")
        return
    # Without a violation the run that costs is any: the workers one after the other.
    run = Token(space=found.space, choices=(), invariant=invariant or "I1") if shown is None else shown.token
    if json:
        data = exploration_data(found) | {
            "token": None if shown is None else shown.token.text(),
            "counterexample": None if shown is None else counterexample_data(shown),
        }
        print_json(data | (severity_data(run, found.space, violation=shown is not None) if severity else {}))
        return
    out = console()
    for part in exploration_report(found):
        out.print(part)
    if shown is not None:
        out.print("")
        for part in counterexample_report(shown, before=before, width=out.width):
            out.print(part, markup=False)
        out.print(f"token: {shown.token.text()}", markup=False, soft_wrap=True)
    elif invariant and found.findings:
        out.print(f"no run breaks {invariant}")
    if severity:
        print_severity(out, run, found.space, violation=shown is not None)
