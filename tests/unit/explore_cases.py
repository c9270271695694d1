"""Spaces that the explorer's tests share, and the plain ways to judge them that engines are held against."""

from __future__ import annotations

from qsim.explore import Choices, Codes, Commits, Kind, Space, completed, interleaved, kind_of, preemptions
from qsim.explore.enumeration import all_runs
from qsim.explore.program import Program, first_raises
from qsim.sim import Cadence, judge

SPLIT, SCRATCH, STEP = Commits.SPLIT, Codes.SCRATCH, Cadence.STEP

SMALL: dict[str, Space] = {
    "atomic": Space(),
    "split": Space(commit=SPLIT),
    "three workers": Space(workers=3),
    "three workers split": Space(workers=3, commit=SPLIT),
    "two roles split": Space(part="linear", commit=SPLIT),
    "two steps split": Space(steps=2, commit=SPLIT),
    "two steps, unit step": Space(steps=2, commit=SPLIT, unit=STEP),
    "own states": Space(scope="layer_worker", commit=SPLIT),
    "own states, one owner declared": Space(scope="layer_worker", declared="layer", unit=STEP),
    "shared, own declared": Space(declared="layer_worker"),
    "whole model split": Space(layers=2, scope="model", commit=SPLIT),
    "whole model, layers declared": Space(layers=2, scope="model", declared="layer", commit=SPLIT),
    "unit step": Space(unit=STEP),
    "live reads": Space(defect="D01"),
    "live reads, unit step": Space(defect="D01", unit=STEP),
    "live reads split": Space(defect="D01", commit=SPLIT),
    "recompute advances": Space(defect="D02"),
    "both": Space(defect="D03"),
    "seed_defective": Space(preset="seed_defective"),
    "shared over layers": Space(layers=2, defect="D04"),
    "one snapshot": Space(defect="D05"),
    "stale centre": Space(defect="D07"),
    "commit per worker": Space(defect="D09"),
    "read then write": Space(defect="D10"),
    "scratch": Space(codes=SCRATCH),
    "never commits": Space(preset="current"),
    "torn": Space(commit=Commits.TORN),
    "torn, own states": Space(scope="layer_worker", commit=Commits.TORN),
    "live reads torn": Space(defect="D01", commit=Commits.TORN),
    "ranks": Space(scope="layer_worker", commit=Commits.REDUCED),
    "ranks, two steps": Space(steps=2, scope="layer_worker", commit=Commits.REDUCED),
    "ranks commit first": Space(scope="layer_worker", commit=Commits.ASYNC),
    "three ranks commit first": Space(workers=3, scope="layer_worker", commit=Commits.ASYNC),
    "te_fused": Space(preset="te_fused"),
    "te_fused, unit step": Space(preset="te_fused", unit=STEP),
    "te_fused, whole model": Space(layers=2, scope="model", preset="te_fused", workers=1),
    "te_unfused split": Space(preset="te_unfused", commit=SPLIT),
    "torchao_delayed": Space(preset="torchao_delayed"),
    "flax": Space(preset="flax"),
    "te_jax": Space(preset="te_jax"),
    "msamp": Space(preset="msamp"),
}
"""Every mechanism of the explorer once; few enough interleavings to judge all of them."""

TIES: dict[str, Space] = {
    "two steps, live reads, unit step": Space(steps=2, defect="D01", unit=STEP),
    "scratch split": Space(codes=SCRATCH, commit=SPLIT),
}
"""Spaces in which runs with the fewest events differ in preemptions: for the least runs alone."""

MANY = 3500
"""Interleavings that a test may enumerate."""


def judged(space: Space, choices: Choices) -> frozenset[Kind]:
    """The kinds that ``check`` finds on the records of a complete run."""
    return frozenset(kind_of(violation) for violation in judge(interleaved(space, completed(space, choices))))


def least_by_enumeration(space: Space, program: Program) -> dict[Kind, tuple[tuple[int, int], int]]:
    """For each kind the fewest (events, preemptions), and the fewest preemptions of all, from every run."""
    short: dict[Kind, tuple[int, int]] = {}
    calm: dict[Kind, int] = {}
    for choices, _ in all_runs(program):
        for kind, first in first_raises(program, choices).items():
            count = preemptions(space, choices[: first.pieces])
            short[kind] = min(short.get(kind, (first.events, count)), (first.events, count))
            calm[kind] = min(calm.get(kind, count), count)
    return {kind: (short[kind], calm[kind]) for kind in short}
