"""From a name to the value it stands for, with the closest known name in the error. Knows no format."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from qsim.errors import FormatError

Choice = TypeVar("Choice", bound=enum.Enum)

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def unknown(
    what: str, name: object, candidates: Iterable[str], known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES
) -> str:
    """Message for a name that nothing has: the closest candidate (of an alias what it stands for), the known names."""
    key, names = str(name).lower(), list(candidates)
    begun = [candidate for candidate in names if key and candidate.startswith(key)]
    close = begun or difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    hint = f"did you mean {aliases.get(close[0], close[0])!r}? " if close else ""
    return f"unknown {what} {str(name)!r}: {hint}known: {', '.join(known)}"


def member(kind: type[Choice], name: str | Choice, *, what: str, aliases: Mapping[str, str] = NO_ALIASES) -> Choice:
    """The member of ``kind`` of this value or alias (any case); a member is returned as it is. Else FormatError."""
    if isinstance(name, kind):
        return name
    known = {str(choice.value): choice for choice in kind}
    key = str(name).lower()
    key = aliases.get(key, key)
    if key in known:
        return known[key]
    raise FormatError(unknown(what, name, (*known, *aliases), known, aliases))
