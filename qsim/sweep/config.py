"""Study files: from TOML and ``--set`` to a checked study, or every error at once. Knows no registry.

Names of defects, formats, recipes and presets are checked against a ``Known`` that the caller passes in.
The key ``kind`` of a file says which schema it is read by.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from qsim import _paths
from qsim.errors import InputError, StudyError
from qsim.sweep.accumulation.schema import NEVER_WORD, AccumulationConfig
from qsim.sweep.allowed import REFUSED, Known, Problems, hint, known_names, shown
from qsim.sweep.files import find
from qsim.sweep.schema import SweepConfig
from qsim.sweep.training.files import with_files
from qsim.sweep.training.schema import BLOCKS, TrainingConfig, release

__all__ = ["Known", "Study", "SweepConfig", "load_study", "read_study", "study_kind"]

Study = SweepConfig | AccumulationConfig | TrainingConfig
SCHEMAS: Mapping[str, type[Study]] = MappingProxyType(
    {s.kind: s for s in (SweepConfig, AccumulationConfig, TrainingConfig)}
)
"""Kind -> the schema of its files; a file without a kind is of the first."""
KIND = "kind"
_NATIVE = {  # pydantic's own refusals, in our words
    "tuple_type": "give a list, like [1, 2]",
    "model_type": "give a table",
    "dict_type": "give a table of tables",
    "string_type": "give a text in quotes",
    "bool_type": "give true or false",
}
_MISSING = {"schema": "; write schema = 1", BLOCKS: f"; write tables [{BLOCKS}.NAME], each with protocols"}


def load_study(path_or_text: Path | str, known: Known, overrides: list[str] | None = None) -> SweepConfig:
    """A lifecycle study: ``read_study``, and a StudyError where the study is of another kind."""
    study = read_study(path_or_text, known, overrides)
    if not isinstance(study, SweepConfig):
        where = _source(path_or_text)[0]
        raise StudyError(
            f"{where}: kind {shown(study.kind)} is no lifecycle study: it replays nothing; give one of kind lifecycle"
        )
    return study


def study_kind(path_or_text: Path | str) -> str:
    """The kind that a study file names, checked for nothing else; StudyError and InputError as read_study."""
    where, _, text = _source(path_or_text)
    return str(_parsed(where, text).get(KIND, SweepConfig.kind))


def read_study(path_or_text: Path | str, known: Known, overrides: list[str] | None = None) -> Study:
    """A study from a file, or from TOML text (a str that is plainly no path), with ``key=value`` overrides.

    StudyError carries every error, one line each: place, value, what is allowed, the closest name. InputError
    where the study or a file that it names cannot be read. A relative path in it starts at the study's folder; in
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
            _word(dict(found), schema, raw, problems)
    if problems.lines or config is None:
        count = len(problems.lines)
        raise StudyError("\n  ".join([f"{where}: {count} error{'s' * (count != 1)}", *problems.lines]))
    match config:
        case SweepConfig():
            return _with_tensors(config, Path.cwd() if "workload.tensors" in overridden else folder)
        case TrainingConfig():
            return with_files(config, folder=folder, overridden=overridden)
    return config


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


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table that a field holds, and whether it holds several: by name, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) in (dict, tuple):
        found = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        return (found[0] if found else None), True
    return None, False


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel] | None, bool]]:
    """Key, the table that it holds, whether it holds several."""
    for name, field in model.model_fields.items():
        yield (field.alias or name, *_inner(field.annotation))


