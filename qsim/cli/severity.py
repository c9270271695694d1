"""What --severity adds to a run that was found. Loads the arithmetic only where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from qsim.explore import Space, Token


def severity_data(token: Token, whole: Space, *, violation: bool) -> dict[str, object]:
    """The cost of a token's run, and where it is a ``violation`` of the dearest run of ``whole``, under one key."""
    from qsim.explore.cost import Setting
    from qsim.report.run_cost import cost_data

    return {"severity": cost_data(token, whole, Setting(), violation=violation)}


def print_severity(out: Console, token: Token, whole: Space, *, violation: bool) -> None:
    """The same in lines."""
    from qsim.explore.cost import Setting
    from qsim.report.run_cost import cost_report

    for line in cost_report(token, whole, Setting(), violation=violation):
        out.print(line, markup=False, soft_wrap=True)
