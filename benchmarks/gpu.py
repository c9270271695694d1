"""Speed on an NVIDIA device by CUDA events, against named peers in the same run: ``python -m benchmarks.gpu``.

Each kernel runs on random data larger than the L2 cache, three times before it is timed and twenty times with a pair of
events about it; the median counts. ``--out`` keeps the rows with date, device and driver. With QSIM_PLACE=played every
run is made once on small data, on numpy in CuPy's place: it shows that the file works and prints no figure.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cuda_kernels import DeviceUnavailableError
from cuda_kernels._place import Device, Place, device
from cuda_kernels.blocks import quantize_blocks
from cuda_kernels.cast import cast
from cuda_kernels.decode import decode
from cuda_kernels.encode import encode
from cuda_kernels.fp4_blocks import fp4_blocks
from cuda_kernels.fp4_sums import fp4_sums
from cuda_kernels.fp8_wgmma import fp8_wgmma
from qsim.codec.general import rule_words
from qsim.codec.scaled import SCALE_RECIPES
from qsim.codec.scaled.rules import device_numbers
from qsim.codec.tables import decode_table
from qsim.formats import FORMATS, POLICIES
from qsim.sweep.cell import Cell, ScheduleParams, WorkloadParams
from qsim.sweep.run import replay_cell
from tests.backends import PLAYED
from tests.places import CHOICE, place
from tests.unit.test_cuda_encode import params

ROUNDS, WARM_UP = 20, 3
INT8_OPS = {"sm_80": 4096, "sm_86": 2048, "sm_89": 2048, "sm_90a": 8192}
"""Dense INT8 operations (two a multiply-add) of one multiprocessor in one cycle; source: NVIDIA's data sheets, as
peak / (multiprocessors * boost clock)."""
E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kernel's median time, its rate, and the rate over that of a peer; floor: the least ratio that is aimed at."""

    what: str
    milliseconds: float
    rate: float
    unit: str
    against: str
    ratio: float | None
    floor: float | None


