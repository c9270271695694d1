"""A counterexample for a reader and as JSON: Let, Then, because, however; what changed. Finds nothing."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from qsim.explore import Search
from qsim.explore.counterexample import Counterexample, Replayed, counterexample
from qsim.explore.repairs import Repair
from qsim.explore.shrink import SECONDS, Size, shrink, size_of
from qsim.explore.token import Token
from qsim.report.exploration import run_text, space_text
from qsim.sim import RULES

if TYPE_CHECKING:
    from rich.table import Table

_INDENT = 9
LONGEST = 600
"""Characters of a worker's program that are shown."""
FIRST, LAST = 8, 32
"""Rows of a long table that are shown; JSON has all of them."""


def found_token(found: Search, invariant: str) -> Token | None:
    """The least run that breaks ``invariant`` ("": the first that is broken); None where no run does."""
    for finding in found.findings:
        if invariant in ("", finding.kind.invariant):
            return Token(space=found.space, choices=finding.calmest, invariant=finding.kind.invariant)
    return None


def shrunk(token: Token, *, seconds: float = SECONDS) -> Token:
    """``shrink`` by this machine's clock."""
    return shrink(token, clock=time.perf_counter, seconds=seconds)


def counterexample_report(
    shown: Counterexample, *, before: Token | None = None, width: int = 120
) -> Iterator[str | Table]:
    """The parts of the report, in order. before: what it was shrunk from."""
    for word, said in _sentences(shown):
        yield textwrap.fill(said, width, initial_indent=f"{word:<{_INDENT}}", subsequent_indent=" " * _INDENT)
    yield ""
    yield _table(shown)
    if before is not None and before != shown.token:
        yield f"shrunk from {_size(size_of(before))}; to {_size(size_of(shown.token))}"


def _sentences(shown: Counterexample) -> Iterator[tuple[str, str]]:
    space, rule = shown.token.space, RULES[shown.token.invariant]
    yield "Let", f"{space_text(space)};"
    for workers, program in shown.programs:
        who = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        yield "", f"{who} run{'s' * (len(workers) == 1)}, alone, {_short(program)}."
    run = run_text(shown.token.choices)
    yield (
        "Then",
        (
            f"in the run {run} ({_of(shown.preemptions, 'preemption')}) event {shown.violation.event}, {shown.event} "
            f"of worker {shown.worker}, breaks {rule.id} {rule.name}: {shown.violation.because} "
            f"(owner {shown.violation.owner}; {_of(shown.violations, 'violation')} of {rule.id} in the run),"
        ),
    )
    yield "because", f"{shown.cause.because}."
    yield "however", f"{_however(shown)}."


def _short(program: str) -> str:
    """Enough of a long program to see what it repeats."""
    return program if len(program) <= LONGEST else f"{program[:LONGEST].rsplit(' ', 1)[0]} ..."


def _however(shown: Counterexample) -> str:
    rule = shown.token.invariant
    helps = [r for r in shown.repairs if r.everywhere]
    here = [r.name for r in shown.repairs if r.same_run and not r.everywhere]
    useless = [r.name for r in shown.repairs if not r.same_run]
    said = []
    if helps:
        said.append(f"{rule} is kept, in this run and in this space, with {'; '.join(map(_repair, helps))}")
    if here:
        said.append(f"in this run alone with {', '.join(here)}")
    if useless:
        said.append(f"it {'stays' if helps or here else 'is'} broken with {', '.join(useless)}")
    return (
        ". ".join(part[0].upper() * (at > 0) + part[(at > 0) :] for at, part in enumerate(said)) or "nothing was tried"
    )


def _repair(repair: Repair) -> str:
    left = f", where {' and '.join(sorted(repair.left))} can break" if repair.left else ""
    return f"{repair.name} ({repair.tried}{'' if repair.proof else ': no proof'}{left})"


def _table(shown: Counterexample) -> Table:
    from rich.table import Table

    table = Table(title='what changed (">": preemption)', title_justify="left", box=None, show_edge=False)
    for column in ("", "event", "worker", "does", "cells", "snapshots", "breaks"):
        table.add_column(column, justify="right" if column in ("event", "worker") else "left")
    rows, left_out = shown.rows, len(shown.rows) - FIRST - LAST
    for at, row in enumerate(rows):
        if left_out > 1 and at == FIRST:
            table.add_row("", "...", "", f"{left_out} rows", "", "", "")
        if left_out > 1 and FIRST <= at < len(rows) - LAST:
            continue
        table.add_row(
            ">" if row.preempts else "",
            str(row.seq),
            str(row.worker),
            row.event,
            ", ".join(row.cells),
            ", ".join(row.snapshots),
            " ".join(row.verdicts),
        )
    return table


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _size(size: Size) -> str:
    return ", ".join(_of(count, name[:-1]) for name, count in size._asdict().items())


def counterexample_data(shown: Counterexample) -> dict[str, object]:
    """The counterexample as JSON data."""
    return {
        "invariant": shown.token.invariant,
        "kind": shown.kind.name.lower(),
        "let": {
            "space": shown.token.space.text(),
            "programs": [{"workers": list(workers), "runs": text} for workers, text in shown.programs],
        },
        "then": {
            "choices": list(shown.token.choices),
            "event": shown.violation.event,
            "worker": shown.worker,
            "does": shown.event,
            "owner": shown.violation.owner,
            "because": shown.violation.because,
            "events": shown.events,
            "preemptions": shown.preemptions,
        },
        "because": {
            "read": shown.cause.read, "writes": list(shown.cause.writes), "text": shown.cause.because,
        },
        "however": [
            {
                "repair": r.name, "same_run": r.same_run, "everywhere": r.everywhere, "tried": r.tried,
                "proof": r.proof, "left": sorted(r.left),
            }
            for r in shown.repairs
        ],
        "table": [row._asdict() for row in shown.rows],
        "token": shown.token.text(),
    }  # fmt: skip


def replayed_line(again: Replayed) -> str:
    """The verdict of a replay, where the token's invariant is kept."""
    others = sorted({v.invariant for v in again.violations})
    said = f"breaks {', '.join(others)}" if others else "breaks no invariant"
    space = again.token.space
    return f"{space_text(space)}\nthe run {run_text(again.run)} keeps {again.token.invariant} and {said}"


def replayed_data(again: Replayed) -> dict[str, object]:
    """The verdicts of a replay as JSON data."""
    return {
        "token": again.token.text(),
        "space": again.token.space.text(),
        "invariant": again.token.invariant,
        "broken": sorted({v.invariant for v in again.violations}),
        "violations": [violation._asdict() for violation in again.violations],
    }


def explored(found: Search, invariant: str, *, whole: bool) -> tuple[Token | None, Counterexample | None]:
    """The found run of an invariant, and the counterexample that it was shrunk to; ``whole``: it is not shrunk."""
    token = found_token(found, invariant)
    if token is None:
        return None, None
    return token, counterexample(token if whole else shrunk(token))
