"""Some runs of a space, one a class, where all of them are too many to judge or to price. Searches nothing."""

from __future__ import annotations

import itertools

from qsim.explore.chance import random_walk
from qsim.explore.classes import class_runs
from qsim.explore.program import Program
from qsim.explore.runs import Choices

LONGEST = 400
"""Pieces of a run beyond which classes are not walked through: their runs are drawn by chance."""


def too_long(program: Program) -> bool:
    """Whether ``some_runs`` draws by chance."""
    return sum(program.lengths) > LONGEST


def some_runs(program: Program, most: int) -> tuple[tuple[Choices, ...], bool]:
    """One run of each class, ``most`` at the most; whether these are all classes. Runs by chance in a long space."""
    if too_long(program):
        return tuple(random_walk(program, runs=most, seed=0)), False
    runs = tuple(run for run, _ in itertools.islice(class_runs(program), most + 1))
    return runs[:most], len(runs) <= most
