"""Agreement of engines: every engine gives the verdicts that the invariants give, and a planted bug is seen.

The judge is ``check`` on the records of a run: the simulator's own. Everything else is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from qsim.errors import CaseError, UsageError
from qsim.explore import Codes, Commits, Kind, Space, classes, explore, kind_of, threads, vectors
from qsim.explore.breadth import breadth_first
from qsim.explore.chance import random_priorities, random_walk
from qsim.explore.classes import class_runs, count_classes
from qsim.explore.compiling import ORDERLESS, assembled, compiled
from qsim.explore.enumeration import all_runs, count_schedules, reached
from qsim.explore.footprints import footprint
from qsim.explore.names import Declared
from qsim.explore.preempted import preemption_bounded
from qsim.explore.program import Differ, Instruction, Mixed, Move, Pop, Program, Raise, advance, flags_of, traced
from qsim.explore.runs import completed, interleaved, preemptions
from qsim.explore.threads import cut
from qsim.quant import StateKey
from qsim.sim import SCOPES, Cadence, Violation, judge
from qsim.sim.defects.scope import one_snapshot
from qsim.sim.events import Begin, Consume, Event, Fetch, Quantize, Schedule, Store
from tests.unit.explore_cases import MANY, SMALL, TIES, judged, least_by_enumeration

T = TypeVar("T")
spaces = pytest.mark.parametrize("space", SMALL.values(), ids=SMALL)


def still() -> float:
    return 0.0


@cache
def verdicts(space: Space) -> dict[tuple[int, ...], frozenset[Kind]]:
    """Every complete run and what ``check`` says of it."""
    return {choices: judged(space, choices) for choices, _ in all_runs(compiled(space))}


def disagreements(space: Space, program: Program) -> Iterator[str]:
    """Where an engine's verdicts differ from those of every run, judged one by one."""
    judge_says = verdicts(space)
    all_verdicts = frozenset(judge_says.values())
    runs = dict(all_runs(program))
    if {choices: program.kinds_of(flags) for choices, flags in runs.items()} != judge_says:
        yield "enumeration"
    of_classes = dict(class_runs(program))
    if {program.kinds_of(flags) for flags in of_classes.values()} != all_verdicts:
        yield "one run a class"
    if len(of_classes) != count_classes(program):
        yield "count of classes"
    for symmetry in (False, True):
        found = breadth_first(program, budget=10**6, symmetry=symmetry)
        if {program.kinds_of(flags) for flags in found.verdicts} != all_verdicts:
            yield f"breadth first, symmetry {symmetry}"
        if any(kind not in judged(space, run) for kind, run in found.runs.items()):
            yield f"runs of breadth first, symmetry {symmetry}"
    least = preemption_bounded(program, most=None, wanted=program.kinds, budget=10**6).least
    if any(kind not in judged(space, run.choices) for kind, run in least.items()):
        yield "runs by preemptions"
    if least.keys() != frozenset().union(*all_verdicts):
        yield "preemptions"


@spaces
def test_every_engine_agrees_with_the_invariants_on_every_run(space: Space) -> None:
    program = compiled(space)
    assert count_schedules(program) <= MANY
    assert count_schedules(program) == len(verdicts(space))
    assert [] == list(disagreements(space, program))


@pytest.mark.parametrize("space", (SMALL | TIES).values(), ids=SMALL | TIES)
def test_the_least_runs_are_the_least_of_all(space: Space) -> None:
    found = explore(space, clock=still)
    assert found.exhaustive
    assert all(finding.least for finding in found.findings)
    assert least_by_enumeration(space, compiled(space)) == {
        f.kind: ((f.events, f.preemptions), f.fewest_preemptions) for f in found.findings
    }
    for finding in found.findings:
        assert finding.preemptions == preemptions(space, finding.choices)
        assert finding.fewest_preemptions == preemptions(space, finding.calmest)
        assert finding.kind in judged(space, finding.choices)
        assert finding.kind in judged(space, finding.calmest)


@spaces
def test_a_least_run_breaks_its_invariant_at_the_event_it_names(space: Space) -> None:
    for finding in explore(space, clock=still).findings:
        if finding.kind in (Kind.OBSERVATIONS, Kind.MISSING_COMMIT):
            continue  # of whole units: check names their last commit, whatever it is
        violations = judge(interleaved(space, completed(space, finding.choices)))
        assert finding.events - 1 == min(v.event for v in violations if kind_of(v) is finding.kind)


