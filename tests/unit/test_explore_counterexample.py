"""Counterexamples: the table by hand, the cause, and repairs that were tried."""

from __future__ import annotations

import pytest

from qsim.errors import UsageError
from qsim.explore import (
    Choices,
    Codes,
    Commits,
    Kind,
    Space,
    Token,
    counterexample,
    followed,
    interleaved,
    repairs,
    replayed,
)
from qsim.explore.breadth import Reached
from qsim.explore.carried import carried
from qsim.explore.notation import programs
from qsim.explore.rows import Row, walked
from qsim.sim import broken, judge

SPLIT = Space(commit=Commits.SPLIT)
LOST = Token(space=SPLIT, choices=(0, 0, 1, 1, 1, 0), invariant="I3")


def test_the_table_of_the_lost_commit_holds_what_changed_and_nothing_else() -> None:
    """By hand. Worker 0: load, P, Q, O, F; worker 1: load, P, Q, O, F, S and its GEMMs; worker 0: S.

    Loads, encodes and GEMMs change no state that is looked at, so the table leaves them out; events count from 0.
    """
    cell = "L0/qkv/input"
    expected = (
        Row(1, 0, False, "P@0", (), ("snap w0 @0",), ()),
        Row(4, 0, False, "F@0", (), ("base w0 @0",), ()),
        Row(6, 1, True, "P@0", (), ("snap w1 @0",), ()),
        Row(9, 1, False, "F@0", (), ("base w1 @0",), ()),
        Row(10, 1, False, "S", (f"{cell} 0 -> 1",), (), ()),
        Row(19, 0, False, "S", (f"{cell} 1 -> 1",), (), ("I3",)),
    )
    assert expected == counterexample(LOST).rows


def test_the_lost_commit_is_told_with_its_cause() -> None:
    told = counterexample(LOST)
    assert (19, 0, "S", 20, 1, 1) == (
        told.violation.event, told.worker, told.event, told.events, told.preemptions, told.violations,
    )  # fmt: skip
    assert (4, (10,)) == told.cause[:2]  # worker 0's F, worker 1's S between it and worker 0's S
    assert (
        "its base, epoch 0, was read by event 4 (F@0 of worker 0); in between, event 10 (S of worker 1) "
        "wrote L0/qkv/input 0 -> 1"
    ) == told.cause.because
    assert (((0, 1), "f: P@0 Q@0 O F@0 S U@0; r: Q@0 U@0"),) == told.programs


def test_snapshots_alone_do_not_repair_a_lost_commit_and_atomic_commits_do() -> None:
    told = {r.name: r for r in counterexample(LOST).repairs}
    helps = {name for name, r in told.items() if r.everywhere}
    fixes = {"compare_and_set", "atomic_commit", "fail_closed_to_one_worker", "per_worker_state"}
    assert fixes | {"commit atomic", "scope layer_worker"} == helps
    assert all(told[name].same_run and told[name].proof and not told[name].left for name in helps)
    assert not told["keyed_snapshot"].same_run
    assert not told["descale_in_the_data"].same_run
    assert "all 20 runs" == told["compare_and_set"].tried  # 6 pieces, 3 of each worker
    assert "all 6 states" == told["commit atomic"].tried


def test_a_repair_that_helps_this_run_alone_is_not_said_to_help_everywhere() -> None:
    """Codes in a buffer that workers share: own codes help, and one snapshot for all hides this run's mistake alone."""
    space = Space(codes=Codes.SCRATCH)
    paired = {
        r.name: r for r in counterexample(Token(space=space, choices=(0, 0, 0, *(1,) * 6), invariant="I1")).repairs
    }
    assert (True, False) == (paired["single_snapshot"].same_run, paired["single_snapshot"].everywhere)
    told = {r.name: r for r in counterexample(Token(space=space, choices=(0, 0, 0, 1, 1, 1), invariant="I4")).repairs}
    assert (True, True) == (told["codes own"].same_run, told["codes own"].everywhere)
    helps = {name for name, r in told.items() if r.everywhere}
    assert {"codes own", "own_buffers", "fail_closed_to_one_worker"} == helps


