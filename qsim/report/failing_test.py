"""Writes a test file for one run: it fails while the run breaks its invariant. Runs nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

from qsim.errors import OutputError, UsageError
from qsim.explore import Token, completed
from qsim.sim import RULES

_TEXT = '''\
"""One interleaving of {workers}, held against {rule}.

The rule: {meaning}.
It fails, and shows the violation, while the protocol breaks the rule. It passes when the protocol is mended: in qsim
itself, or in SPACE below. `python -m qsim replay TOKEN` says what would mend it. RUN says whose turn it is: a worker
that has ended is passed over, and what is left runs at the end.
"""

from qsim.explore import followed, interleaved, space_of
from qsim.sim import judge

# workers.steps.layers.scope.declared.commit.codes.unit.preset.recipe.defect.part
SPACE = "{space}"
RUN = {run}
TOKEN = "{token}"


def test_{name}():
    space = space_of(SPACE)
    case = interleaved(space, followed(space, RUN))
    assert [] == [violation for violation in judge(case) if violation.invariant == "{id}"]
'''


def file_text(token: Token) -> str:
    """The file for a token."""
    rule, workers = RULES[token.invariant], token.space.workers
    run = str(completed(token.space, token.choices))  # the whole run: a prefix may go on in another way
    if len(run) > 112:
        run = f"(\n{textwrap.fill(run[1:-1], 118, initial_indent='    ', subsequent_indent='    ')},\n)"
    return _TEXT.format(
        workers=f"{workers} worker{'s' * (workers != 1)}",
        rule=f"{rule.id} {rule.name}",
        meaning=rule.meaning,
        space=token.space.text(),
        run=run,
        token=token.text(),
        name=f"this_run_keeps_{rule.name}",
        id=rule.id,
    )


def write_test(path: Path, token: Token, *, force: bool) -> None:
    """Write the file. UsageError where one is there and ``force`` is not given, OutputError where it cannot be."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(file_text(token))
    except FileExistsError as error:
        raise UsageError(f"{path} is there already; name another file, or add --force to write over it") from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; name a file in a folder that can be") from error
