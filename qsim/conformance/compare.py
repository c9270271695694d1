"""Compare results by their bits and say where they first differ. Computes nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qsim.codec.oracle import decode_scalar

if TYPE_CHECKING:
    from qsim.arrays import F32, AnyArray
    from qsim.formats import FloatFormat


def assert_codes_equal(
    expected: AnyArray, actual: AnyArray, fmt: FloatFormat, *, inputs: AnyArray | None = None
) -> None:
    """AssertionError naming the first differing index, both codes and both values.

    expected, actual: uint8 of equal shape. ``inputs``, of the same shape, adds the number that was encoded.
    """
    expected, actual = np.asarray(expected), np.asarray(actual)
    _assert_alike(expected, actual, f"codes of {fmt.name}")
    differs = expected != actual
    if not differs.any():
        return
    index = _first(differs)
    of = "" if inputs is None else f" of {np.asarray(inputs)[index]!r}"
    raise AssertionError(
        f"codes of {fmt.name} differ at {int(differs.sum())} of {differs.size} places, first at {index}{of}: "
        f"expected {_code(int(expected[index]), fmt)}, actual {_code(int(actual[index]), fmt)}"
    )


def assert_bits_equal(expected: F32, actual: F32, *, what: str = "values") -> None:
    """AssertionError naming the first index whose float32 bits differ; +0 is not -0, NaN has its bits."""
    expected, actual = np.asarray(expected), np.asarray(actual)
    _assert_alike(expected, actual, what)
    if expected.dtype != np.float32:
        raise AssertionError(f"{what} are {expected.dtype}; bits are compared in float32")
    wanted, found = (np.array(array, np.float32, order="C").view(np.uint32) for array in (expected, actual))
    differs = wanted != found
    if not differs.any():
        return
    index = _first(differs)
    raise AssertionError(
        f"{what} differ at {int(differs.sum())} of {differs.size} places, first at {index}: "
        f"expected {expected[index]!r} (0x{int(wanted[index]):08x}), "
        f"actual {actual[index]!r} (0x{int(found[index]):08x})"
    )


def _assert_alike(expected: AnyArray, actual: AnyArray, what: str) -> None:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        raise AssertionError(
            f"{what}: expected {expected.dtype} of shape {expected.shape}, "
            f"actual {actual.dtype} of shape {actual.shape}"
        )


def _first(differs: AnyArray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))


def _code(code: int, fmt: FloatFormat) -> str:
    value = repr(decode_scalar(code, fmt)) if 0 <= code < fmt.code_count else "no code of it"
    return f"0x{code:02x} ({value})"
