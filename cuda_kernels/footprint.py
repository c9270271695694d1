"""What each kernel takes of a device: registers, shared memory, stack, spills, as ptxas reports them. Needs no GPU.

``python -m cuda_kernels.footprint`` measures every kernel for every target and prints the table that
``footprint.csv`` keeps; a test compares both, so a kernel that begins to spill is seen where it was changed.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from cuda_kernels import KernelBuildError, source
from cuda_kernels._kernel import Kernel
from cuda_kernels._nvrtc import Compiled, compile_cubin, nvrtc_version
from cuda_kernels.blocks import BLOCKS_ENCODE, BLOCKS_FUSED, BLOCKS_MEASURE, BLOCKS_SCALE
from cuda_kernels.cast import CAST
from cuda_kernels.decode import DECODE
from cuda_kernels.encode import ENCODE
from cuda_kernels.epilogue import EPILOGUE, EPILOGUE_CODES
from cuda_kernels.exact import EXACT, OF_SUMS, SETTLE
from cuda_kernels.fp4_blocks import FP4_BLOCKS
from cuda_kernels.fp4_sums import FP4_SUMS
from cuda_kernels.fp8_mma import FP8_MMA, FP8_MMA_PROMOTED
from cuda_kernels.fp8_wgmma import FP8_WGMMA
from cuda_kernels.hadamard import HADAMARD
from cuda_kernels.pack import PACK, UNPACK
from cuda_kernels.reduce import OBSERVE, SUMS_TOP, SUMS_TOTAL
from cuda_kernels.swizzle import SWIZZLE, UNSWIZZLE
from cuda_kernels.unblocks import UNBLOCKS

KERNELS = (
    *(ENCODE, CAST, DECODE, PACK, UNPACK, SWIZZLE, UNSWIZZLE),
    *(BLOCKS_FUSED, BLOCKS_MEASURE, BLOCKS_SCALE, BLOCKS_ENCODE, UNBLOCKS, HADAMARD),
    *(OBSERVE, SUMS_TOP, SUMS_TOTAL),
    *(FP4_SUMS, *FP4_BLOCKS.values()),
    *(*FP8_MMA.values(), *FP8_MMA_PROMOTED.values(), *FP8_WGMMA.values()),
    *(EXACT, OF_SUMS, SETTLE),
    *(EPILOGUE, EPILOGUE_CODES),
)
"""Every kernel of this package."""


class Footprint(NamedTuple):
    """One row of the table; bytes are of shared memory a block, of stack and spills (stores and loads) a thread."""

    nvrtc: str
    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@cache
def compiled(text: str, file: str, arch: str) -> Compiled:
    """``text`` with PTX and the words of ptxas, built once a process."""
    return compile_cubin(text, arch, name=file, ptx=True, options=("--ptxas-options=-v",))


def footprint_of(kernel: Kernel, arch: str) -> Footprint:
    """What ``kernel`` takes on ``arch``; KernelBuildError where it does not compile or ptxas says nothing of it."""
    log = compiled(kernel.text, kernel.file, arch).log
    match = re.search(
        rf"Function properties for {kernel.entry}\n"
        r"\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers(.*)",
        log,
    )
    if match is None:
        raise KernelBuildError(f"ptxas says nothing of {kernel.entry} for {arch}:\n{log}")
    shared = re.search(r"(\d+) bytes smem", match[5])
    return Footprint(
        nvrtc=nvrtc_version(),
        kernel=kernel.entry,
        arch=arch,
        registers=int(match[4]),
        shared_bytes=int(shared[1]) if shared else 0,
        stack_bytes=int(match[1]),
        spill_bytes=int(match[2]) + int(match[3]),
    )


def measured() -> Iterator[Footprint]:
    """A row for each kernel and each of its targets."""
    for kernel in KERNELS:
        for arch in kernel.arches:
            yield footprint_of(kernel, arch)


def kept() -> list[Footprint]:
    """The rows of ``footprint.csv``."""
    rows = csv.DictReader(source("footprint.csv").splitlines())
    return [
        Footprint(row["nvrtc"], row["kernel"], row["arch"], *(int(row[name]) for name in Footprint._fields[3:]))
        for row in rows
    ]


def main() -> None:
    """Print the table as it is measured here."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    try:
        rows = list(measured())
    except KernelBuildError as error:
        sys.exit(f"nothing measured: {error}")
    table.writerow(Footprint._fields)
    table.writerows(rows)


if __name__ == "__main__":
    main()
