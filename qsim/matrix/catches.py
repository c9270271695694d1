"""Every defect on every family, judged by every invariant, without a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsim.errors import CaseError
from qsim.formats import get_format
from qsim.matrix.families import Family
from qsim.quant import Recipe, make_recipe
from qsim.sim import PRESETS, Case, Defect, broken, build_case, judge
from qsim.workloads.seeded import BODY

PRESET = "seed_correct"


def matrix_recipe() -> Recipe:
    """A recipe that can host every defect: with a centre, a window of 1, gradients in their own format."""
    return make_recipe("centred", fmt=get_format("e4m3"), window=1, grad_fmt=get_format("e5m2"))


def host_case(family: Family) -> Case:
    """The correct case of one family."""
    return build_case(family.spec, body=BODY, preset=PRESETS[PRESET], recipe=matrix_recipe(), cadence=family.cadence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One defect on one family: the invariants that it breaks there, or why it cannot be hosted.

    as_expected: what breaks is what the catalogue names; True where it is not hosted.
    """

    defect: str
    variant: str
    family: int
    broken: frozenset[str]
    refused: str
    as_expected: bool

    @property
    def hosted(self) -> bool:
        """True where the family can show this defect."""
        return not self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells; ``families`` in the order of ``Cell.family``."""

    strength: int
    families: tuple[Family, ...]
    cells: tuple[Cell, ...]

    def of(self, defect: str, variant: str = "") -> tuple[Cell, ...]:
        """The cells of one defect (or one of its variants), a family each."""
        return tuple(cell for cell in self.cells if (cell.defect, cell.variant) == (defect, variant))

    def hosts(self, family: int) -> tuple[Cell, ...]:
        """The cells of one family that are hosted."""
        return tuple(cell for cell in self.cells if cell.family == family and cell.hosted)


def build_matrix(defects: Sequence[Defect], found: Sequence[Family], *, strength: int) -> Matrix:
    """Every defect with its variants on every family. A correct family must break nothing: CaseError otherwise."""
    cells: list[Cell] = []
    for number, family in enumerate(found):
        case = host_case(family)
        if wrong := broken(judge(case)):
            raise CaseError(f"family {family.name}: the correct protocol breaks {', '.join(sorted(wrong))}")
        for defect in defects:
            for variant, due in (("", defect.breaks), *((v.name, v.breaks) for v in defect.variants)):
                cells.append(_cell(case, defect, variant, due, number))
    return Matrix(strength=strength, families=tuple(found), cells=tuple(cells))


def _cell(case: Case, defect: Defect, variant: str, due: frozenset[str], number: int) -> Cell:
    try:
        seen, refused = broken(judge(defect.apply(case, variant))), ""
    except CaseError as error:
        seen, refused = frozenset(), str(error)
    return Cell(
        defect=defect.id,
        variant=variant,
        family=number,
        broken=seen,
        refused=refused,
        as_expected=bool(refused) or seen == due,
    )
