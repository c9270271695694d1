"""Sixteen float32 numbers as one value of a kernel, and sums of rows by halves. Knows no node.

LLVM makes vectors of a long loop by itself. A row of 16 to 64 numbers is mostly beginning and end to it, and a sum or a
maximum of floats it leaves scalar, for it must not choose an order. So there the vectors are written: every processor
gets the instructions that it has, and each step is the one of the formula, in 16 places.

``at`` is an index into the array in C order. Nothing is checked: a load or a store of fewer than 16 numbers says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

from qsim.codec.jit import inlined

LANES = 16
"""Numbers of one vector."""

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS, _FLAGS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _WORD, ir.IntType(1)))
_SIZE = numba.types.intp
_ALIGN = 4  # bytes: a row may begin anywhere
_POINTER = _FLOATS.as_pointer()


class Vector(numba.types.Type):  # type: ignore[misc]
    """Type of sixteen float32 numbers; it lives inside a kernel only."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


VECTOR = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _operate(symbol: Any, instruction: str) -> None:
    """``symbol`` between two vectors is one rounded operation in each place."""
    case = {"cases": [signature(VECTOR, VECTOR, VECTOR)]}
    infer_global(symbol)(type(f"Vector_{instruction}", (ConcreteTemplate,), case))

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)

    lower_builtin(symbol, VECTOR, VECTOR)(build)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operate(_symbol, _instruction)


def _place(target: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    values = target.make_array(kind)(target, builder, array)
    return builder.bitcast(builder.gep(values.data, [at]), _POINTER)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * LANES))


def _before(builder: Any, count: Any) -> Any:
    """Flags of the places before ``count``."""
    limit = _spread(builder, builder.trunc(count, _WORD), _WORDS)
    return builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))), limit)


def _masked(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.v{LANES}f32.p0")
    return builder.call(function, arguments)


def _by_halves(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One number of sixteen: element i with element i + n/2, for n = 16, 8, 4, 2."""
    left = LANES
    while left > 1:
        left //= 2
        nothing = ir.Constant(vector.type, ir.Undefined)
        places = ir.VectorType(_WORD, left)
        low, high = (
            builder.shuffle_vector(vector, nothing, ir.Constant(places, list(range(first, first + left))))
            for first in (0, left)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_WORD, 0))


@intrinsic  # type: ignore[untyped-decorator]
def every(context: Any, x: Any) -> Any:
    """x in every place."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], _FLOATS)

    return VECTOR(numba.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def load(context: Any, array: Any, at: Any) -> Any:
    """array[at : at + 16]."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(target, builder, signature.args[0], *arguments), align=_ALIGN)

    return VECTOR(array, _SIZE), build


@intrinsic  # type: ignore[untyped-decorator]
def load_some(context: Any, array: Any, at: Any, count: Any, rest: Any) -> Any:
    """array[at : at + count], then ``rest``; what lies behind is not read. count may be more than 16."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(target, builder, signature.args[0], *arguments[:2])
        flags, filled = _before(builder, arguments[2]), _spread(builder, arguments[3], _FLOATS)
        return _masked(builder, "load", _FLOATS, [place, ir.Constant(_WORD, _ALIGN), flags, filled])

    return VECTOR(array, _SIZE, _SIZE, numba.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def store(context: Any, vector: Any, array: Any, at: Any) -> Any:
    """array[at : at + 16] = vector."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[0], _place(target, builder, signature.args[1], *arguments[1:]), align=_ALIGN)
        return target.get_dummy_value()

    return numba.types.void(VECTOR, array, _SIZE), build


@intrinsic  # type: ignore[untyped-decorator]
def store_some(context: Any, vector: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count] = vector; what lies behind stays. count may be more than 16."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(target, builder, signature.args[1], *arguments[1:3])
        flags = _before(builder, arguments[3])
        _masked(builder, "store", ir.VoidType(), [arguments[0], place, ir.Constant(_WORD, _ALIGN), flags])
        return target.get_dummy_value()

    return numba.types.void(VECTOR, array, _SIZE, _SIZE), build


@intrinsic  # type: ignore[untyped-decorator]
def kept(context: Any, vector: Any, count: Any) -> Any:
    """The vector, +0 in the places from ``count`` on."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        nothing = ir.Constant(_FLOATS, [0.0] * LANES)
        return builder.select(_before(builder, arguments[1]), arguments[0], nothing)

    return VECTOR(VECTOR, _SIZE), build


@intrinsic  # type: ignore[untyped-decorator]
def root(context: Any, vector: Any) -> Any:
    """The square root in each place, correctly rounded."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{LANES}f32")
        return builder.call(function, arguments)

    return VECTOR(VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def larger(context: Any, a: Any, b: Any) -> Any:
    """a where it is greater, else b: of two zeros or with a NaN, b."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return VECTOR(VECTOR, VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def largest(context: Any, vector: Any) -> Any:
    """The largest number of sixteen, none of them NaN; a zero of either sign."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def combine(low: Any, high: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", low, high), low, high)

        return _by_halves(builder, arguments[0], combine)

    return numba.float32(VECTOR), build


@intrinsic  # type: ignore[untyped-decorator]
def total(context: Any, vector: Any) -> Any:
    """The sum of sixteen by halves."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _by_halves(builder, arguments[0], builder.fadd)

    return numba.float32(VECTOR), build


@inlined
def halved(row: Any, n: Any) -> Any:
    """The sum of row[:n] by halves, n > 0: ``Arithmetic.total``. row is used up, and LANES longer than n."""
    while n > LANES:
        half = n >> 1
        # The last store may reach up to half + 14, into numbers that have been read. An odd last one lies at 2 half,
        # behind that: half >= 8, and up to 16 there is one store, of 0..15.
        for i in range(0, half, LANES):
            store(load(row, i) + load(row, i + half), row, i)
        if n & 1:
            row[half] = row[2 * half]
        n = half + (n & 1)
    if n == LANES:
        return total(load(row, 0))
    while n > 1:
        half = n >> 1
        for i in range(half):
            row[i] = row[i] + row[i + half]
        if n & 1:
            row[half] = row[2 * half]
        n = half + (n & 1)
    return row[0]


@inlined
def halved_rows(rows: Any, n: Any, width: Any) -> None:
    """The sum of n rows of ``width`` numbers, by halves of their number, into the first of them; n > 0.

    rows, flat, is used up, and LANES longer than n rows.
    """
    while n > 1:
        half = n >> 1
        size = half * width
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            store(load(rows, i) + load(rows, i + size), rows, i)
        store_some(load(rows, whole) + load(rows, whole + size), rows, whole, size - whole)
        if n & 1:
            for i in range(width):
                rows[size + i] = rows[2 * size + i]
        n = half + (n & 1)
