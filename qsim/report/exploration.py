"""One search of interleavings, for a reader and as JSON: sizes, verdict, least runs. Holds no engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

from qsim.explore import BUDGET, Choices, Codes, Commits, Finding, Search, Space, explore
from qsim.explore.space import NO_DEFECT, enum_of
from qsim.sim import RULES, Cadence

if TYPE_CHECKING:
    from rich.table import Table


def search(space: Space, *, budget: int = BUDGET, seed: int = 0) -> Search:
    """``explore`` by this machine's clock."""
    return explore(space, clock=time.perf_counter, budget=budget, seed=seed)


def space_from_words(
    sizes: tuple[int, int, int], scopes: tuple[str, str], modes: tuple[str, str, str], rest: tuple[str, str, str, str]
) -> Space:
    """A space from words of the command line, "" for what was left out.

    sizes: workers, steps, layers. scopes: shared, declared. modes: commit, codes, unit. rest: preset, recipe,
    defect, part. Raises UsageError or StudyError that lists what is known.
    """
    commit, codes, unit = modes
    preset, recipe, defect, part = rest
    return Space(
        workers=sizes[0],
        steps=sizes[1],
        layers=sizes[2],
        scope=scopes[0],
        declared=scopes[1],
        commit=enum_of(Commits, commit, "commit"),
        codes=enum_of(Codes, codes, "codes"),
        unit=enum_of(Cadence, unit, "unit") if unit else None,
        preset=preset,
        recipe=recipe,
        defect=defect or NO_DEFECT,
        part=part,
    )


def exit_code(found: Search) -> int:
    """1 where an invariant can break, 4 where nothing was found within bounds only, else 0."""
    if found.findings:
        return 1
    return 0 if found.exhaustive else 4


def verdict(found: Search) -> str:
    """What the search says, and how far it goes, in one sentence or two."""
    broken = ", ".join(_broken(found))
    said = f"breaks {broken}" if broken else "no run breaks an invariant"
    if found.private:
        return f"{said}. No two workers share a cell: all runs are of one class, so one run is the proof for all."
    if found.exhaustive:
        return f"{said}. All runs of this space are covered: a proof within these bounds."
    if not broken:
        said = "nothing was found"
    return f"{said}. Bounded: not a proof. {found.bound[0].upper()}{found.bound[1:]}."


def exploration_data(found: Search) -> dict[str, object]:
    """The search as JSON data."""
    return {
        "space": found.space.text(),
        "engine": found.engine.value,
        "states": found.states,
        "seconds": round(found.seconds, 6),
        "exhaustive": found.exhaustive,
        "private": found.private,
        "classes": found.classes,
        "schedules": found.schedules,
        "bound": found.bound,
        "violations": {rule: [_data(f) for f in found.findings if f.kind.invariant == rule] for rule in _broken(found)},
    }


def _broken(found: Search) -> list[str]:
    return [rule for rule in RULES if rule in found.broken]


def _data(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind.name.lower(),
        "meaning": finding.kind.meaning,
        "events": finding.events,
        "preemptions": finding.preemptions,
        "choices": list(finding.choices),
        "fewest_preemptions": finding.fewest_preemptions,
        "calmest": list(finding.calmest),
        "least": finding.least,
    }


def exploration_report(found: Search) -> Iterator[str | Table]:
    """The parts of the report, in order."""
    yield space_text(found.space)
    yield (
        f"{found.engine.value}: {found.states:,} states in {found.seconds:.3f} s; "
        f"{_large(found.schedules)} interleavings in {_classes(found.classes)}"
    )
    yield verdict(found)
    if found.findings:
        yield ""
        yield _table(found)


def space_text(space: Space) -> str:
    """The bounds of a search in words."""
    return (
        f"{_of(space.workers, 'worker')}, {_of(space.steps, 'step')}, {_of(space.layers, 'layer')} ({space.part}); "
        f"preset {space.preset}, defect {space.defect}, unit {space.cadence.value}; "
        f"scope {space.scope}{'' if space.declared == space.scope else f' declared {space.declared}'}, "
        f"commit {space.commit.value}, codes {space.codes.value}"
    )


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _classes(count: int | None) -> str:
    if count is None:
        return "classes too many to count"
    return f"{_large(count)} class{'es' * (count != 1)}"


def _large(count: int) -> str:
    return f"{count:,}" if count < 10**9 else f"{Decimal(count):.3g}"


def _table(found: Search) -> Table:
    from rich.table import Table

    table = Table(title="least runs", title_justify="left", box=None, show_edge=False)
    for column in ("breaks", "how", "events", "preemptions", "run (worker x pieces)", "fewest preemptions", "its run"):
        counts = column in ("events", "preemptions", "fewest preemptions")
        table.add_column(column, justify="right" if counts else "left")
    for f in found.findings:
        table.add_row(
            f.kind.invariant,
            f.kind.meaning,
            str(f.events),
            str(f.preemptions),
            run_text(f.choices),
            str(f.fewest_preemptions),
            "the same" if f.calmest == f.choices else run_text(f.calmest),
        )
    return table


def run_text(choices: Choices) -> str:
    """A run in short: "0x3 1x2 0" is worker 0 with three pieces, worker 1 with two, worker 0 with one."""
    parts = ((worker, len(list(group))) for worker, group in itertools.groupby(choices))
    return " ".join(f"{worker}x{count}" if count > 1 else str(worker) for worker, count in parts)
