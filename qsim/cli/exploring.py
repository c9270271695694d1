"""The command that searches interleavings of workers. It writes no file."""

from __future__ import annotations

from typing import Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json


@app.command()
def explore(
    workers: Annotated[int, typer.Option(min=1, help="Workers, each with its own microbatch.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 1,
    scope: Annotated[str, typer.Option(help="Who shares a state: model, layer or layer_worker.")] = "layer",
    declared: Annotated[str, typer.Option(help="The owners that were declared; the scope by default.")] = "",
    commit: Annotated[str, typer.Option(help="atomic, or split into a read and a write.")] = "atomic",
    codes: Annotated[str, typer.Option(help="own, or scratch: one buffer of codes for all workers.")] = "own",
    preset: Annotated[str, typer.Option(help="How the system orders its events.")] = "seed_correct",
    recipe: Annotated[str, typer.Option(help="delayed, centred or current; one that fits the preset by default.")] = "",
    defect: Annotated[str, typer.Option(help='A defect by id or name (see "defects").')] = "",
    part: Annotated[str, typer.Option(help="What a layer casts: input, linear, gradients or block.")] = "input",
    unit: Annotated[str, typer.Option(help="The declared unit of a commit: microbatch or step.")] = "",
    budget: Annotated[int, typer.Option(min=1, help="States that one engine may visit.")] = 2_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Of random priorities, where the states are too many.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Search all interleavings of workers that share quantizer state for broken invariants.

    Exit code 0: none can break; 1: one can; 4: bounded, and nothing was found.
    """
    from qsim.report.exploration import exit_code, exploration_data, exploration_report, search, space_from_words

    space = space_from_words(
        (workers, steps, layers), (scope, declared), (commit, codes, unit), (preset, recipe, defect, part)
    )
    found = search(space, budget=budget, seed=seed)
    if json:
        print_json(exploration_data(found))
    else:
        out = console()
        for piece in exploration_report(found):
            out.print(piece)
    raise typer.Exit(exit_code(found))
