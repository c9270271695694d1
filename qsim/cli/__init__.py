"""The command line: parses words, calls a door, prints, exits. Imports nothing heavy before a command runs."""

from __future__ import annotations

import sys
from typing import NoReturn

from qsim.cli import (  # noqa: F401  a command registers itself
    about,
    exploring,
    lifecycle,
    replaying,
    schedules,
    sweeps,
)
from qsim.cli.app import app, forget_stdout
from qsim.errors import OutputError, QsimError, UsageError

__all__ = ["app", "main"]


def main() -> NoReturn:
    """Run the command line; a user's mistake is one clear message and an exit code, never a traceback."""
    try:
        app()  # ends in SystemExit; usage errors are typer's own, with exit code 2
    except QsimError as error:
        print(f"qsim: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:  # a kernel that could not be built or launched says why
        if type(error).__module__ != "cuda_kernels":
            raise
        print(f"qsim: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except MemoryError as error:  # of a device it says how much was asked for; of this machine it says nothing
        print(f"qsim: {error or 'out of memory: use fewer replicas or smaller tensors'}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except OSError as error:  # standard output: its reader is gone (nothing is lost), or its device is full
        forget_stdout()
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        print(f"qsim: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(OutputError.exit_code)
    sys.exit(0)
