"""Study files: from TOML and ``--set`` to a checked SweepConfig, or every error at once. Knows no registry.

Names of defects, formats, recipes and presets are checked against a ``Known`` that the caller passes in.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qsim import _paths
from qsim.errors import InputError, StudyError
from qsim.sweep.allowed import REFUSED, Known, Problems, hint, known_names, shown
from qsim.sweep.schema import SweepConfig

__all__ = ["Known", "SweepConfig", "load_study"]

BUILTIN = "builtin"
_CHUNK = 1 << 20
_NATIVE = {  # pydantic's own refusals, in our words
    "tuple_type": "give a list, like [1, 2]",
    "model_type": "give a table",
    "string_type": "give a text in quotes",
    "bool_type": "give true or false",
}


def load_study(path_or_text: Path | str, known: Known, overrides: list[str] | None = None) -> SweepConfig:
    """A study from a file, or from TOML text (a str that is plainly no path), with ``key=value`` overrides.

    StudyError carries every error, one line each: place, value, what is allowed, the closest name. InputError
    where the study or its tensors cannot be read. A relative path of tensors starts at the study's folder; in
    an override and in a text it starts at the working folder.
    """
    where, folder, text = _source(path_or_text)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets without end
        raise StudyError(f"{where} is no TOML: {str(error).splitlines()[0]}") from error
    problems = Problems()
    for override in overrides or []:
        try:
            override.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            raise StudyError(f"--set {override!a}: broken UTF-8; write plain text") from error
    overridden = _override(raw, overrides or [], problems)
    _find_duplicates(raw, known, problems)
    config = None
    try:
        config = SweepConfig.model_validate(raw, context={"known": known})
    except ValidationError as error:
        for found in error.errors(include_url=False):
            _word(dict(found), problems)
    if problems.lines or config is None:
        count = len(problems.lines)
        raise StudyError("\n  ".join([f"{where}: {count} error{'s' * (count != 1)}", *problems.lines]))
    base = Path.cwd() if "workload.tensors" in overridden else folder
    return _with_tensors(config, base)


def _source(path_or_text: Path | str) -> tuple[str, Path, str]:
    """What to call the study, the folder that its relative paths start from, its text."""
    given = str(path_or_text)
    if isinstance(path_or_text, str) and ("\n" in given or ("=" in given and not given.endswith(".toml"))):
        return "study", Path.cwd(), path_or_text
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"no study at {str(path)!r}; give the path of a .toml file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the study {str(path)!r} cannot be read: {error}") from error
    return str(path), path.resolve().parent, text


def _tables() -> dict[str, type[BaseModel]]:
    fields = SweepConfig.model_fields
    kinds = {name: field.annotation for name, field in fields.items()}
    return {n: k for n, k in kinds.items() if isinstance(k, type) and issubclass(k, BaseModel)}


def _keys(table: str = "") -> list[str]:
    """The keys of one table, or those of the top level."""
    model: type[BaseModel] = _tables()[table] if table else SweepConfig
    return [field.alias or name for name, field in model.model_fields.items()]


def _dotted() -> list[str]:
    tables = _tables()
    return [k for k in _keys() if k not in tables] + [f"{t}.{k}" for t in tables for k in _keys(t)]


def _override(raw: dict[str, Any], overrides: list[str], problems: Problems) -> set[str]:
    """Write the overrides into ``raw``; the keys that were set."""
    done = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        key, place = key.strip(), f"--set {text.strip()}"
        if not equals:
            problems.add(place, "give key=value, like replicas.count=4")
        elif key in _tables():
            problems.add(place, f"{key} is a table; set one of {', '.join(f'{key}.{k}' for k in _keys(key))}")
        elif key not in _dotted():
            problems.add(place, f"unknown key; {known_names(_dotted())}{hint(key, _dotted())}")
        else:
            table, _, name = key.rpartition(".")
            target = raw.setdefault(table, {}) if table else raw
            if isinstance(target, dict):
                target[name] = _toml_value(value)
                done.add(key)
    return done


def _toml_value(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return parsed["value"] if set(parsed) == {"value"} else text.strip()


def _find_duplicates(raw: dict[str, Any], known: Known, problems: Problems) -> None:
    """A value twice in a list of the grid would be a case twice; 1 and 1.0 are one value, so are aliases."""
    grid = raw.get("grid")
    for key, values in grid.items() if isinstance(grid, dict) else ():
        if key not in _keys("grid") or not isinstance(values, list):
            continue
        first: dict[Any, int] = {}
        for i, value in enumerate(values):
            if isinstance(value, (bool, list, dict)):
                continue
            same = known.names("formats").get(value, value) if key == "formats" else value
            if same in first:
                problems.add(f"grid.{key}[{i}]", f"the same as grid.{key}[{first[same]}]; keep one", value)
            first.setdefault(same, i)


def _word(found: dict[str, Any], problems: Problems) -> None:
    """One pydantic error as our line."""
    loc = found["loc"]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
    kind, text = found["type"], found["msg"]
    if kind == REFUSED and not loc:  # tables that do not fit together: the lines carry their places
        for line in text.split("\n"):
            problems.add(*line.split(": ", 1))
    elif kind == "extra_forbidden":
        table = str(loc[0]) if len(loc) > 1 else ""
        known = _keys(table)
        elsewhere = [key for key in _dotted() if key.rpartition(".")[2] == loc[-1]]
        close = hint(str(loc[-1]), known) or (f'; did you mean "{elsewhere[0]}"?' if elsewhere else "")
        problems.add(place, f"unknown key; {known_names(known)}{close}")
    elif kind == "missing":
        keys = f", a table with the keys {', '.join(_keys(place))}" if place in _tables() else ""
        problems.add(place, f"is missing{keys}" if place != "schema" else "is missing; write schema = 1")
    else:
        problems.add(place, _NATIVE.get(kind, text), found["input"])


def _with_tensors(config: SweepConfig, base: Path) -> SweepConfig:
    """Find the tensors and tie the study to their bytes."""
    given = config.workload.tensors
    digest = hashlib.sha256()
    try:
        path = _paths.sample_capture() if given == BUILTIN else base / Path(given).expanduser()
    except RuntimeError as error:  # ~name of a user who is not there
        raise InputError(f"workload.tensors: {shown(given)} cannot be found: {error}") from error
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except (OSError, ValueError) as error:  # a ValueError: a null byte in the name
        raise InputError(
            f"workload.tensors: {shown(given)} cannot be read at {str(path)!r} "
            f"({getattr(error, 'strerror', None) or error}); "
            f'give a .safetensors or .npz file, or "{BUILTIN}"'
        ) from error
    return config.with_tensors(BUILTIN if given == BUILTIN else str(path.resolve()), digest.hexdigest())
