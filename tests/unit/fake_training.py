"""A fake trainer for tests of the training kind: it trains nothing, its numbers are a hash of configuration and seed.

Spawned workers get the sys.path of their parent: a test that prepends this folder can name fake_training:run. Every
run is logged to $QSIM_FAKE_LOG as "block label seed". ``install`` puts the fake where the real trainer is called.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import qsim.sweep.training.run as sweeping
from qsim.errors import QsimError
from qsim.sweep.training.cell import TrainingCell, TrainingRecord
from qsim.training.config import HIGH_PRECISION, TrainConfig, defects_of
from qsim.training.log import MatchedPoint, StepLog, TrainLog

STUDY = """
schema = 1
kind = "training"
title = "fake"
[loop]
steps = 3
matched = 2
[replicas]
count = 2
[blocks.timing]
protocols = ["high_precision", "correct", "D03"]
[blocks.scope]
protocols = ["correct", { defect = "D04+D02", label = "shared, paired" }]
[blocks.scope.model]
half = "float16"
[blocks.scope.workload]
spread = [1, 1, 0, 0, 0, 0, -1, -1]
"""
CELLS = 10
BREAKS = {"D02": ("I2", "I3", "I5"), "D03": ("I1", "I2", "I3", "I5"), "D04": ("I4",)}


def fake_train(config: TrainConfig, seeds: Sequence[int]) -> TrainLog:
    """Numbers that are a pure function of what was asked for, some of them awkward."""
    text = f"{msgspec.json.encode(config).decode()} {tuple(seeds)}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    broken = tuple(sorted({rule for name in defects_of(config.defect) for rule in BREAKS[name]}))
    steps = tuple(_step(i, number, config) for i in range(config.loop.steps))
    return TrainLog(
        seeds=tuple(seeds),
        steps=steps,
        matched=tuple(_point(step, layer) for step in config.loop.matched for layer in range(config.model.layers)),
        scales={"L0.qkv.input": (math.log2(number + 1),)},
        commits={"L0.qkv.input": 1 if config.defect == HIGH_PRECISION else 3},
        broken=broken,
        expected=broken,
        violations=len(broken),
        digest=(hashlib.sha256(text.encode()).hexdigest(),),
        final_loss=(math.nan,),
    )


def _step(step: int, number: int, config: TrainConfig) -> StepLog:
    norm = math.inf if "D02" in config.defect and step == 1 else (number + step) / 7.0
    layers = {f"L{i}": (norm,) for i in range(config.model.layers)}
    return StepLog(
        step=step,
        loss=(1.5 - step / 100,),
        grad_norm=(norm,),
        norm_by_layer={"stem": (-0.0,), **layers, "tail": (5e-324,)},
        norm_by_kind={"qkv": (0.1,), "head": (norm,)},
        dominant=("L3.qkv",),
        lr=(config.optimizer.lr,),
        loss_scale=(config.optimizer.loss_scale,),
        clipped=(False,),
        skipped=(math.isinf(norm),),
        reason=("gradient is inf" if math.isinf(norm) else "",),
        finite_loss=(True,),
        saturated=(0.0,),
        flushed=(0.25,),
        tokens=512,
    )


def _point(step: int, layer: int) -> MatchedPoint:
    return MatchedPoint(
        step=step,
        point=f"m0.w0.L{layer}.qkv",
        same=(layer % 2 == 0,),
        digest_forward="aa",
        digest_recompute="aa" if layer % 2 == 0 else "bb",
        max_abs=(0.5,),
        max_rel=(math.nan,),
        finite_same=(True,),
        amax_forward=(1.0,),
        amax_recompute=(1.0,),
        scale_forward=(448.0,),
        scale_recompute=(448.0,),
    )


def install() -> None:
    """Put the fake where ``run_cell`` calls the trainer, in this process."""
    sweeping.train = fake_train


def log(cell: TrainingCell) -> None:
    if path := os.environ.get("QSIM_FAKE_LOG"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{cell.block}|{cell.label}|{cell.seed}\n")


def run(cell: TrainingCell) -> TrainingRecord:
    """The real ``run_cell`` around the fake trainer, also in a spawned worker."""
    from qsim.sweep.training.run import run_cell

    install()
    log(cell)
    return run_cell(cell)


def stuck_on_scope(cell: TrainingCell) -> TrainingRecord:
    """The six cells of the first block end; then a process sits in a cell until it is killed."""
    if cell.block == "scope":
        log(cell)
        time.sleep(120)
    return run(cell)


def unexpected_on_d03(cell: TrainingCell) -> TrainingRecord:
    record = run(cell)
    if cell.config.defect != "D03":
        return record
    return msgspec.structs.replace(record, log=msgspec.structs.replace(record.log, broken=("I1",)))


def main() -> int:
    """``fake_training.py STUDY OUT WORKERS RUN``: a sweep in a process of its own, to be killed."""
    from qsim.sweep.config import read_study
    from qsim.sweep.known import registries
    from qsim.sweep.sweep import run_sweep

    study, out, workers, name = sys.argv[1:]
    try:
        run_sweep(read_study(Path(study), registries()), out=out, workers=int(workers), run=f"fake_training:{name}")
    except QsimError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
