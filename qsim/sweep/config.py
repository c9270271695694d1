"""Study files: from TOML and ``--set`` to a checked study, or every error at once. Knows no registry.

Names of defects, formats, recipes and presets are checked against a ``Known`` that the caller passes in.
The key ``kind`` of a file says which schema it is read by.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from qsim import _paths
from qsim.errors import InputError, StudyError
from qsim.sweep.accumulation.schema import NEVER_WORD, AccumulationConfig
from qsim.sweep.allowed import REFUSED, Known, Problems, hint, known_names, shown
from qsim.sweep.schema import SweepConfig

__all__ = ["Known", "Study", "SweepConfig", "load_study", "read_study", "study_kind"]

Study = SweepConfig | AccumulationConfig
SCHEMAS: Mapping[str, type[Study]] = MappingProxyType({s.kind: s for s in (SweepConfig, AccumulationConfig)})
"""Kind -> the schema of its files; a file without a kind is of the first."""
KIND = "kind"
BUILTIN = "builtin"
_CHUNK = 1 << 20
_NATIVE = {  # pydantic's own refusals, in our words
    "tuple_type": "give a list, like [1, 2]",
    "model_type": "give a table",
    "string_type": "give a text in quotes",
    "bool_type": "give true or false",
}


def load_study(path_or_text: Path | str, known: Known, overrides: list[str] | None = None) -> SweepConfig:
    """A lifecycle study: ``read_study``, and a StudyError where the study is of another kind."""
    study = read_study(path_or_text, known, overrides)
    if not isinstance(study, SweepConfig):
        where = _source(path_or_text)[0]
        raise StudyError(
            f"{where}: kind {shown(study.kind)} is no lifecycle study: it has no schedules; give one of kind lifecycle"
        )
    return study


def study_kind(path_or_text: Path | str) -> str:
    """The kind that a study file names, checked for nothing else; StudyError and InputError as read_study."""
    where, _, text = _source(path_or_text)
    return str(_parsed(where, text).get(KIND, SweepConfig.kind))


def read_study(path_or_text: Path | str, known: Known, overrides: list[str] | None = None) -> Study:
    """A study from a file, or from TOML text (a str that is plainly no path), with ``key=value`` overrides.

    StudyError carries every error, one line each: place, value, what is allowed, the closest name. InputError
    where the study or its tensors cannot be read. A relative path of tensors starts at the study's folder; in
    an override and in a text it starts at the working folder.
    """
    where, folder, text = _source(path_or_text)
    raw = _parsed(where, text)
    problems = Problems()
    schema = _schema(raw, problems)
    for override in overrides or []:
        try:
            override.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            raise StudyError(f"--set {override!a}: broken UTF-8; write plain text") from error
    overridden = _override(raw, overrides or [], schema, problems)
    _find_duplicates(raw, known, schema, problems)
    config = None
    try:
        config = schema.model_validate(raw, context={"known": known})
    except ValidationError as error:
        for found in error.errors(include_url=False):
            _word(dict(found), schema, problems)
    if problems.lines or config is None:
        count = len(problems.lines)
        raise StudyError("\n  ".join([f"{where}: {count} error{'s' * (count != 1)}", *problems.lines]))
    if not isinstance(config, SweepConfig):
        return config
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


def _parsed(where: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets without end
        raise StudyError(f"{where} is no TOML: {str(error).splitlines()[0]}") from error


def _schema(raw: dict[str, Any], problems: Problems) -> type[Study]:
    """Take the kind out of ``raw``. Where it is unknown, the rest is held against the closest one."""
    kind = raw.pop(KIND, SweepConfig.kind)
    if isinstance(kind, str) and kind in SCHEMAS:
        return SCHEMAS[kind]
    close = hint(kind, SCHEMAS) if isinstance(kind, str) else ""
    problems.add(KIND, f"unknown kind of study; {known_names(SCHEMAS)}{close}", kind)
    return next((schema for name, schema in SCHEMAS.items() if f'"{name}"' in close), SweepConfig)


def _tables(schema: type[Study]) -> dict[str, type[BaseModel]]:
    fields = schema.model_fields
    kinds = {name: field.annotation for name, field in fields.items()}
    return {n: k for n, k in kinds.items() if isinstance(k, type) and issubclass(k, BaseModel)}


def _keys(schema: type[Study], table: str = "") -> list[str]:
    """The keys of one table, or those of the top level that can be set."""
    model: type[BaseModel] = _tables(schema)[table] if table else schema
    return [field.alias or name for name, field in model.model_fields.items()]


def _dotted(schema: type[Study]) -> list[str]:
    tables = _tables(schema)
    return [k for k in _keys(schema) if k not in tables] + [f"{t}.{k}" for t in tables for k in _keys(schema, t)]


def _override(raw: dict[str, Any], overrides: list[str], schema: type[Study], problems: Problems) -> set[str]:
    """Write the overrides into ``raw``; the keys that were set."""
    done, settable = set(), _dotted(schema)
    for text in overrides:
        key, equals, value = text.partition("=")
        key, place = key.strip(), f"--set {text.strip()}"
        if not equals:
            problems.add(place, "give key=value, like replicas.count=4")
        elif key in _tables(schema):
            problems.add(place, f"{key} is a table; set one of {', '.join(f'{key}.{k}' for k in _keys(schema, key))}")
        elif key == KIND:
            problems.add(place, "the kind stands in the study file; give the path of another study")
        elif key not in settable:
            problems.add(place, f"unknown key; {known_names(settable)}{hint(key, settable)}")
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


def _find_duplicates(raw: dict[str, Any], known: Known, schema: type[Study], problems: Problems) -> None:
    """A value twice in a list of the grid would be a case twice; 1 and 1.0 are one value, so are aliases."""
    grid = raw.get("grid")
    for key, values in grid.items() if isinstance(grid, dict) else ():
        if key not in _keys(schema, "grid") or not isinstance(values, list):
            continue
        first: dict[Any, int] = {}
        for i, value in enumerate(values):
            if isinstance(value, (bool, list, dict)):
                continue
            same = known.names("formats").get(value, value) if key == "formats" else value
            same = 0 if key == "promote_every" and value == NEVER_WORD else same
            if same in first:
                problems.add(f"grid.{key}[{i}]", f"the same as grid.{key}[{first[same]}]; keep one", value)
            first.setdefault(same, i)


def _word(found: dict[str, Any], schema: type[Study], problems: Problems) -> None:
    """One pydantic error as our line."""
    loc = found["loc"]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
    kind, text = found["type"], found["msg"]
    if kind == REFUSED and not loc:  # tables that do not fit together: the lines carry their places
        for line in text.split("\n"):
            problems.add(*line.split(": ", 1))
    elif kind == "extra_forbidden":
        table = str(loc[0]) if len(loc) > 1 else ""
        known = _keys(schema, table) + ([] if table else [KIND])
        elsewhere = [key for key in _dotted(schema) if key.rpartition(".")[2] == loc[-1]]
        close = hint(str(loc[-1]), known) or (f'; did you mean "{elsewhere[0]}"?' if elsewhere else "")
        problems.add(place, f"unknown key; {known_names(known)}{close}")
    elif kind == "missing":
        keys = f", a table with the keys {', '.join(_keys(schema, place))}" if place in _tables(schema) else ""
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
