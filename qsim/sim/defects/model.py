"""What a defect and a fix are: pure rewrites of a case, with what they break and what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qsim.errors import CaseError
from qsim.quant import Recipe
from qsim.sim.case import Case
from qsim.sim.events import Event
from qsim.sim.presets import Cadence, Preset
from qsim.sim.schedule import ScheduleSpec

Rewrite = Callable[[Case], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A repair, as a rewrite of the case it is applied to."""

    name: str
    rewrite: Rewrite
    story: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One lifecycle defect.

    breaks: exactly the invariants that it breaks. minimal: the smallest schedule that can host it; cadence and
    centred: what else its host must have (None: anything). fixes: names of repairs that silence it;
    wrong_fixes: plausible ones that do not. tier: S4 (order of magnitude, NaN) down to S0 (metrics only).
    """

    id: str
    name: str
    kind: str
    tier: str
    rewrite: Rewrite
    breaks: frozenset[str]
    minimal: ScheduleSpec = field(default_factory=lambda: ScheduleSpec(steps=1, layers=1))
    cadence: Cadence | None = None
    centred: bool = False
    fixes: tuple[str, ...]
    wrong_fixes: tuple[str, ...] = ()
    story: str
    anchors: tuple[str, ...] = ()

    def host(self, spec: ScheduleSpec) -> ScheduleSpec:
        """The schedule ``spec``, grown where it is too small to host this defect."""
        workers = max(spec.workers, self.minimal.workers)
        microbatches = max(spec.microbatches, self.minimal.microbatches)
        return replace(
            spec,
            steps=max(spec.steps, self.minimal.steps),
            layers=max(spec.layers, self.minimal.layers),
            workers=workers,
            microbatches=-(-microbatches // workers) * workers,
        )

    def require(self, preset: Preset, recipe: Recipe) -> None:
        """Raise CaseError, naming the missing feature, where preset or recipe cannot host this defect."""
        if preset.cadence is Cadence.NEVER or preset.breaks:
            why = "is defective itself" if preset.breaks else "commits nothing, so no state can be read at a wrong time"
            raise CaseError(f'{self.id} {self.name} needs a correct preset with state; preset "{preset.name}" {why}')
        if self.centred and not recipe.centred:
            raise CaseError(f'{self.id} {self.name} needs a recipe with a centre; recipe "{recipe.name}" has none')


def rewritten(case: Case, schedule: list[Event]) -> Case:
    """``case`` with another schedule."""
    return replace(case, schedule=tuple(schedule))
