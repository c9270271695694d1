"""What a value of a study file may be, and the sentence that says so. Knows no keys and no registries."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")

REFUSED = "refused"  # the pydantic error type of every refusal that is worded here
_EXACT = 2**53  # integers up to here are exact floats; above, 1e20 names no single integer
_NAMES_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The names that a study may use. An empty tuple means: not checked here.

    formats maps every alias and every canonical name to its canonical name.
    """

    defects: tuple[str, ...]
    formats: Mapping[str, str]
    recipes: tuple[str, ...]
    presets: tuple[str, ...]
    backends: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()

    def names(self, kind: str) -> Mapping[str, str]:
        """Accepted name -> canonical name."""
        found: Mapping[str, str] | tuple[str, ...] = getattr(self, kind)
        if isinstance(found, Mapping):
            return {**found, **{name: name for name in found.values()}}
        return {name: name for name in found}


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in low..high. 3e6, 3000000.0 and 3000000 are the one integer 3000000; true is none."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        """The sentence for an error."""
        return f"give {self.low}" if self.low == self.high else f"give an integer from {self.low} to {self.high}"

    def check(self, value: Any) -> int:
        """The integer, or a refusal."""
        if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise refusal(self.allowed)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number, never -0.0 (it equals 0.0 and would be a second case)."""

    positive: bool = False

    @property
    def allowed(self) -> str:
        """The sentence for an error."""
        kind = "number above 0" if self.positive else "number (0.0, not -0.0)"
        return f"give a finite {kind}"

    def check(self, value: Any) -> float:
        """The float, or a refusal."""
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _EXACT:
            value = float(value)
        if not isinstance(value, float) or not math.isfinite(value):
            raise refusal(self.allowed)
        if (math.copysign(1.0, value) < 0.0 and value == 0.0) or (self.positive and value <= 0.0):
            raise refusal(self.allowed)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, slots=True)
class Between:
    """A finite number from ``low`` on, below ``high``; never -0.0."""

    low: float
    high: float = math.inf

    @property
    def allowed(self) -> str:
        """The sentence for an error."""
        below = "" if math.isinf(self.high) else f", below {self.high:g}"
        return f"give a finite number from {self.low:g} on{below}"

    def check(self, value: Any) -> float:
        """The float, or a refusal."""
        try:
            found = Real().check(value)
        except PydanticCustomError as error:
            raise refusal(self.allowed) from error
        if not self.low <= found < self.high:
            raise refusal(self.allowed)
        return found

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words that stand in no registry."""

    words: tuple[str, ...]

    def check(self, value: Any) -> str:
        """The word, or a refusal with all of them and the closest one."""
        if not isinstance(value, str):
            raise refusal("give a name in quotes")
        if value not in self.words:
            raise refusal(f"unknown name; {known_names(self.words)}{hint(value, self.words)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, slots=True)
class Name:
    """A name out of Known; an alias becomes its canonical name. Without a Known in the context any passes."""

    kind: str

    def check(self, value: Any, info: ValidationInfo) -> str:
        """The canonical name, or a refusal with the known names and the closest one."""
        if not isinstance(value, str):
            raise refusal("give a name in quotes")
        known = (info.context or {}).get("known")
        names = known.names(self.kind) if known is not None else {}
        if not names:
            return value
        if value not in names:
            raise refusal(f"unknown name; {known_names(names)}{hint(value, names)}")
        return str(names[value])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self.check)


def distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    """The values, or a refusal where one is there twice."""
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise refusal(f'"{twice}" is there twice; keep one')
    return values


def not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    """The values, or a refusal where there is none."""
    if not values:
        raise refusal("give at least one value")
    return values


def refusal(allowed: str) -> PydanticCustomError:
    """A pydantic error that carries our sentence."""
    return PydanticCustomError(REFUSED, "{allowed}", {"allowed": allowed})


def known_names(names: Iterable[str]) -> str:
    """``known: a, b, c``."""
    found = list(names)
    more = f", and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
    return "known: " + ", ".join(found[:_NAMES_SHOWN]) + more


def hint(wrong: str, names: Iterable[str]) -> str:
    """``; did you mean "e4m3"?`` or nothing. Case does not count."""
    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(wrong.casefold(), list(by_folded), n=1, cutoff=0.6)
    return f'; did you mean "{by_folded[close[0]]}"?' if close else ""


def shown(value: Any) -> str:
    """A value as TOML would write it, cut to one short line."""
    try:
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists without end
        text = f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(slots=True)
class Problems:
    """Every error of one study, in the order found; one line each."""

    lines: list[str] = field(default_factory=list)

    def add(self, place: str, text: str, value: Any = ...) -> None:
        """One more line: place, value, what is allowed."""
        line = f"{place}: {text}" if value is ... else f"{place}: {shown(value)} is refused; {text}"
        if line not in self.lines:
            self.lines.append(line)
