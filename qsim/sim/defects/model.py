"""What a defect and a fix are: pure rewrites of a case, with what they break and what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qsim.errors import CaseError
from qsim.quant import Recipe
from qsim.sim.case import Case
from qsim.sim.events import Event
from qsim.sim.presets import Cadence, Preset
from qsim.sim.schedule import GROUPS, Feature, Order, ScheduleSpec

Rewrite = Callable[[Case], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A repair, as a rewrite of the case it is applied to."""

    name: str
    rewrite: Rewrite
    story: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The same mistake in another shape, with the invariants that this shape breaks.

    minimal, needs, excludes, orders, cadence: those of the defect where they are None.
    """

    name: str
    rewrite: Rewrite
    breaks: frozenset[str]
    minimal: ScheduleSpec | None = None
    needs: frozenset[str] | None = None
    excludes: frozenset[str] | None = None
    orders: tuple[Order, ...] | None = None
    cadence: Cadence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One lifecycle defect.

    breaks: exactly the invariants that it breaks. minimal: the smallest schedule that can host it; needs: the traits
    that a host must have (``Context.traits``); excludes: those that it must not have, for they hide the defect or make
    it break more; orders: the orders of microbatches that show it, () for all; cadence: the unit that its host must
    have, None for any. fixes: names of repairs that silence it; wrong_fixes: plausible ones that do not. tier: S4
    (order of magnitude, NaN) down to S0 (metrics only).
    """

    id: str
    name: str
    kind: str
    tier: str
    rewrite: Rewrite
    breaks: frozenset[str]
    minimal: ScheduleSpec = field(default_factory=lambda: ScheduleSpec(steps=1, layers=1))
    needs: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    orders: tuple[Order, ...] = ()
    cadence: Cadence | None = None
    fixes: tuple[str, ...]
    wrong_fixes: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    story: str
    anchors: tuple[str, ...] = ()

    @property
    def centred(self) -> bool:
        """True where it can only be hosted by a recipe with a centre."""
        return "centre" in self.needs

    def shaped(self, variant: str) -> Defect:
        """This defect in the shape of a variant, "" for its own; CaseError for an unknown one."""
        if not variant:
            return self
        for one in self.variants:
            if one.name == variant:
                return replace(
                    self,
                    rewrite=one.rewrite,
                    breaks=one.breaks,
                    minimal=one.minimal or self.minimal,
                    needs=self.needs if one.needs is None else one.needs,
                    excludes=self.excludes if one.excludes is None else one.excludes,
                    orders=self.orders if one.orders is None else one.orders,
                    cadence=one.cadence or self.cadence,
                    variants=(),
                )
        known = ", ".join(one.name for one in self.variants) or "none"
        raise CaseError(f'{self.id} {self.name} has no variant "{variant}"; known: {known}')

    def host(self, spec: ScheduleSpec, variant: str = "") -> ScheduleSpec:
        """The schedule ``spec``, grown where it is too small to host this defect, or one of its variants.

        Raises CaseError where a feature that it needs excludes one that ``spec`` has, or where it excludes one itself.
        """
        if variant:
            return self.shaped(variant).host(spec)
        needed = frozenset(feature for feature in Feature if feature.value in self.needs)
        if "ranks" in self.needs and not spec.features & {Feature.DATA_PARALLEL, Feature.TENSOR_PARALLEL}:
            needed |= {Feature.DATA_PARALLEL}
        for name, group in GROUPS:
            have, want = spec.features & set(group), needed & set(group)
            if have and want and have != want:
                raise CaseError(
                    f"{self.id} {self.name} needs feature {min(want)}; the schedule has {min(have)}, and a schedule "
                    f"has one feature of group {name}: take {min(have)} out"
                )
        workers = max(spec.workers, self.minimal.workers)
        microbatches = max(spec.microbatches, self.minimal.microbatches)
        if "accumulation" in self.needs and Feature.TENSOR_PARALLEL not in spec.features:
            microbatches = max(microbatches, 2 * workers)
        grown = replace(
            spec,
            steps=max(spec.steps, self.minimal.steps),
            layers=max(spec.layers, self.minimal.layers),
            workers=workers,
            microbatches=-(-microbatches // workers) * workers,
            order=spec.order if not self.orders or spec.order in self.orders else self.minimal.order,
            features=spec.features | needed,
        )
        self._refuse(grown.traits())
        return grown

    def require(self, preset: Preset, recipe: Recipe) -> None:
        """Raise CaseError, naming the missing feature, where preset or recipe cannot host this defect."""
        if preset.cadence is Cadence.NEVER or preset.breaks:
            why = "is defective itself" if preset.breaks else "commits nothing, so no state can be read at a wrong time"
            raise CaseError(f'{self.id} {self.name} needs a correct preset with state; preset "{preset.name}" {why}')
        if self.cadence not in (None, preset.cadence) and not preset.any_unit:
            raise CaseError(
                f"{self.id} {self.name} needs commits once a {self.cadence.value}; preset "
                f'"{preset.name}" commits once a {preset.cadence.value}, and under another unit it is another protocol'
            )
        if self.centred and not recipe.centred:
            raise CaseError(f'{self.id} {self.name} needs a recipe with a centre; recipe "{recipe.name}" has none')

    def apply(self, case: Case, variant: str = "") -> Case:
        """The case with this defect, or with one of its variants.

        Raises CaseError, naming what is missing, where the case cannot host it.
        """
        if variant:
            return self.shaped(variant).apply(case)
        missing = self.needs - case.context.traits
        if missing:
            raise CaseError(f"{self.id} {self.name} needs {', '.join(sorted(missing))}: the schedule has none of it")
        self._refuse(case.context.traits)
        if self.orders and not {order.value for order in self.orders} & case.context.traits:
            raise CaseError(
                f"{self.id} {self.name} needs one of the orders {', '.join(order.value for order in self.orders)}"
            )
        if self.cadence is not None and self.cadence is not case.context.unit:
            raise CaseError(
                f"{self.id} {self.name} needs commits once a {self.cadence.value}, not once a {case.context.unit.value}"
            )
        made = self.rewrite(case)
        if made == case:
            raise CaseError(f"{self.id} {self.name} finds nothing to change: no event of the schedule is of its kind")
        return made

    def _refuse(self, traits: frozenset[str]) -> None:
        barred = self.excludes & traits
        if barred:
            raise CaseError(
                f"{self.id} {self.name} excludes {', '.join(sorted(barred))}: with it this mistake is another one or "
                "none; take it out of the schedule"
            )


def rewritten(case: Case, schedule: list[Event]) -> Case:
    """``case`` with another schedule."""
    return replace(case, schedule=tuple(schedule))
