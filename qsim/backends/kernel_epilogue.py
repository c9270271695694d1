"""Epilogues by the CUDA text: an accumulator to D. Knows no product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_kernels._place import Place
from cuda_kernels.epilogue import epilogue as launch
from qsim.arrays import F32, F64, U32, AnyArray
from qsim.backends.protocol import Finish
from qsim.codec.general import rule_words
from qsim.formats import FORMATS, get_policy
from qsim.gemm.epilogue import WIDE_OUTPUTS, Epilogue, fitted, number, output, output_name

if TYPE_CHECKING:
    from qsim.backends.kernel_backend import KernelBackend


def finish(
    backend: KernelBackend, place: Place, acc: Any, row: F64, column: F64, epilogue: Epilogue, how: Finish
) -> tuple[F32, AnyArray]:
    """``Backend.finish``: y by one launch, another output format by a second over y."""
    shape, beta = tuple(int(size) for size in acc.shape), number(epilogue.beta, "beta")
    planes = {
        "c": None if beta == 0 or epilogue.c is None else fitted(epilogue.c, how.shape, "c"),
        "bias": None if epilogue.bias is None else fitted(epilogue.bias, how.shape, "bias"),
        "correction": how.correction,
    }
    uploaded: dict[str, Any] = {
        name: None if plane is None else backend.put(np.ascontiguousarray(plane.reshape(shape)))
        for name, plane in planes.items()
    }
    factors: dict[str, Any] = {
        name: backend.put(np.asarray(own, np.float32)) for name, own in (("row", row), ("column", column))
    }
    done = launch(
        place, backend.put(acc), **factors, **uploaded, order=how.order, alpha=float(number(epilogue.alpha, "alpha")),
        beta=float(beta), nan=how.nan,
    )  # fmt: skip
    y: F32 = backend.get(done.out).reshape(how.shape)
    name, scale = output_name(how.out_dtype), number(epilogue.scale_d, "scale_d")
    if name == "float32" or (name in WIDE_OUTPUTS and scale != 1):  # the latter is refused there
        return y, output(y, how.out_dtype, epilogue)
    codes = {} if name in WIDE_OUTPUTS else {"rules": backend.put(_rules_of(name, epilogue.overflow)), "scale_d": scale}
    made = launch(place, done.out, order="exact", out="codes" if codes else name, nan=how.nan, **codes)
    if int(backend.get(made.refused)):
        return y, output(y, how.out_dtype, epilogue)  # says which
    d = backend.get(made.out).reshape(how.shape)
    return y, d.view(np.float16) if name == "float16" else d


def _rules_of(name: str, overflow: str) -> U32:
    fmt = FORMATS[name]
    policy = get_policy("ocp").for_format(fmt, rounding=None, overflow=overflow, nan=None, missing_nan=None)
    return rule_words(fmt, policy)