def _table_at(schema: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """The table that a path of keys, names and places in lists leads to; None where it leads to none."""
    found, steps = schema, iter(path)
    for step in steps:
        there = {key: (table, several) for key, table, several in _fields(found)}
        table, several = there.get(str(step), (None, False))
        if table is None or (several and next(steps, None) is None):
            return None
        found = table
    return found


def _keys(model: type[BaseModel]) -> list[str]:
    """The keys of one table."""
    return [key for key, _, _ in _fields(model)]


def _dotted(model: type[BaseModel], raw: Any, path: str = "") -> list[str]:
    """Every key that can be set; of tables that have names, those of the names that are there."""
    plain, deep = [], []
    for key, table, several in _fields(model):
        held = raw.get(key) if isinstance(raw, dict) else None
        if table is None or (several and not isinstance(held, dict)):
            plain.append(f"{path}{key}")
        elif not several:
            deep += _dotted(table, held, f"{path}{key}.")
        else:
            deep += [k for name, one in (held or {}).items() for k in _dotted(table, one, f"{path}{key}.{name}.")]
    return plain + deep


def _override(raw: dict[str, Any], overrides: list[str], schema: type[Study], problems: Problems) -> set[str]:
    """Write the overrides into ``raw``; the keys that were set."""
    done, settable = set(), _dotted(schema, raw)
    for text in overrides:
        key, equals, value = text.partition("=")
        key, place = key.strip(), f"--set {text.strip()}"
        path = key.split(".")
        if not equals:
            problems.add(place, "give key=value, like replicas.count=4")
        elif (table := _table_at(schema, path)) is not None:
            problems.add(place, f"{key} is a table; set one of {', '.join(f'{key}.{k}' for k in _keys(table))}")
        elif key == KIND:
            problems.add(place, "the kind stands in the study file; give the path of another study")
        elif key not in settable:
            beside = [k for k in settable if k.rpartition(".")[0] == key.rpartition(".")[0]] if len(path) > 1 else []
            problems.add(place, f"unknown key; {known_names(beside or settable)}{hint(key, settable)}")
        elif (target := _reach(raw, path[:-1])) is not None:
            target[path[-1]] = _toml_value(value)
            done.add(key)
            if schema is TrainingConfig and len(path) == 2:
                release(raw, *path)
    return done


def _reach(raw: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """The table of ``raw`` at a path, made where it is missing; None where something else is there."""
    found: Any = raw
    for step in path:
        found = found.setdefault(step, {}) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _toml_value(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return parsed["value"] if set(parsed) == {"value"} else text.strip()


def _find_duplicates(raw: dict[str, Any], known: Known, schema: type[Study], problems: Problems) -> None:
    """A value twice in a list of the grid would be a case twice; 1 and 1.0 are one value, so are aliases."""
    grid, table = raw.get("grid"), _table_at(schema, ["grid"])
    if table is None or not isinstance(grid, dict):
        return
    for key, values in grid.items():
        if key not in _keys(table) or not isinstance(values, list):
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


def _word(found: dict[str, Any], schema: type[Study], raw: dict[str, Any], problems: Problems) -> None:
    """One pydantic error as our line."""
    loc = found["loc"]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
    kind, text = found["type"], found["msg"]
    if kind == REFUSED and not loc:  # tables that do not fit together: the lines carry their places
        for line in text.split("\n"):
            problems.add(*line.split(": ", 1))
    elif kind == "extra_forbidden":
        known = _keys(_table_at(schema, loc[:-1]) or schema) + ([KIND] if len(loc) == 1 else [])
        elsewhere = [key for key in _dotted(schema, raw) if key.rpartition(".")[2] == loc[-1]]
        close = hint(str(loc[-1]), known) or (f'; did you mean "{elsewhere[0]}"?' if elsewhere else "")
        problems.add(place, f"unknown key; {known_names(known)}{close}")
    elif kind == "missing":
        table = _table_at(schema, loc)
        keys = f", a table with the keys {', '.join(_keys(table))}" if table is not None else ""
        problems.add(place, f"is missing{_MISSING.get(place, keys)}")
    else:
        problems.add(place, _NATIVE.get(kind, text), found["input"])


def _with_tensors(config: SweepConfig, base: Path) -> SweepConfig:
    """Find the tensors and tie the study to their bytes."""
    found = find(
        "workload.tensors",
        config.workload.tensors,
        base=base,
        builtin=_paths.sample_capture(),
        kinds="a .safetensors or .npz file",
    )
    return config.with_tensors(*found)
