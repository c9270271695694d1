"""What a search found: verdicts, the shortest run of each, sizes, and which bound was hit. Searches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qsim.explore.runs import Choices
from qsim.explore.space import Space
from qsim.sim import Violation


class Kind(Enum):
    """A way to break an invariant. I3 has three, which need different runs."""

    PAIRING = ("I1", "decoded with another version")
    REPLAY = ("I2", "recomputed with another version")
    SECOND_COMMIT = ("I3", "a second commit in a unit")
    LOST_COMMIT = ("I3", "a lost commit")
    MISSING_COMMIT = ("I3", "no commit in a unit")
    OWNERSHIP = ("I4", "state or codes of another owner")
    OBSERVATIONS = ("I5", "other observations than the unit's")
    TORN_READ = ("I7", "versions mixed in one decode")

    @property
    def invariant(self) -> str:
        """The id of the invariant."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """The way it is broken, in a few words."""
        return self.value[1]


_BY_INVARIANT = {kind.invariant: kind for kind in Kind if kind.invariant != "I3"}


def kind_of(violation: Violation) -> Kind:
    """The kind of a violation that ``check`` found; the three of I3 are told apart by its words."""
    if violation.invariant != "I3":
        return _BY_INVARIANT[violation.invariant]
    if "lost" in violation.because:
        return Kind.LOST_COMMIT
    return Kind.MISSING_COMMIT if violation.because.startswith("no commit") else Kind.SECOND_COMMIT


class Engine(Enum):
    """How the runs were searched, strongest first."""

    BREADTH_FIRST = "breadth first"
    PREEMPTION_BOUNDED = "preemptions bounded"
    PCT = "random priorities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of violation, and how little it takes.

    choices: the run with the fewest events up to the violation, of those the one with the fewest preemptions
    (``preemptions``); it stops with the piece that breaks the invariant, ``completed`` carries it on. events: those
    up to and with the one that breaks it. fewest_preemptions and calmest: the same with the two aims exchanged.
    An observation set and a missing commit count over whole units: they are judged when a worker has ended.
    least: no run of the space has fewer of either; False where a bound was hit, then fewest is of the runs searched.
    """

    kind: Kind
    choices: Choices
    events: int
    preemptions: int
    fewest_preemptions: int
    calmest: Choices
    least: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of a search.

    states: distinct states visited; where all workers run the same code, states that differ in the workers' numbers
    alone are one. exhaustive: every run was covered, so what was not found cannot happen in this space. private: no
    two workers share a cell or slot, so there is one class and one run is the proof. classes: runs that differ in
    the order of two dependent events (Mazurkiewicz traces), None where counting was too much. schedules: all
    interleavings of the pieces. findings: by kind, in the order of Kind. bound: what was hit, in words, "" where
    exhaustive.
    """

    space: Space
    engine: Engine
    states: int
    seconds: float
    exhaustive: bool
    private: bool
    classes: int | None
    schedules: int
    findings: tuple[Finding, ...]
    bound: str

    @property
    def broken(self) -> frozenset[str]:
        """The ids of the invariants that some run breaks."""
        return frozenset(finding.kind.invariant for finding in self.findings)
