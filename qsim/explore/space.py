"""A space: the bounds of one search, as a canonical value. Builds no schedule and searches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from qsim.checks import whole_number
from qsim.errors import UsageError
from qsim.quant import RECIPES, TensorRole
from qsim.sim import PRESETS, SCOPES, Cadence, Linear, Scores, get_defect
from qsim.sim.schedule import Body


class Commits(Enum):
    """How a worker advances a state. What each entry means in events stands in ``threads.COMMITS``."""

    ATOMIC = "atomic"  # one indivisible read, update and write
    SPLIT = "split"  # read, then write: others may act in between
    TORN = "torn"  # read, then write the scale, then its descale
    REDUCED = "reduced"  # workers are ranks: each hands in what it saw, waits for all, and commits what all saw
    ASYNC = "async"  # the same, but each commits its own before it has waited

    @property
    def ranked(self) -> bool:
        """True where workers are ranks whose states are replicas."""
        return self in (Commits.REDUCED, Commits.ASYNC)


class Codes(Enum):
    """Where a worker's codes lie between the encode and its GEMM."""

    OWN = "own"  # in a buffer of this worker
    SCRATCH = "scratch"  # in one buffer a GEMM operand that all workers share


class Part(NamedTuple):
    """What a layer does, and which roles are cast with a state; other roles stay in high precision."""

    body: Body
    cast: frozenset[TensorRole]


_ALL = frozenset(TensorRole)
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "input": Part((Linear(0),), frozenset({TensorRole.INPUT})),  # one cell a layer: roles never share a cell
        "linear": Part((Linear(0),), _ALL),
        "gradients": Part((Linear(0, True),), _ALL),
        "block": Part((Linear(0), Scores(1)), _ALL),
    }
)
"""What there is to run in a layer, by name."""

NO_DEFECT = "none"
MAX_WORKERS = 8
MAX_VISITS = 300
"""Visits of a layer by all workers in all steps: a case of that size is judged in seconds, its numbers are small."""

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Every worker runs its own microbatch in every step: ``steps`` times forward and recompute of ``layers`` layers.

    scope: who shares a state; declared: what check holds it against ("" means the same). preset, recipe: as in
    build_case; recipe "" means one that fits: "centred" for a defect of centres, "current" for a preset that never
    commits, else "delayed". defect: a rewrite put on the case before it is cut into threads, by id. unit: the
    declared cadence; None means the defect's, else the preset's. What is left out is filled in, so equal spaces are
    equal values and have equal texts.
    """

    workers: int = 2
    steps: int = 1
    layers: int = 1
    scope: str = "layer"
    declared: str = ""
    commit: Commits = Commits.ATOMIC
    codes: Codes = Codes.OWN
    preset: str = "seed_correct"
    recipe: str = ""
    defect: str = NO_DEFECT
    part: str = "input"
    unit: Cadence | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "layers"):
            object.__setattr__(self, name, whole_number(f"explore: {name}", getattr(self, name), least=1))
        if self.workers > MAX_WORKERS:
            raise UsageError(f"explore: workers {self.workers} are too many; at most {MAX_WORKERS}")
        visits = self.workers * self.steps * self.layers
        if visits > MAX_VISITS:
            raise UsageError(
                f"explore: {self.workers} workers x {self.steps} steps x {self.layers} layers are {visits} visits of a "
                f"layer; at most {MAX_VISITS}"
            )
        _known("preset", self.preset, PRESETS)
        _known("scope", self.scope, SCOPES)
        _known("part", self.part, PARTS)
        preset = PRESETS[self.preset]
        defect = None if self.defect == NO_DEFECT else get_defect(self.defect)
        never = preset.cadence is Cadence.NEVER
        filled = {
            "declared": self.declared or self.scope,
            "recipe": self.recipe or ("current" if never else "centred" if defect and defect.centred else "delayed"),
            "defect": NO_DEFECT if defect is None else defect.id,
            "unit": Cadence.NEVER
            if never
            else self.unit or (None if defect is None else defect.cadence) or preset.cadence,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        _known("declared scope", self.declared, SCOPES)
        _known("recipe", self.recipe, RECIPES)
        if self.commit.ranked and not (SCOPES[self.scope].worker and SCOPES[self.declared].worker):
            raise UsageError(
                f'explore: commit "{self.commit.value}" makes workers ranks with a replica of each state, and scope '
                f'"{self.scope}" declared "{self.declared}" has none a worker; use scope "layer_worker"'
            )

    @property
    def cadence(self) -> Cadence:
        """The declared unit of a commit; never None."""
        assert self.unit is not None, "filled in when the space was made"
        return self.unit

    @property
    def ranks(self) -> int:
        """Workers whose states are replicas; 1 where workers are no ranks."""
        return self.workers if self.commit.ranked else 1

    def text(self) -> str:
        """The space in one word, without blanks: ``space_of`` reads it back."""
        sizes = f"{self.workers}.{self.steps}.{self.layers}"
        modes = f"{self.commit.value}.{self.codes.value}.{self.cadence.value}"
        return f"{sizes}.{self.scope}.{self.declared}.{modes}.{self.preset}.{self.recipe}.{self.defect}.{self.part}"


def space_of(text: str) -> Space:
    """The space that ``Space.text`` wrote; UsageError where it is none."""
    words = text.split(".")
    if len(words) != 12 or not all(word.isascii() and word.isdigit() for word in words[:3]):
        raise UsageError(f'"{text}" is no space: it must be 12 words with dots between, the first three of them sizes')
    workers, steps, layers = (int(word) for word in words[:3])
    scope, declared, commit, codes, unit, preset, recipe, defect, part = words[3:]
    return Space(
        workers=workers,
        steps=steps,
        layers=layers,
        scope=scope,
        declared=declared,
        commit=enum_of(Commits, commit, "commit"),
        codes=enum_of(Codes, codes, "codes"),
        unit=enum_of(Cadence, unit, "unit"),
        preset=preset,
        recipe=recipe,
        defect=defect,
        part=part,
    )


def enum_of(kind: type[E], word: str, what: str) -> E:
    """The member of ``kind`` with the value ``word``; UsageError says ``what`` it is and lists the known ones."""
    _known(what, word, {member.value: member for member in kind})
    return kind(word)


def _known(what: str, name: str, registry: Mapping[str, object]) -> None:
    if name not in registry:
        raise UsageError(f'explore: {what} "{name}" is unknown; known: {", ".join(registry)}')
