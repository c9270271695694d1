"""Products of small integers by the int8 dot-product instruction of AVX-512 VNNI. Know no format.

vpdpbusd adds four products of unsigned by signed bytes to each of 16 int32 lanes. B is the unsigned side, shifted by
SHIFT to be so, and what that adds is taken off again: SHIFT times the sum of the row of A. Integers: every bit is that
of any other way to add them. A tile of ROWS x 64 outputs stays in registers over all of K.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from qsim.codec.jit import kernel, read, write

if TYPE_CHECKING:
    from qsim.arrays import I8, I32, U8

_U1, _S1, _S4, _I8 = numba.uint8, numba.int8, numba.int32, numba.int64

ROWS, LANES, VECTORS = 6, 16, 4
COLUMNS = LANES * VECTORS
DEPTH = 4
SHIFT = np.int32(12)
"""Twice the largest E2M1 value: makes every doubled value unsigned."""

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_WORDS, _BYTES = ir.VectorType(_WORD, LANES), ir.VectorType(_BYTE, LANES * DEPTH)
_NAME = "llvm.x86.avx512.vpdpbusd.512"


@lru_cache(maxsize=1)
def has_instruction() -> bool:
    """Whether this processor has vpdpbusd on 512 bits, and Numba compiles for it."""
    from numba.core import config

    named = config.CPU_NAME or config.CPU_FEATURES
    return not named and bool(llvm.get_host_cpu_features().get("avx512vnni")) and _operands() is not None


@lru_cache(maxsize=1)
def _operands() -> Any:
    """The type that this LLVM gives the bytes of the instruction; None where it has no such intrinsic."""
    for kind in (_BYTES, _WORDS):
        text = f"declare {_WORDS} @{_NAME}({_WORDS}, {kind}, {kind})"
        try:
            llvm.parse_assembly(text).verify()
        except RuntimeError:
            continue
        return kind
    return None


@intrinsic  # type: ignore[untyped-decorator]
def _tile(context: Any, a: Any, row: Any, panel: Any, start: Any, steps: Any, c: Any, column: Any) -> Any:
    """c[row : row + ROWS, column : column + COLUMNS] += a[row : row + ROWS] times the panel from byte ``start`` on."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, row, panel, start, steps, c, column = arguments
        a_view, panel_view, c_view = (
            target.make_array(signature.args[i])(target, builder, x) for i, x in ((0, a), (2, panel), (5, c))
        )
        kind = _operands()
        call_type = ir.FunctionType(_WORDS, [_WORDS, kind, kind])
        dot = cgutils.get_or_insert_function(builder.module, call_type, _NAME)
        width, across = cgutils.unpack_tuple(builder, a_view.shape)[1], cgutils.unpack_tuple(builder, c_view.shape)[1]
        index = row.type
        rows = [
            builder.gep(a_view.data, [builder.mul(builder.add(row, ir.Constant(index, r)), width)]) for r in range(ROWS)
        ]
        outputs = [
            [
                builder.bitcast(
                    builder.gep(
                        c_view.data,
                        [builder.add(builder.mul(builder.add(row, ir.Constant(index, r)), across),
                                     builder.add(column, ir.Constant(index, v * LANES)))],
                    ),
                    _WORDS.as_pointer(),
                )
                for v in range(VECTORS)
            ]
            for r in range(ROWS)
        ]  # fmt: skip
        sums = [[cgutils.alloca_once(builder, _WORDS) for _ in range(VECTORS)] for _ in range(ROWS)]
        for r in range(ROWS):
            for v in range(VECTORS):
                builder.store(builder.load(outputs[r][v], align=4), sums[r][v])
        first = builder.gep(panel_view.data, [start])
        nothing = ir.Constant(_WORDS, ir.Undefined)
        with cgutils.for_range(builder, steps) as loop:
            here = builder.gep(first, [builder.mul(loop.index, ir.Constant(index, COLUMNS * DEPTH))])
            fours = []
            for v in range(VECTORS):
                at = builder.gep(here, [ir.Constant(index, v * LANES * DEPTH)])
                fours.append(builder.load(builder.bitcast(at, kind.as_pointer()), align=1))
            for r in range(ROWS):
                at = builder.gep(rows[r], [builder.mul(loop.index, ir.Constant(index, DEPTH))])
                word = builder.load(builder.bitcast(at, _WORD.as_pointer()), align=1)
                every = builder.shuffle_vector(
                    builder.insert_element(nothing, word, ir.Constant(_WORD, 0)),
                    nothing,
                    ir.Constant(_WORDS, [0] * LANES),
                )
                own = builder.bitcast(every, kind)
                for v in range(VECTORS):
                    builder.store(builder.call(dot, [builder.load(sums[r][v]), fours[v], own]), sums[r][v])
        for r in range(ROWS):
            for v in range(VECTORS):
                builder.store(builder.load(sums[r][v]), outputs[r][v], align=4)
        return target.get_dummy_value()

    size = numba.types.intp
    return numba.void(a, size, panel, size, size, c, size), build


@kernel(read(_U1, 2), read(_S1, 1), write(_S1, 2))
def spread_rows(codes: U8, table: I8, out: I8) -> None:
    """out [rows or more, K or more] = table[code], 0 beyond."""
    for row in range(codes.shape[0]):
        source, target = codes[row], out[row]
        for k in range(source.size):
            target[k] = table[source[k]]


@kernel(read(_U1, 2), read(_S1, 1), _I8, _I8, write(_U1, 1))
def panels(codes: U8, table: I8, first: int, last: int, out: U8) -> None:
    """Column blocks first..last-1 of COLUMNS rows of codes [N, K]: bytes [block][K / DEPTH][COLUMNS][DEPTH], shifted.

    out is filled with SHIFT beforehand, what 0 is.
    """
    rows, depth = codes.shape
    steps = (depth + DEPTH - 1) // DEPTH
    for block in range(first, last):
        base = block * steps * COLUMNS * DEPTH
        for column in range(min(COLUMNS, rows - block * COLUMNS)):
            source = codes[block * COLUMNS + column]
            for k in range(depth):
                at = base + (k // DEPTH) * COLUMNS * DEPTH + column * DEPTH + k % DEPTH
                out[at] = np.uint8(np.int32(table[source[k]]) + SHIFT)


@kernel(read(_S1, 2), read(_U1, 1), _I8, write(_S4, 2))
def product(a: I8, panel: U8, steps: int, c: I32) -> None:
    """c [M, N] = a [M, DEPTH * steps] times the panels; M is a multiple of ROWS, N of COLUMNS."""
    for m in range(a.shape[0]):
        total = np.int32(0)
        for k in range(a.shape[1]):
            total = np.int32(total + np.int32(a[m, k]))
        for n in range(c.shape[1]):
            c[m, n] = np.int32(-SHIFT * total)
    for block in range(c.shape[1] // COLUMNS):
        for m in range(0, a.shape[0], ROWS):
            _tile(a, m, panel, block * steps * COLUMNS * DEPTH, steps, c, block * COLUMNS)
