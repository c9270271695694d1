"""Every emulated CUDA kernel on odd shapes, in arrays of exactly their size: ``python -m tests.sanitized``.

For a process that AddressSanitizer watches (tests/unit/test_cuda_sanitized.py starts it). With arguments
FILE OLD NEW the text of one kernel is changed first, so that a test can see a stray access reported.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cuda_kernels._kernel as kernels
from cuda_kernels.cast import cast_on_host
from cuda_kernels.decode import decode_on_host
from cuda_kernels.encode import encode_on_host
from cuda_kernels.fp4_sums import fp4_sums_on_host
from cuda_kernels.fp8_mma import fp8_mma_on_host
from cuda_kernels.reduce import observe_on_host, sums_on_host, totals_on_host
from cuda_kernels.swizzle import swizzle_on_host, unswizzle_on_host
from qsim.codec.general_kernels import rules_of
from qsim.formats import FORMATS, POLICIES
from tests.unit.test_cuda_encode import params

SHAPES = ((1, 1), (1, 3), (2, 4), (3, 5), (2, 17), (1, 255), (3, 256), (1, 257), (5, 129), (2, 1031))


def own(x: Any) -> Any:
    """A copy of ``x`` in an allocation of exactly its size."""
    return np.array(x, order="C", copy=True)


def run(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    x = own(rng.standard_normal(shape).astype(np.float32))
    row = own(np.ones(shape[0], np.float32))
    stream = own(rng.integers(0, 2**32, (shape[0], 5), dtype=np.uint32))
    centres = (None, own(np.ones((1, shape[1]), np.float32)), own(np.ones((shape[0], 1), np.float32)), x)
    fmt, policy = FORMATS["float8_e4m3fn"], POLICIES["ocp"]
    rounding = policy.with_choices(rounding="stochastic", random_bits=7)
    rules = own(np.array([int(v) for v in rules_of(fmt, rounding, np.uint32)], np.uint32))
    table = own(np.arange(256, dtype=np.float32))
    for center in centres:
        codes = own(encode_on_host(x, params(fmt, policy), scale=row, center=center))
        cast_on_host(x, rules, scale=row, center=center, streams=stream)
        decode_on_host(codes, table, descale=row, center=center)
        observe_on_host(x, lead=1, center=center)
    slots = own(np.arange(shape[0], dtype=np.int64))
    sums_on_host(x, slots, *shape)
    totals_on_host(x, slots, own(np.ones(shape)))
    tiles = own(swizzle_on_host(codes))
    unswizzle_on_host(tiles, *shape)
    packed = own(rng.integers(0, 256, shape, dtype=np.uint8))
    fp4_sums_on_host(packed, packed[:1], 2 * shape[1] - shape[0] % 2)
    fp8_mma_on_host(packed, packed, formats=("float8_e4m3fn", "float8_e5m2"))


def main(change: list[str]) -> None:
    if change:
        file, old, new = change
        plain = kernels.source

        def changed(name: str) -> str:
            text = plain(name)
            if name != file:
                return text
            assert text.count(old) == 1, (file, old)
            return text.replace(old, new)

        kernels.source = changed
    for shape in SHAPES:
        run(shape)
    print(f"{len(SHAPES)} shapes")


if __name__ == "__main__":
    main(sys.argv[1:])
