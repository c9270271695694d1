"""What makes two cells the same case, and the exact text of cells and records. Knows no files, no processes.

A case is identified by the engine's semantics and its typed parameters, never by where or how it ran: the
path of the tensors, the host, the number of worker processes and the output folder are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from qsim.errors import InputError, StudyError
from qsim.sweep.cell import Cell, CellRecord
from qsim.sweep.kinds import ACCUMULATION, KINDS, LIFECYCLE, AnyCell, AnyRecord, Kind, kind_of
from qsim.sweep.training.cell import TrainingCell

ENGINE = 1  # raise it when the same cell would give other numbers: old results then belong to other cases
ACCUMULATION_ENGINE = 1  # the same for cells of accumulation studies
TRAINING_ENGINE = 1  # and of training studies
CASE_ID_DIGITS = 20
_KIND = "kind"

S = TypeVar("S", bound=msgspec.Struct)


def engine_of(kind: Kind) -> int:
    """The version of the semantics of a kind's cells."""
    if kind is LIFECYCLE:
        return ENGINE
    return ACCUMULATION_ENGINE if kind is ACCUMULATION else TRAINING_ENGINE


def case_id(cell: AnyCell) -> str:
    """The first 20 hex digits of the sha256 of the cell's identity."""
    return hashlib.sha256(identity_text(cell).encode()).hexdigest()[:CASE_ID_DIGITS]


def identity_text(cell: AnyCell) -> str:
    """Canonical JSON of engine and parameters; refuses NaN, infinities, -0.0 and undigested tensors."""
    kind = kind_of(cell)
    return canonical_json({"engine": engine_of(kind), "cell": parameters(cell)} | _tag(kind))


def parameters(cell: AnyCell) -> dict[str, Any]:
    """The typed parameters of a cell as plain values, without the paths of its files and what only names it."""
    plain = typing.cast(dict[str, Any], _plain(cell, type(cell), "cell", _parameter_hex))
    match cell:
        case Cell():
            _take_path(plain["workload"], "cell.workload.", "tensors")
        case TrainingCell():
            _take_path(plain["config"]["data"], "cell.config.data.", "text")
            _take_path(plain["config"]["data"], "cell.config.data.", "checkpoint", no_file="scratch")
            for name in TrainingCell.UNSAID:
                del plain[name]
    return plain


def _take_path(table: dict[str, Any], place: str, name: str, *, no_file: str | None = None) -> None:
    """Take a path out; its digest, which stays, must be there. no_file: a name that stands for no file."""
    given = table.pop(name)
    if not table[f"{name}_digest"] and given != no_file:
        raise StudyError(
            f"{place}{name}_digest is empty for {given!r}; "
            "fill in the sha256 of the file, or read the study with read_study, which does"
        )


def _tag(kind: Kind) -> dict[str, str]:
    """What tells a text's kind. Lifecycle cells were there first and carry none."""
    return {} if kind is LIFECYCLE else {_KIND: kind.name}


def spec_hash(case_ids: Sequence[str]) -> str:
    """One hash for a whole grid: its cases in their order. Comments and the title of a study do not enter."""
    return hashlib.sha256(canonical_json(list(case_ids)).encode()).hexdigest()


def encode_record(record: AnyRecord) -> str:
    """Canonical JSON of a record; floats are hex strings, inf and nan included. NumPy scalars are welcome."""
    return canonical_json(_plain(record, type(record), "record", float.hex))


def decode_record(text: str) -> CellRecord:
    """The inverse of encode_record, exact for every float (a NaN comes back as a NaN). Raises InputError."""
    return _decoded(text, CellRecord)


def decode_record_of(cell: AnyCell, text: str) -> AnyRecord:
    """The record of a cell, of the cell's kind. Raises InputError."""
    return _decoded(text, kind_of(cell).record)


def record_digest(record: AnyRecord) -> str:
    """sha256 of the record's canonical text."""
    return text_digest(encode_record(record))


def encode_cell(cell: AnyCell) -> str:
    """Canonical JSON of a cell with the path of its tensors: for the journal, not for its identity."""
    return canonical_json(_plain(cell, type(cell), "cell", _parameter_hex) | _tag(kind_of(cell)))


def decode_cell(text: str) -> AnyCell:
    """The inverse of encode_cell. Raises InputError."""
    try:
        value = json.loads(text)
        name = value.pop(_KIND, LIFECYCLE.name) if isinstance(value, dict) else LIFECYCLE.name
    except ValueError as error:
        raise InputError(f"no cell in {text[:60]!r}: {error}") from error
    if name not in KINDS:
        raise InputError(f"a cell of kind {name!r} is unknown here; use the qsim that wrote it, or give another --out")
    return _decoded(json.dumps(value), KINDS[name].cell)


def text_digest(text: str) -> str:
    """sha256 of a text in UTF-8, as hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """The one spelling: sorted keys, no spaces, ASCII. Floats must have become hex strings before."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _parameter_hex(value: float) -> str:
    if not math.isfinite(value) or (value == 0.0 and math.copysign(1.0, value) < 0.0):
        raise StudyError(f"the parameter {value!r} names no case; give a finite number, and 0.0 for -0.0")
    return value.hex()


def _plain(value: Any, kind: Any, place: str, hexed: typing.Callable[[float], str]) -> Any:
    """``value`` as JSON types by its declared type: 1, 1.0 and np.float64(1) as a float are one text."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, kind):
        usual = _later(kind)
        return {
            name: _plain(getattr(value, name), t, f"{place}.{name}", hexed)
            for name, t in _fields(kind)
            if name not in usual or getattr(value, name) != usual[name]
        }
    if typing.get_origin(kind) is tuple and isinstance(value, (tuple, list)):
        (item, _) = typing.get_args(kind)
        return [_plain(v, item, f"{place}[{i}]", hexed) for i, v in enumerate(value)]
    if typing.get_origin(kind) is dict and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(v, typing.get_args(kind)[1], f"{place}[{key!r}]", hexed) for key, v in value.items()}
    if (kind is str and isinstance(value, str)) or (kind is bool and isinstance(value, bool)):
        return value
    if kind in (int, float) and not isinstance(value, (bool, str)):
        try:
            return operator.index(value) if kind is int else hexed(float(value))
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{place} is {value!r} ({type(value).__name__}), which is no {_name(kind)}")


def _decoded(text: str, kind: type[S]) -> S:
    try:
        return msgspec.convert(_typed(json.loads(text), kind), kind)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"no {kind.__name__} in {text[:60]!r}: {error}") from error


def _typed(value: Any, kind: Any) -> Any:
    """Hex strings back to floats where the declared type says float; msgspec checks everything else."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        known = dict(_fields(kind))
        if not set(known) - set(_later(kind)) <= set(value) <= set(known):
            raise ValueError(f"its keys differ in {sorted(set(value) ^ set(known))}: another version wrote it")
        return {name: _typed(v, known[name]) for name, v in value.items()}
    if typing.get_origin(kind) is tuple:
        return [_typed(v, typing.get_args(kind)[0]) for v in value]
    if typing.get_origin(kind) is dict:
        return {key: _typed(v, typing.get_args(kind)[1]) for key, v in value.items()}
    return float.fromhex(value) if kind is float else value


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


@cache
def _later(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Fields that came after the first cases were written, with the default that leaves a case what it was."""
    later: frozenset[str] = getattr(kind, "LATER", frozenset())
    return {field.name: field.default for field in msgspec.structs.fields(kind) if field.name in later}


def _name(kind: Any) -> str:
    return str(kind) if isinstance(kind, types.GenericAlias) else str(getattr(kind, "__name__", kind))
