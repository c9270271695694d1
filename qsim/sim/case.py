"""A case is data: a schedule, a recipe, a policy, a context. Holds them; runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.formats import CastPolicy
from qsim.quant import OpId, Recipe
from qsim.sim.events import DEFAULT_FOLD, Fold, Schedule
from qsim.sim.presets import Cadence
from qsim.sim.scopes import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What was declared, and what a trace is held against: who owns a state, the unit of a commit, the ranks.

    fold: how commits merge. ranks: workers of one group whose states are replicas, 1 where workers are none. traits:
    what the schedule does, by name, as ``ScheduleSpec.traits`` says, with "gradients", "centre" and "two sites" of
    body and recipe, "queue" where the preset carries metadata to recompute in one, and "reread" where its recompute
    reads the live state, "dataflow" where values go from step to step of a graph.
    """

    scope: Scope
    unit: Cadence
    fold: Fold = DEFAULT_FOLD
    ranks: int = 1
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to run. A defect is a pure function from Case to Case. recipes: of roles that have one of their own."""

    schedule: Schedule
    recipe: Recipe
    policy: CastPolicy
    context: Context
    recipes: tuple[tuple[int, Recipe], ...] = ()

    def recipe_of(self, op: OpId) -> Recipe:
        """The recipe that casts ``op``."""
        return dict(self.recipes).get(op.role_id, self.recipe) if self.recipes else self.recipe
