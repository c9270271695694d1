"""What a run costs in numbers: replayed with real tensors, against its correct twin. Judges no invariant.

The twin is the correct protocol in the same order of workers, over the same tensors: atomic commits, one for each
declared owner and unit, codes of their own, states of the declared owners. A correct run is its own twin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from qsim._paths import sample_capture
from qsim.arrays import F64
from qsim.backends import get_backend
from qsim.errors import CaseError
from qsim.explore.carried import followed, same_order, step_by_step
from qsim.explore.compiling import compiled
from qsim.explore.program import flags_of
from qsim.explore.runs import Choices, completed, interleaved
from qsim.explore.sampled import some_runs, too_long
from qsim.explore.space import NO_DEFECT, PARTS, Codes, Commits, Space
from qsim.formats import get_format
from qsim.quant import OpId, Recipe, Timing, make_recipe
from qsim.record import Op
from qsim.severity import measure_severity
from qsim.sim import FIXES, PRESETS, Case, Env, Linear, Trace, judge, records_of, replay
from qsim.workloads import WORKLOADS, Shaping, Workload

MOST, EVENTS = 100, 100_000
"""Violating runs of which the cost is measured, and the events of all of them together."""
LOOKED = 10_000
"""Classes that are looked at for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What numbers depend on. after: further steps, by one worker after the other: a commit shows in the next read."""

    fmt: str = "float8_e4m3fn"
    window: int = 16
    seeds: int = 16
    after: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of all GEMMs of a run and all seeds, against the twin.

    worst: the largest relative L2 error, and ``gemm`` with ``phase`` where; median: the median error; wrong: share
    of outputs that differ in any bit; gain: descale used / descale paired, farthest from 1. waiting: in the twin
    workers wait for each other at the end of each step: in the run's own order none can commit once a unit.
    """

    choices: Choices
    worst: float
    median: float
    wrong: float
    gain: float
    gemm: str
    phase: str
    waiting: bool

    @property
    def identical(self) -> bool:
        """True where no bit of any output differs."""
        return self.wrong == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The dearest of some violating runs. measured: how many; all_of_them: one of every class that there is.

    by_chance: they are runs drawn by chance, not one a class.
    """

    cost: Cost
    measured: int
    all_of_them: bool
    by_chance: bool


def cost_of(space: Space, choices: Choices, setting: Setting) -> Cost:
    """The cost of a run, carried on to its end and ``setting.after`` steps beyond.

    Raises CaseError where the shipped capture has no tensors for the space.
    """
    longer = replace(space, steps=space.steps + setting.after)
    run = followed(longer, completed(space, choices))
    mine = _played(interleaved(longer, run), longer, setting)
    correct, waiting = twin_of(longer, run)
    twin = _played(correct, longer, setting)
    severity = measure_severity(mine, twin)
    errors = np.concatenate([part.rel_error.ravel() for part in severity.gemms.values()])
    phase, part = max(severity.gemms.items(), key=lambda item: float(item[1].rel_error.max()))
    key = part.keys[int(part.rel_error.max(axis=1).argmax())]
    return Cost(
        choices=choices,
        worst=float(errors.max()),
        median=float(np.quantile(errors, 0.5, method="inverted_cdf")),
        wrong=float(_differ(mine, twin).mean()),
        gain=severity.farthest_gain(),
        gemm=f"{key.gemm} of {key.op}",
        phase=phase,
        waiting=waiting,
    )


def worst_of(space: Space, setting: Setting, *, invariant: str = "") -> Worst | None:
    """The dearest run of a space among those that break ``invariant`` ("": any). None where none was met."""
    program = compiled(space)
    wanted = sum(program.bit(kind) for kind in program.kinds if invariant in ("", kind.invariant))
    runs, whole = some_runs(program, LOOKED)
    wrong = [run for run in runs if flags_of(program, run) & wanted]
    most = max(1, min(MOST, EVENTS // sum(ends[-1] for ends in program.ends)))
    costs = [cost_of(space, run, setting) for run in wrong[:most]]
    if not costs:
        return None
    dearest = max(costs, key=lambda cost: (cost.worst, cost.wrong))
    everything = whole and len(wrong) <= most
    return Worst(cost=dearest, measured=len(costs), all_of_them=everything, by_chance=too_long(program))


def twin_of(space: Space, choices: Choices) -> tuple[Case, bool]:
    """The correct twin of a complete run, and whether its workers wait for each other at the end of each step.

    Raises CaseError where neither keeps every invariant: what is declared cannot be kept.
    """
    correct = replace(
        space,
        preset="seed_correct" if PRESETS[space.preset].breaks else space.preset,
        defect=NO_DEFECT,
        scope=space.declared,
        commit=Commits.REDUCED if space.commit.ranked else Commits.ATOMIC,
        codes=Codes.OWN,
    )
    merged = FIXES["merged_commit"].rewrite
    alike = merged(same_order(correct, space, choices))
    if not judge(alike):
        return alike, False
    waiting = merged(step_by_step(correct))
    if violations := judge(waiting):
        raise CaseError(
            f"no protocol keeps what is declared (scope {space.declared}, unit {space.cadence.value}): even workers "
            f"that wait for each other break {violations[0].invariant}; declare another scope or unit for a cost"
        )
    return waiting, True


def _played(case: Case, space: Space, setting: Setting) -> Trace:
    recipe = _recipe(space.recipe, setting)
    env = Env(
        load=_workload(space.layers, space.workers, space.part, setting.seeds).load,
        backend=get_backend("numba"),
        recipe=recipe,
        policy=case.policy,
        lead=(setting.seeds,),
        reproducible=True,
    )
    return replay(replace(case, recipe=recipe), env, records_of(case))


def _recipe(name: str, setting: Setting) -> Recipe:
    fmt = get_format(setting.fmt)
    recipe = make_recipe(name, fmt=fmt)
    return recipe if recipe.timing is Timing.CURRENT else make_recipe(name, fmt=fmt, window=setting.window)


@lru_cache(maxsize=4)
def _workload(layers: int, workers: int, part: str, seeds: int) -> Workload:
    path = sample_capture()
    found = WORKLOADS["replay"](
        path, shaping=Shaping(), seeds=range(seeds), layers=layers, microbatches=workers
    )  # fmt: skip
    for node in PARTS[part].body:
        wanted = {node} if not isinstance(node, Linear) else {node, node._replace(gradients=True)}
        if wanted.isdisjoint(found.body):
            raise CaseError(
                f'{path.name} has no tensors for part "{part}" ({node}), so its cost cannot be measured; use part input'
            )
    return found


def _differ(mine: Trace, twin: Trace) -> F64:
    """1.0 for each output [gemms, seeds] with any bit other than in the twin."""
    theirs = _outputs(twin)
    rows = []
    for key, seq in _outputs(mine).items():
        a, b = mine.outputs[seq].view(np.uint32), twin.outputs[theirs[key]].view(np.uint32)
        rows.append((a != b).any(axis=tuple(range(1, a.ndim))))
    return np.array(rows, np.float64)


def _outputs(trace: Trace) -> dict[tuple[str, Op, str], int]:
    return {(r.phase, OpId(*r.op), r.gemm): r.seq for r in trace.records if r.kind == "consume" and r.op is not None}
