"""Every emulated CUDA kernel on odd shapes, in arrays of exactly their size: ``python -m tests.sanitized``.

For a process that AddressSanitizer watches (tests/unit/test_cuda_sanitized.py starts it). With arguments
FILE OLD NEW the text of one kernel, or that of a header for its kernels, is changed first, so that a test can see a
stray access reported; FILE:HEADER changes the header for one text alone.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cuda_kernels._kernel as kernels
from cuda_kernels._place import HOST
from cuda_kernels.cast import cast
from cuda_kernels.decode import decode
from cuda_kernels.encode import encode
from cuda_kernels.footprint import KERNELS
from cuda_kernels.fp4_sums import fp4_sums
from cuda_kernels.fp8_mma import fp8_mma
from cuda_kernels.reduce import observe, sums, totals
from cuda_kernels.swizzle import swizzle, unswizzle
from qsim.codec.general_kernels import rules_of
from qsim.formats import FORMATS, POLICIES
from tests.unit.test_cuda_encode import params

SHAPES = ((1, 1), (1, 3), (2, 4), (3, 5), (2, 17), (1, 255), (3, 256), (1, 257), (5, 129), (2, 1031))
FMT = FORMATS["float8_e4m3fn"]


def own(x: Any) -> Any:
    """A copy of ``x`` in an allocation of exactly its size."""
    return np.array(x, order="C", copy=True)


class Inputs:
    """Arrays of one odd shape; ``centres`` lie beside x in each of the ways that there are."""

    def __init__(self, shape: tuple[int, int]) -> None:
        rng = np.random.default_rng(sum(shape))
        self.shape = shape
        self.x = own(rng.standard_normal(shape).astype(np.float32))
        self.row = own(np.ones(shape[0], np.float32))
        self.streams = own(rng.integers(0, 2**32, (shape[0], 5), dtype=np.uint32))
        self.codes = own(rng.integers(0, 256, shape, dtype=np.uint8))
        self.slots = own(np.arange(shape[0], dtype=np.int64))
        ones = (own(np.ones((1, shape[1]), np.float32)), own(np.ones((shape[0], 1), np.float32)))
        self.centres = (None, *ones, self.x)


def _encode(given: Inputs) -> None:
    for center in given.centres:
        encode(HOST, given.x, params(FMT, POLICIES["ocp"]), scale=given.row, center=center)


def _cast(given: Inputs) -> None:
    policy = POLICIES["ocp"].with_choices(rounding="stochastic", random_bits=7)
    rules = own(np.array([int(v) for v in rules_of(FMT, policy, np.uint32)], np.uint32))
    for center in given.centres:
        cast(HOST, given.x, rules, scale=given.row, center=center, streams=given.streams)


def _decode(given: Inputs) -> None:
    for center in given.centres:
        decode(HOST, given.codes, own(np.arange(256, dtype=np.float32)), descale=given.row, center=center)


def _reduce(given: Inputs) -> None:
    for center in given.centres:
        observe(HOST, given.x, lead=1, center=center)
    sums(HOST, given.x, given.slots, *given.shape)
    totals(HOST, given.x, given.slots, own(np.ones(given.shape)))


def _swizzle(given: Inputs) -> None:
    unswizzle(HOST, own(swizzle(HOST, given.codes)), *given.shape)


def _fp4_sums(given: Inputs) -> None:
    fp4_sums(HOST, given.codes, given.codes[:1], 2 * given.shape[1] - given.shape[0] % 2)


def _fp8_mma(given: Inputs) -> None:
    fp8_mma(HOST, given.codes, given.codes, formats=("float8_e4m3fn", "float8_e5m2"))


RUNS = {
    "encode.cu": _encode,
    "cast.cu": _cast,
    "decode.cu": _decode,
    "reduce.cu": _reduce,
    "swizzle.cu": _swizzle,
    "fp4_sums.cu": _fp4_sums,
    "fp8_mma.cu": _fp8_mma,
}


def main(change: list[str]) -> None:
    assert set(RUNS) == {kernel.file for kernel in KERNELS}
    files = list(RUNS)
    if change:
        place, old, new = change
        file, _, header = place.partition(":")
        files = sorted({kernel.file for kernel in KERNELS if file in (kernel.file, *kernel.prelude)})
        plain = kernels.source

        def changed(name: str) -> str:
            text = plain(name)
            if name != (header or file):
                return text
            assert text.count(old) == 1, (place, old)
            return text.replace(old, new)

        kernels.source = changed
    for shape in SHAPES:
        for each in files:
            RUNS[each](Inputs(shape))
    print(f"{len(files)} texts, {len(SHAPES)} shapes")


if __name__ == "__main__":
    main(sys.argv[1:])
