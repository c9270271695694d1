"""What a caller passes: arrays, and the stream of a cast. Knows no format and no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.errors import FormatError, UsageError
from qsim.formats import RoundMode
from qsim.philox import MAX_WORDS, RandomStream

if TYPE_CHECKING:
    import numpy.typing as npt

    from qsim.arrays import AnyArray
    from qsim.formats import CastPolicy


def as_array(value: npt.ArrayLike, what: str) -> AnyArray:
    """``value`` as an array; FormatError for a ragged list, UsageError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{what} is a masked array; fill it first, a code has no mask")
    try:
        return np.asarray(value)
    except TypeError as error:  # an array of a device does not become numpy by itself
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise UsageError(
            f"{what} is {kind}, which numpy cannot take ({error}); pass a numpy array, or call a backend's own methods "
            "with an array of its device"
        ) from None
    except ValueError as error:
        raise FormatError(f"{what} is no array: {error}; pass numbers of one shape") from None


def holds_real_numbers(array: AnyArray) -> bool:
    """False for text, times and complex numbers, and for Python objects that are no numbers."""
    if array.dtype.kind == "O":
        return all(hasattr(value, "__float__") for value in array.flat)
    return array.dtype.kind not in "SUcMm"


def no_quantized_tensor(value: object, instead: str) -> None:
    """UsageError where ``value`` is what ``qsim.quantize`` returned; ``instead``: what to pass or call."""
    if type(value).__name__ == "QuantizedTensor":  # of a floor above: it cannot be imported here
        raise UsageError(f"a QuantizedTensor is no array: {instead}")


def check_is_stream(stream: object) -> None:
    """UsageError for what is no RandomStream."""
    if not isinstance(stream, RandomStream):
        raise UsageError(f"stream is {type(stream).__name__}; pass RandomStream(seed=...), or OpId.stream(seed)")


def check_stream(policy: CastPolicy, stream: RandomStream | None, size: int) -> None:
    """UsageError unless a stream is there exactly where the rounding draws, and long enough for ``size``."""
    draws = policy.rounding is RoundMode.STOCHASTIC
    if stream is not None:
        check_is_stream(stream)
    if draws and stream is None:
        raise UsageError(
            f"policy {policy.name} rounds stochastically and no stream was given: pass stream=RandomStream(seed=...), "
            "or OpId.stream(seed)"
        )
    if not draws and stream is not None:
        raise UsageError(
            f"a stream was given, but policy {policy.name} rounds by {policy.rounding.value!r}: leave it out, "
            "or ask for rounding='stochastic'"
        )
    if draws and size > MAX_WORDS:
        raise UsageError(f"{size} elements need more than the 2^34 words of one stream; cast parts with other streams")
