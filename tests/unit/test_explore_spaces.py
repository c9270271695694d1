"""Spaces, footprints, threads and runs: what a search is about, before any search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsim.errors import CaseError, UsageError
from qsim.explore import (
    Codes,
    Commits,
    Kind,
    Space,
    completed,
    interleaved,
    kind_of,
    preemptions,
    space_of,
    threads,
)
from qsim.explore.footprints import footprint
from qsim.quant import StateKey
from qsim.sim import Cadence, Violation, judge, records_of, run
from qsim.sim.control import Control, Epochs, apply, control_step, witness
from qsim.sim.events import Begin, Commit, Consume, Fetch, Quantize, Store
from tests.unit.explore_cases import SMALL
from tests.unit.sim_cases import env_of

SPLIT = Commits.SPLIT


def kinds(space: Space, worker: int = 0) -> list[type]:
    """The kinds of a thread's events that touch state or codes."""
    shown = (Begin, Quantize, Commit, Fetch, Store, Consume)
    return [type(event) for event in threads(space)[worker].events if isinstance(event, shown)]


@pytest.mark.parametrize("space", SMALL.values(), ids=SMALL)
def test_a_space_is_read_back_from_its_text(space: Space) -> None:
    assert space == space_of(space.text())
    assert hash(space) == hash(space_of(space.text()))


def test_what_is_left_out_of_a_space_is_filled_in() -> None:
    assert Space() == Space(declared="layer", recipe="delayed", unit=Cadence.MICROBATCH)
    assert Space(defect="D09") == Space(defect="concurrent_double_commit", unit=Cadence.STEP)
    assert Space(defect="D07").recipe == "centred"
    assert (Cadence.NEVER, "current") == (Space(preset="current").cadence, Space(preset="current").recipe)


