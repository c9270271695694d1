"""The walk of controls through the article's defect, for a reader. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

    from qsim.training.article import Finding


def walk_table(found: Sequence[Finding], seeds: Sequence[int]) -> Table:
    """A row a run: its largest gradient norms and where, how many steps spike, how many matched points differ."""
    from rich.table import Table

    first = found[0]
    table = Table(
        title=f"D03 with FP8 activations, Q and K, window 1, under controls: {first.steps} steps, seeds "
        f"{', '.join(map(str, seeds))}; a step spikes above 3x the median norm of low_precision_off",
        title_justify="left", box=None, show_edge=False,
    )  # fmt: skip
    for column in ("run", "largest gradient norm", "at step", "steps that spike", "points that differ"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for one in found:
        table.add_row(
            one.control or "suspect",
            "  ".join(f"{value:.3g}" for value in one.largest),
            "  ".join(map(str, one.at)),
            "  ".join(map(str, one.spikes)),
            f"{one.differing} of {one.points}" if one.points else "not compared",
        )
    return table


def walk_lines(found: Sequence[Finding]) -> Iterator[str]:
    """What each control changed, and what it rules out."""
    for one in found:
        if not one.control:
            continue
        where = f" (first: {one.first})" if one.control == "matched_points" and one.first else ""
        yield f"{one.control}: {one.what}. Then {one.verdict}{where}."


def walk_data(found: Sequence[Finding], seeds: Sequence[int]) -> dict[str, Any]:
    """The same for a program."""
    return {"seeds": list(seeds), "runs": [msgspec.structs.asdict(one) for one in found]}
