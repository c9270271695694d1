"""The article's story in three rows: correct, defective, and a snapshot on the wrong scope. Writes no file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from qsim.report.severity_table import figure
from qsim.sweep.cell import Cell, CellRecord, ScheduleParams, WorkloadParams
from qsim.sweep.run import run_cell

if TYPE_CHECKING:
    from rich.table import Table


class Scene(NamedTuple):
    """One row of the demo."""

    title: str
    defect: str
    fmt: str


SCENES = (
    Scene("correct: snapshot, one commit, read-only recompute", "correct", "float8_e4m3fn"),
    Scene("defective: advance before the GEMM reads, again in recompute", "D03", "float8_e4m3fn"),
    Scene("snapshot on the wrong scope: one state for all layers", "D05", "float8_e4m3fn"),
)
STEPS, LAYERS, REPLICAS = 8, 4, 4


def demo_rows() -> list[tuple[Scene, CellRecord]]:
    """Replay the three scenes over the sample that ships with qsim."""
    return [(scene, run_cell(_cell(scene))) for scene in SCENES]


def _cell(scene: Scene) -> Cell:
    return Cell(
        defect=scene.defect,
        fmt=scene.fmt,
        recipe="delayed",
        window=1,
        preset="seed_correct",
        seed=0,
        replicas=REPLICAS,
        skip_steps=1,
        backend="numba",
        reproducible=True,
        schedule=ScheduleParams(steps=STEPS, layers=LAYERS),
        workload=WorkloadParams(),
    )


def demo_table(rows: list[tuple[Scene, CellRecord]]) -> Table:
    """The three rows. commits: per owner and step. gain: of descale used / descale paired, see CellRecord."""
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("protocol", overflow="fold", min_width=30)
    for column in ("commits", "forward == recompute", "gain", "farthest", "error median", "p99", "breaks"):
        table.add_column(column, justify="right", no_wrap=column == "breaks")
    for scene, r in rows:
        table.add_row(
            scene.title,
            f"{r.commits / r.commits_expected:.3g}",
            f"{100 * (1 - r.replay_mismatch):.0f}%",
            f"x{figure(r.gain_median)}",
            figure(r.gain_max),
            figure(r.rel_error_median),
            figure(r.rel_error_p99),
            " ".join(r.broken) or "none",
        )
    return table
