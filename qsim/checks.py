"""Arguments of plain Python types, refused with the value and the next step. Knows no array and no format."""

from __future__ import annotations

import operator

from qsim.errors import UsageError


def whole_number(what: str, value: object, *, least: int | None = None) -> int:
    """``value`` as a Python integer (a NumPy one is narrow); UsageError for another type, or below ``least``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what} {value!r} is no integer; pass an int") from None
    if least is not None and number < least:
        raise UsageError(f"{what} {number} is too small; it must be at least {least}")
    return number


def yes_or_no(what: str, value: object) -> bool:
    """``value`` as a bool; UsageError for anything but True and False (NumPy's too), as "no" would count as True."""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return bool(value)
    raise UsageError(f"{what} {value!r} is neither True nor False")
