"""What searches find: the acceptance lines, known counts worked out by hand, bounds, and the command."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from qsim.cli import exploring
from qsim.errors import UsageError
from qsim.explore import BUDGET, Codes, Commits, Engine, Kind, Search, Space, explore, preempted, vectors
from qsim.explore.breadth import breadth_first
from qsim.explore.chance import chance_of_a_run, random_priorities, random_walk
from qsim.explore.classes import count_classes
from qsim.explore.compiling import compiled
from qsim.explore.enumeration import count_schedules
from qsim.explore.program import After, Program, Raise
from qsim.sim import Cadence

ROOT = Path(__file__).resolve().parents[2]
SPLIT, SCRATCH, STEP = Commits.SPLIT, Codes.SCRATCH, Cadence.STEP


def searched(space: Space, **options: int) -> Search:
    ticks = itertools.count(5)
    return explore(space, clock=lambda: float(next(ticks)), **options)


def needed(space: Space) -> dict[Kind, int]:
    """The fewest preemptions that each kind takes; the search must be exhaustive."""
    found = searched(space)
    assert found.exhaustive
    return {finding.kind: finding.fewest_preemptions for finding in found.findings}


def test_a_stale_live_read_needs_no_preemption() -> None:
    assert {Kind.PAIRING: 0} == needed(Space(defect="D01"))
    assert 0 == needed(Space(preset="seed_defective"))[Kind.PAIRING]


def test_a_stale_read_across_workers_needs_one_preemption() -> None:
    """Live reads, but each worker commits when its step is over: alone it never reads what it has advanced."""
    assert {} == needed(Space(workers=1, defect="D01", unit=STEP))
    assert 1 == needed(Space(defect="D01", unit=STEP))[Kind.PAIRING]


def test_a_lost_commit_needs_one_preemption_and_survives_snapshots() -> None:
    assert {Kind.LOST_COMMIT: 1} == needed(Space(commit=SPLIT))


def test_atomic_commits_with_snapshots_break_nothing() -> None:
    for workers in (2, 3, 4):
        assert {} == needed(Space(workers=workers, steps=2, layers=2))


def test_two_commits_of_one_unit_are_found_from_the_unit_and_the_scope_alone() -> None:
    """D09 by search: no defect is named, the preset is correct; a merged commit was due and two come."""
    assert {Kind.SECOND_COMMIT: 0} == needed(Space(unit=STEP))
    assert {} == needed(Space(unit=STEP, scope="layer_worker"))
    assert {} == needed(Space(unit=STEP, workers=1))


def test_a_reused_buffer_is_found_from_the_buffer_and_the_number_of_workers_alone() -> None:
    """D12 by search: I4 and I7 where no epoch tells the casts apart, I1 where a commit came between."""
    assert {Kind.PAIRING: 1, Kind.OWNERSHIP: 1, Kind.TORN_READ: 1} == needed(Space(codes=SCRATCH))
    assert {} == needed(Space(codes=SCRATCH, workers=1))
    assert {Kind.OWNERSHIP: 1, Kind.TORN_READ: 1} == needed(Space(codes=SCRATCH, preset="current"))


def test_a_state_a_layer_and_worker_is_one_class_and_that_is_the_proof() -> None:
    for workers, layers in ((2, 1), (3, 2), (4, 3)):
        found = searched(Space(workers=workers, layers=layers, steps=2, scope="layer_worker", commit=SPLIT))
        assert (True, 1, True, ()) == (found.private, found.classes, found.exhaustive, found.findings)


def test_a_state_for_all_workers_is_not_private() -> None:
    found = searched(Space())
    assert (False, 4) == (found.private, found.classes)


def test_the_shortest_run_and_the_calmest_run_may_differ() -> None:
    """With a second layer worker 1 has not ended when its store is done: to go back at once is a second preemption."""
    (found,) = searched(Space(layers=2, commit=SPLIT)).findings
    assert ((0, 0, 1, 1, 1, 0), 2) == (found.choices, found.preemptions)
    assert ((0, 0, *(1,) * 6, 0), 1) == (found.calmest, found.fewest_preemptions)


def test_counts_worked_out_by_hand() -> None:
    """Two workers, one cell. Atomic: begin and commit; split: begin, fetch and store.

    Atomic: the counters alone are the state, 3 x 3, or 6 unordered pairs. A class is the order of the commits and
    what the other worker had begun before the first of them: 2 x 2. Split: 4 x 4 counters; three of them hold two
    states each, as a worker with its base in hand may have read it before or after the other's store (twice), and
    at the end a commit may be lost or not. Classes: who stores first, and whether the other had begun and fetched.
    """
    atomic, split = compiled(Space()), compiled(Space(commit=SPLIT))
    assert (9, 6) == tuple(breadth_first(atomic, budget=99, symmetry=s).states for s in (False, True))
    assert (6, 4) == (count_schedules(atomic), count_classes(atomic))
    assert 4 * 4 + 3 == breadth_first(split, budget=99, symmetry=False).states
    assert (20, 2 * 3) == (count_schedules(split), count_classes(split))


PINNED = {  # workers, steps, layers, scope, commit -> states of snapshots, states of live reads, classes of live reads
    (2, 1, 1, "layer", Commits.ATOMIC): (9, 43, 12),
    (2, 1, 1, "layer", SPLIT): (19, 75, 18),
    (2, 2, 1, "layer", SPLIT): (94, 554, 792),
    (2, 1, 2, "model", SPLIT): (94, 947, 744),
    (2, 1, 2, "layer_worker", SPLIT): (4, 4, 1),
    (3, 1, 1, "layer", SPLIT): (105, 1590, 1944),
    (2, 2, 2, "layer", SPLIT): (648, 6786, 83316),
    (3, 1, 2, "layer", SPLIT): (1047, 76083, 1308420),
}


@pytest.mark.parametrize("size", PINNED, ids=str)
def test_state_and_class_counts_stay(size: tuple[int, int, int, str, Commits]) -> None:
    workers, steps, layers, scope, commit = size

    def program_of(defect: str):  # type: ignore[no-untyped-def]
        return compiled(Space(workers=workers, steps=steps, layers=layers, scope=scope, commit=commit, defect=defect))

    states = [breadth_first(program_of(d), budget=10**6, symmetry=False).states for d in ("none", "D01")]
    assert PINNED[size] == (*states, count_classes(program_of("D01")))


def test_three_workers_with_two_layers_have_the_interleavings_of_thirty_pieces() -> None:
    assert 5_550_996_791_340 == searched(Space(workers=3, layers=2, commit=SPLIT, defect="D01")).schedules


def test_the_seconds_are_those_of_the_clock_that_is_passed_in() -> None:
    assert 1.0 == searched(Space()).seconds


def test_least_runs_that_were_not_all_looked_for_are_not_called_least() -> None:
    found = searched(Space(workers=3, commit=SPLIT), budget=33)  # 32 states, but more with who ran last
    assert found.exhaustive
    assert [(Kind.LOST_COMMIT, False)] == [(f.kind, f.least) for f in found.findings]
    assert searched(Space(workers=3, commit=SPLIT)).findings[0].least


def test_of_runs_with_the_same_events_the_one_with_fewer_preemptions_is_the_least() -> None:
    """Found first, after three pieces: 0 0 1 leaves worker 0 before its end. After four pieces: 2 2 2 2 leaves none."""
    late = After(((0, 1), (1, 0)), Kind.PAIRING, 1)
    by_hand = Program(
        code=(((), (), ()), ((late,),), ((), (), (), (Raise(Kind.PAIRING, 1),))),
        numbers=((0, 0, 0, -1), (0, -1), (0, 0, 0, 1, -1)),
        ends=((0, 1, 3, 4), (0, 1), (0, 1, 2, 3, 4)),
        touches=((frozenset(),) * 3, (frozenset(),), (frozenset(),) * 4),
        needs=(((),) * 3, ((),), ((),) * 4),
        kinds=(Kind.PAIRING,),
        start=(0,) * 8,
        block=1,
        flags=3,
        largest=4,
        symmetric=False,
    )
    found = preempted.preemption_bounded(by_hand, most=None, wanted=by_hand.kinds, budget=999)
    assert {Kind.PAIRING: (4, 0, (2, 2, 2, 2))} == found.least


def test_a_budget_that_is_hit_is_no_proof() -> None:
    found = searched(Space(workers=3, commit=SPLIT), budget=20)
    assert (Engine.PCT, False) == (found.engine, found.exhaustive)
    assert found.states > 20
    assert found.bound.startswith(f"breadth first was stopped after {found.states} states; 1000 runs")
    assert "1000 runs by random priorities (depth 3, seed 0): p >= 0.0041 a run" in found.bound  # 1 / (3 * 9^2)
    assert [(Kind.LOST_COMMIT, False)] == [(f.kind, f.least) for f in found.findings]


def test_beyond_the_budget_preemptions_are_bounded_first() -> None:
    found = searched(Space(workers=4, layers=2, commit=SPLIT), budget=1200)
    assert (Engine.PREEMPTION_BOUNDED, False) == (found.engine, found.exhaustive)
    assert "every run with at most 3 preemptions was covered" in found.bound
    assert [(Kind.LOST_COMMIT, 1)] == [(f.kind, f.fewest_preemptions) for f in found.findings]


def test_a_preemption_bound_covers_what_it_says() -> None:
    program = compiled(Space(commit=SPLIT))
    none = preempted.preemption_bounded(program, most=0, wanted=program.kinds, budget=99)
    one = preempted.preemption_bounded(program, most=1, wanted=program.kinds, budget=99)
    assert ({}, True, 7) == (none.least, none.whole, none.states - 6)  # the start, and 6 places in each of 2 orders
    assert {Kind.LOST_COMMIT: (20, 1, (0, 0, 1, 1, 1, 0))} == one.least


def test_random_priorities_run_one_worker_at_a_time_and_drop_it_at_depth_minus_one_places() -> None:
    program = compiled(Space(workers=3, commit=SPLIT))
    for depth in (1, 2, 3):
        for run in random_priorities(program, runs=200, depth=depth, seed=3):
            assert [3, 3, 3] == [run.count(worker) for worker in range(3)]
            assert len(list(itertools.groupby(run))) <= 3 + depth - 1
    alone = set(random_priorities(program, runs=200, depth=1, seed=3))
    assert {tuple(w for w in order for _ in range(3)) for order in itertools.permutations(range(3))} == alone
    assert Fraction(1, 3 * 9**2) == chance_of_a_run(program, 3)


def test_searches_by_chance_are_functions_of_their_seed() -> None:
    program = compiled(Space(workers=3, commit=SPLIT))
    for search in (lambda seed: random_priorities(program, runs=9, depth=3, seed=seed),
                   lambda seed: random_walk(program, runs=9, seed=seed)):  # fmt: skip
        assert list(search(5)) == list(search(5))
        assert list(search(5)) != list(search(6))


def test_rows_alike_are_found_even_where_their_mixes_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([[1] * 8 + [2] * 8, [3] * 16, [1] * 8 + [2] * 8, [3] * 16, [1] * 16], np.uint8)
    rank = np.array([5, 4, 3, 2, 1])
    assert [0, 1, 4] == sorted(vectors.first_of_each(rows).tolist())
    assert [2, 3, 4] == sorted(vectors.first_of_each(rows, rank).tolist())
    monkeypatch.setattr(vectors, "_MIX", np.uint64(0))  # every row has the same mix now
    assert [0, 1, 4] == sorted(vectors.first_of_each(rows).tolist())
    assert [2, 3, 4] == sorted(vectors.first_of_each(rows, rank).tolist())


def test_blocks_are_sorted_whatever_their_width() -> None:
    live = Space(workers=4, layers=2, defect="D01", commit=SPLIT)
    wide = Space(workers=4, layers=2, part="block", preset="seed_defective", commit=SPLIT)
    for space, width in ((Space(workers=4), 1), (live, 4), (wide, 16)):
        program = compiled(space)
        assert width == program.block
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 3, (200, len(program.start)), dtype=np.uint8)
        cut = program.block * program.workers
        shuffled = rows.copy()
        for row in shuffled:
            row[:cut] = rng.permutation(row[:cut].reshape(4, -1)).ravel()
        normal = vectors.sorted_blocks(program, rows.copy())
        assert normal.tolist() == vectors.sorted_blocks(program, shuffled).tolist()
        assert rows[:, cut:].tolist() == normal[:, cut:].tolist()
        for row, by_block in zip(rows, normal, strict=True):
            assert sorted(row[:cut].reshape(4, -1).tolist()) == sorted(by_block[:cut].reshape(4, -1).tolist())


def test_a_program_whose_numbers_do_not_fit_a_byte_takes_two() -> None:
    program = compiled(Space(workers=2, steps=150))
    assert (np.uint16, 301) == (vectors.start_rows(program).dtype, program.largest)
    assert 301 * 301 == breadth_first(program, budget=10**6, symmetry=False).states


def test_the_commands_budget_is_the_searchs() -> None:
    assert BUDGET == inspect.signature(exploring.explore).parameters["budget"].default


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="budget 0 is too small"):
        searched(Space(), budget=0)


def qsim(*args: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="126")
    return subprocess.run([sys.executable, "-m", "qsim", "explore", *args], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 0, ["no run breaks an invariant. All runs of this space are covered"]),
        (("--scope", "layer_worker", "--commit", "split"), 0, ["No two workers share a cell", "in 1 class\n"]),
        (("--commit", "split"), 1, ["breaks I3.", "a lost commit", "0x2 1x3 0"]),
        (
            ("--workers", "3", "--budget", "2"),
            4,
            ["nothing was found. Bounded: not a proof. Breadth first was stopped after 4 states"],
        ),
    ],
)
def test_the_command_says_how_far_its_verdict_goes(args: tuple[str, ...], code: int, words: list[str]) -> None:
    done = qsim(*args)
    assert (code, "") == (done.returncode, done.stderr)
    for word in words:
        assert word in done.stdout


def test_the_command_prints_json() -> None:
    done = qsim("--commit", "split", "--layers", "2", "--json")
    data = json.loads(done.stdout)
    assert 1 == done.returncode
    assert ("2.1.2.layer.layer.split.own.microbatch.seed_correct.delayed.none.input", True) == (
        data["space"],
        data["exhaustive"],
    )
    assert (924, 36) == (data["schedules"], data["classes"])
    (lost,) = data["violations"]["I3"]
    assert ("lost_commit", 2, 1, [0, 0, 1, 1, 1, 0]) == (
        lost["kind"],
        lost["preemptions"],
        lost["fewest_preemptions"],
        lost["choices"],
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--scope", "cell"), "known: layer"),
        (("--preset", "none"), "use another preset"),
        (("--defect", "D99"), "D99"),
        (("--commit", "tom"), 'commit "tom" is unknown; known: atomic, split, torn, reduced, async'),
        (("--workers", "9"), "at most 8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: tuple[str, ...], words: str) -> None:
    done = qsim(*args)
    assert 2 == done.returncode
    assert words in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_a_level_that_is_too_wide_for_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(Space(workers=3, commit=SPLIT))  # rows of 8 bytes
    monkeypatch.setattr(vectors, "LEVEL_BYTES", 8 * 8)
    found = breadth_first(program, budget=10**6, symmetry=False)
    assert (False, 1 + 3) == (found.whole, found.states)  # the start's 3 successors have 3 each: one too many
    bounded = preempted.preemption_bounded(program, most=None, wanted=program.kinds, budget=10**6)
    assert (False, 1 + 3) == (bounded.whole, bounded.states)
