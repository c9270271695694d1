"""Families of schedules: a covering array over all that a schedule can do. Judges nothing.

A family takes one choice of every factor. Families of strength t hold every combination of choices of any t factors
(those that can occur) at least once: what needs t features together is reached, what needs more may be missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from qsim.errors import UsageError
from qsim.sim import Cadence, Feature, Order, ScheduleSpec
from qsim.sim.schedule import GROUPS

NOT = "-"
"""The choice of a factor that adds nothing."""

STEPS, LAYERS = 3, 4


def _factors() -> dict[str, tuple[str, ...]]:
    found = {
        "order": tuple(order.value for order in Order),
        "microbatches": ("1", "2"),
        "unit": (Cadence.MICROBATCH.value, Cadence.STEP.value),
        "workers": ("1", "2"),
    }
    for name, features in GROUPS:
        found[name] = (NOT, *(feature.value for feature in features))
    return found


FACTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(_factors())
"""Factor -> its choices. microbatches: of each worker in a step. workers: that share every state; 2 with ranks."""

MAX_STRENGTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of a covering array: a schedule and the unit of its commits."""

    spec: ScheduleSpec
    cadence: Cadence

    @property
    def name(self) -> str:
        """The family in a few words: what differs from one microbatch, one worker, no feature."""
        spec = self.spec
        words = [spec.order.value]
        words += [f"x{spec.batches}"] if spec.batches > 1 else []
        words += [f"{spec.workers} workers"] if spec.workers > 1 and spec.ranks == 1 else []
        words += ["per step"] if self.cadence is Cadence.STEP else []
        return " ".join([*words, *sorted(feature.value for feature in spec.features)])


_EXCLUDED: tuple[tuple[tuple[str, str, bool], tuple[str, str, bool]], ...] = (
    # two stages of an interleaved pipeline take microbatches in twos; ranks are at least two
    (("order", Order.INTERLEAVED.value, True), ("microbatches", "1", True)),
    (("ranks", NOT, False), ("workers", "1", True)),
)
"""Pairs of choices that cannot occur together: (factor, choice, is it or is it not)."""


def possible(row: Mapping[str, str]) -> bool:
    """True where no two choices of ``row`` (of some factors or all) exclude each other."""

    def holds(factor: str, choice: str, equal: bool) -> bool:
        return factor in row and (row[factor] == choice) == equal

    return not any(holds(*one) and holds(*other) for one, other in _EXCLUDED)


def _family(row: Mapping[str, str]) -> Family:
    features = frozenset(Feature(row[name]) for name, _ in GROUPS if row[name] != NOT)
    workers, batches = int(row["workers"]), int(row["microbatches"])
    shared = Feature.TENSOR_PARALLEL in features
    spec = ScheduleSpec(
        steps=STEPS,
        microbatches=batches if shared else batches * workers,
        layers=LAYERS,
        workers=workers,
        order=Order(row["order"]),
        features=features,
    )
    return Family(spec=spec, cadence=Cadence(row["unit"]))


@lru_cache(maxsize=MAX_STRENGTH)
def rows(strength: int) -> tuple[tuple[str, ...], ...]:
    """The covering array: a choice a factor, in the order of FACTORS. The same for the same strength."""
    from covertable import make

    if not 1 <= strength <= MAX_STRENGTH:
        raise UsageError(f"strength {strength} is outside 1..{MAX_STRENGTH}; it is how many features must meet")
    ruled = [
        {
            "operator": "or",
            "conditions": [
                {"operator": "ne" if equal else "eq", "left": factor, "value": choice} for factor, choice, equal in pair
            ],
        }
        for pair in _EXCLUDED
    ]
    made = make({name: list(choices) for name, choices in FACTORS.items()}, strength=strength, constraints=ruled)
    return tuple(sorted(tuple(row[name] for name in FACTORS) for row in made))


def families(strength: int) -> tuple[Family, ...]:
    """The families of one strength, 1 to 4."""
    return tuple(_family(dict(zip(FACTORS, row, strict=True))) for row in rows(strength))
