"""Speed of the explorer against plain loops in the same run: read the medians as ratios. Run with ``make bench``."""

from __future__ import annotations

from typing import Any

import pytest

from qsim.explore import Commits, Space, completed, interleaved
from qsim.explore.breadth import breadth_first
from qsim.explore.compiling import compiled
from qsim.explore.enumeration import reached
from qsim.explore.program import Program, State
from qsim.sim import records_of

SPACE = Space(workers=3, layers=2, commit=Commits.SPLIT, defect="D01")
STATES = 76_083
"""Of SPACE: three workers, two layers, split commits, live reads; 5.55e12 interleavings of 30 pieces."""


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(SPACE)


@pytest.fixture(scope="module")
def states(program: Program) -> list[State]:
    return list(reached(program))


@pytest.mark.benchmark(group="76,083 states of 3 workers, 2 layers, split commits")
def test_breadth_first(benchmark: Any, program: Program) -> None:
    found = benchmark(breadth_first, program, budget=10**6, symmetry=False)
    assert (found.whole, found.states) == (True, STATES)


@pytest.mark.benchmark(group="76,083 states of 3 workers, 2 layers, split commits")
def test_breadth_first_with_symmetry(benchmark: Any, program: Program) -> None:
    found = benchmark(breadth_first, program, budget=10**6)
    assert found.whole


@pytest.mark.benchmark(group="76,083 states of 3 workers, 2 layers, split commits")
def test_peer_a_set_of_tuples_and_one_state_at_a_time(benchmark: Any, program: Program) -> None:
    found = benchmark.pedantic(reached, args=(program,), rounds=3, iterations=1)
    assert len(found) == STATES


@pytest.mark.benchmark(group="76,083 states of 3 workers, 2 layers, split commits")
def test_peer_inserts_alone(benchmark: Any, states: list[State]) -> None:
    assert len(benchmark(set, states)) == STATES


@pytest.mark.benchmark(group="one run of 96 events")
def test_peer_records_of_one_run(benchmark: Any) -> None:
    case = interleaved(SPACE, completed(SPACE, ()))
    assert len(benchmark(records_of, case)) == 96
