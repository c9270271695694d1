"""What would repair a counterexample: every fix, and what the space could do otherwise, tried. Believes no name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from qsim.errors import CaseError, QsimError
from qsim.explore.breadth import breadth_first
from qsim.explore.carried import same_order
from qsim.explore.compiling import compiled
from qsim.explore.enumeration import all_runs, count_schedules
from qsim.explore.runs import Choices, completed, interleaved
from qsim.explore.sampled import some_runs
from qsim.explore.space import Codes, Commits, Space
from qsim.sim import FIXES, Case, Violation, broken, judge

RUNS = 256
"""Runs of a space on which a fix is tried."""
EVENTS = 20_000
"""Events of all these runs together: a run of many layers is judged less often."""
STATES = 50_000
"""States of a space that does it otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One thing tried. same_run: the run itself, repaired, keeps the invariant.

    everywhere: every run that was tried does. tried: how many, in words. proof: they are all that there are.
    left: other invariants that some tried run still breaks; complete where ``everywhere``.
    """

    name: str
    same_run: bool
    everywhere: bool
    tried: str
    proof: bool
    left: frozenset[str]


FIRST_THOUGHTS = ("descale_in_the_data", "keyed_snapshot", "per_owner_state", "merged_commit")
"""Fixes that are named even where they are in force already: that they are no help is what one wants to know."""


def repairs(space: Space, choices: Choices, invariant: str) -> tuple[Repair, ...]:
    """All that was tried, what helps everywhere and leaves nothing first. What does not fit the space is left out."""
    found = [*_fixes(space, choices, invariant), *_otherwise(space, choices, invariant)]
    return tuple(sorted(found, key=lambda r: (not r.everywhere, not r.same_run, len(r.left))))


def _fixes(space: Space, choices: Choices, invariant: str) -> Iterator[Repair]:
    run = completed(space, choices)
    runs, tried, proof = _runs(space)
    case = interleaved(space, run)
    for fix in FIXES.values():
        try:
            if fix.name not in FIRST_THOUGHTS and fix.rewrite(case).schedule == case.schedule:
                continue  # it has nothing to mend here
            same = invariant not in broken(_repaired(space, run, fix.rewrite))
            everywhere, left = _everywhere(space, runs, fix.rewrite, invariant)
        except CaseError:  # the fix does not fit: its schedule reads what nothing filled
            continue
        yield Repair(
            name=fix.name, same_run=same, everywhere=same and everywhere, tried=tried, proof=proof, left=left
        )  # fmt: skip


def _runs(space: Space) -> tuple[tuple[Choices, ...], str, bool]:
    """All runs, else one of every class, as far as RUNS and EVENTS; in words; whether they stand for all."""
    program = compiled(space)
    most = max(1, min(RUNS, EVENTS // sum(ends[-1] for ends in program.ends)))
    if (count := count_schedules(program)) <= most:
        return tuple(run for run, _ in all_runs(program)), f"all {count} runs" if count > 1 else "the only run", True
    runs, whole = some_runs(program, most)
    # No proof: a rewrite may make pieces dependent that commuted before.
    return runs, f"a run of each of {len(runs)} classes" if whole else f"{len(runs)} runs", False


def _everywhere(
    space: Space, runs: tuple[Choices, ...], rewrite: Callable[[Case], Case], invariant: str
) -> tuple[bool, frozenset[str]]:
    left: set[str] = set()
    for run in runs:
        found = broken(_repaired(space, run, rewrite))
        left |= found - {invariant}
        if invariant in found:
            return False, frozenset(left)
    return True, frozenset(left)


def _repaired(space: Space, run: Choices, rewrite: Callable[[Case], Case]) -> tuple[Violation, ...]:
    return judge(rewrite(interleaved(space, run)))


def _otherwise(space: Space, choices: Choices, invariant: str) -> Iterator[Repair]:
    """The same workers with an atomic commit, with codes of their own, and with a state each."""
    whole = Commits.REDUCED if space.commit.ranked else Commits.ATOMIC
    changed = {
        f"commit {whole.value}": replace(space, commit=whole),
        "codes own": replace(space, codes=Codes.OWN),
        "scope layer_worker": replace(space, scope="layer_worker", declared="layer_worker"),
    }
    for name, other in changed.items():
        if other == space:
            continue
        try:
            same = invariant not in broken(judge(same_order(other, space, choices)))
            reached = breadth_first(compiled(other), budget=STATES)
        except QsimError:  # the defect needs what was changed
            continue
        all_broken = frozenset(kind.invariant for kind in reached.runs)
        yield Repair(
            name=name,
            same_run=same,
            everywhere=same and invariant not in all_broken,
            tried=f"{'all' if reached.whole else 'some'} {reached.states} states",
            proof=reached.whole,
            left=all_broken - {invariant},
        )
