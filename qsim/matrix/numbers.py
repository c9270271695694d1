"""What numbers can see: a defect on a family with tensors, and whether a family could show anything at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsim.arrays import same_bits
from qsim.matrix.catches import host_case
from qsim.matrix.families import Family
from qsim.severity import measure_severity, replay_mismatch
from qsim.sim import Case, Defect, Trace
from qsim.workloads import Shaping
from qsim.workloads.seeded import play_seeded

SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """One defect on one family. replay: share of recomputed GEMMs that differ from forward's in a bit; twin: share of
    GEMMs (the worse of forward and recompute) whose relative error against the correct twin is above 3%; worst: the
    largest such error, inf where an output is not finite.
    """

    replay: float
    twin: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacuity:
    """Whether the correct protocol of a family moves enough to show a defect. scale_moved: share of owners whose scale
    is not its first one at the end; layers_differ: the scales of one role differ between layers; recomputed: GEMMs
    that run twice.
    """

    scale_moved: float
    layers_differ: bool
    recomputed: int

    @property
    def vacuous(self) -> bool:
        """True where nothing can be seen whatever is wrong."""
        return self.scale_moved == 0.0


def play(case: Case, family: Family) -> Trace:
    """The trace of a case over the seeded workload."""
    return play_seeded(case, family.spec, seeds=SEEDS, shaping=Shaping())


def measure(defect: Defect, family: Family, *, correct: Trace, variant: str = "") -> Numbers:
    """The defect's numbers against the correct trace of the same family. CaseError where it cannot be hosted."""
    trace = play(defect.apply(host_case(family), variant), family)
    severity = measure_severity(trace, correct)
    error = severity.worst("rel_error")
    mismatch = replay_mismatch(trace)
    return Numbers(
        replay=float(mismatch.mean()) if mismatch.size else 0.0,
        twin=float((error > 0.03).mean()),
        worst=float(error.max()),
    )


def vacuity(family: Family) -> tuple[Vacuity, Trace]:
    """Whether a family can show anything, and the correct trace that says so."""
    trace = play(host_case(family), family)
    scales: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]] = {}
    for record in trace.records:
        if record.kind == "quantize" and record.phase in ("f", "b") and record.used is not None:
            snapshot = trace.casts[record.seq].snapshot
            assert snapshot is not None, "the simulator casts through snapshots only"
            scales.setdefault(record.used.owner, []).append(snapshot.scale)
    moved = [not same_bits(found[0], found[-1]) for found in scales.values()]
    by_role: dict[str, set[bytes]] = {}
    for owner, found in scales.items():
        by_role.setdefault(owner.split("/", 1)[1], set()).add(found[-1].tobytes())
    return (
        Vacuity(
            scale_moved=float(np.mean(moved)) if moved else 0.0,
            layers_differ=any(len(found) > 1 for found in by_role.values()),
            recomputed=len(replay_mismatch(trace)),
        ),
        trace,
    )
