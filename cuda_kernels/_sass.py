"""Machine code as text: what ptxas made of a kernel, read back by NVIDIA's nvdisasm. Needs no GPU; knows no kernel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuda_kernels import KernelBuildError

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+),.*\n", re.MULTILINE)
_ROUTINE = re.compile(r"^(\$\S+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")


class Instruction(NamedTuple):
    """``@guard opcode operands``; routine: the compiler's own that it belongs to, ``""`` for the kernel's code."""

    routine: str
    guard: str
    opcode: str
    operands: tuple[str, ...]


def disassembled(cubin: bytes, name: str) -> str:
    """The code of the entry ``name``, a line an instruction, with the compiler's routines (64-bit division) behind it.

    KernelBuildError where nvdisasm is missing or refuses the cubin, or the cubin has no such entry.
    """
    sections = _sections(cubin)
    if name not in sections:
        raise KernelBuildError(f"the cubin has no entry {name}; its entries: {', '.join(sections) or 'none'}")
    return sections[name]


def instructions(text: str) -> list[Instruction]:
    """What ``disassembled`` printed, line by line."""
    found, routine = [], ""
    for line in text.splitlines():
        if label := _ROUTINE.match(line):
            routine = label[1]
        elif match := _LINE.match(line):
            operands = tuple(word.strip().removesuffix(".reuse") for word in match[3].split(",")) if match[3] else ()
            found.append(Instruction(routine, match[1] or "", match[2], operands))
    return found


def disassembler() -> str | None:
    """Path of nvdisasm: the wheel's, else that of a CUDA toolkit on PATH; or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("nvdisasm")


@cache
def _sections(cubin: bytes) -> dict[str, str]:
    path = disassembler()
    if path is None:
        raise KernelBuildError("nvdisasm was not found: install nvidia-cuda-nvdisasm (the extra test has it)")
    with tempfile.TemporaryDirectory(prefix="qsim-sass-") as folder:
        own = Path(folder) / "kernel.cubin"
        own.write_bytes(cubin)
        run = subprocess.run([path, "--print-code", str(own)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise KernelBuildError(f"nvdisasm could not read the cubin: {(run.stderr or run.stdout).strip()}")
    _, *parts = _SECTION.split(run.stdout)
    return dict(zip(parts[::2], parts[1::2], strict=True))
