"""1,000 training runs of 20 steps on two processes: replica-steps a second. Run ``python -m benchmarks.replicas``."""

from __future__ import annotations

import argparse
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is loaded, here and in the processes that are spawned


def run(first: int, count: int) -> tuple[int, float]:
    """Runs of the seeds first ... first + count - 1; how many steps were applied, and the largest memory in MiB."""
    from qsim.training.config import SCRATCH, DataParams, LoopParams, ModelParams, TrainConfig
    from qsim.training.run import train

    config = TrainConfig(
        model=ModelParams(layers=2, width=64, context=32),
        data=DataParams(checkpoint=SCRATCH),
        loop=LoopParams(steps=20, warm_steps=0),
        accumulation="blas",
    )
    steps = 0
    for seed in range(first, first + count):
        log = train(config, (seed,))
        steps += sum(not step.skipped[0] for step in log.steps)
    return steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    part = 25
    parts = [(first, min(part, given.replicas - first)) for first in range(0, given.replicas, part)]
    begun = time.perf_counter()
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(run, *zip(*parts, strict=True)))
    seconds = time.perf_counter() - begun
    steps = sum(count for count, _ in found)
    print(
        f"{given.replicas} replicas x 20 steps, {given.workers} processes: {seconds:.1f} s, {steps / seconds:.0f} "
        f"replica-steps a second, at most {max(memory for _, memory in found):.0f} MiB a process"
    )


if __name__ == "__main__":
    main()
