"""Every emulated CUDA kernel on odd shapes, in arrays of exactly their size: ``python -m tests.sanitized``.

For a process that AddressSanitizer watches (tests/unit/test_cuda_sanitized.py starts it), or, with QSIM_PLACE=cuda,
compute-sanitizer. With arguments
FILE OLD NEW the text of one kernel, or that of a header for its kernels, is changed first, so that a test can see a
stray access reported; FILE:HEADER changes the header for one text alone.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cuda_kernels._kernel as kernels
from cuda_kernels.blocks import quantize_blocks
from cuda_kernels.cast import cast
from cuda_kernels.decode import decode
from cuda_kernels.encode import encode
from cuda_kernels.epilogue import OUTPUTS, epilogue
from cuda_kernels.exact import Operand, exact_product, matmul, product_of_sums
from cuda_kernels.footprint import KERNELS
from cuda_kernels.fp4_blocks import BLOCKS, FP4_BLOCKS, fp4_blocks
from cuda_kernels.fp4_sums import fp4_sums
from cuda_kernels.fp8_mma import fp8_mma
from cuda_kernels.fp8_wgmma import fp8_wgmma
from cuda_kernels.hadamard import hadamard
from cuda_kernels.pack import pack, unpack
from cuda_kernels.reduce import observe, sums, totals
from cuda_kernels.swizzle import swizzle, unswizzle
from cuda_kernels.unblocks import dequantize_blocks
from qsim.codec.general import rule_words
from qsim.codec.scaled import SCALE_RECIPES
from qsim.codec.scaled.rules import device_numbers
from qsim.formats import FORMATS, POLICIES
from tests.places import is_played, launch, place
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
        launch(encode, given.x, params(FMT, POLICIES["ocp"]), scale=given.row, center=center)


def _cast(given: Inputs) -> None:
    policy = POLICIES["ocp"].with_choices(rounding="stochastic", random_bits=7)
    rules = own(rule_words(FMT, policy))
    for center in given.centres:
        launch(cast, given.x, rules, scale=given.row, center=center, streams=given.streams)


def _decode(given: Inputs) -> None:
    for center in given.centres:
        launch(decode, given.codes, own(np.arange(256, dtype=np.float32)), descale=given.row, center=center)


RECIPES = ("float4_e2m1fn", "float4_e2m1fn_row", "float4_e2m1fn_col", "float4_e2m1fn_1x128", "mxfp4_even",
           "nvfp4_4over6", "nvfp4_exact_16x16")  # fmt: skip


def _blocks(given: Inputs) -> None:
    policy = POLICIES["ocp"].with_choices(rounding="stochastic")
    rules = own(rule_words(FORMATS["float4_e2m1fn"], policy))
    for i, name in enumerate(RECIPES):
        recipe, center = device_numbers(SCALE_RECIPES[name]), given.centres[(i + given.shape[1]) % 4]
        launch(quantize_blocks, given.x, rules, recipe, center=center, stream=given.streams[0], packed=i % 2 == 1)


def _unblocks(given: Inputs) -> None:
    for name in RECIPES:
        recipe, grid = device_numbers(SCALE_RECIPES[name]), SCALE_RECIPES[name].block.grid(given.shape)
        scales = own(np.ones(grid, np.uint8 if recipe.rule else np.float32))
        tensor = own(np.ones(1, np.float32)) if recipe.two_level else None
        launch(dequantize_blocks, given.codes, scales, own(np.ones(16, np.float32)), recipe, tensor=tensor)


def _hadamard(given: Inputs) -> None:
    for size in (16, 32):
        for rows in given.shape:
            factors = own(np.ones(size, np.float32))
            launch(hadamard, own(np.ones((rows, size), np.float32)), factors, factors)


def _reduce(given: Inputs) -> None:
    for center in given.centres:
        launch(observe, given.x, lead=1, center=center)
    launch(sums, given.x, given.slots, *given.shape)
    launch(totals, given.x, given.slots, own(np.ones(given.shape)))


def _pack(given: Inputs) -> None:
    launch(unpack, own(launch(pack, given.codes)), given.shape[1])


def _swizzle(given: Inputs) -> None:
    launch(unswizzle, own(launch(swizzle, given.codes)), *given.shape)


def _fp4_sums(given: Inputs) -> None:
    launch(fp4_sums, given.codes, given.codes[:1], 2 * given.shape[1] - given.shape[0] % 2)


def _fp4_blocks(given: Inputs) -> None:
    codes, depth = given.codes, 2 * given.shape[1] - given.shape[0] % 2
    for kinds in FP4_BLOCKS:
        rows = -(-codes.shape[0] // 2)  # two rows of a share a scale
        grids = [
            own(np.full((n, -(-depth // BLOCKS[kind])), 127, np.uint8))
            for n, kind in zip((rows, 1), kinds, strict=True)
        ]
        launch(fp4_blocks, codes, own(codes[:1]), depth, *grids, kinds=kinds, extents=(2, 1))


def _fp8_mma(given: Inputs) -> None:
    for more in ({}, _block_scales(given)):
        launch(fp8_mma, given.codes, given.codes, formats=("float8_e4m3fn", "float8_e5m2"), **more)


def _epilogue(given: Inputs) -> None:
    rules = own(rule_words(FMT, POLICIES["ocp"]))
    column, flat = own(given.x[0]), own(given.x.reshape(-1)[:1])
    for plane in (given.x, column, own(given.x[:, :1]), flat):
        for out in (*OUTPUTS, "codes"):
            launch(
                epilogue, given.x, row=given.row, column=column, order="product", beta=2, c=plane, bias=plane,
                correction=plane, out=out, rules=rules if out == "codes" else None,
            )  # fmt: skip


def _fp8_wgmma(given: Inputs) -> None:
    for more in ({}, _block_scales(given)):
        launch(fp8_wgmma, given.codes, given.codes, formats=("float8_e4m3fn", "float8_e5m2"), **more)


def _block_scales(given: Inputs) -> dict[str, Any]:
    rows, depth = given.shape
    blocks = -(-depth // 128)
    scales = own(np.ones((rows, blocks), np.float32)), (1, 128), own(np.ones((1, blocks), np.float32)), (128, 128)
    return {"scales": scales, "split_k": 2}


def _exact(given: Inputs) -> None:
    rows, depth = given.shape
    launch(matmul, given.x, given.x.T)
    launch(matmul, given.x[::-1, ::-2], given.x[:1, ::2].T)
    scales = own(np.ones((-(-rows // 2), -(-depth // 16)), np.float32))
    table, one = own(np.arange(256, dtype=np.float32)), own(np.ones(rows))
    a = Operand(given.codes, table, scales, (2, 16), one)
    launch(exact_product, a, a)
    launch(exact_product, a._replace(row=own(one * 1e-200)), a, divisor=21)  # so small that no output has a proof
    launch(
        product_of_sums,
        own(np.ones((rows, rows), np.int32)),
        a._replace(block=None),
        a._replace(block=None),
        unit=0.25,
        divisor=3,
    )
    launch(exact_product, a._replace(row=None), Operand(given.codes, table), per_block=5)


RUNS = {
    "encode.cu": _encode,
    "cast.cu": _cast,
    "decode.cu": _decode,
    "blocks.cu": _blocks,
    "unblocks.cu": _unblocks,
    "hadamard.cu": _hadamard,
    "reduce.cu": _reduce,
    "pack.cu": _pack,
    "swizzle.cu": _swizzle,
    "fp4_sums.cu": _fp4_sums,
    "fp4_blocks.cu": _fp4_blocks,
    "fp8_mma.cu": _fp8_mma,
    "epilogue.cu": _epilogue,
    "fp8_wgmma.cu": _fp8_wgmma,
    "exact.cu": _exact,
}


def main(change: list[str]) -> None:
    if place().name == "cuda" and not is_played():
        place().xp.cuda.set_allocator(None)  # an allocation of its own for every array: memcheck sees its end
    assert set(RUNS) == {kernel.file for kernel in KERNELS}
    files = list(RUNS)
    if change:
        where, old, new = change
        file, _, header = where.partition(":")
        files = sorted({kernel.file for kernel in KERNELS if file in (kernel.file, *kernel.prelude)})
        plain = kernels.source

        def changed(name: str) -> str:
            text = plain(name)
            if name != (header or file):
                return text
            assert text.count(old) == 1, (where, old)
            return text.replace(old, new)

        kernels.source = changed
    for shape in SHAPES:
        for each in files:
            RUNS[each](Inputs(shape))
    print(f"{len(files)} texts, {len(SHAPES)} shapes")


if __name__ == "__main__":
    main(sys.argv[1:])
