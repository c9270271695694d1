"""A counterexample as data: what is given, what then happens, because of what, and what would repair it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsim.errors import UsageError
from qsim.explore.causes import Cause, cause_of
from qsim.explore.notation import programs, sign
from qsim.explore.repairs import Repair, repairs
from qsim.explore.result import Kind, kind_of
from qsim.explore.rows import Row, rows_of, walked
from qsim.explore.runs import Choices, completed, interleaved, preemptions
from qsim.explore.space import Space
from qsim.explore.threads import threads
from qsim.explore.token import Token
from qsim.record import Record
from qsim.sim import Violation, judge, records_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """One violated invariant in one run.

    token: the run up to the piece that breaks it. programs: which workers run what. violation: the first of its
    invariant in the completed run; worker and event: who breaks it, doing what. violations: how many there are of
    this invariant. events, preemptions: of the run up to it.
    """

    token: Token
    programs: tuple[tuple[tuple[int, ...], str], ...]
    violation: Violation
    kind: Kind
    worker: int
    event: str
    violations: int
    events: int
    preemptions: int
    rows: tuple[Row, ...]
    cause: Cause
    repairs: tuple[Repair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A token, run again: its records and all violations of the completed run."""

    token: Token
    run: Choices
    records: tuple[Record, ...]
    violations: tuple[Violation, ...]

    @property
    def found(self) -> tuple[Violation, ...]:
        """The violations of the token's invariant."""
        return tuple(v for v in self.violations if v.invariant == self.token.invariant)


def replayed(token: Token) -> Replayed:
    """Run a token to the end of all threads and judge it. UsageError where its choices do not fit its space."""
    partial = interleaved(token.space, token.choices)  # refuses choices that do not fit
    run = completed(token.space, token.choices)
    case = interleaved(token.space, run) if len(run) > len(token.choices) else partial
    records = records_of(case)
    violations = judge(case, records)
    return Replayed(token=token, run=run, records=records, violations=violations)


def counterexample(token: Token) -> Counterexample:
    """The counterexample that a token stands for. UsageError where its run keeps its invariant."""
    again = replayed(token)
    if not again.found:
        raise UsageError(f"token: the run keeps {token.invariant}, so it is no counterexample to it")
    first, space = again.found[0], token.space
    steps = tuple(walked(space, again.run))
    short = Token(space=space, choices=cut(space, again.run, first.event), invariant=token.invariant)
    context = interleaved(space, ()).context
    return Counterexample(
        token=short,
        programs=tuple(programs(space)),
        violation=first,
        kind=kind_of(first),
        worker=steps[first.event].worker,
        event=sign(again.records[first.event]),
        violations=len(again.found),
        events=first.event + 1,
        preemptions=preemptions(space, short.choices),
        rows=rows_of(space, again.run, again.records, again.violations, until=first.event),
        cause=cause_of(first, steps, again.records, context),
        repairs=repairs(space, again.run, token.invariant),
    )


def cut(space: Space, run: Sequence[int], event: int) -> Choices:
    """The run up to and with the piece that holds event number ``event``."""
    pieces, done, count = [thread.pieces for thread in threads(space)], [0] * space.workers, 0
    for at, worker in enumerate(run):
        piece = pieces[worker][done[worker]]
        count += piece.stop - piece.start
        done[worker] += 1
        if count > event:
            return tuple(run[: at + 1])
    return tuple(run)
