"""Breadth-first search over states: exhaustive within its bounds, and by far the most states a second.

It holds one level at a time, and of each level who came from whom. Knows no event.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qsim.arrays import I64
from qsim.explore.program import Program
from qsim.explore.result import Kind
from qsim.explore.runs import Choices
from qsim.explore.vectors import Rows, first_of_each, grown, sorted_blocks, start_rows, successors, widest


class Reached(NamedTuple):
    """states: how many were visited; whole: whether that was all. runs: for each kind a run with the fewest pieces.

    verdicts: the flags of complete runs, each set of flags once; all of them where the search was whole.
    """

    states: int
    whole: bool
    runs: dict[Kind, Choices]
    verdicts: frozenset[int]


class _Level(NamedTuple):
    """Of each row of a level: the row of the level before that it comes from, and the worker that moved."""

    parents: I64
    workers: np.ndarray[tuple[int], np.dtype[np.uint8]]


def breadth_first(program: Program, *, budget: int, symmetry: bool = True) -> Reached:
    """Search all states, at most about ``budget`` of them: the level that goes beyond it is the last.

    No level is begun that would be too wide for the budget or for memory.

    symmetry: where all workers run the same code, count states that differ in the workers' numbers alone as one.
    """
    alike = symmetry and program.symmetric
    rows, states, levels = start_rows(program), 1, list[_Level]()
    found: dict[Kind, tuple[int, int, int]] = {}  # kind -> level, row and worker of the piece that raises it
    for level in range(sum(program.lengths)):
        if states > budget or successors(program, rows) > widest(program, rows, budget):
            break
        parts, parents, workers = [], [], []
        for group in grown(program, rows):
            for mark in group.raised:
                if mark.kind not in found:
                    at = 0 if mark.where is None else int(mark.where.argmax())
                    found[mark.kind] = level, int(group.parents[at]), group.worker
            parts.append(group.rows)
            parents.append(group.parents)
            workers.append(np.full(len(group.rows), group.worker, np.uint8))
        rows = np.concatenate(parts)
        if alike:
            rows = sorted_blocks(program, rows)
        kept = first_of_each(rows)
        rows = rows[kept]
        levels.append(_Level(np.concatenate(parents)[kept], np.concatenate(workers)[kept]))
        states += len(rows)
    whole = len(levels) == sum(program.lengths)
    verdicts = frozenset(np.unique(rows[:, program.flags]).tolist()) if whole else frozenset()
    runs = {kind: _run(program, levels, at, alike) for kind, at in found.items()}
    return Reached(states, whole, runs, verdicts)


def _run(program: Program, levels: list[_Level], at: tuple[int, int, int], alike: bool) -> Choices:
    """The choices that lead to a row, and the last one; with symmetry the blocks are followed to their workers."""
    level, row, worker = at
    path = [worker]
    for before in reversed(levels[:level]):
        path.append(int(before.workers[row]))
        row = int(before.parents[row])
    path.reverse()
    if not alike:
        return tuple(path)
    rows, who, choices = start_rows(program), list(range(program.workers)), []
    for block in path:
        choices.append(who[block])
        rows, who = _followed(program, rows, block, who)
    return tuple(choices)


def _followed(program: Program, rows: Rows, block: int, who: list[int]) -> tuple[Rows, list[int]]:
    """One row after a piece of ``block``, sorted, and which worker each of its blocks belongs to now."""
    after = next(group.rows for group in grown(program, rows) if group.worker == block)
    blocks = _blocks(program, after)
    after = sorted_blocks(program, after)
    left, moved = list(range(program.workers)), []
    for wanted in _blocks(program, after):
        old = next(at for at in left if blocks[at] == wanted)
        left.remove(old)
        moved.append(who[old])
    return after, moved


def _blocks(program: Program, rows: Rows) -> list[bytes]:
    size = program.block
    return [rows[0, size * w : size * (w + 1)].tobytes() for w in range(program.workers)]
