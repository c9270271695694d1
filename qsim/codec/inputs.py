"""What a caller passes, as an array. Knows no format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.errors import FormatError, UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

    from qsim.arrays import AnyArray


def as_array(value: npt.ArrayLike, what: str) -> AnyArray:
    """``value`` as an array; FormatError for a ragged list, UsageError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{what} is a masked array; fill it first, a code has no mask")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise FormatError(f"{what} is no array: {error}; pass numbers of one shape") from None


def no_quantized_tensor(value: object, instead: str) -> None:
    """UsageError where ``value`` is what ``qsim.quantize`` returned; ``instead``: what to pass or call."""
    if type(value).__name__ == "QuantizedTensor":  # of a floor above: it cannot be imported here
        raise UsageError(f"a QuantizedTensor is no array: {instead}")
