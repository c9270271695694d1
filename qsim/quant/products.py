"""Scaled products of quantized tensors: the door ``scaled_gemm``. Knows no schedule and no state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsim.arrays import F32, F64, AnyArray
from qsim.backends.protocol import Backend, Finish
from qsim.checks import yes_or_no
from qsim.codec.hadamard import rotate_back
from qsim.codec.scaled.result import BlockCounts, ScaledCodes
from qsim.errors import UsageError
from qsim.gemm.block_dot import NAN_F32
from qsim.gemm.centred import Product, centred_matmul
from qsim.gemm.epilogue import DEFAULT, Epilogue, amax_of, output_name
from qsim.gemm.exact import _round_oracle
from qsim.gemm.exact_scaled import ProductReport
from qsim.gemm.models import TensorCoreModel
from qsim.gemm.products import EXACT, QUIET_NAN
from qsim.gemm.scaled import ScaledOperand, scaled_operand
from qsim.quant.plain import backend_of, lined_shape, unpacked_codes
from qsim.quant.state import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmResult:
    """d as ``scaled_gemm`` returns it, y float32 before its output format, and how the sums were made."""

    d: AnyArray
    y: F32
    report: ProductReport

    @property
    def amax(self) -> np.float32:
        """The largest finite |y|, what delayed scaling of D observes; 0.0 where there is none."""
        return amax_of(self.y)


def scaled_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    accumulate: str | TensorCoreModel = "exact",
    promote_every: int | None = None,
    split_k: int = 1,
    epilogue: Epilogue = DEFAULT,
    out_dtype: str = "float32",
    transpose_b: bool = False,
    backend: str | Backend = "auto",
) -> AnyArray:
    """D = a @ b of tensors from ``qsim.quantize``; float32 [..., M, N] unless ``out_dtype`` says otherwise.

    a: [..., M, K] (or [K]), quantized along its last axis; b: [K, N], quantized along axis 0, or with ``transpose_b``
    [N, K], along axis 1. Any recipe, packed or not, in any nibble order. A tensor whose one scale is for all of it may
    have any axis.
    accumulate: "exact" (default), one rounding to float32 of the exact sum, all scales included, the same bits on any
    machine; "exact_per_block", each block's exact partial rounded to float32 and added in ascending k; or the name of a
    tensor-core model of FP8, FP6 or FP4 (``qsim.gemm.MODELS``), with ``promote_every`` k between float32 additions (by
    default never, or a block whose scale the model does not take) and at most ``split_k`` parts of K.
    epilogue: alpha, beta, c, bias, scale_d and the order of scales (``qsim.gemm.Epilogue``). out_dtype: "float32",
    "float16", "bfloat16" (its values, in float32) or an FP8 format (uint8 codes).
    A centre: X = C + R, D = RN(y + RN(alpha RN(C B))), the product of the centre with the decoded other side exact and
    rounded once; of two centres the terms are added in the order R_a C_b, C_a R_b, C_a C_b. Rotated operands need one
    rotation. float16, bfloat16 and FP8 outputs are rounded from float32, ties to even. NaN is 7fc00000 of the exact
    ways and of bfloat16, 7fffffff of a model (float16: 7e00 and 7fff).
    backend: by name or itself; a model runs on a device whose instruction adds so.
    UsageError: shapes, axes, blocks, signs or options that do not fit; FormatError: an unknown out_dtype.
    """
    return scaled_gemm_with_report(
        a, b, accumulate=accumulate, promote_every=promote_every, split_k=split_k, epilogue=epilogue,
        out_dtype=out_dtype, transpose_b=transpose_b, backend=backend,
    ).d  # fmt: skip


def scaled_gemm_with_report(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    accumulate: str | TensorCoreModel = "exact",
    promote_every: int | None = None,
    split_k: int = 1,
    epilogue: Epilogue = DEFAULT,
    out_dtype: str = "float32",
    transpose_b: bool = False,
    backend: str | Backend = "auto",
) -> GemmResult:
    """``scaled_gemm``, as a GemmResult: d, y (float32 before the output format), amax, and the report of its sums."""
    if not isinstance(epilogue, Epilogue):
        raise UsageError(f"epilogue is {type(epilogue).__name__}; pass qsim.gemm.Epilogue(...)")
    output_name(out_dtype)
    left, right = _side(a, "a", -1), _side(b, "b", 1 if yes_or_no("transpose_b", transpose_b) else 0)
    if not _same(a.signs, b.signs):
        raise UsageError("a and b are rotated differently; H a and H b need the same signs, or none")
    if not isinstance(accumulate, (str, TensorCoreModel)):
        raise UsageError(f"accumulate is {type(accumulate).__name__}; pass a name, or a TensorCoreModel")
    order = epilogue.order or ("exact" if accumulate == "exact" else "product")
    if order == "exact" and accumulate != "exact":
        raise UsageError(f"order 'exact' needs accumulate='exact'; {accumulate!r} rounds its sums before the scales")
    device = backend_of(backend, "accumulate")
    result = device.accumulate(
        left.operand, right.operand, accumulate, promote_every=promote_every, split_k=split_k, factors=order == "exact"
    )
    row, column = _factors(left.operand, right.operand)
    exact = isinstance(accumulate, str) and accumulate in EXACT
    how = Finish(
        order=order,
        shape=(*a.shape[:-1], result.acc.shape[1]),
        out_dtype=out_dtype,
        nan=int((QUIET_NAN if exact else NAN_F32).view(np.uint32)),
        correction=_correction(left, right, device.matmul),
    )
    y, d = device.finish(result.acc, row, column, epilogue, how)
    return GemmResult(d=d, y=y, report=result.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """An operand, K last, and what belongs to its centre."""

    operand: ScaledOperand
    tensor: QuantizedTensor

    @property
    def residual(self) -> F32:
        """The decoded residual [rows, K]: element times factors, rounded once; rotated back where it is rotated."""
        x = self.operand
        with np.errstate(all="ignore"):
            decoded = np.asarray(x.values() * _with_tensor(x)[:, None], np.float32)
        return decoded if self.tensor.signs is None else rotate_back(decoded, self.tensor.signs)

    def center(self) -> tuple[F32, str, int]:
        """The centre as ``qsim.gemm.centred`` takes it: numbers, axis, columns of a block."""
        rows, depth = self.operand.codes.shape
        c = self.tensor.center
        assert c is not None, "only a centred operand is asked"
        if self.tensor.center_per_block:
            assert self.tensor.recipe is not None
            width = self.tensor.recipe.block.within((rows, depth))[1]
            return c.reshape(rows, -(-depth // width)), "block", width
        if c.size == 1:
            return c.reshape(1, 1), "tensor", 0
        if c.size == depth and c.shape[-1] == depth:
            return c.reshape(1, depth), "channel", 0
        lined = lined_shape(self.tensor.shape, self.tensor.axis)
        if c.shape[-1] == 1:
            return np.ascontiguousarray(np.broadcast_to(c, (*lined[:-1], 1))).reshape(rows, 1), "token", 0
        return np.ascontiguousarray(np.broadcast_to(c, lined)).reshape(rows, depth), "block", 1


def _side(tensor: object, name: str, axis: int) -> _Side:
    if not isinstance(tensor, QuantizedTensor):
        raise UsageError(
            f"{name} is {type(tensor).__name__}; pass what qsim.quantize returned, or of codes "
            "qsim.from_codes(codes, recipe)"
        )
    recipe = tensor.recipe
    if recipe is None or tensor.snapshot is not None or tensor.scales is None:
        raise UsageError(
            f"{name} has a snapshot: decode_for_consumer decodes that, and names its consumer; to multiply its codes "
            "under the snapshot's scale, qsim.from_codes(codes, format, scales=snapshot.scale)"
        )
    shape = tensor.shape
    if (axis != -1 and len(shape) != 2) or not shape:
        raise UsageError(f"{name} has shape {shape}; b is [K, N], or [N, K] with transpose_b, and a has an axis K")
    wanted = len(shape) - 1 if axis == -1 else axis
    codes = unpacked_codes(tensor, lined_shape(shape, tensor.axis))
    if tensor.axis != wanted:
        if tuple(recipe.block) != (0, 0) or tensor.center is not None or tensor.signs is not None:
            hint = f"quantize it with axis={wanted}" if name == "b" else "K is the last axis of a"
            hint += ", or pass transpose_b=True for b [N, K]" if name == "b" and wanted == 0 else ""
            raise UsageError(
                f"{name} of shape {shape} is quantized along axis {tensor.axis}, K is axis {wanted}; {hint}"
            )
        whole = np.moveaxis(codes.reshape(lined_shape(shape, tensor.axis)), -1, tensor.axis)
        codes = np.ascontiguousarray(np.moveaxis(whole, wanted, -1)).reshape(-1, shape[wanted])
    grid = recipe.block.grid(codes.shape)
    scaled = ScaledCodes(
        codes=codes, scales=tensor.scales.reshape(grid), tensor_scale=tensor.tensor_scale, amax=tensor.amax,
        counts=BlockCounts(0, 0, 0, 0, 0),
    )  # fmt: skip
    return _Side(operand=scaled_operand(scaled, recipe), tensor=tensor)


def _factors(a: ScaledOperand, b: ScaledOperand) -> tuple[F64, F64]:
    """Factors of rows and columns, float32 numbers: the tensor factors of both sides as one, rounded once."""
    row, column = a.row, b.row
    if (row == 1).all() and (column == 1).all():
        return np.full_like(row, float(_round_oracle(a.tensor * b.tensor))), column
    return _with_tensor(a), _with_tensor(b)


def _with_tensor(x: ScaledOperand) -> F64:
    """Row factors, or the tensor factor, as float32 numbers."""
    return x.row if x.tensor == 1 else x.row * float(_round_oracle(x.tensor))


def _same(a: F32 | None, b: F32 | None) -> bool:
    """Whether two rotations are one."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _correction(a: _Side, b: _Side, product: Product) -> F32 | None:
    """What the centres add, float32 [M, N]; None without centres."""
    terms: list[F32] = []
    zero_a = None if a.tensor.center is None else np.zeros_like(a.residual)
    if b.tensor.center is not None:
        center, axis, block = b.center()
        flipped = centred_matmul(
            np.zeros_like(b.residual), a.residual.T, center=center, axis=axis, block=block, product=product
        )
        terms.append(np.ascontiguousarray(flipped.T))
    if zero_a is not None:
        center, axis, block = a.center()
        terms.append(centred_matmul(zero_a, b.residual.T, center=center, axis=axis, block=block, product=product))
    if len(terms) == 2:
        whole = [np.broadcast_to(_spread(side), side.operand.codes.shape) for side in (a, b)]
        terms.append(product(np.ascontiguousarray(whole[0]), np.ascontiguousarray(whole[1].T)))
    total: F32 | None = None
    for term in terms:
        with np.errstate(all="ignore"):
            total = term if total is None else np.asarray(total + term, np.float32)
    return total


def _spread(side: _Side) -> F32:
    """The centre under every element."""
    center, axis, block = side.center()
    if axis == "block":
        return np.repeat(center, block, axis=1)[:, : side.operand.codes.shape[1]]
    return center
