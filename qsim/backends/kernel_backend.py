"""Backends whose arithmetic is the CUDA texts: on a device, or emulated. Knows no state, no time.

Tensors and codes stay where they are: what ``put`` made stays on the device, a numpy array comes back as one. What a
trace records of them - amax, counts, sums - is always numpy, one number a replica.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from cuda_kernels._place import Place, at
from cuda_kernels.blocks import quantize_blocks
from cuda_kernels.cast import cast
from cuda_kernels.decode import decode
from cuda_kernels.exact import matmul
from cuda_kernels.hadamard import hadamard
from cuda_kernels.pack import pack, unpack
from cuda_kernels.reduce import observe, sums, totals
from cuda_kernels.unblocks import dequantize_blocks
from qsim.arrays import F32, F64, U8, U32, AnyArray
from qsim.backends import elementwise
from qsim.backends.checks import as_float32, lead_shape, matrix_center, mean_shape, rows_of, streams_of
from qsim.backends.protocol import Cast, CastCounts, CastSpec, Finish, Observed
from qsim.backends.scaling import check_broadcast
from qsim.checks import whole_number
from qsim.codec.general import rule_words
from qsim.codec.hadamard import FACTORS, checked_signs
from qsim.codec.inputs import as_array, check_stream
from qsim.codec.means import Sums, check_count
from qsim.codec.scaled import BlockCounts, ScaledCodes, ScaleRecipe
from qsim.codec.scaled.rules import check_cast, device_numbers
from qsim.codec.sums_kernels import sums_scale
from qsim.codec.tables import decode_table
from qsim.errors import FormatError, UsageError
from qsim.formats import CastPolicy
from qsim.philox import RandomStream

if TYPE_CHECKING:
    from qsim.backends.fused import FusedNodes
    from qsim.gemm.epilogue import Epilogue
    from qsim.gemm.models import TensorCoreModel
    from qsim.gemm.products import Accumulator
    from qsim.gemm.scaled import ScaledOperand

_COUNTED = ("saturated", "flushed", "nan", "inf")


T = TypeVar("T")


def _translated(method: Callable[..., T]) -> Callable[..., T]:
    """``method`` whose launchers refuse in the words of this floor."""

    @functools.wraps(method)
    def call(self: KernelBackend, *args: Any, **options: Any) -> T:
        with self._place.room():
            try:
                return method(self, *args, **options)
            except (TypeError, ValueError) as error:
                raise UsageError(f"backend {self.name}, {method.__name__}: {error}") from error

    return call


def _in_words_of_this_floor(kind: type[KernelBackend]) -> type[KernelBackend]:
    for name in DOORS:
        setattr(kind, name, _translated(getattr(kind, name)))
    return kind


DOORS = ("quantize", "decode", "observe", "sums", "pack", "unpack", "quantize_blocks", "dequantize_blocks", "matmul",
         "exp", "log", "rotate", "accumulate", "finish")  # fmt: skip
"""What the protocol asks for."""


@_in_words_of_this_floor
class KernelBackend:
    """Launches of ``cuda_kernels`` at one place; equal to ``OracleBackend`` bit for bit."""

    name: str

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def xp(self) -> Any:
        """Module of the arrays that ``put`` makes."""
        return self._place.xp

    @property
    def fused(self) -> FusedNodes | None:
        """None; see ``Backend.fused``."""
        return None

    def put(self, x: AnyArray) -> Any:
        """``x`` where the kernels run; see ``Backend.put``."""
        return at(self._place, x)

    def get(self, x: Any) -> AnyArray:
        """``x`` as a numpy array; see ``Backend.get``."""
        if isinstance(x, self.xp.ndarray) and not isinstance(x, np.ndarray):
            return np.asarray(x.get())
        return as_array(x, "x")

    def quantize(self, x: F32, scale: F32, center: F32 | None, spec: CastSpec) -> Cast:
        """Encode RN(RN(x - center) * scale); see ``Backend.quantize``."""
        own, scale = self._float32(x, "x"), as_float32(self.get(scale), "scale")
        lead = lead_shape(scale, own)
        spec.fmt.params()  # refuses a format that holds no elements
        replicas = math.prod(lead)
        streams = [s for s in streams_of(spec, replicas) if s is not None]
        done = cast(
            self._place,
            own,
            self.put(rule_words(spec.fmt, spec.policy)),
            scale=self.put(scale),
            center=self._center(own.shape, center),
            streams=self.put(_words(streams)) if streams else None,
        )
        counts = self.get(done.counts).reshape(*lead, 5).astype(np.int64)
        if counts[..., 4].any():
            self._refuse(x, scale, center, spec)
        return Cast(
            codes=self._back(done.codes, x),
            amax=self.get(done.top).view(np.float32).reshape(lead),
            counts=CastCounts(
                **{name: np.ascontiguousarray(counts[..., i]).reshape(lead) for i, name in enumerate(_COUNTED)}
            ),
        )

    def decode(self, codes: U8, descale: F32, center: F32 | None, spec: CastSpec) -> F32:
        """RN(RN(value(code) * descale) + center); see ``Backend.decode``."""
        own, descale = self._codes(codes), as_float32(self.get(descale), "descale")
        lead_shape(descale, own)
        if spec.fmt.bits < 8 and own.size and isinstance(codes, np.ndarray):
            spec.fmt.check_code(int(codes.max()))
        table = self.put(decode_table(spec.fmt)[: spec.fmt.code_count])
        values = decode(
            self._place, own, table, descale=self.put(descale), center=self._center(own.shape, center)
        )  # fmt: skip
        return self._back(values, codes)

    def quantize_and_decode(
        self, x: F32, scale: F32, descale: F32, center: F32 | None, spec: CastSpec
    ) -> tuple[Cast, F32]:
        """``quantize``, then ``decode``; see ``Backend.quantize_and_decode``."""
        cast = self.quantize(x, scale, center, spec)
        return cast, self.decode(cast.codes, descale, center, spec)

    def observe(self, x: F32, center: F32 | None, *, lead: int, mean_axes: tuple[int, ...] | None) -> Observed:
        """amax of the residual, counts of NaN and Inf, sums for a mean of x; see ``Backend.observe``."""
        own = self._float32(x, "x")
        if not 0 <= lead <= min(own.ndim, 1):
            raise UsageError(f"lead {lead} of x {tuple(own.shape)}: 0 or 1 leading axes are replicas")
        seen = observe(self._place, own, lead=lead, center=self._center(own.shape, center))
        return Observed(
            amax=self.get(seen.top).view(np.float32),
            nan_count=self.get(seen.nan_count).astype(np.int64),
            inf_count=self.get(seen.inf_count).astype(np.int64),
            sums=None if mean_axes is None else self._sums(own, lead, mean_axes),
        )

    def sums(self, x: F32, *, lead: int, axes: tuple[int, ...]) -> Sums:
        """Fixed-point sums of x for a mean; see ``Backend.sums``."""
        return self._sums(self._float32(x, "x"), lead, axes)

    def pack(self, codes: U8) -> U8:
        """Two 4-bit codes a byte; see ``Backend.pack``. Codes on a device are not looked at: above 15 they are cut."""
        own = self._codes(codes)
        if own.ndim == 0 or (isinstance(codes, np.ndarray) and codes.size and int(codes.max()) > 15):
            raise FormatError(f"codes of shape {own.shape}: packing needs an axis and codes 0..15")
        return self._back(pack(self._place, own), codes)

    def unpack(self, packed: U8, length: int) -> U8:
        """Inverse of ``pack``; see ``Backend.unpack``."""
        own, length = self._codes(packed), whole_number("length", length)
        if own.ndim == 0 or length < 0 or (length + 1) // 2 != own.shape[-1]:
            raise FormatError(f"length {length} does not fit packed codes of shape {own.shape}")
        return self._back(unpack(self._place, own, length), packed)

    def quantize_blocks(
        self,
        x: F32,
        recipe: ScaleRecipe,
        policy: CastPolicy,
        *,
        stream: RandomStream | None = None,
        packed: bool = False,
        counting: bool = True,
        tensor_amax: np.float32 | None = None,
        center: F32 | None = None,
    ) -> ScaledCodes:
        """Codes and scales of a matrix by a scale recipe; see ``Backend.quantize_blocks``. Always counts."""
        own = self._matrix(x)
        check_stream(policy, stream, own.size)
        check_cast(recipe, packed=packed, tensor_amax=tensor_amax)
        spread = None if center is None else self.put(matrix_center(self.get(center), own))
        numbers = device_numbers(recipe)
        given = np.array([tensor_amax], np.float32) if numbers.two_level and tensor_amax is not None else None
        done = quantize_blocks(
            self._place,
            own,
            self.put(rule_words(recipe.fmt, policy)),
            numbers,
            center=spread,
            stream=None if stream is None else self.put(_words([stream])[0]),
            packed=packed,
            tensor_amax=None if given is None else self.put(given),
        )
        *counts, refused = (int(n) for n in self.get(done.counts))
        if refused:
            self._refuse_blocks(x, recipe, policy, stream=stream, tensor_amax=tensor_amax, center=center)
        return ScaledCodes(
            codes=self._back(done.codes, x),
            scales=self._back(done.scales, x),
            tensor_scale=None if done.tensor is None else np.array(self.get(done.tensor)).reshape(()),
            amax=self.get(done.top).view(np.float32).reshape(()),
            counts=BlockCounts(*counts),
        )

    def dequantize_blocks(self, scaled: ScaledCodes, recipe: ScaleRecipe) -> F32:
        """The matrix of codes and scales; see ``Backend.dequantize_blocks``."""
        own = self._codes(scaled.codes)
        if recipe.fmt.bits < 8 and own.size and isinstance(scaled.codes, np.ndarray):
            recipe.fmt.check_code(int(scaled.codes.max()))
        g = scaled.tensor_scale
        values = dequantize_blocks(
            self._place,
            own,
            self.put(np.ascontiguousarray(scaled.scales) if isinstance(scaled.scales, np.ndarray) else scaled.scales),
            self.put(decode_table(recipe.fmt)[: recipe.fmt.code_count]),
            device_numbers(recipe),
            tensor=None if g is None else self.put(np.asarray(g, np.float32).reshape(1)),
        )
        return self._back(values, scaled.codes)

    def matmul(self, a: F32, b: F32) -> F32:
        """The exact sum of products rounded once; see ``Backend.matmul``."""
        left, right = (x if isinstance(x, self.xp.ndarray) else as_array(x, "an operand") for x in (a, b))
        if left.dtype != np.float32 or right.dtype != np.float32:
            raise UsageError(f"matmul of {left.dtype} and {right.dtype}; pass float32 arrays")
        return self._back(matmul(self._place, self.put(left), self.put(right)), a)

    def exp(self, x: F32) -> F32:
        """e^x rounded once; see ``Backend.exp``."""
        return self._back(elementwise.exp(self._float32(x, "x"), self.xp), x)

    def log(self, x: F32) -> F32:
        """ln x rounded once; see ``Backend.log``."""
        return self._back(elementwise.log(self._float32(x, "x"), self.xp), x)

    def rotate(self, x: F32, signs: F32, *, back: bool = False) -> F32:
        """The Hadamard rotation of x, or its way back; see ``Backend.rotate``."""
        own, signs = self._float32(x, "x"), checked_signs(self.get(signs))
        if own.ndim == 0 or own.shape[-1] % signs.size:
            raise UsageError(
                f"x of shape {tuple(own.shape)} cannot be rotated in blocks of {signs.size}: its last axis must be a "
                f"multiple of {signs.size}"
            )
        ones = np.full(signs.size, 1, np.float32)
        before, after = (ones, FACTORS[signs.size] * signs) if back else (signs, FACTORS[signs.size] * ones)
        return self._back(hadamard(self._place, own, self.put(before), self.put(after)), x)

    def accumulate(
        self, a: ScaledOperand, b: ScaledOperand, how: str | TensorCoreModel, *, promote_every: int | None = None,
        split_k: int = 1, factors: bool = True,
    ) -> Accumulator:  # fmt: skip
        """The accumulator of a scaled product, at the place; see ``Backend.accumulate``."""
        from qsim.backends.kernel_products import accumulate

        return accumulate(
            self._place_of, a, b, how, promote_every=promote_every, split_k=split_k, factors=factors
        )  # fmt: skip

    def finish(self, acc: F32, row: F64, column: F64, epilogue: Epilogue, how: Finish) -> tuple[F32, AnyArray]:
        """(y, D) of an accumulator; see ``Backend.finish``."""
        from qsim.backends.kernel_epilogue import finish

        return finish(self, self._place, acc, row, column, epilogue, how)

    def _place_of(self, arch: str | None) -> Place:
        """The place that has the instructions of ``arch``, None for any; UsageError where it is another."""
        if arch not in (None, self._place.arch):
            raise UsageError(
                f"that model is of {arch} and this device is {self._place.arch}; the numba backend computes every model"
            )
        return self._place

    # ---- steps of the above ----------------------------------------------------------------------------------

    def _float32(self, x: Any, what: str) -> Any:
        """``x`` at the place; FormatError unless it is float32."""
        array = x if isinstance(x, self.xp.ndarray) else as_array(x, what)
        if array.dtype != np.float32:
            raise FormatError(f"{what} is {array.dtype}; a backend takes float32 (qsim.codec.encode takes the rest)")
        return self.put(array)

    def _matrix(self, x: Any) -> Any:
        own = self._float32(x, "x")
        if own.ndim != 2:
            raise UsageError(f"x of shape {tuple(own.shape)} is no matrix; blocks tile [rows, columns]")
        return own

    def _codes(self, codes: Any) -> Any:
        array = codes if isinstance(codes, self.xp.ndarray) else as_array(codes, "codes")
        if array.dtype != np.uint8:
            raise FormatError(f"codes are {array.dtype}; a backend takes uint8")
        return self.put(array)

    def _center(self, shape: tuple[int, ...], center: Any) -> Any:
        if center is None:
            return None
        own = self._float32(center, "center")
        check_broadcast(shape, own.shape)
        return own

    def _back(self, made: Any, like: Any) -> AnyArray:
        """``made`` where ``like`` is."""
        if isinstance(like, self.xp.ndarray):
            found: AnyArray = made
            return found
        return self.get(made)

    def _sums(self, x: Any, lead: int, axes: tuple[int, ...]) -> Sums:
        shape = mean_shape(x.shape, lead, axes)
        rows = rows_of(x.shape, lead, shape)
        flat = x.reshape(-1, rows.shape[2]) if x.size else x.reshape(0, rows.shape[2])
        slot_of = self.put(np.ascontiguousarray(rows.row_of))
        if flat.shape[0] != rows.row_of.size:
            slot_of = self.put(np.zeros(flat.shape[0], np.int64))
        top, seen = sums(self._place, flat, slot_of, *rows.partner)
        count = self.get(seen).astype(np.int64)
        check_count(int(count.max(initial=0)))
        exponent, unit = np.empty(rows.partner, np.int32), np.empty(rows.partner, np.float64)
        sums_scale(np.ascontiguousarray(self.get(top)), exponent, unit)
        total = self.get(totals(self._place, flat, slot_of, self.put(unit)))
        return Sums(total=total.reshape(shape), exponent=exponent.reshape(shape), count=count.reshape(shape))

    def _refuse(self, x: Any, scale: F32, center: Any, spec: CastSpec) -> NoReturn:
        """What the policy refuses is named by the CPU backend, which finds its place."""
        from qsim.backends.numba_backend import NumbaBackend

        host_center = None if center is None else self.get(self.put(center))
        NumbaBackend().quantize(self.get(self.put(x)), scale, host_center, spec)
        raise AssertionError("the kernel refused what the CPU backend takes")

    def _refuse_blocks(self, x: Any, recipe: ScaleRecipe, policy: CastPolicy, **given: Any) -> NoReturn:
        from qsim.backends.numba_backend import NumbaBackend

        given["center"] = None if given["center"] is None else self.get(self.put(given["center"]))
        NumbaBackend().quantize_blocks(self.get(self.put(x)), recipe, policy, **given)
        raise AssertionError("the kernel refused what the CPU backend takes")


def _words(streams: list[RandomStream]) -> U32:
    return np.array([[*stream.key(), *stream.counter()] for stream in streams], np.uint32)
