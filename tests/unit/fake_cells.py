"""Run functions for tests of the sweep: cheap, wicked where a test wants it. Also a script that runs a sweep.

Spawned workers get the sys.path of their parent: a test that prepends this folder can name fake_cells:plain.
Every run is logged to $QSIM_FAKE_LOG as "case_id pid". Workers import this module: nothing heavy at the top.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from qsim.errors import QsimError
from qsim.sweep.cell import Cell, CellRecord, ScheduleParams, WorkloadParams
from qsim.sweep.identity import case_id

if TYPE_CHECKING:
    from qsim.sweep.config import Known, SweepConfig

STUDY = """
schema = 1
[grid]
defects = ["correct", "D01", "D02"]
formats = ["e4m3"]
recipes = ["delayed"]
windows = [1, 4, 16, 64]
"""


def known() -> Known:
    from qsim.sweep.config import Known

    return Known(
        defects=("correct", "high_precision", "D01", "D02"),
        formats={"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"},
        recipes=("delayed", "centred", "current"),
        presets=("seed_correct", "te_fused"),
        orders=("forward_first",),
    )


def study(tensors: Path, *overrides: str) -> SweepConfig:
    """Twelve cells, unless overridden; the tensors are any bytes."""
    from qsim.sweep.config import load_study

    if not tensors.exists():
        tensors.write_bytes(b"not tensors, but bytes to be tied to")
    return load_study(STUDY, known(), [f"workload.tensors={tensors}", *overrides])


def cell(defect: str = "correct", *, window: int = 1, mean_shift: float = 0.0, tensors: str = "a") -> Cell:
    return Cell(
        defect=defect,
        fmt="float8_e4m3fn",
        recipe="delayed",
        window=window,
        preset="seed_correct",
        seed=0,
        replicas=2,
        skip_steps=1,
        backend="numba",
        reproducible=True,
        schedule=ScheduleParams(steps=20),
        workload=WorkloadParams(  # every default that may change is given: a test pins the id of such a cell
            tensors=tensors, tensors_digest="d1" * 32, mean_shift=mean_shift, tokens=8, outputs=32
        ),
    )


def record_of(cell: Cell) -> CellRecord:
    """A pure function of the cell, with awkward floats."""
    number = int(case_id(cell), 16)
    return CellRecord(
        status="ok",
        note=f'{cell.defect} "{cell.window}"',
        commits=number % 997,
        rel_error_median=number / 7.0,
        rel_error_max=float("inf"),
        rel_error_replica=(float("nan"), -0.0, 5e-324, 0.1),
        expected=("I1",),
    )


def log(cell: Cell) -> None:
    if path := os.environ.get("QSIM_FAKE_LOG"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{case_id(cell)} {os.getpid()}\n")


def plain(cell: Cell) -> CellRecord:
    log(cell)
    return record_of(cell)


def together(cell: Cell) -> CellRecord:
    """Waits until two processes are at work: no worker may do it all."""
    log(cell)
    for _ in range(500):
        if len({line.split()[1] for line in Path(os.environ["QSIM_FAKE_LOG"]).read_text().splitlines()}) >= 2:
            break
        time.sleep(0.02)
    return record_of(cell)


def endless_on_d02(cell: Cell) -> CellRecord:
    """With two workers: four cells are done, then both processes sit in a cell for good."""
    log(cell)
    if cell.defect == "D02":
        time.sleep(120)
    return record_of(cell)


def raises_on_d02(cell: Cell) -> CellRecord:
    if cell.defect == "D02":
        raise ValueError("the second\n   defect")
    return plain(cell)


def exits_on_d02(cell: Cell) -> CellRecord:
    if cell.defect == "D02":
        sys.exit("leaving")
    return plain(cell)


def returns_a_number(cell: Cell) -> CellRecord:
    return 3  # type: ignore[return-value]


def dies_on_d02(cell: Cell) -> CellRecord:
    record = plain(cell)
    if cell.defect == "D02" and cell.window == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return record


def dies_once_on_d02(cell: Cell) -> CellRecord:
    marker = Path(os.environ["QSIM_FAKE_LOG"] + ".died")
    if cell.defect == "D02" and not marker.exists():
        marker.touch()
        os._exit(3)
    return plain(cell)


def tells_caps(cell: Cell) -> CellRecord:
    names = ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMBA", "NUMEXPR")
    return CellRecord(status="ok", note=" ".join(os.environ.get(f"{n}_NUM_THREADS", "-") for n in names))


def tells_sigint(cell: Cell) -> CellRecord:
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return CellRecord(status="ok", note=f"blocked {blocked}, ignored {ignored}")


def main() -> int:
    from qsim.sweep.sweep import run_sweep

    out, tensors, workers, run = sys.argv[1:]
    try:
        run_sweep(study(Path(tensors)), out=out, workers=int(workers), run=f"fake_cells:{run}")
    except KeyboardInterrupt:
        return 130
    except QsimError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
