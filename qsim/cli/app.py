"""The typer application and what its commands share. Holds no command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qsim import __version__

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="qsim",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Bit-exact FP8/FP4 codecs, and the lifecycle of stateful quantizers under activation recompute.",
    epilog="Exit codes: 0 as expected, 1 an unexpected outcome or failed cells, 2 usage, 3 unreadable input or "
    "unwritable output, 4 inconclusive, 130 Ctrl-C.",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
WIDTH = 126
"""Columns assumed where the output is no terminal."""


def forget_stdout() -> None:
    """Send the rest of standard output nowhere, so that the interpreter's last flush cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Where tables go: as wide as the terminal, or WIDTH."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which means something else here
            forget_stdout()

    out = Quiet(highlight=False)
    return out if out.is_terminal else Quiet(highlight=False, width=WIDTH)


def print_json(data: object) -> None:
    """JSON, indented; NaN and Inf are our own mistake."""
    import json

    print(json.dumps(data, indent=2, allow_nan=False))


def _version(value: bool) -> None:
    if value:
        print(f"qsim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Bit-exact FP8/FP4 codecs, and the lifecycle of stateful quantizers under activation recompute."""
