"""The matrix of defects, families and checks, for a reader and as JSON. Computes nothing but counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qsim.matrix import Matrix, Numbers
from qsim.matrix.families import MAX_STRENGTH
from qsim.matrix.numbers import Vacuity
from qsim.sim import RULES, Defect

if TYPE_CHECKING:
    from rich.table import Table

Measured = Mapping[tuple[str, str], Numbers]
"""Numbers by (defect, variant) on one family."""


def rows_of(defects: Sequence[Defect]) -> Iterator[tuple[Defect, str]]:
    """Every defect, then its variants."""
    for defect in defects:
        yield defect, ""
        for variant in defect.variants:
            yield defect, variant.name


def name_of(defect: str, variant: str) -> str:
    """ "D26", or "D26/mean"."""
    return f"{defect}/{variant}" if variant else defect


def catch_table(matrix: Matrix, defects: Sequence[Defect], numbers: Sequence[Measured]) -> Table:
    """Which check catches what: families in which each invariant fires, of those that host the defect."""
    from rich.table import Table

    table = Table(
        title=f"families of strength {matrix.strength} in which a check fires, of {len(matrix.families)}",
        title_justify="left", box=None, show_edge=False,
    )  # fmt: skip
    table.add_column("defect")
    table.add_column("hosts", justify="right")
    for rule in RULES:
        table.add_column(rule, justify="right")
    for column in ("replay", "twin") if numbers else ():
        table.add_column(column, justify="right")
    for defect, variant in rows_of(defects):
        hosted = [cell for cell in matrix.of(defect.id, variant) if cell.hosted]
        odd = " (!)" if any(not cell.as_expected for cell in hosted) else ""
        fired = [sum(rule in cell.broken for cell in hosted) for rule in RULES]
        row = [name_of(defect.id, variant) + odd, str(len(hosted)), *(str(n) if n else "" for n in fired)]
        if numbers:
            mine = [measured[defect.id, variant] for measured in numbers if (defect.id, variant) in measured]
            row += [str(sum(n.replay > 0 for n in mine)), str(sum(n.twin > 0 for n in mine))]
        table.add_row(*row)
    return table


def blind_table(matrix: Matrix, seen: Sequence[Vacuity]) -> Table:
    """What each family cannot show: the defects that it does not host, and whether anything moved at all."""
    from rich.table import Table

    table = Table(title="what each family can show", title_justify="left", box=None, show_edge=False)
    for column, justify in (("family", "left"), ("hosts", "right"), ("scales moved", "right"), ("blind to", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for number, family in enumerate(matrix.families):
        plain = [cell for cell in matrix.cells if cell.family == number and not cell.variant]
        blind = " ".join(cell.defect for cell in plain if not cell.hosted)
        moved = "" if not seen else f"{100 * seen[number].scale_moved:.0f}%" + (" (!)" if seen[number].vacuous else "")
        table.add_row(family.name, f"{sum(cell.hosted for cell in plain)}/{len(plain)}", moved, blind or "nothing")
    return table


def notes(matrix: Matrix, defects: Sequence[Defect], numbers: Sequence[Measured]) -> Iterator[str]:
    """What the tables add up to."""
    nowhere = [name_of(d.id, v) for d, v in rows_of(defects) if not any(cell.hosted for cell in matrix.of(d.id, v))]
    if nowhere:
        more = f"; take --strength {matrix.strength + 1}" if matrix.strength < MAX_STRENGTH else ""
        yield f"hosted by no family of strength {matrix.strength}: {', '.join(nowhere)}{more}"
    silent = [name_of(c.defect, c.variant) for c in matrix.cells if c.hosted and not c.broken]
    yield f"caught by no invariant on some family that hosts them: {', '.join(sorted(set(silent))) or 'none'}"
    odd = sorted({name_of(c.defect, c.variant) for c in matrix.cells if not c.as_expected})
    yield f"other invariants than the catalogue names: {', '.join(odd) or 'none'}"
    if numbers:
        unseen = [
            name_of(d.id, v)
            for d, v in rows_of(defects)
            if (mine := [m[d.id, v] for m in numbers if (d.id, v) in m]) and not any(n.replay > 0 for n in mine)
        ]
        yield f"seen by no comparison of forward and recompute: {', '.join(unseen) or 'none'}"


def matrix_data(
    matrix: Matrix, defects: Sequence[Defect], seen: Sequence[Vacuity], numbers: Sequence[Measured]
) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "strength": matrix.strength,
        "families": [
            {"name": family.name, "vacuity": asdict(seen[i]) if seen else None}
            for i, family in enumerate(matrix.families)
        ],
        "cells": [
            {
                "defect": cell.defect,
                "variant": cell.variant,
                "family": matrix.families[cell.family].name,
                "broken": sorted(cell.broken),
                "refused": cell.refused,
                "as_expected": cell.as_expected,
                "numbers": _finite(numbers[cell.family].get((cell.defect, cell.variant))) if numbers else None,
            }
            for cell in matrix.cells
        ],
    }


def _finite(numbers: Numbers | None) -> dict[str, float | str] | None:
    if numbers is None:
        return None
    return {name: value if abs(value) < float("inf") else str(value) for name, value in asdict(numbers).items()}
