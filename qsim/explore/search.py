"""Chooses an engine for a space: all states where they fit the budget, else bounds on preemptions, else chance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from qsim.checks import whole_number
from qsim.explore.breadth import Reached, breadth_first
from qsim.explore.chance import chance_of_a_run, random_priorities
from qsim.explore.classes import count_classes
from qsim.explore.compiling import compiled
from qsim.explore.enumeration import count_schedules
from qsim.explore.preempted import Least, preemption_bounded
from qsim.explore.program import First, Program, first_raises
from qsim.explore.result import Engine, Finding, Kind, Search
from qsim.explore.runs import Choices, preemptions
from qsim.explore.space import Space

BUDGET = 2_000_000
"""States that one engine may visit."""
MOST_PREEMPTIONS = 3
PCT_RUNS, PCT_DEPTH, PCT_PIECES = 1000, 3, 100_000
"""Random priorities: runs, constraints of order that a violation may need, and pieces of all runs together."""


def explore(space: Space, *, clock: Callable[[], float], budget: int = BUDGET, seed: int = 0) -> Search:
    """Search ``space``. clock: seconds from any origin. seed: of the random priorities, where it comes to that.

    Raises UsageError for a budget below 1, CaseError for a space whose events cannot be followed.
    """
    started = clock()
    budget = whole_number("explore: budget", budget, least=1)
    program = compiled(space)
    reached = breadth_first(program, budget=budget)
    if reached.whole:
        engine, bound = Engine.BREADTH_FIRST, ""
        findings = _least_runs(space, program, reached.runs, budget)
    else:
        engine, bound, findings = _beyond(space, program, reached, budget, seed)
    return Search(
        space=space,
        engine=engine,
        states=reached.states,
        seconds=clock() - started,
        exhaustive=reached.whole,
        private=program.private,
        classes=count_classes(program),
        schedules=count_schedules(program),
        findings=findings,
        bound=bound,
    )


def _least_runs(space: Space, program: Program, runs: Mapping[Kind, Choices], budget: int) -> tuple[Finding, ...]:
    """For each kind that can happen the least runs; ``runs`` are used where looking for lesser ones is too much."""
    calm, whole = _calmest(program, runs, budget)
    short = preemption_bounded(program, most=None, wanted=runs, budget=budget)
    found = []
    for kind in program.kinds:
        if kind in runs:
            known = [_as_least(space, runs[kind], first_raises(program, runs[kind])[kind])]
            known += [least[kind] for least in (calm, short.least) if kind in least]
            found.append(_finding(kind, known, whole and short.whole))
    return tuple(found)


def _calmest(program: Program, wanted: Collection[Kind], budget: int) -> tuple[dict[Kind, Least], bool]:
    """For each kind the run with the fewest preemptions, and whether that is known of all."""
    calm: dict[Kind, Least] = {}
    for most in range(sum(program.lengths)):
        missing = frozenset(wanted) - calm.keys()
        if not missing:
            break
        bounded = preemption_bounded(program, most=most, wanted=missing, budget=budget)
        calm |= bounded.least
        if not bounded.whole:
            return calm, False
    return calm, True


def _as_least(space: Space, choices: Choices, first: First) -> Least:
    choices = choices[: first.pieces]
    return Least(first.events, preemptions(space, choices), choices)


def _finding(kind: Kind, known: list[Least], least: bool) -> Finding:
    short = min(known, key=lambda run: run[:2])
    calm = min(known, key=lambda run: (run.preemptions, run.events))
    return Finding(
        kind=kind,
        choices=short.choices,
        events=short.events,
        preemptions=short.preemptions,
        fewest_preemptions=calm.preemptions,
        calmest=calm.choices,
        least=least,
    )


def _beyond(
    space: Space, program: Program, reached: Reached, budget: int, seed: int
) -> tuple[Engine, str, tuple[Finding, ...]]:
    """What can still be said where the states do not fit the budget."""
    known = {kind: [_as_least(space, run, first_raises(program, run)[kind])] for kind, run in reached.runs.items()}
    said, covered = [f"breadth first was stopped after {reached.states:,} states"], -1
    for most in range(MOST_PREEMPTIONS + 1):
        bounded = preemption_bounded(program, most=most, wanted=program.kinds, budget=budget)
        for kind, least in bounded.least.items():
            known.setdefault(kind, []).append(least)
        if not bounded.whole:
            break
        covered = most
    if covered >= 0:
        said.append(f"every run with at most {covered} preemption{'s' * (covered != 1)} was covered")
    engine = Engine.PREEMPTION_BOUNDED
    if covered < MOST_PREEMPTIONS:
        engine = Engine.PCT
        said.append(_by_chance(space, program, known, seed))
    found = tuple(_finding(kind, known[kind], least=False) for kind in program.kinds if kind in known)
    return engine, "; ".join(said), found


def _by_chance(space: Space, program: Program, known: dict[Kind, list[Least]], seed: int) -> str:
    """Add what random priorities find to ``known``, and say how much was tried."""
    runs = min(PCT_RUNS, 1 + PCT_PIECES // sum(program.lengths))
    for choices in random_priorities(program, runs=runs, depth=PCT_DEPTH, seed=seed):
        for kind, first in first_raises(program, choices).items():
            known.setdefault(kind, []).append(_as_least(space, choices, first))
    chance = float(chance_of_a_run(program, PCT_DEPTH))
    return f"{runs} runs by random priorities (depth {PCT_DEPTH}, seed {seed}): p >= {chance:.2g} a run"
