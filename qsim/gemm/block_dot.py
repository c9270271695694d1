"""Dot products and matrix products as a tensor core makes them. Knows no recipe and no epilogue.

``block_fma.dot_oracle`` is the definition; these equal it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsim.arrays import F32, F64, U8, AnyArray
from qsim.checks import whole_number
from qsim.codec.inputs import as_array
from qsim.codec.tables import decode_table
from qsim.codec.threads import in_chunks
from qsim.errors import FormatError, UsageError
from qsim.formats import FloatFormat, get_format
from qsim.gemm import model_kernels as kernels
from qsim.gemm.epilogue import SHORT_NAMES
from qsim.gemm.models import TensorCoreModel, get_model
from qsim.gemm.operands import FLOAT16, OperandFormat, checked_codes, operand_format, values_and_powers

if TYPE_CHECKING:
    import numpy.typing as npt

NAN_F32: Final = np.uint32(0x7FFFFFFF).view(np.float32)
NAN_F16: Final = np.uint32(0x7FFFE000).view(np.float32)
"""The NaN of a float16 result, 7fff, widened."""

SAFE_C: Final = 2.0**-100
"""Accumulators below this have powers whose reciprocals leave float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One operand as a model multiplies it: values and powers float64 [rows, K], K a multiple of the model's step.

    Where the model adds groups of products first, ``scales`` [rows, 2 * groups]: their values, then their powers.
    """

    values: F64
    powers: F64
    scales: F64 | None = None


def block_dot(
    a_codes: npt.ArrayLike,
    b_codes: npt.ArrayLike,
    c: npt.ArrayLike = 0.0,
    *,
    fmt_a: str | FloatFormat,
    fmt_b: str | FloatFormat,
    model: str | TensorCoreModel,
    scale_a: npt.ArrayLike | None = None,
    scale_b: npt.ArrayLike | None = None,
    out_dtype: str = "float32",
) -> F32:
    """Every row one tensor-core dot product: chain over a_codes [rows, K] and b_codes [rows, K] that begins with c.

    codes: one a byte (uint8) for formats of at most 8 bits; for "float16", "bfloat16" and "tf32" bit patterns (uint16,
    uint16, uint32 of a float32) or arrays of those dtypes; for the model "int8" int8 arrays, both formats "int8" too.
    Any K: a tail counts as zeros. c: float32 [rows] or one number; a float16 result takes it rounded to float16.
    scale_a, scale_b: uint8 [rows, ceil(K / 32 or 16)], codes of block scales (E8M0, or E4M3 whose sign is not read), of
    models with scales. out_dtype: "float32", or "float16" for its values as float32. Returns float32 [rows] (int32 for
    "int8", sums modulo 2^32). NaN is 7fffffff, of float16 7fff widened; a result of 0 is +0.
    UsageError: an unknown model, shapes that do not fit, formats or scales that the model does not take; FormatError:
    another dtype, a code outside its format.
    """
    chosen, half = get_model(model), half_result(out_dtype)
    if chosen.integer:
        if half or scale_a is not None or scale_b is not None or (fmt_a, fmt_b) != ("int8", "int8"):
            raise UsageError(f"model {chosen.name} takes fmt_a='int8', fmt_b='int8', no scales, and returns int32")
        return _integer_rows(a_codes, b_codes, c, chosen)
    one, other = (operand_format(fmt) for fmt in (fmt_a, fmt_b))
    check_formats(chosen, one, other, half)
    a, b = (_rows(codes, fmt, what) for codes, fmt, what in ((a_codes, one, "a_codes"), (b_codes, other, "b_codes")))
    if a.shape != b.shape:
        raise UsageError(f"a_codes {a.shape} and b_codes {b.shape} differ in shape; each row is one dot product")
    left, right = side(a, one, chosen, scale_a, "scale_a"), side(b, other, chosen, scale_b, "scale_b")
    out = accumulators(c, (a.shape[0], 1), half)
    if left.scales is not None and right.scales is not None:
        for row in range(a.shape[0]):
            here = slice(row, row + 1)
            part = Side(values=right.values[here], powers=right.powers[here], scales=right.scales[here])
            _grouped(left, transposed(part), row, chosen, half, out[row])
    else:
        values, powers = right.values[..., None], right.powers[..., None]

        def work(start: int, stop: int) -> None:
            kernels.paired_chains(
                left.values[start:stop], left.powers[start:stop], values[start:stop], powers[start:stop],
                chosen.products, chosen.step, chosen.late, 2.0**chosen.fraction, chosen.result, half, out[start:stop],
            )  # fmt: skip

        in_chunks(work, a.shape[0], cost=16 * left.values.shape[1])
    return finished(out, half)[:, 0]


def half_result(out_dtype: object) -> bool:
    """Whether a result is float16; UsageError for what no accumulator is."""
    name = out_dtype if isinstance(out_dtype, str) else str(getattr(out_dtype, "__name__", out_dtype))
    name = SHORT_NAMES.get(name, name)
    if name not in ("float32", "float16"):
        raise UsageError(f"out_dtype {out_dtype!r}: a tensor core returns 'float32' or 'float16'")
    return name == "float16"


def check_formats(model: TensorCoreModel, a: OperandFormat, b: OperandFormat, half: bool) -> None:
    """UsageError for operands or a result that the model does not have."""
    for fmt in (a, b):
        if fmt.name not in model.formats:
            hint = "; qsim.gemm.block_dot takes such operands" if set(model.formats) & {"float16", "tf32"} else ""
            raise UsageError(f"model {model.name} takes {', '.join(model.formats)}, not {fmt.name}{hint}")
    if a != b and not model.mixed:
        raise UsageError(f"model {model.name} takes two operands of one format, not {a.name} and {b.name}")
    if half and (not model.half_result or a.name == "bfloat16"):
        raise UsageError(f"model {model.name} has no float16 result for {a.name}; ask for 'float32'")


def side(codes: AnyArray, fmt: OperandFormat, model: TensorCoreModel, scale: npt.ArrayLike | None, what: str) -> Side:
    """An operand of codes [rows, K], ready for the kernels of ``model``."""
    rows, depth = codes.shape
    lowest = FLOAT16.min_exponent if model.lowered else None
    values, powers = values_and_powers(codes, fmt, lowest)
    if (scale is None) != (model.scale_format is None):
        needs = "takes no scales" if model.scale_format is None else f"needs {what}, codes of {model.scale_format}"
        raise UsageError(f"model {model.name} {needs}")
    whole = -(-depth // model.step) * model.step
    values, powers = _padded(values, whole), _padded(powers, whole)
    scales = None
    if model.scale_format is not None:
        given, own = _scales(scale, model, rows, depth, what)
        blocks = whole // model.scale_block
        given, own = _padded(given, blocks, 1.0), _padded(own, blocks, 1.0)
        if model.group:
            each = model.scale_block // model.group
            scales = np.concatenate([np.repeat(given, each, axis=1), np.repeat(own, each, axis=1)], axis=1)
        else:
            given, own = (np.repeat(s, model.scale_block, axis=1) for s in (given, own))
            with np.errstate(invalid="ignore"):
                values, powers = values * given, np.where(np.isnan(given), 0.0, powers * own)
    if model.order:
        order = _in_steps(whole, model)
        values, powers = values[:, order], powers[:, order]
    return Side(
        values=np.ascontiguousarray(values),
        powers=np.ascontiguousarray(powers),
        scales=None if scales is None else np.ascontiguousarray(scales),
    )


def transposed(b: Side) -> Side:
    """Side b as the product kernels take it: [K, N]."""
    return Side(
        values=np.ascontiguousarray(b.values.T),
        powers=np.ascontiguousarray(b.powers.T),
        scales=None if b.scales is None else np.ascontiguousarray(b.scales.T),
    )


def chain_product(a: Side, b: Side, c: F64, model: TensorCoreModel, *, half: bool, first: int, last: int) -> None:
    """Chains over k first..last-1 (multiples of the model's step) of every row of a with every column of b.

    b as ``transposed`` gives it. c float64 [M, N]: float32 values, from and to.
    """
    if a.scales is not None:
        parts = [
            Side(values=x.values[cut], powers=x.powers[cut], scales=_group_range(x.scales, first, last, model, axis))
            for x, cut, axis in ((a, np.s_[:, first:last], 1), (b, np.s_[first:last], 0))
        ]
        left, right = (
            Side(**{name: np.ascontiguousarray(getattr(part, name)) for name in ("values", "powers", "scales")})
            for part in parts
        )

        def grouped(start: int, stop: int) -> None:
            for row in range(start, stop):
                _grouped(left, right, row, model, half, c[row])

        in_chunks(grouped, c.shape[0], cost=16 * (last - first) * c.shape[1])
        return
    narrow = _is_narrow(a, b, c, model)
    run: Any = kernels.narrow_chains if narrow else kernels.chains
    arrays: list[AnyArray] = [a.values, a.powers, b.values, b.powers]
    if narrow:
        arrays = [x.astype(np.float32) for x in arrays]

    def work(start: int, stop: int) -> None:
        run(
            arrays[0][start:stop], arrays[1][start:stop], arrays[2], arrays[3], first, last, model.products, model.step,
            model.late, 2.0**model.fraction, model.result, half, c[start:stop],
        )  # fmt: skip

    in_chunks(work, c.shape[0], cost=16 * (last - first) * c.shape[1])


def accumulators(c: npt.ArrayLike, shape: tuple[int, int], half: bool) -> F64:
    """c as float64 of the kernels' shape: float32 values, rounded to float16 where the result is."""
    array = as_array(c, "c")
    if array.dtype.kind not in "fiu" and array.dtype.name not in ("bfloat16", "float16"):
        raise FormatError(f"c of dtype {array.dtype}; pass float32")
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
        numbers = numbers.astype(np.float16).astype(np.float32) if half else numbers
    if numbers.ndim == 1 and shape[1] == 1:
        numbers = numbers[:, None]
    try:
        return np.ascontiguousarray(np.broadcast_to(numbers, shape), np.float64).copy()
    except ValueError:
        raise UsageError(f"c of shape {array.shape} does not broadcast to {shape}") from None


def finished(out: F64, half: bool) -> F32:
    """What the instruction returns, as float32."""
    nan = NAN_F16 if half else NAN_F32
    return np.where(np.isnan(out), nan, out.astype(np.float32))


# ---- steps of the above --------------------------------------------------------------------------------------


def _rows(codes: npt.ArrayLike, fmt: OperandFormat, what: str) -> AnyArray:
    array = checked_codes(as_array(codes, what), fmt, what)
    if array.ndim != 2:
        raise UsageError(f"{what} of shape {array.shape}: pass [rows, K]")
    return np.ascontiguousarray(array)


def _padded(x: F64, length: int, value: float = 0.0) -> F64:
    missing = length - x.shape[1]
    return np.pad(x, ((0, 0), (0, missing)), constant_values=value) if missing else x


def _scales(scale: npt.ArrayLike | None, model: TensorCoreModel, rows: int, depth: int, what: str) -> tuple[F64, F64]:
    """Values of scale codes [rows, blocks], and their powers of two."""
    codes: U8 = as_array(scale if scale is not None else [], what)
    blocks = -(-depth // model.scale_block)
    if codes.dtype != np.uint8:
        raise FormatError(f"{what} of dtype {codes.dtype}: pass the codes of {model.scale_format}, uint8")
    if codes.shape != (rows, blocks):
        raise UsageError(f"{what} of shape {codes.shape}: blocks of {model.scale_block} take {(rows, blocks)}")
    fmt = get_format(str(model.scale_format))
    if fmt.signed:
        return values_and_powers(codes & np.uint8(fmt.magnitude_mask), operand_format(fmt))
    values = decode_table(fmt)[codes].astype(np.float64)
    return values, np.where(np.isnan(values), 0.0, values)


def _in_steps(depth: int, model: TensorCoreModel) -> AnyArray:
    """K reordered so that every step takes neighbours."""
    blocks = np.arange(depth).reshape(-1, model.step)
    residues = np.arange(model.step) % 4
    return np.concatenate([blocks[:, np.isin(residues, own)] for own in model.order], axis=1).reshape(-1)


def _is_narrow(a: Side, b: Side, c: F64, model: TensorCoreModel) -> bool:
    """Whether float32 holds every step: products of at most 8 bits, sums below 2^24 units, powers near 1."""
    few = model.fraction + 2 + (model.products + 1).bit_length() <= 24 and model.scale_format is None
    small = np.abs(c)
    return few and not bool(np.any((small > 0) & (small < SAFE_C)))


def _group_range(scales: F64 | None, first: int, last: int, model: TensorCoreModel, axis: int) -> F64:
    assert scales is not None, "a grouped model has scales"
    values, powers = np.split(scales, 2, axis=axis)
    here = slice(first // model.group, last // model.group)
    cut = (slice(None), here) if axis == 1 else (here,)
    return np.concatenate([values[cut], powers[cut]], axis=axis)


def _grouped(a: Side, b: Side, row: int, model: TensorCoreModel, half: bool, out: F64) -> None:
    """Chain of one row of outputs out [N] of a grouped model; b as ``transposed`` gives it."""
    groups = b.values.shape[0] // model.group
    terms, powers = np.empty((groups, out.size)), np.empty((groups, out.size))
    assert a.scales is not None
    assert b.scales is not None
    kernels.group_row(a.values, b.values, row, a.scales, b.scales, model.group, terms, powers)
    ones = np.ones((1, groups))
    kernels.chains(
        ones, ones, terms, powers, 0, groups, model.products // model.group, model.step // model.group, model.late,
        2.0**model.fraction, model.result, half, out.reshape(1, -1),
    )  # fmt: skip


def _integer_rows(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike, model: TensorCoreModel) -> AnyArray:
    left, right, start = as_array(a, "a_codes"), as_array(b, "b_codes"), as_array(c, "c")
    for name, x in (("a_codes", left), ("b_codes", right)):
        if x.dtype != np.int8 or x.ndim != 2:
            raise FormatError(f"{name} is {x.dtype} of shape {x.shape}; model {model.name} takes int8 [rows, K]")
    if left.shape != right.shape:
        raise UsageError(f"a_codes of shape {left.shape} and b_codes of shape {right.shape} differ")
    if start.size == 1 and start.dtype == np.float64 and start.reshape(-1)[0] == 0:
        start = np.zeros((), np.int64)  # the default
    if start.dtype.kind not in "iu" or start.shape not in ((), (left.shape[0],)):
        raise FormatError(
            f"c is {start.dtype} of shape {start.shape}; model {model.name} takes integers [rows], or one"
        )
    total = np.einsum("rk,rk->r", left.astype(np.int64), right.astype(np.int64)) + start.astype(np.int64)
    return wrapped(total)


def wrapped(total: AnyArray) -> AnyArray:
    """int64 sums modulo 2^32, as int32."""
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def cuts(
    depth: int, step: int, *, promote_every: int | None, split_k: int, unit: int | None = None
) -> list[list[tuple[int, int]]]:
    """K as parts (of split_k) of chains (of promote_every): k ranges that begin at multiples of ``step``.

    unit: what the length of a part is a multiple of, by default ``step``. UsageError: promote_every that is no multiple
    of ``step``.
    """
    split_k = whole_number("split_k", split_k, least=1)
    if promote_every is not None:
        promote_every = whole_number("promote_every", promote_every, least=1)
        if promote_every % step:
            raise UsageError(f"promote_every {promote_every} cuts an instruction; choose a multiple of {step}")
    whole = -(-depth // step) * step
    if whole == 0:
        return []
    unit = step if unit is None else unit
    units = -(-whole // unit)
    each = -(-units // split_k) * unit
    parts = []
    for start in range(0, whole, each):
        stop = min(start + each, whole)
        run = promote_every or each
        parts.append([(at, min(at + run, stop)) for at in range(start, stop, run)])
    return parts
