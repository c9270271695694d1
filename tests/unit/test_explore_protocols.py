"""What searches find in whole protocols: the acceptance lines, D08 to D12, presets of real systems, ranks that wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qsim.errors import CaseError, UsageError
from qsim.explore import (
    Codes,
    Commits,
    Kind,
    Space,
    Token,
    completed,
    counterexample,
    explore,
    followed,
    interleaved,
    kind_of,
    preemptions,
    threads,
)
from qsim.explore.breadth import breadth_first
from qsim.explore.classes import count_classes
from qsim.explore.compiling import compiled
from qsim.explore.enumeration import count_schedules
from qsim.explore.program import Pop, Program, Push, Queue, Set, advance
from qsim.explore.threads import cut
from qsim.explore.vectors import grown, start_rows
from qsim.sim import RULES, Cadence, Violation
from qsim.sim.events import Reduce, Wait

STEP, MICROBATCH = Cadence.STEP, Cadence.MICROBATCH
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explore.md"
RANKS = Space(scope="layer_worker", commit=Commits.ASYNC)


def needed(space: Space) -> dict[Kind, int]:
    """The fewest preemptions that each kind takes, of all runs of the space."""
    found = explore(space, clock=lambda: 0.0)
    assert found.exhaustive
    assert all(finding.least for finding in found.findings)
    return {finding.kind: finding.fewest_preemptions for finding in found.findings}


def test_the_four_lines_of_acceptance() -> None:
    """Two workers on one cell; then nobody to share with, which is one class."""
    assert {Kind.PAIRING: 0} == needed(Space(defect="D01"))  # a stale live read: sequential
    assert 1 == needed(Space(defect="D01", unit=STEP))[Kind.PAIRING]  # stale across workers
    assert {Kind.LOST_COMMIT: 1} == needed(Space(commit=Commits.SPLIT))  # and it survives the snapshots
    assert {} == needed(Space())  # atomic commits with snapshots
    for space in (Space(scope="layer_worker", commit=mode) for mode in Commits if not mode.ranked):
        found = explore(space, clock=lambda: 0.0)
        assert (True, 1, ()) == (found.private, found.classes, found.findings)


FOUND = {  # by search from a correct preset: id -> space, kinds with preemptions, interleavings by hand
    "D08": (Space(commit=Commits.TORN), {Kind.LOST_COMMIT: 1, Kind.TORN_READ: 1}, 70),  # P F S S each: 8 over 4
    "D09": (Space(unit=STEP), {Kind.SECOND_COMMIT: 0}, 6),  # P C each: 4 over 2
    "D10": (Space(commit=Commits.SPLIT), {Kind.LOST_COMMIT: 1}, 20),  # P F S each: 6 over 3
    "D11": (RANKS, {Kind.REPLICAS: 0}, 4),  # 2 orders to hand in, then 2 to go on
    "D12": (Space(codes=Codes.SCRATCH, preset="current"), {Kind.OWNERSHIP: 1, Kind.TORN_READ: 1}, 70),  # Q U Q U each
}


@pytest.mark.parametrize("defect", FOUND)
def test_a_concurrency_defect_is_found_by_search(defect: str) -> None:
    space, kinds, schedules = FOUND[defect]
    assert ("none", schedules) == (space.defect, count_schedules(compiled(space)))
    assert kinds == needed(space)


def test_a_torn_pair_is_read_by_the_eighth_event() -> None:
    """Load P Q O F S.scale of worker 0, then Load and P of worker 1, between the two writes."""
    torn = next(f for f in explore(Space(commit=Commits.TORN), clock=lambda: 0.0).findings if f.kind is Kind.TORN_READ)
    assert ((0, 0, 0, 1), 8, 1) == (torn.choices, torn.events, torn.preemptions)
    told = counterexample(Token(space=Space(commit=Commits.TORN), choices=torn.choices, invariant="I7"))
    assert ("P@1", (5,)) == (told.event, told.cause.writes)
    assert "event 5 (S.scale of worker 0) wrote the scale of L0/qkv/input" in told.cause.because
    assert [(1, (), ("snap w0 @0",)), (4, (), ("base w0 @0",)), (5, ("L0/qkv/input 0 -> 1",), ())] == [
        (row.seq, row.cells, row.snapshots) for row in told.rows[:3]
    ]


def test_the_two_writes_of_a_torn_commit_are_told_apart() -> None:
    told = counterexample(Token(space=Space(commit=Commits.TORN), choices=(0, 0, 1, 1, 1, 1, 0), invariant="I3"))
    written = [(row.event, row.cells) for row in told.rows if row.cells]
    assert [
        ("S.scale", ("L0/qkv/input 0 -> 1",)),
        ("S.descale", ("L0/qkv/input descale -> 1",)),
        ("S.scale", ("L0/qkv/input 1 -> 1",)),
    ] == written


def test_a_rank_waits_until_all_have_handed_in_and_to_leave_it_then_is_no_preemption() -> None:
    """Each rank has two pieces: up to its wait, and the rest. The states: none, one, both, then one or both gone on."""
    assert (5, 2) == (breadth_first(compiled(RANKS), budget=99).states, count_classes(compiled(RANKS)))
    assert (0, 1, 1, 0) == completed(RANKS, (0,))  # worker 0 waits; worker 1 hands in and goes on
    assert [0, 0, 1] == [preemptions(RANKS, run) for run in ((0, 1), (0, 1, 1, 0), (0, 1, 0, 1))]
    with pytest.raises(UsageError, match="choice 1 of the run is worker 0, which waits for others"):
        interleaved(RANKS, (0, 0))
    assert (0, 1, 0, 1) == followed(RANKS, (0, 0, 0, 1))


def test_ranks_that_commit_what_all_have_seen_agree() -> None:
    for workers, layers in ((2, 1), (3, 1), (2, 2)):
        reduced = Space(workers=workers, layers=layers, scope="layer_worker", commit=Commits.REDUCED)
        assert {} == needed(reduced)
        assert {Kind.REPLICAS: 0} == needed(
            Space(workers=workers, layers=layers, scope=reduced.scope, commit=RANKS.commit)
        )
    told = counterexample(Token(space=RANKS, choices=(0, 1), invariant="I6"))
    helps = [repair.name for repair in told.repairs if repair.everywhere]
    assert ["wait_before_commit", "commit reduced"] == helps
    assert (12, 0) == (told.events, told.preemptions)  # Load P Q O R C of each
    assert [] == [row for row in told.rows if row.preempts]  # nor does the table mark one


def test_ranks_need_a_state_each() -> None:
    for scope, declared in (("layer", ""), ("layer_worker", "layer")):
        with pytest.raises(UsageError, match='use scope "layer_worker"'):
            Space(scope=scope, declared=declared, commit=Commits.REDUCED)


def test_ranks_that_could_never_go_on_are_refused() -> None:
    programs = [thread.events for thread in threads(RANKS)]
    alone = tuple(e for e in programs[1] if not isinstance(e, Reduce))
    with pytest.raises(CaseError, match="waits for 2 ranks and 1 take part"):
        cut([programs[0], alone])
    first = tuple(sorted(programs[0], key=lambda e: not isinstance(e, Wait)))  # waits before it hands in
    with pytest.raises(CaseError, match="wait for each other for ever"):
        cut([first, programs[1]])


PRESETS = {  # preset, unit -> what two workers on one cell break, with the fewest preemptions
    ("te_fused", None): {Kind.REPLAY: 1, Kind.MISPAIRED: 1},
    ("te_unfused", None): {Kind.REPLAY: 1, Kind.MISPAIRED: 1},
    ("te_fused", STEP): {Kind.SECOND_COMMIT: 0, Kind.MISPAIRED: 1},  # all entries of a step have one epoch
    ("torchao_delayed", None): {Kind.REPLAY: 1, Kind.SECOND_COMMIT: 0},
    ("torchao_delayed", MICROBATCH): {Kind.REPLAY: 0},  # its own commit comes between forward and recompute
    ("flax", None): {Kind.SECOND_COMMIT: 0},
    ("te_jax", None): {},
    ("msamp", None): {},
}


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_what_two_workers_on_one_cell_of_a_real_system_break(preset: tuple[str, Cadence | None]) -> None:
    name, unit = preset
    assert PRESETS[preset] == needed(Space(preset=name, unit=unit))
    found = explore(Space(preset=name, unit=unit, scope="layer_worker"), clock=lambda: 0.0)
    assert (True, 1) == (found.private, found.classes)
    assert (name, unit) == ("torchao_delayed", MICROBATCH) or () == found.findings


def test_a_shared_queue_is_mispaired_where_both_have_put_and_one_takes() -> None:
    """P, stash, C, restore of each: 8 over 4 runs. Least: worker 1 puts, then worker 0 runs up to its restore."""
    space = Space(preset="te_fused")
    assert 70 == count_schedules(compiled(space))
    told = counterexample(Token(space=space, choices=(1, 1, 0, 0, 0, 0), invariant="I10"))
    assert ("restore", 1, (2,)) == (told.event, told.preemptions, told.cause.writes)
    assert "event 2 (stash of worker 1) put that entry into stash/L0/qkv/input before event 10" in told.cause.because
    assert ("snap.r w0 entry of worker 1",) == told.rows[-1].snapshots
    later = counterexample(Token(space=space, choices=(1, 1, 1, 0, 0, 0, 0), invariant="I2"))
    assert "recompute with what event 1 (P@0 of worker 1) read, as event 20 (restore of worker 0) took it" in (
        later.cause.because
    )


@pytest.mark.parametrize("newest", [False, True])
def test_queues_hand_out_the_oldest_or_the_newest(newest: bool) -> None:
    queue = Queue(4, 3)  # version and op in or out, 3 ops, 3 versions
    puts = [(Set(4, 10 + op), Set(5, op), Push(queue)) for op in (1, 2, 3)]
    code = (*puts, (Pop(queue, newest),), (Pop(queue, newest),))
    by_hand = Program(
        code=(code,),
        numbers=((0, 1, 2, 3, 4, -1),),
        ends=((0, 1, 2, 3, 4, 5),),
        touches=((frozenset(),) * 5,),
        needs=(((),) * 5,),
        kinds=(),
        start=(0,) * 16,
        block=1,
        flags=1,
        largest=13,
        symmetric=False,
    )
    state, rows, out = by_hand.start, start_rows(by_hand), []
    for _ in code:
        state = advance(by_hand, state, 0)
        rows = next(grown(by_hand, rows)).rows
        assert state == tuple(rows[0].tolist())
        out.append(state[4:6])
    assert ([(13, 3), (12, 2)] if newest else [(11, 1), (12, 2)]) == out[3:]
    left = (1, 0, 0, 11, 0, 0) if newest else (3, 0, 0, 13, 0, 0)
    assert left == state[6:12]


def test_a_queue_over_several_steps_is_refused_and_why() -> None:
    with pytest.raises(CaseError, match="I10 ends a step for all workers at once"):
        compiled(Space(preset="te_fused", steps=2))
    assert {} == needed(Space(preset="te_fused", steps=2, workers=1))


def test_every_rule_has_a_kind_and_a_reason_of_no_kind_is_refused() -> None:
    assert set(RULES) == {kind.invariant for kind in Kind}
    for rule in set(RULES) - {"I3", "I10", "I12"}:
        assert rule == kind_of(Violation(rule, 0, "", "x")).invariant
    assert Kind.FROZEN is kind_of(Violation("I12", 0, "", "observed, and still in its initial state: x"))
    assert Kind.HELD_UP is kind_of(Violation("I12", 0, "", "Inf or NaN enters the window"))
    assert Kind.LEFT_IN_QUEUE is kind_of(Violation("I10", 0, "", "left in q at the end of its step"))
    assert Kind.MISPAIRED is kind_of(Violation("I10", 0, "", "takes the entry of another operation out of q"))
    with pytest.raises(CaseError, match=r"I3 .*is of no kind"):
        kind_of(Violation("I3", 0, "", "something new"))


def test_the_page_says_what_is_found() -> None:
    """The tables of docs/explore.md against the searches."""
    rows = dict(re.findall(r"^\| (D\d\d) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(FOUND) == sorted(rows)
    for defect, (space, kinds, _) in FOUND.items():
        cells = [cell.strip() for cell in rows[defect].split("|")]
        states = breadth_first(compiled(space), budget=999).states
        told = "; ".join(f"{kind.invariant} {count}" for kind, count in kinds.items())
        assert (told, str(states)) == (cells[-2], cells[-1])
