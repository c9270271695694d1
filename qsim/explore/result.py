"""What a search found: verdicts, the shortest run of each, sizes, and which bound was hit. Searches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qsim.errors import CaseError
from qsim.explore.runs import Choices
from qsim.explore.space import Space
from qsim.sim import Violation


class Kind(Enum):
    """A way to break an invariant. I3, I10 and I12 have several, which need different runs."""

    PAIRING = ("I1", "decoded with another version")
    REPLAY = ("I2", "recomputed with another version")
    SECOND_COMMIT = ("I3", "a second commit in a unit")
    LOST_COMMIT = ("I3", "a lost commit")
    MISSING_COMMIT = ("I3", "no commit in a unit")
    OWNERSHIP = ("I4", "state or codes of another owner")
    OBSERVATIONS = ("I5", "other observations than the unit's")
    REPLICAS = ("I6", "other observations than the group's")
    TORN_READ = ("I7", "a torn pair, or versions or casts mixed in one decode")
    PERSISTENCE = ("I8", "read back otherwise than saved")
    CACHE = ("I9", "a cast of other weights or another descale")
    MISPAIRED = ("I10", "a queue hands out another operation's entry")
    LEFT_IN_QUEUE = ("I10", "an entry left in a queue at the end of its step")
    ALGEBRA = ("I11", "amaxes merged otherwise than by max")
    FROZEN = ("I12", "observed, and never committed")
    HELD_UP = ("I12", "a scale or a rank that nothing moves on")
    CONTEXT = ("I13", "recomputed in another context")

    @property
    def invariant(self) -> str:
        """The id of the invariant."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """The way it is broken, in a few words."""
        return self.value[1]


_WORDS = {
    Kind.LOST_COMMIT: "a commit is lost",
    Kind.MISSING_COMMIT: "no commit in unit",
    Kind.SECOND_COMMIT: "in unit",
    Kind.LEFT_IN_QUEUE: "at the end of its step",
    Kind.MISPAIRED: "takes",
    Kind.FROZEN: "still in its initial state",
    Kind.HELD_UP: "",
}
"""What the reasons of kinds of one invariant have in them, in the order in which they are looked for."""


def kind_of(violation: Violation) -> Kind:
    """The kind of a violation that ``check`` found; kinds of one invariant are told apart by its words.

    Raises CaseError for a violation that has no kind.
    """
    kinds = [kind for kind in Kind if kind.invariant == violation.invariant]
    if len(kinds) == 1:
        return kinds[0]
    for kind, words in _WORDS.items():
        if kind in kinds and words in violation.because:
            return kind
    raise CaseError(
        f"explore: {violation.invariant} ({violation.because}) is of no kind; name it in qsim.explore.result.Kind"
    )


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
