"""What a run costs: nothing where the protocol is correct, what the defect is known to cost where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from qsim.errors import CaseError
from qsim.explore import Codes, Commits, Space, followed, interleaved
from qsim.explore.carried import step_by_step
from qsim.explore.chance import random_walk
from qsim.explore.compiling import compiled
from qsim.explore.cost import MOST, Setting, cost_of, twin_of, worst_of
from qsim.sim import Cadence, judge

SETTING = Setting(seeds=8)
SPLIT = Space(commit=Commits.SPLIT)
LOST = (0, 0, 1, 1, 1, 0)

CORRECT = {
    "atomic": Space(),
    "three workers": Space(workers=3, steps=2),
    "block": Space(layers=2, part="block"),
    "own states, split": Space(scope="layer_worker", commit=Commits.SPLIT),
    "one worker, unit step": Space(workers=1, steps=2, unit=Cadence.STEP),
    "never commits": Space(preset="current"),
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_space_costs_nothing_to_the_bit_in_any_order(name: str) -> None:
    space = CORRECT[name]
    for run in random_walk(compiled(space), runs=5, seed=7):
        cost = cost_of(space, run, SETTING)
        assert (0.0, 0.0, 0.0, 1.0) == (cost.worst, cost.median, cost.wrong, cost.gain)
        assert cost.identical
        assert not cost.waiting
    assert worst_of(space, SETTING) is None


WRONG = {
    "split": SPLIT,
    "three workers split": Space(workers=3, commit=Commits.SPLIT),
    "live reads": Space(defect="D01"),
    "both": Space(preset="seed_defective"),
    "layers share": Space(layers=2, scope="model", declared="layer"),
    "own declared": Space(declared="layer_worker"),
    "scratch": Space(codes=Codes.SCRATCH),
    "commits twice": Space(workers=3, steps=2, unit=Cadence.STEP),
    "centre": Space(defect="D07"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_twin_of_a_run_is_correct_and_computes_the_same(name: str) -> None:
    space = WRONG[name]
    for run in random_walk(compiled(space), runs=5, seed=3):
        twin, waiting = twin_of(space, run)
        assert () == judge(twin)
        assert not waiting or name == "commits twice"  # the run's own order will do for all others
        mine = interleaved(space, run)

        def gemms(schedule: object) -> list[object]:
            return sorted((e.phase, e.op, e.gemm) for e in schedule if type(e).__name__ == "Consume")  # type: ignore[attr-defined]

        assert gemms(mine.schedule) == gemms(twin.schedule)


def test_a_lost_commit_costs_nothing_in_its_own_step_and_something_in_the_next() -> None:
    """Both workers have encoded before the first write, so in this step nothing differs; the next one reads less."""
    assert cost_of(SPLIT, LOST, Setting(seeds=8, after=0)).identical
    cost = cost_of(SPLIT, LOST, SETTING)
    assert 0.1 < cost.worst < 1.0
    assert 1.0 == cost.gain  # snapshots pair every decode: what is wrong is the scale that both use
    assert "step 1" in cost.gemm


def test_a_window_of_one_hides_what_another_write_would_have_pushed_out() -> None:
    """The last write is worker 0's in both, and a history of one holds nothing else."""
    assert cost_of(SPLIT, LOST, Setting(seeds=8, window=1)).identical


def test_a_live_read_costs_a_gain_and_codes_of_another_worker_cost_more() -> None:
    live = cost_of(Space(defect="D01"), (0, 0, 0), SETTING)
    foreign = cost_of(Space(codes=Codes.SCRATCH), (0, 0, 0, 1, 1, 1, 1, 1, 1, 0), SETTING)
    assert 0.9 < live.worst < 10.0
    assert 1.0 < foreign.worst / live.worst
    assert live.gain != 1.0 != foreign.gain


def test_the_worst_run_is_at_least_as_dear_as_any_that_was_found() -> None:
    worst = worst_of(SPLIT, SETTING, invariant="I3")
    assert worst is not None
    assert (2, True, False) == (worst.measured, worst.all_of_them, worst.by_chance)  # who writes last decides
    dear = max(cost_of(SPLIT, run, SETTING).worst for run in (LOST, (0, 0, 1, 1, 0, 1)))
    assert dear == worst.cost.worst
    assert worst.cost.worst == cost_of(SPLIT, worst.cost.choices, SETTING).worst
    assert worst_of(SPLIT, SETTING, invariant="I1") is None


def test_no_more_than_the_stated_number_of_runs_is_measured() -> None:
    worst = worst_of(Space(preset="seed_defective"), Setting(seeds=1), invariant="I1")
    assert worst is not None
    assert (MOST, False) == (worst.measured, worst.all_of_them)  # of 138 classes


def test_where_no_order_of_the_run_allows_one_commit_the_twin_lets_workers_wait() -> None:
    """Worker 0 runs both steps before worker 1 begins: one merged commit a step cannot be had in that order."""
    space = Space(steps=2, unit=Cadence.STEP)
    twin, waiting = twin_of(space, followed(space, (0,) * 4))
    assert waiting
    assert [0, 1] == [e.op.logical_step for e in twin.schedule if type(e).__name__ == "Commit"]
    assert [2, 2] == [len(e.obs) for e in twin.schedule if type(e).__name__ == "Commit"]
    assert 4 == sum(type(e).__name__ == "Commit" for e in step_by_step(space).schedule)


def test_a_declaration_that_nothing_can_keep_has_no_twin() -> None:
    """Two layers on one declared owner commit twice a microbatch, whoever waits for whom."""
    with pytest.raises(CaseError, match="no protocol keeps what is declared"):
        cost_of(Space(layers=2, scope="model"), (), SETTING)


def test_a_part_without_tensors_is_refused_by_name() -> None:
    with pytest.raises(CaseError, match='no tensors for part "gradients"'):
        cost_of(Space(part="gradients"), (), SETTING)


def test_more_seeds_can_only_raise_the_largest_error() -> None:
    few, many = (cost_of(SPLIT, LOST, Setting(seeds=seeds)).worst for seeds in (8, 16))
    assert 0.0 < few <= many < np.inf
