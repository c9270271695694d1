"""AddressSanitizer over every emulated kernel: no access outside an array of exactly its size, on odd shapes."""

import os
import subprocess
import sys

import pytest

from cuda_kernels import host
from cuda_kernels.footprint import KERNELS
from tests.oracles import unavailable
from tests.places import CHOICE

FOUR = "j + 4 <= size && qsim_aligned(row + j, 16)) {\n        "
TOO_FAR = FOUR.replace("4", "3", 1)
READ, WRITE = "const float4", "*reinterpret_cast<float4*>"


def watched(*change):
    """The finished process ``python -m tests.sanitized`` under AddressSanitizer."""
    library = host.sanitizer()
    if library is None:
        unavailable("g++ has no AddressSanitizer")
    more = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0:symbolize=0", host.SANITIZE: "1", CHOICE: "emulated"}
    return subprocess.run(
        [sys.executable, "-m", "tests.sanitized", *change],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_no_kernel_touches_what_is_not_its_own():
    done = watched()
    texts = {kernel.file for kernel in KERNELS}
    assert (done.returncode, done.stdout) == (0, f"{len(texts)} texts, 10 shapes\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("encode.cu:groups.cuh", FOUR + READ, TOO_FAR + READ, "READ of size 16"),
        ("decode.cu:groups.cuh", FOUR + WRITE, TOO_FAR + WRITE, "WRITE of size 16"),
        ("cast.cu:groups.cuh", "j + 4 <= size && qsim_aligned(row + j, 4)", "j + 3 <= size", "WRITE of size 4"),
        ("decode.cu:groups.cuh", "j + 16 <= size", "j + 15 <= size", "READ of size 16"),
        ("encode.cu:groups.cuh", "j + e < size ? row[j + e]", "j + e <= size ? row[j + e]", "READ of size 4"),
        ("decode.cu:groups.cuh", "j + e < size) words", "j + e <= size) words", "READ of size 1"),
        ("encode.cu:groups.cuh", "at + 1 == period ? 0 : at + 1", "at + 1", "READ of size 4"),
        ("cast.cu", "atomicMax(top + r, best)", "atomicMax(top + r + 1, best)", "READ of size 4"),
        ("reduce.cu", "j % center_period]", "j % center_period + 1]", "READ of size 4"),
        ("pack.cu", "first + 1 < length", "first + 1 <= length", "READ of size 1"),
        ("matrix.cuh", "if (first >= of.columns) return;", "if (first > of.columns) return;", "READ of size"),
        ("matrix.cuh", "columns) own[e] = (unsigned char)", "columns + 1) own[e] = (unsigned char)", "WRITE of size 1"),
        ("blocks.cu", "if (present > 0 && lane % lanes == 0) {", "if (lane % lanes == 0) {", "WRITE of size"),
        ("unblocks.cu", "if (first >= columns) continue;", "if (first > columns) continue;", "READ of size"),
        ("hadamard.cu", "present = group < groups;", "present = group <= groups;", "READ of size"),
        ("swizzle.cu", "tiles[word] = value;", "tiles[word + 1] = value;", "WRITE of size 4"),
        ("fp4.cuh", "if (row >= rows) return;", "if (row > rows) return;", "READ of size"),
        ("fp4_blocks.cu", "own && k < depth ?", "own ?", "READ of size 1"),
        ("fp4_blocks.cu", "row < a.rows ?", "row <= a.rows ?", "READ of size 1"),
        ("epilogue.cu", "i < count ? at[i * across]", "i <= count ? at[i * across]", "READ of size 4"),
        ("epilogue.cu", "if (i < count) at[i] = __uint_as_float(bits[i]);", "at[i] = __uint_as_float(bits[i]);",
         "WRITE of size 4"),
        ("fp8_mma.cu", "if (first + i < last)", "if (first + i <= last)", "READ of size 1"),
        ("promote.cuh", "min(row, count - 1)", "min(row, count)", "READ of size 4"),
        ("fp8_wgmma.cu", "row < rows && column < columns", "row <= rows && column < columns", "of size 4"),
        ("wgmma_emulated.cuh", "1ull * r < word[2]", "1ull * r <= word[2]", "READ of size 1"),
        ("exact.cu", "inside && k + i < stop", "inside && k + i <= stop", "READ of size"),
        ("exact.cu", "if (top + m >= rows || start + n >= columns)", "if (top + m > rows)", "WRITE of size 4"),
        ("exact.cu", "min(begin + part, depth), by)", "min(begin + part, depth) + 1, by)", "READ of size 1"),
        ("tile.cuh", "row < rows && column < columns", "row < rows && column <= columns", "WRITE of size 4"),
    ],
)  # fmt: skip
def test_a_stray_access_ends_the_process(file, old, new, what):
    done = watched(file, old, new)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert what in done.stderr