def test_a_space_in_which_some_run_still_breaks_the_rule_is_no_help_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No small space is like that by itself, so the search is made to find one."""
    found = Reached(6, True, {Kind.LOST_COMMIT: (0,)}, frozenset())
    monkeypatch.setattr(repairs, "breadth_first", lambda *_, **__: found)
    told = {r.name: r for r in counterexample(LOST).repairs}
    assert (True, False) == (told["commit atomic"].same_run, told["commit atomic"].everywhere)


def test_what_a_repair_leaves_broken_is_said() -> None:
    """Live reads and split commits: the descale in the data mends the reads, and commits are still lost."""
    space = Space(defect="D01", commit=Commits.SPLIT)
    told = {r.name: r for r in counterexample(Token(space=space, choices=(0, 0, 0, 0), invariant="I1")).repairs}
    assert (True, frozenset({"I3"})) == (told["descale_in_the_data"].everywhere, told["descale_in_the_data"].left)
    assert not told["compare_and_set"].everywhere


# By hand. D01, worker 0 alone: load P Q O C(4) load F(6) U(7) ... D02: load P(1) Q O C(4) load U drop load P(9) Q(10)
# O C(12) ... Two layers, split: worker 0 up to F(4), 28 events of worker 1, S(33): one of its writes is to this cell.
# Codes in scratch, run 0 0 1 1 1 0 0: load P Q(2) O | load P Q(6) O C load | C load U(12).
CAUSES = [
    # space, run, invariant -> violating event, where its state was read, writes in between, words
    (
        Space(defect="D01"),
        (0,) * 4,
        "I1",
        7,
        6,
        (4,),
        "decodes with what event 6 (F@1 of worker 0) read, its codes were",
    ),
    (Space(defect="D02"), (0,) * 4, "I2", 10, 9, (4,), "forward encoded with what event 1 (P@0 of worker 0) read"),
    (Space(defect="D02"), (0,) * 4, "I3", 12, None, (4,), "event 4 (C of worker 0) folded in worker 0's L0/qkv/input"),
    (Space(defect="D02"), (0,) * 4, "I5", 12, None, (4, 12), "event 12 (C of worker 0) folded in worker 0's"),
    (Space(defect="D07"), (0,) * 4, "I7", 7, 6, (4,), "event 1 (P@0 of worker 0) and event 6 (F@1 of worker 0)"),
    (Space(declared="layer_worker"), (0, 0, 1, 1), "I4", 1, None, (), "which L0/qkv/input/w0 does not declare"),
    (
        Space(codes=Codes.SCRATCH),
        (0, 0, 1, 1, 1, 0, 0),
        "I4",
        12,
        2,
        (6,),
        "in between, event 6 (Q@0 of worker 1) wrote",
    ),
    (Space(layers=2, commit=Commits.SPLIT), (0, 0, *(1,) * 6, 0), "I3", 33, 4, (10,), "its base, epoch 0, was read"),
]


@pytest.mark.parametrize(("space", "run", "invariant", "event", "read", "writes", "words"), CAUSES)
def test_the_cause_names_what_was_read_and_what_was_written_in_between(
    space: Space, run: Choices, invariant: str, event: int, read: int | None, writes: tuple[int, ...], words: str
) -> None:
    told = counterexample(Token(space=space, choices=run, invariant=invariant))
    assert (event, read, writes) == (told.violation.event, told.cause.read, told.cause.writes)
    assert words in told.cause.because


def test_a_token_is_cut_at_the_piece_that_breaks_its_invariant() -> None:
    longer = Token(space=Space(workers=3, commit=Commits.SPLIT), choices=(0, 0, 1, 1, 1, 2, 0, 2, 2), invariant="I3")
    assert (0, 0, 1, 1, 1, 2, 0) == counterexample(longer).token.choices


def test_a_run_that_keeps_the_invariant_is_no_counterexample() -> None:
    kept = Token(space=SPLIT, choices=(0, 0, 0, 1, 1, 1), invariant="I3")
    assert () == replayed(kept).found
    with pytest.raises(UsageError, match="keeps I3"):
        counterexample(kept)


@pytest.mark.parametrize("choices", [(0, 0, 0, 0), (0, 2)])
def test_choices_that_do_not_fit_their_space_are_refused(choices: Choices) -> None:
    with pytest.raises(UsageError, match="of the run is worker"):
        replayed(Token(space=SPLIT, choices=choices, invariant="I3"))


def test_workers_that_do_different_things_are_told_apart() -> None:
    """D10 lets the last worker write first and the others once all have read."""
    told = dict(programs(Space(defect="D10")))
    assert {(0,): "f: P@0 Q@0 O F@0 U@0 S; r: Q@0 U@0", (1,): "f: P@0 Q@0 O F@0 S U@0; r: Q@0 U@0"} == told


def test_owners_and_steps_are_named_where_there_are_several() -> None:
    (only,) = programs(Space(workers=1, steps=2, layers=2))
    first = "step 0 f: L0/qkv/input P@0 Q@0 O C U@0, L1/qkv/input P@0 Q@0 O C U@0"
    again = "step 1 r: L1/qkv/input Q@1 U@1, L0/qkv/input Q@1 U@1"
    assert only[1].startswith(first)
    assert only[1].endswith(again)


RUNS = [(0, 0, 1, 1, 1, 0), (1, 0, 1, 0, 1, 0), (0, 0, 0, 1, 1, 1)]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_carried_over_to_its_own_space_is_itself(run: Choices) -> None:
    assert interleaved(SPLIT, run).schedule == carried(SPLIT, tuple(walked(SPLIT, run))).schedule


@pytest.mark.parametrize("run", RUNS)
def test_a_run_carried_over_to_atomic_commits_keeps_the_order_of_writes(run: Choices) -> None:
    atomic = carried(Space(), tuple(walked(SPLIT, run)))
    writers = [e.op.worker_id for e in interleaved(SPLIT, run).schedule if type(e).__name__ == "Store"]
    assert writers == [e.op.worker_id for e in atomic.schedule if type(e).__name__ == "Commit"]
    assert 26 == len(atomic.schedule)  # 13 of each worker: nothing is lost on the way
    assert frozenset() == broken(judge(atomic))


def test_what_has_no_match_still_runs() -> None:
    assert 26 == len(carried(Space(), ()).schedule)


def test_an_order_of_workers_passes_over_those_that_have_ended() -> None:
    assert (0, 0, 1, 1) == followed(Space(), (0, 0, 0, 1, 1, 1))
    assert (1, 0, 0, 1) == followed(Space(), (1, 5))
