"""The command that runs one found interleaving again. Writes a file only where it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.cli.severity import print_severity, severity_data


@app.command()
def replay(
    token: Annotated[str, typer.Argument(help='A token that "explore" printed.')],
    pytest: Annotated[Path | None, typer.Option("--pytest", metavar="FILE", help="Write a failing test.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    severity: Annotated[bool, typer.Option("--severity", help="What it costs, by real tensors.")] = False,
    json: JsonFlag = False,
) -> None:
    """Run a found interleaving again, and say which invariant it breaks and why.

    Exit code 0: the token's invariant is kept; 1: it is broken.
    """
    from qsim.explore.counterexample import counterexample, replayed
    from qsim.explore.token import token_of
    from qsim.report.counterexample import (
        counterexample_data,
        counterexample_report,
        replayed_data,
        replayed_line,
    )
    from qsim.report.failing_test import write_test

    read = token_of(token)
    again = replayed(read)
    if pytest is not None:
        write_test(pytest, read, force=force)
    shown = counterexample(read) if again.found else None
    if json:
        data = replayed_data(again) | {"counterexample": None if shown is None else counterexample_data(shown)}
        print_json(data | (severity_data(read, read.space, violation=bool(again.found)) if severity else {}))
    else:
        out = console()
        if shown is None:
            out.print(replayed_line(again), markup=False)
        else:
            for part in counterexample_report(shown, width=out.width):
                out.print(part, markup=False)
        if severity:
            print_severity(out, read, read.space, violation=bool(again.found))
        if pytest is not None:
            out.print(f"wrote {pytest}: it {'fails' if again.found else 'passes'} today", markup=False, soft_wrap=True)
    raise typer.Exit(1 if again.found else 0)