def test_the_text_of_a_space_is_its_fields_in_order() -> None:
    space = Space(workers=3, layers=2, scope="model", commit=SPLIT, defect="D01", unit=Cadence.STEP)
    assert "3.1.2.model.model.split.own.step.seed_correct.delayed.D01.input" == space.text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2.1.1", "12 words"),
        ("2.x.1.layer.layer.atomic.own.step.seed_correct.delayed.none.input", "sizes"),
        (
            "2.1.1.layers.layer.atomic.own.step.seed_correct.delayed.none.input",
            'scope "layers" is unknown; known: layer,',
        ),
        ("2.1.1.layer.layer.tom.own.step.seed_correct.delayed.none.input", 'commit "tom" is unknown; known: atomic'),
        ("2.1.1.layer.layer.atomic.own.step.seed.delayed.none.input", 'preset "seed" is unknown; known: seed_correct'),
        ("9.1.1.layer.layer.atomic.own.step.seed_correct.delayed.none.input", "workers 9 are too many"),
        ("0.1.1.layer.layer.atomic.own.step.seed_correct.delayed.none.input", "workers 0 is too small"),
        ("2.76.2.layer.layer.atomic.own.step.seed_correct.delayed.none.input", "304 visits of a layer; at most 300"),
    ],
)
def test_a_text_that_is_no_space_is_refused_with_what_is_known(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        space_of(text)


def test_a_preset_that_casts_nothing_has_nothing_to_explore() -> None:
    with pytest.raises(CaseError, match="casts nothing"):
        threads(Space(preset="none"))


def test_a_defect_is_refused_where_the_preset_cannot_host_it() -> None:
    with pytest.raises(CaseError, match="D01"):
        threads(Space(preset="seed_defective", defect="D01"))


@pytest.mark.parametrize("space", SMALL.values(), ids=SMALL)
def test_an_event_changes_what_its_footprint_says_and_depends_on_nothing_else(space: Space) -> None:
    """The table is held against the simulator's control: by what changes, and by what a change elsewhere changes."""
    case = interleaved(space, completed(space, ()))
    cells = {cell for event in case.schedule if (cell := footprint(event).cell) is not None}
    control = Control()
    for event in case.schedule:
        mark, after = footprint(event), control_step(control, event)
        names = control.slots.keys() | after.slots.keys()
        assert {name for name in names if control.slots.get(name) != after.slots.get(name)} <= set(mark.puts)
        written = {cell for cell in cells if control.cells.get(cell) != after.cells.get(cell)}
        assert written == ({mark.cell} if mark.writes_cell else set())
        for places, prefix in ((control.queues, ""), (control.mail, "mail/")):
            moved = after.queues if places is control.queues else after.mail
            changed = {prefix + name for name in places.keys() | moved.keys() if places.get(name) != moved.get(name)}
            assert changed <= {mark.place}
        for cell in cells - {mark.cell}:
            other = control.copy()
            other.cells[cell] = Epochs(70, 70)
            assert witness(control, event) == witness(other, event)
            apply(other, event)
            other.cells[cell] = after.cells.get(cell, Epochs(0, 0))
            assert {**after.cells, cell: other.cells[cell]} == other.cells
            assert (after.slots, after.queues, after.mail) == (other.slots, other.queues, other.mail)
        for name in control.slots.keys() - {*mark.takes, *mark.puts}:  # an empty slot that is read would raise
            other = control.copy()
            del other.slots[name]
            assert witness(control, event) == witness(other, event)
            assert {k: v for k, v in after.slots.items() if k != name} == control_step(other, event).slots
        for queue in control.queues.keys() - {mark.place}:
            other = control.copy()
            del other.queues[queue]
            assert witness(control, event) == witness(other, event)
        control = after


def test_a_worker_begins_quantizes_commits_and_consumes_and_recompute_has_fewer_events() -> None:
    assert [Begin, Quantize, Commit, Consume, Quantize, Consume] == kinds(Space())
    assert [Begin, Quantize, Fetch, Store, Consume, Quantize, Consume] == kinds(Space(commit=SPLIT))
    assert [Begin, Quantize, Consume, Quantize, Consume, Commit] == kinds(Space(unit=Cadence.STEP))


def test_a_worker_commits_what_it_saw_itself() -> None:
    for worker in (0, 1, 2):
        (commit,) = (e for e in threads(Space(workers=3, unit=Cadence.STEP))[worker].events if isinstance(e, Commit))
        assert (worker, worker) == (commit.op.worker_id, commit.op.microbatch)
        assert (f"obs.f/m{worker}/w{worker}/L0/s0/r0",) == commit.obs


def test_a_store_is_based_on_the_read_just_before_it_and_folds_in_what_the_commit_would() -> None:
    (commit,) = (e for e in threads(Space())[1].events if isinstance(e, Commit))
    events = threads(Space(commit=SPLIT))[1].events
    at = next(i for i, e in enumerate(events) if isinstance(e, Store))
    fetch, store = events[at - 1], events[at]
    assert isinstance(fetch, Fetch)
    assert isinstance(store, Store)
    assert (commit.cell, fetch.into, commit.obs) == (store.cell, store.base, store.obs)
    assert commit.cell == fetch.cell


def test_threads_are_cut_before_what_another_worker_could_see() -> None:
    cell = StateKey(layer_id=0, site=0, role_id=0)
    assert [((cell, False),), ((cell, False),), ((cell, True),)] == [
        piece.touches for piece in threads(Space(commit=SPLIT))[0].pieces
    ]
    assert [()] == [piece.touches for piece in threads(Space(scope="layer_worker", commit=SPLIT))[0].pieces]
    assert [()] == [piece.touches for piece in threads(Space(workers=1, commit=SPLIT))[0].pieces]
    scratch = [piece.touches for piece in threads(Space(codes=Codes.SCRATCH))[0].pieces]
    slot = "scratch/s0/r0"
    assert [
        ((cell, False),),
        ((slot, True),),
        ((cell, True),),
        ((slot, False),),
        ((slot, True),),
        ((slot, False),),
    ] == scratch


@pytest.mark.parametrize("space", SMALL.values(), ids=SMALL)
def test_pieces_cover_a_thread_and_each_holds_one_shared_event_at_most(space: Space) -> None:
    for thread in threads(space):
        assert [0, *(piece.stop for piece in thread.pieces[:-1])] == [piece.start for piece in thread.pieces]
        assert len(thread.events) == thread.pieces[-1].stop


def test_a_run_is_an_ordinary_case_that_computes() -> None:
    for space in (Space(commit=SPLIT), Space(codes=Codes.SCRATCH), Space(defect="D07")):
        case = interleaved(space, completed(space, (0, 0, 1)))
        assert records_of(case) == run(case, env_of(case)).records


def test_a_run_may_stop_anywhere_and_is_completed_without_a_preemption() -> None:
    space = Space(commit=SPLIT, workers=3)
    assert (0, 0, 1, 1, 0, 1, 2, 2, 2) == completed(space, (0, 0, 1, 1, 0))
    assert (1, 1, 0, 0, 0, 2, 2, 2, 1) == completed(space, (1, 1, 0, 0, 0, 2, 2))
    whole, part = interleaved(space, completed(space, (0, 1))), interleaved(space, (0, 1))
    assert part.schedule == whole.schedule[: len(part.schedule)]


def test_preemptions_count_who_is_left_before_the_end() -> None:
    space = Space(commit=SPLIT)
    assert [0, 1, 1, 2] == [
        preemptions(space, run) for run in ((0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 1, 0), (0, 1), (0, 1, 0))
    ]


@pytest.mark.parametrize(("choices", "words"), [((0, 2), "worker 2"), ((0,) * 4, "has ended"), ((-1,), "worker -1")])
def test_a_run_that_cannot_be_is_refused(choices: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        interleaved(Space(commit=SPLIT), choices)


def test_kinds_of_violations_tell_the_three_of_I3_apart() -> None:  # noqa: N802
    lost = judge(interleaved(Space(commit=SPLIT), (0, 0, 1, 1, 1, 0)))
    assert [Kind.LOST_COMMIT] == [kind_of(v) for v in lost]
    second = judge(interleaved(Space(unit=Cadence.STEP), (0, 0, 1, 1)))
    assert [Kind.SECOND_COMMIT] == [kind_of(v) for v in second]
    space = replace(Space(), steps=2)
    case = interleaved(space, completed(space, ()))
    first = next(i for i, e in enumerate(case.schedule) if isinstance(e, Commit))
    missing = judge(replace(case, schedule=case.schedule[:first] + case.schedule[first + 1 :]))
    assert [Kind.MISSING_COMMIT] == [kind_of(v) for v in missing]
    assert Kind.TORN_READ is kind_of(Violation("I7", 0, "", "x"))