@dataclass(frozen=True, slots=True)
class Bench:
    """Where, and how large: elements of a tensor, rows of a square product."""

    here: Place
    elements: int
    side: int
    played: bool

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of a launch by events about it."""
        if self.played:
            run()
            return float("nan")
        cuda, times = self.here.xp.cuda, []
        for _ in range(WARM_UP):
            run()
        for _ in range(ROUNDS):
            start, stop = cuda.Event(), cuda.Event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(cuda.get_elapsed_time(start, stop) / 1000)
        return statistics.median(times)

    def random(self, *shape: int) -> Any:
        """Normal float32."""
        return self.here.upload(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))

    def codes(self, *shape: int) -> Any:
        """E4M3 codes without NaN."""
        drawn = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return self.here.upload(np.where(drawn & 0x7F == 0x7F, 0, drawn).astype(np.uint8))


def of_memory(bench: Bench) -> Iterator[Row]:
    """Codec kernels against a copy on the device, in bytes read and written a second."""
    here, n, fmt = bench.here, bench.elements, FORMATS[E4M3]
    x, codes = bench.random(n), here.empty(n, "uint8")
    target = here.empty(n, "float32")
    copied = 8 * n / bench.seconds(lambda: target.__setitem__(slice(None), x))
    constants, own = params(fmt, POLICIES["ocp"]), here.upload(rule_words(fmt, POLICIES["ocp"]))
    table, scale = here.upload(decode_table(fmt)), here.upload(np.float32([3.0]))
    columns = 128
    matrix = x[: n // columns * columns].reshape(-1, columns)
    runs: dict[str, tuple[float, float | None, Callable[[], object]]] = {
        "encode E4M3 into out": (5, 0.9, lambda: encode(here, x, constants, out=codes)),
        "cast E4M3: scale, amax, counts": (5, None, lambda: cast(here, x.reshape(1, n), own, scale=scale)),
        "decode E4M3": (5, None, lambda: decode(here, codes, table)),
    }
    nearest = here.upload(rule_words(FORMATS["float4_e2m1fn"], POLICIES["ocp"]))
    for name, each in (("mxfp4_rceil", 4.5 + 1 / 32), ("nvfp4_te", 8.5 + 1 / 16)):  # of which NVFP4 reads twice
        recipe = device_numbers(SCALE_RECIPES[name])
        run = functools.partial(quantize_blocks, here, matrix, nearest, recipe, packed=True)
        runs[f"{name}, packed, with scales and counts"] = (each, None, run)
    for what, (bytes_each, floor, run) in runs.items():
        seconds = bench.seconds(run)
        rate = bytes_each * n / seconds
        yield Row(what=f"{what}, {n} elements", milliseconds=1000 * seconds, rate=rate / 1e9, unit="GB/s",
                  against="copy on the device", ratio=rate / copied, floor=floor)  # fmt: skip


def of_products(bench: Bench) -> Iterator[Row]:
    """FP8 wgmma against torch._scaled_mm, exact FP4 sums against the INT8 peak."""
    here, side = bench.here, bench.side
    operations = 2.0 * side**3
    a, b = bench.codes(side, side), bench.codes(side, side)
    peer = bench.seconds(run) if (run := _scaled_mm(bench)) else None
    for what, promote in (("fast", None), ("promote_every 128", 128)):
        seconds = bench.seconds(lambda: fp8_wgmma(here, a, b, formats=(E4M3, E4M3), promote_every=promote))  # noqa: B023
        yield Row(what=f"FP8 wgmma {what}, {side}^3", milliseconds=1000 * seconds, rate=operations / seconds / 1e12,
                  unit="TFLOP/s", against="torch._scaled_mm" if peer else "no torch with CUDA",
                  ratio=peer / seconds if peer else None, floor=0.7 if promote is None else None)  # fmt: skip
    packed = here.upload(np.random.default_rng(1).integers(0, 256, (side, side // 2), dtype=np.uint8))
    scales = here.upload(np.full((side, side // 16), 0x38, np.uint8))
    products: dict[str, Callable[[], object]] = {
        "exact FP4 sums": lambda: fp4_sums(here, packed, packed, side),
        "NVFP4, block by block": lambda: fp4_blocks(here, packed, packed, side, scales, scales, kinds=("e4m3", "e4m3")),
    }
    peak = _int8_peak(bench)
    for what, multiply in products.items():
        seconds = bench.seconds(multiply)
        yield Row(what=f"{what}, {side}^3", milliseconds=1000 * seconds, rate=operations / seconds / 1e12,
                  unit="TOP/s", against="INT8 peak" if peak else "INT8 peak unknown",
                  ratio=operations / seconds / peak if peak else None,
                  floor=0.5 if "sums" in what else None)  # fmt: skip


def of_replicas(bench: Bench) -> Iterator[Row]:
    """One case of many replicas against the CPU: whole seconds, tensors made and fetched included."""
    count = 2 if bench.played else 256
    times = {}
    for backend in ("numba",) if bench.played else ("numba", "cuda"):
        for _ in range(2):  # the first time compiles
            start = time.perf_counter()
            replay_cell(_cell(backend, count))
            times[backend] = time.perf_counter() - start
    own, peer = times.get("cuda", float("nan")), times["numba"]
    yield Row(what=f"D01, {count} replicas", milliseconds=1000 * own, rate=count / own, unit="replicas/s",
              against="numba backend", ratio=peer / own, floor=None)  # fmt: skip


def _cell(backend: str, replicas: int) -> Cell:
    return Cell(
        defect="D01", fmt=E4M3, recipe="delayed", window=16, preset="seed_correct", seed=replicas, replicas=replicas,
        skip_steps=1, backend=backend, reproducible=True, schedule=ScheduleParams(steps=4),
        workload=WorkloadParams(tokens=32, outputs=64),
    )  # fmt: skip


def _scaled_mm(bench: Bench) -> Callable[[], object] | None:
    """The same product by torch, where torch has a device."""
    try:
        import torch
    except ImportError:
        return None
    if bench.played or not torch.cuda.is_available():
        return None
    a = torch.randn(bench.side, bench.side, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8_peak(bench: Bench) -> float | None:
    if bench.played or bench.here.arch not in INT8_OPS:
        return None
    found = bench.here.xp.cuda.Device().attributes
    return float(INT8_OPS[bench.here.arch] * found["MultiProcessorCount"] * found["ClockRate"] * 1000)


def _driver_version() -> str:
    """As nvidia-smi prints it; "unknown" without it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def described(here: Device) -> dict[str, str]:
    """Device, driver, date, command."""
    runtime = here.cupy.cuda.runtime
    properties = runtime.getDeviceProperties(here.cupy.cuda.Device().id)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": properties["name"].decode(),
        "driver": _driver_version(),
        "driver_cuda": str(runtime.driverGetVersion()),
        "cupy": str(here.cupy.__version__),
        "command": "python -m benchmarks.gpu",
    }


def main() -> int:
    """Print every row, mark what is below its floor, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the rows, as JSON")
    chosen = parser.parse_args()
    if os.environ.get(CHOICE) == PLAYED:
        bench = Bench(here=place(), elements=5000, side=128, played=True)
    else:
        try:
            bench = Bench(here=device(), elements=1 << 28, side=8192, played=False)
        except DeviceUnavailableError as error:
            print(f"no figures: {error}", file=sys.stderr)
            return 2
    rows = []
    for part in (of_memory, of_products, of_replicas):
        for row in part(bench):
            if bench.played:
                print(f"{row.what}: ran; a dry run has no figures")
                continue
            rows.append(row)
            ratio = "" if row.ratio is None else f", {row.ratio:.2f} of {row.against}"
            missed = " BELOW ITS FLOOR" if row.floor and row.ratio is not None and row.ratio < row.floor else ""
            floor = "" if row.floor is None else f" (floor {row.floor})"
            print(f"{row.what}: {row.milliseconds:.3f} ms, {row.rate:.1f} {row.unit}{ratio}{floor}{missed}")
    if chosen.out and rows:
        assert isinstance(bench.here, Device)
        about = described(bench.here)
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / f"gpu-{about['date'][:10]}.json"
        path.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
        print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
