"""Sixteen float32 numbers at a time, for kernels whose blocks are that short. Knows no recipe.

LLVM unrolls a loop of 16 before it looks for vectors, and what is left is scalar, 4 times slower; a loop over many
short blocks pays for its own beginning and end. So the vectors are written here, in LLVM's own types: every processor
gets the instructions that it has, and each step is the one of ``numba_kernels`` with 16 numbers in place of one.
k is what ``numba_kernels.load`` returns.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers of one step; the block sizes of the field are multiples of it."""

_BYTE, _WORD, _FLOAT, _DOUBLE = ir.IntType(8), ir.IntType(32), ir.FloatType(), ir.DoubleType()
_WORDS, _FLOATS, _DOUBLES = (ir.VectorType(kind, LANES) for kind in (_WORD, _FLOAT, _DOUBLE))
_PAIRS = ir.VectorType(ir.IntType(64), LANES // 2)
_MAGNITUDE, _SIGN, _INF, _LOW5 = 0x7FFFFFFF, 0x80000000, 0x7F800000, 31
_SIZE = numba.types.intp

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of E2M1; a tie goes up, to the even code, at every second."""
_E2M1_SIGN_SHIFT = 28


class _Lanes:
    """What builds the vectors of one intrinsic."""

    def __init__(self, target: Any, builder: Any, signature: Any) -> None:
        self._target, self.types = target, signature.args
        self.builder = builder

    def load(self, argument: int, array: Any, index: Any) -> Any:
        """The float32 numbers of array[index : index + LANES], the argument of that number."""
        return self.builder.load(self._place(argument, array, index, _FLOATS), align=4)

    def _place(self, argument: int, array: Any, index: Any, lanes: Any) -> Any:
        values = self._target.make_array(self.types[argument])(self._target, self.builder, array)
        return self.builder.bitcast(self.builder.gep(values.data, [index]), lanes.as_pointer())

    def every(self, value: Any) -> Any:
        """A scalar, or a word of that value, in every lane."""
        if isinstance(value, int):
            return ir.Constant(_WORDS, [value] * LANES)
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * LANES))

    def bits(self, floats: Any) -> Any:
        return self.builder.bitcast(floats, _WORDS)

    def magnitude(self, floats: Any) -> Any:
        return self.builder.and_(self.bits(floats), self.every(_MAGNITUDE))

    def nonzero(self, floats: Any) -> Any:
        return self.builder.icmp_signed("!=", self.magnitude(floats), self.every(0))

    def chosen(self, order: str, a: Any, b: Any) -> Any:
        """The smaller ('<') or the larger ('>') of two signed numbers, lane by lane."""
        return self.builder.select(self.builder.icmp_signed(order, a, b), a, b)

    def largest(self, words: Any) -> Any:
        """The largest of all lanes, signed."""
        kind = ir.FunctionType(_WORD, [_WORDS])
        name = f"llvm.vector.reduce.smax.v{LANES}i32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [words])

    def codes(self, floats: Any, k: Any) -> tuple[Any, Any]:
        """Codes as words, right in the low 8 bits, and the magnitudes: ``magnitude_code`` and ``signed``, by steps."""
        build, bits, magnitude = self.builder, self.bits(floats), self.magnitude(floats)
        words = cgutils.unpack_tuple(build, k)
        shift, least, lift, limit, _, flushed, sign_shift, negative_zero, *_ = words
        m = self.chosen("<", magnitude, self.every(limit))
        field = self.chosen(">", build.and_(m, self.every(_INF)), self.every(least))
        anchor = build.bitcast(build.add(field, self.every(lift)), _FLOATS)
        units = self.bits(build.fadd(build.bitcast(m, _FLOATS), anchor))
        code = build.add(units, build.lshr(field, self._shift(shift)))
        nowhere = ir.Constant(_WORD, -1)
        unsigned = build.select(build.icmp_unsigned("!=", negative_zero, ir.Constant(_WORD, 0)), nowhere, flushed)
        has_sign = build.icmp_signed(">", magnitude, self.every(unsigned))  # a format without -0 has no sign at 0
        sign = build.select(has_sign, build.and_(bits, self.every(_SIGN)), self.every(0))
        return build.or_(code, build.lshr(sign, self._shift(sign_shift))), magnitude

    def exact_codes(self, floats: Any, divisor: Any, full_range: Any) -> Any:
        """E2M1 codes of floats * full_range / divisor, > 0 and finite: |x| * full_range against ties * divisor.

        Both sides are exact in float64 (24 + 5 bits, 3 + 28 bits), and so is each comparison.
        """
        build, code = self.builder, self.every(0)
        product = self.exact_products(floats, full_range)
        for i, tie in enumerate(E2M1_TIES):
            bound = self.every(build.fmul(divisor, ir.Constant(_DOUBLE, tie)))
            code = build.add(code, build.zext(build.fcmp_ordered(">=" if i % 2 else ">", product, bound), _WORDS))
        sign = build.lshr(build.and_(self.bits(floats), self.every(_SIGN)), self.every(_E2M1_SIGN_SHIFT))
        return build.or_(code, sign)

    def exact_products(self, floats: Any, full_range: Any) -> Any:
        """|x| * full_range in float64."""
        wide = self.builder.fpext(self.builder.bitcast(self.magnitude(floats), _FLOATS), _DOUBLES)
        return self.builder.fmul(wide, self.every(full_range))

    def put(self, codes: Any, argument: int, array: Any, index: Any, packed: bool) -> None:
        """Words whose low bits are codes, as bytes, or two a byte with the even element low (little-endian)."""
        build = self.builder
        if packed:
            codes = build.bitcast(codes, _PAIRS)
            low, high, down = (ir.Constant(_PAIRS, [n] * (LANES // 2)) for n in (0x0F, 0xF0, 28))
            codes = build.or_(build.and_(codes, low), build.and_(build.lshr(codes, down), high))
        kind = ir.VectorType(_BYTE, codes.type.count)
        build.store(build.trunc(codes, kind), self._place(argument, array, index, kind), align=1)

    def endless(self, magnitude: Any) -> Any:
        """A word with a bit for every lane that is no finite number."""
        flags = self.builder.icmp_signed(">=", magnitude, self.every(_INF))
        return self.builder.zext(self.builder.bitcast(flags, ir.IntType(LANES)), _WORD)

    def counted(self, saturated: Any, flushed: Any) -> Any:
        """How many lanes of each, the second from bit 16 on."""
        high = self.builder.shl(self._how_many(flushed), ir.Constant(_WORD, 16))
        return self.builder.or_(self._how_many(saturated), high)

    def _how_many(self, flags: Any) -> Any:
        count = self.builder.ctpop(self.builder.bitcast(flags, ir.IntType(LANES)))
        return self.builder.zext(count, _WORD)

    def _shift(self, count: Any) -> Any:
        return self.builder.and_(self.every(count), self.every(_LOW5))


def _factors(lanes: _Lanes, factor: Any, at: Any, argument: int) -> Any:
    """One number for all lanes, or one for each: an array, from ``at`` on."""
    array = isinstance(lanes.types[argument], numba.types.Array)
    return lanes.load(argument, factor, at) if array else lanes.every(factor)


@intrinsic  # type: ignore[untyped-decorator]
def top_of_lanes(context: Any, x: Any, at: Any) -> Any:
    """Bits of the largest magnitude of x[at : at + LANES]; NaN and Inf included."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _Lanes(target, builder, signature)
        return lanes.largest(lanes.magnitude(lanes.load(0, *arguments)))

    return numba.uint32(x, _SIZE), build


def _encoder(packed: bool) -> Any:
    def encode_lanes(context: Any, x: Any, at: Any, factor: Any, k: Any, codes: Any) -> Any:
        """codes[at + i] = code of RN(x[at + i] * factor); returns 0 where all products are finite, and so right.

        factor: a number, or an array of one a column, read from ``at`` on.
        """

        def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes, (x, at, factor, k, codes) = _Lanes(target, builder, signature), arguments
            product = builder.fmul(lanes.load(0, x, at), _factors(lanes, factor, at, 2))
            found, magnitude = lanes.codes(product, k)
            lanes.put(found, 4, codes, builder.lshr(at, ir.Constant(at.type, int(packed))), packed)
            return lanes.endless(magnitude)

        return numba.uint32(x, _SIZE, factor, k, codes), build

    return intrinsic(encode_lanes)


encode_lanes = _encoder(packed=False)
encode_packed_lanes = _encoder(packed=True)
"""``encode_lanes`` of a 4-bit format, two codes a byte, the even element in the low nibble; ``at`` is even."""


@intrinsic  # type: ignore[untyped-decorator]
def count_lanes(context: Any, x: Any, at: Any, factor: Any, k: Any) -> Any:
    """How many of RN(x[at + i] * factor), all finite, saturate, plus 2^16 times how many non-zero x are flushed."""

    def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, (x, at, factor, k) = _Lanes(target, builder, signature), arguments
        words, number = cgutils.unpack_tuple(builder, k), lanes.load(0, x, at)
        magnitude = lanes.magnitude(builder.fmul(number, _factors(lanes, factor, at, 2)))
        saturated = builder.icmp_signed(">=", magnitude, lanes.every(words[4]))
        small = builder.icmp_signed("<=", magnitude, lanes.every(words[5]))
        return lanes.counted(saturated, builder.and_(small, lanes.nonzero(number)))

    return numba.uint32(x, _SIZE, factor, k), build


def _exact_encoder(packed: bool) -> Any:
    def encode_exact_lanes(context: Any, x: Any, at: Any, divisor: Any, full_range: Any, codes: Any) -> Any:
        """codes[at + i] = E2M1 code of x[at + i] * full_range / divisor; returns counts as ``count_lanes`` does.

        Right where all x are finite and divisor, float64, is positive and finite.
        """

        def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes, (x, at, divisor, full_range, codes) = _Lanes(target, builder, signature), arguments
            number = lanes.load(0, x, at)
            found = lanes.exact_codes(number, divisor, full_range)
            lanes.put(found, 4, codes, builder.lshr(at, ir.Constant(at.type, int(packed))), packed)
            product = lanes.exact_products(number, full_range)
            seven, quarter = (lanes.every(builder.fmul(divisor, ir.Constant(_DOUBLE, n))) for n in (7.0, 0.25))
            small = builder.fcmp_ordered("<=", product, quarter)
            return lanes.counted(builder.fcmp_ordered(">=", product, seven), builder.and_(small, lanes.nonzero(number)))

        return numba.uint32(x, _SIZE, numba.float64, numba.float64, codes), build

    return intrinsic(encode_exact_lanes)


encode_exact_lanes = _exact_encoder(packed=False)
encode_exact_packed_lanes = _exact_encoder(packed=True)
"""``encode_exact_lanes``, two codes a byte, the even element in the low nibble; ``at`` is even."""