@spaces
def test_breadth_first_visits_the_states_that_a_plain_set_holds(space: Space) -> None:
    program = compiled(space)
    assert len(reached(program)) == breadth_first(program, budget=10**6, symmetry=False).states


@spaces
def test_runs_by_chance_find_what_can_be_found_and_nothing_else(space: Space) -> None:
    program = compiled(space)
    possible = frozenset().union(*verdicts(space).values())
    by_priority = list(random_priorities(program, runs=300, depth=3, seed=7))
    by_walk = list(random_walk(program, runs=300, seed=7))
    for runs in (by_priority, by_walk):
        assert all(run in verdicts(space) for run in runs)
        assert possible == program.kinds_of(_union(flags_of(program, run) for run in runs))


def _union(flags: Iterator[int]) -> int:
    total = 0
    for flag in flags:
        total |= flag
    return total


@spaces
def test_runs_of_one_class_have_one_verdict(space: Space) -> None:
    """Every run is brought to the one that the class keeps, by exchanging neighbours that commute."""
    program = compiled(space)
    kept = dict(class_runs(program))
    assert len(kept) == len({_normal(program, choices) for choices in kept})
    for choices, kinds in verdicts(space).items():
        assert kinds == program.kinds_of(kept[_normal(program, choices)])


def _normal(program: Program, choices: tuple[int, ...]) -> tuple[int, ...]:
    """The least run of the class: of the pieces that nothing before them holds back, the lowest worker's first."""
    done, pieces = [0] * program.workers, []
    for worker in choices:
        pieces.append((worker, program.touches[worker][done[worker]]))
        done[worker] += 1
    normal = []
    while pieces:
        free = [
            at
            for at, (worker, touches) in enumerate(pieces)
            if all(w != worker and classes.independent(touches, other) for w, other in pieces[:at])
        ]
        normal.append(pieces.pop(min(free, key=lambda at: pieces[at][0]))[0])
    return tuple(normal)


sizes = st.integers(1, 2)
PLAIN = [mode for mode in Commits if not mode.ranked]
RANKED = [mode for mode in Commits if mode.ranked]


def spaces_of(commits: list[Commits], scopes: list[str], declared: list[str]) -> st.SearchStrategy[Space]:
    return st.builds(
        Space,
        workers=st.integers(1, 4),
        steps=sizes,
        layers=sizes,
        scope=st.sampled_from(scopes),
        declared=st.sampled_from(declared),
        commit=st.sampled_from(commits),
        codes=st.sampled_from(Codes),
        defect=st.sampled_from(["none", "D01", "D02", "D03", "D04", "D05", "D07"]),
        part=st.sampled_from(["input", "linear", "gradients", "block"]),
        unit=st.sampled_from([None, Cadence.STEP]),
    )


def preset_spaces() -> st.SearchStrategy[Space]:
    queued = st.builds(
        Space,
        workers=st.integers(1, 4),
        layers=sizes,
        scope=st.sampled_from(["layer", "layer_worker", "model"]),
        commit=st.sampled_from(PLAIN),
        codes=st.sampled_from(Codes),
        preset=st.sampled_from(["te_fused", "te_unfused"]),
        part=st.sampled_from(["input", "gradients", "block"]),
        unit=st.sampled_from([None, Cadence.STEP]),
    )
    others = st.builds(
        Space,
        workers=st.integers(1, 4),
        steps=sizes,
        layers=sizes,
        commit=st.sampled_from(PLAIN),
        codes=st.sampled_from(Codes),
        preset=st.sampled_from(["torchao_delayed", "flax", "te_jax", "msamp"]),
        part=st.sampled_from(["input", "gradients", "block"]),
        unit=st.sampled_from([None, Cadence.STEP, Cadence.MICROBATCH]),
    )
    return queued | others


