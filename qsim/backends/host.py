"""Arrays, rotations, accumulators and epilogues of the backends on this processor. Knows no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.arrays import F32, F64, AnyArray
from qsim.backends import elementwise
from qsim.backends.checks import as_float32
from qsim.backends.protocol import Finish

if TYPE_CHECKING:
    from qsim.backends.fused import FusedNodes
    from qsim.gemm.epilogue import Epilogue
    from qsim.gemm.models import TensorCoreModel
    from qsim.gemm.products import Accumulator
    from qsim.gemm.scaled import ScaledOperand


class HostBackend:
    """What the oracle and the Numba backend have in common; ``qsim.gemm`` is the definition."""

    @property
    def xp(self) -> Any:
        """numpy."""
        return np

    @property
    def fused(self) -> FusedNodes | None:
        """None; see ``Backend.fused``."""
        return None

    def put(self, x: AnyArray) -> AnyArray:
        """``x`` itself; see ``Backend.put``."""
        return x

    def get(self, x: AnyArray) -> AnyArray:
        """``x`` itself; see ``Backend.get``."""
        return x

    def exp(self, x: F32) -> F32:
        """e^x rounded once; see ``Backend.exp``."""
        return elementwise.exp(as_float32(x, "x"), np)

    def log(self, x: F32) -> F32:
        """ln x rounded once; see ``Backend.log``."""
        return elementwise.log(as_float32(x, "x"), np)

    def rotate(self, x: F32, signs: F32, *, back: bool = False) -> F32:
        """The Hadamard rotation of x, or its way back; see ``Backend.rotate``."""
        from qsim.codec.hadamard import rotate, rotate_back

        return rotate_back(x, signs) if back else rotate(x, signs)

    def accumulate(
        self, a: ScaledOperand, b: ScaledOperand, how: str | TensorCoreModel, *, promote_every: int | None = None,
        split_k: int = 1, factors: bool = True,
    ) -> Accumulator:  # fmt: skip
        """The accumulator of a scaled product; see ``Backend.accumulate``."""
        from qsim.gemm.products import accumulate

        return accumulate(a, b, how, promote_every=promote_every, split_k=split_k, factors=factors)

    def finish(self, acc: F32, row: F64, column: F64, epilogue: Epilogue, how: Finish) -> tuple[F32, AnyArray]:
        """(y, D) of an accumulator; see ``Backend.finish``."""
        from qsim.gemm.epilogue import finished, output
        from qsim.gemm.products import canonical

        y = finished(acc, row, column, epilogue, order=how.order, shape=how.shape, correction=how.correction)
        y = canonical(y, np.uint32(how.nan).view(np.float32))
        return y, output(y, how.out_dtype, epilogue)
