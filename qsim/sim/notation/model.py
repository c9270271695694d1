"""What a written schedule is: its events and what it declares. Knows no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsim.errors import StudyError
from qsim.sim.case import Context
from qsim.sim.events import DEFAULT_FOLD, Fold, Schedule
from qsim.sim.presets import Cadence
from qsim.sim.scopes import LAYER, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the first line of a text may say; ``Context`` for what each means.

    fold: of every commit that names no other. breaks: invariants that the schedule is expected to break.
    """

    scope: Scope = LAYER
    unit: Cadence = Cadence.MICROBATCH
    ranks: int = 1
    fold: Fold = DEFAULT_FOLD
    breaks: frozenset[str] = frozenset()

    def context(self) -> Context:
        """What the schedule is held against."""
        return Context(scope=self.scope, unit=self.unit, fold=self.fold, ranks=self.ranks)


def declared_by(context: Context, breaks: frozenset[str] = frozenset()) -> Declared:
    """The declaration that says what ``context`` says."""
    return Declared(scope=context.scope, unit=context.unit, ranks=context.ranks, fold=context.fold, breaks=breaks)


class Written(NamedTuple):
    """A schedule that was read, with its declaration."""

    schedule: Schedule
    declared: Declared


class Wrong(Exception):  # noqa: N818 - a note from a codec to the reader, which knows the place
    """A piece of text that cannot be read: what was found, what is allowed. Never leaves this room."""


class NotationError(StudyError):
    """A text that is no schedule. ``problems``: one line each with place, what was found, what is allowed."""

    def __init__(self, problems: Sequence[str]) -> None:
        """All problems of one text."""
        super().__init__(
            "\n  ".join([f"the schedule has {len(problems)} error{'s' * (len(problems) != 1)}", *problems])
        )
        self.problems = tuple(problems)