EVERY_SCOPE = ["layer", "layer_worker", "model"]
some_spaces = (
    spaces_of(PLAIN, EVERY_SCOPE, ["", *EVERY_SCOPE])
    | spaces_of(RANKED, ["layer_worker"], ["layer_worker"])
    | preset_spaces()
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(some_spaces, st.integers(0, 2**32))
def test_any_run_of_any_space_is_judged_as_the_invariants_judge_it(space: Space, seed: int) -> None:
    try:
        program = compiled(space)
    except CaseError as error:  # one scope for all layers already: sharing it changes nothing
        if "finds nothing to change" not in str(error):
            raise
        reject()
    (choices,) = random_walk(program, runs=1, seed=seed)
    assert judged(space, choices) == program.kinds_of(flags_of(program, choices))
    assert events_of(judge(interleaved(space, choices))) == raised_events(program, choices)


def events_of(violations: Sequence[Violation]) -> set[tuple[Kind, int]]:
    """Which event breaks what, by ``check``; but for kinds that count over whole units."""
    found = {(kind_of(violation), violation.event) for violation in violations}
    return {(kind, event) for kind, event in found if kind not in ORDERLESS}


def raised_events(program: Program, choices: tuple[int, ...]) -> set[tuple[Kind, int]]:
    """The same by the compiled judge."""
    state, found = program.start, set[tuple[Kind, int]]()
    for worker in choices:
        before = program.events(state)
        state, raised = traced(program, state, worker)
        found |= {(kind, before + at - 1) for kind, at in raised if kind not in ORDERLESS}
    return found


@st.composite
def mistaken_programs(draw: st.DrawFn) -> tuple[Space, tuple[Schedule, ...]]:
    """Threads that name cells, snapshots and codes of others: no rewrite of the catalogue goes so far."""
    space = Space(
        workers=2,
        steps=draw(st.integers(1, 2)),
        layers=draw(st.integers(1, 2)),
        scope=draw(st.sampled_from(["layer", "layer_worker"])),
        declared=draw(st.sampled_from(["", "layer", "layer_worker", "model"])),
        commit=draw(st.sampled_from(PLAIN)),
        preset=draw(st.sampled_from(["seed_correct", "seed_defective"])),
        recipe=draw(st.sampled_from(["delayed", "centred"])),
    )
    case = interleaved(space, completed(space, ()))
    if draw(st.booleans()):
        case = one_snapshot(case)
    mistakes = draw(st.sets(st.sampled_from(["cell", "by", "codes", "metadata", "base", "fetch"])))

    def named(what: str, right: T, known: Sequence[T]) -> T:
        return draw(st.sampled_from([right, *known])) if what in mistakes else right

    cells = sorted({event.cell for event in case.schedule if isinstance(event, Begin)})
    return space, tuple(tuple(_mistaken(case.schedule, worker, cells, named)) for worker in range(2))


def _mistaken(
    schedule: Schedule, worker: int, cells: list[StateKey], named: Callable[[str, Any, Sequence[Any]], Any]
) -> Iterator[Event]:
    begun: list[str] = []
    cast: list[str] = []
    bases: dict[StateKey, list[str]] = {}
    filled: set[str] = set()
    for event in schedule:
        op = footprint(event).op
        if op is None or op.worker_id != worker:
            continue  # nothing is freed, so whatever is named holds something
        match event:
            case Begin():
                event = event._replace(cell=named("cell", event.cell, cells))
                begun.append(event.into)
            case Fetch():
                if event.into in filled and named("fetch", False, [True]):
                    continue  # whoever reads the slot finds what was fetched into it before
                bases.setdefault(event.cell, []).append(event.into)
            case Store():
                event = event._replace(base=named("base", event.base, bases[event.cell]))
            case Quantize():
                event = event._replace(by=named("by", event.by, begun))
                cast.append(event.out)
            case Consume(operands=(left, right)):
                left = left._replace(codes=named("codes", left.codes, cast))
                left = left.renamed(lambda name: named("metadata", name, begun))
                event = event._replace(operands=(left, right))
        filled.update(footprint(event).puts)
        yield event


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(mistaken_programs(), st.integers(0, 2**32))
def test_any_mistake_in_any_order_is_judged_as_the_invariants_judge_it(
    mistaken: tuple[Space, tuple[Schedule, ...]], seed: int
) -> None:
    space, programs = mistaken
    workers, scope = cut(programs), SCOPES[space.declared]
    by_order = assembled(workers, Declared(scope, space.cadence), ())
    for choices in random_walk(by_order, runs=6, seed=seed):
        done, schedule = [0, 0], []
        for worker in choices:
            piece = workers[worker].pieces[done[worker]]
            schedule += workers[worker].events[piece.start : piece.stop]
            done[worker] += 1
        case = replace(interleaved(space, ()), schedule=tuple(schedule))
        assert events_of(judge(case)) == raised_events(by_order, choices)
        assert_rows_advance_as_single_states(by_order, choices)


def assert_rows_advance_as_single_states(program: Program, choices: tuple[int, ...]) -> None:
    state, rows = program.start, vectors.start_rows(program)
    for worker in choices:
        state = advance(program, state, worker)
        rows = next(group.rows for group in vectors.grown(program, rows) if group.worker == worker)
        assert state == tuple(rows[0].tolist())


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(some_spaces, st.integers(0, 2**32))
def test_rows_advance_as_single_states_do(space: Space, seed: int) -> None:
    program = compiled(space)
    (choices,) = random_walk(program, runs=1, seed=seed)
    assert_rows_advance_as_single_states(program, choices)


def edited(program: Program, change: Callable[[Instruction], Instruction | None]) -> Program:
    """The program with every instruction changed, or left out."""
    code = tuple(
        tuple(tuple(d for do in piece if (d := change(do)) is not None) for piece in thread) for thread in program.code
    )
    return replace(program, code=code)


PLANTED: dict[str, tuple[str, Callable[[Instruction], Instruction | None]]] = {
    "a lost commit is not looked for": ("split", lambda do: None if isinstance(do, Differ) else do),
    "a commit does not move the epoch": (
        "live reads",
        lambda do: do._replace(add=0) if isinstance(do, Move) and do.add else do,
    ),
    "a version is not kept": (
        "live reads, unit step",
        lambda do: None if isinstance(do, Move) and not do.add else do,
    ),
    "an unconditional mistake is not raised": ("seed_defective", lambda do: None if isinstance(do, Raise) else do),
    "other workers' commits are not counted": (
        "unit step",
        lambda do: None if type(do).__name__ == "After" else do,
    ),
    "a torn pair is not looked for": (
        "torn",
        lambda do: None if isinstance(do, Differ) and do.kind is Kind.TORN_READ else do,
    ),
    "casts of one version are not told apart": (
        "scratch",
        lambda do: None if isinstance(do, Mixed) else do,
    ),
    "a queue hands out the newest": (
        "te_fused",
        lambda do: do._replace(newest=True) if isinstance(do, Pop) else do,
    ),
    "ranks are not compared": (
        "ranks commit first",
        lambda do: None if type(do).__name__ == "After" else do,
    ),
    "the writer of a buffer is not looked at": (
        "scratch",
        lambda do: None if type(do).__name__ == "Foreign" else do,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_planted_in_the_compiled_judge_is_seen(bug: str) -> None:
    name, change = PLANTED[bug]
    space = SMALL[name]
    program = compiled(space)
    assert edited(program, change) != program
    assert "enumeration" in list(disagreements(space, edited(program, change)))


def test_ranks_that_do_not_wait_are_seen() -> None:
    space = SMALL["ranks"]
    program = compiled(space)
    eager = replace(program, needs=tuple(((),) * length for length in program.lengths))
    assert 4 == count_schedules(program)
    assert 6 == count_schedules(eager)
    with pytest.raises(UsageError, match="waits for others"):
        [interleaved(space, choices) for choices, _ in all_runs(eager)]


def test_classes_by_a_wrong_independence_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SMALL["split"]
    monkeypatch.setattr(classes, "independent", lambda a, b: True)
    assert ["one run a class"] == list(disagreements(space, compiled(space)))


def test_a_search_that_forgets_the_verdict_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SMALL["live reads, unit step"]  # its last epochs do not tell who read too late
    program = compiled(space)

    def without_flags(rows: vectors.Rows, rank: object = None) -> object:
        blind = rows.copy()
        blind[:, program.flags] = 0
        return vectors.first_of_each(blind)

    monkeypatch.setattr("qsim.explore.breadth.first_of_each", without_flags)
    assert "breadth first, symmetry False" in list(disagreements(space, program))


def test_a_symmetry_that_does_not_hold_is_seen() -> None:
    """With one buffer for all, who wrote it is a worker's number: states that differ in it are not alike."""
    space = SMALL["scratch"]
    program = compiled(space)
    assert not program.symmetric
    assert list(disagreements(space, replace(program, symmetric=True)))


def test_with_symmetry_each_state_stands_for_all_that_it_is_alike_to() -> None:
    program = compiled(Space(workers=3, layers=1, commit=Commits.SPLIT))
    assert program.symmetric
    size, width = program.block, program.block * program.workers
    alike = set()
    for state in reached(program):
        blocks = sorted(state[at : at + size] for at in range(0, width, size))
        alike.add((tuple(blocks), state[width:]))
    assert len(alike) == breadth_first(program, budget=10**6).states


def test_threads_keep_every_event_of_the_case_in_its_order() -> None:
    space = Space(workers=2, layers=2, part="block")
    runs = interleaved(space, completed(space, ()))
    events = [event for thread in threads(space) for event in thread.events]
    assert events == list(runs.schedule)
