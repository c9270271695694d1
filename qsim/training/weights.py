"""Named arrays in a file that proves itself whole, and a cache of trained weights. Knows no model and runs no code.

A file is safetensors: 8 bytes with the length of a JSON header, the header, the bytes of the arrays in ascending order
of their names, little-endian. Its metadata hold what the caller gives and two keys of qsim: ``qsim.format``, and
``qsim.sha256`` over the header without that key, followed by the data. The container alone would notice a truncated
file and no changed byte. The header is written here: the library orders metadata by a hash map, so that one run's bytes
would not be another's. Any safetensors reader takes the file, and the library reads it here.

A file appears whole or not at all: it is written under another name in the same folder, flushed to the disk and
renamed. What was killed in between leaves ``.qsim-*.tmp``, which nothing reads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qsim._paths import cache_dir
from qsim.arrays import F32, AnyArray, frozen
from qsim.errors import InputError, OutputError, UsageError

U16 = npt.NDArray[np.uint16]

FORMAT = "1"
_FORMAT_KEY = "qsim.format"
_DIGEST_KEY = "qsim.sha256"
_RESERVED = "qsim."

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U64": "<u8", "U32": "<u4", "U8": "|u1", "BF16": "<u2"}
)
"""Tag in the file -> how numpy holds it; BF16, which numpy lacks, as bit patterns."""

_TAGS = MappingProxyType({np.dtype(held): tag for tag, held in _DTYPES.items() if tag != "BF16"})


# ---- bfloat16 -------------------------------------------------------------------------------------------


def to_bfloat16(x: F32) -> U16:
    """The bfloat16 bit patterns of float32 values, to nearest, ties to even; a NaN becomes 7fc0.

    A value of at least 2^128 - 2^119 becomes infinite, as IEEE rounding has it.
    """
    from qsim.gemm.epilogue import Epilogue, output

    values: F32 = output(np.asarray(x, np.float32, order="C"), "bfloat16", Epilogue())
    return (np.asarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(codes: U16) -> F32:
    """The float32 values of bfloat16 bit patterns, exactly."""
    return np.asarray(np.asarray(codes, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


# ---- the file -------------------------------------------------------------------------------------------


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(header: Mapping[str, Any], data: Sequence[bytes | memoryview]) -> str:
    metadata = {k: v for k, v in header["__metadata__"].items() if k != _DIGEST_KEY}
    sha = hashlib.sha256(_json({**header, "__metadata__": metadata}))
    for part in data:
        sha.update(part)
    return sha.hexdigest()


def _check_text(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise UsageError(f"{what} {text!r} is no string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {text!r} holds half a surrogate pair, which no file can hold") from None
    return text


def _encode(tagged: Mapping[str, tuple[str, AnyArray]], metadata: Mapping[str, str]) -> list[bytes]:
    """The parts of a file; arrays are given with their tags."""
    kept = {_check_text("metadata key", k): _check_text(f"metadata {k!r}", v) for k, v in metadata.items()}
    if taken := sorted(k for k in kept if k.startswith(_RESERVED)):
        raise UsageError(f'metadata key "{taken[0]}": keys that begin with {_RESERVED} are qsim\'s own; use another')
    header: dict[str, Any] = {"__metadata__": {**kept, _FORMAT_KEY: FORMAT}}
    data: list[bytes] = []
    offset = 0
    for name in sorted(_check_text("array name", name) for name in tagged):
        if name == "__metadata__":
            raise UsageError('an array cannot be named "__metadata__": the file keeps its metadata there')
        tag, array = tagged[name]
        part = array.astype(_DTYPES[tag], copy=False).tobytes()
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [offset, offset + len(part)]}
        data.append(part)
        offset += len(part)
    header["__metadata__"][_DIGEST_KEY] = _digest(header, data)
    head = _json(header)
    head += b" " * (-len(head) % 8)  # the data must start at a multiple of 8 bytes
    return [len(head).to_bytes(8, "little"), head, *data]


def _write(path: Path, parts: Sequence[bytes]) -> None:
    """All parts or nothing under ``path``; OutputError where it cannot be written."""
    try:
        for attempt in itertools.count():
            temporary = path.parent / f".qsim-{os.getpid()}-{attempt}.tmp"
            with suppress(FileExistsError):  # of another thread, or of a process that had this number and was killed
                file = temporary.open("xb")
                break
        try:
            with file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise OutputError(f"{path}: cannot be written ({error}); choose a file in a folder that can be") from error


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # systems that cannot open a folder; the rename is then as durable as they make it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _decode(path: Path) -> tuple[dict[str, tuple[str, AnyArray]], dict[str, str]]:
    """Arrays with their tags, and the caller's metadata; InputError for anything but a whole file of qsim."""
    from safetensors import SafetensorError

    try:
        if not path.is_file():
            raise InputError(f"{path}: no such file; give a .safetensors file that qsim wrote")
        return _parse(path, path.read_bytes())
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: a NUL in the name, a forged header
        raise InputError(f"{path}: cannot be read as .safetensors ({error})") from error


def _parse(path: Path, payload: bytes) -> tuple[dict[str, tuple[str, AnyArray]], dict[str, str]]:
    from safetensors import deserialize

    entries: list[tuple[str, dict[str, Any]]] = deserialize(payload)  # type: ignore[no-untyped-call]
    start = 8 + int.from_bytes(payload[:8], "little")
    header: dict[str, Any] = json.loads(payload[8:start])
    metadata: dict[str, str] = header.get("__metadata__") or {}  # the library lets null pass
    if metadata.get(_FORMAT_KEY) != FORMAT:
        found = f"its format is {metadata[_FORMAT_KEY]}" if _FORMAT_KEY in metadata else f"no {_FORMAT_KEY} in it"
        raise InputError(f"{path}: not a checkpoint that this qsim reads ({found}); write it with save_weights")
    if metadata.get(_DIGEST_KEY) != _digest(header, [memoryview(payload)[start:]]):
        raise InputError(f"{path}: damaged, its bytes are not those that were written; make it again")
    tagged = {name: (entry["dtype"], _array(entry)) for name, entry in entries}
    given = {k: v for k, v in metadata.items() if not k.startswith(_RESERVED)}
    return dict(sorted(tagged.items())), dict(sorted(given.items()))


def _array(entry: Mapping[str, Any]) -> AnyArray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{entry['dtype']} is no dtype that qsim writes")
    held = np.dtype(_DTYPES[entry["dtype"]])
    array = np.frombuffer(entry["data"], held).reshape(tuple(entry["shape"]))
    return frozen(array.astype(held.newbyteorder("="), copy=False))


# ---- arrays and weights ---------------------------------------------------------------------------------


def save_arrays(
    path: Path, arrays: Mapping[str, AnyArray], *, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write arrays of any shape, bit for bit, with text beside them: the whole state of a run.

    float32, float64, int32, int64, uint8, uint32 or uint64; others raise UsageError. One set of arrays and metadata
    gives one sequence of bytes. OutputError where the file cannot be written; an older file is then left as it was.
    """
    tagged: dict[str, tuple[str, AnyArray]] = {}
    for name, array in arrays.items():
        tag = _TAGS.get(np.asarray(array).dtype.newbyteorder("<"))
        if tag is None:
            known = ", ".join(sorted(held.name for held in _TAGS))
            raise UsageError(f"array {name!r} is {np.asarray(array).dtype}; a checkpoint holds {known}")
        tagged[name] = tag, np.asarray(array)
    _write(path, _encode(tagged, metadata))


def load_arrays(path: Path) -> tuple[dict[str, AnyArray], dict[str, str]]:
    """What ``save_arrays`` wrote, read-only, by ascending name, and its metadata. Raises InputError.

    Bits are those that were saved: NaN payloads and -0 too.
    """
    tagged, metadata = _decode(path)
    if narrow := [name for name, (tag, _) in tagged.items() if tag == "BF16"]:
        raise InputError(f"{path}: {narrow[0]} is bfloat16; read the file with load_weights")
    return {name: array for name, (_, array) in tagged.items()}, metadata


def _finite(place: str, name: str, array: AnyArray) -> None:
    if array.dtype != np.float32:
        raise InputError(f"{place}: {name} is {array.dtype}; weights are float32 or bfloat16")
    if not np.isfinite(array).all():
        where = [int(i) for i in np.argwhere(~np.isfinite(array))[0]]
        raise InputError(f"{place}: {name} holds {array[tuple(where)]} at {where}; weights must be finite")


def save_weights(
    path: Path,
    arrays: Mapping[str, F32],
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write finite float32 arrays, as they are or rounded to bfloat16 (nearest, ties to even).

    Raises InputError for NaN, Inf or another dtype, and for a value that bfloat16 would make infinite; else as
    ``save_arrays``.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f'dtype "{dtype}" of weights is unknown; use float32 or bfloat16')
    tagged: dict[str, tuple[str, AnyArray]] = {}
    for name, array in arrays.items():
        _finite(str(path), name, array)
        tagged[name] = "F32", array
        if dtype == "bfloat16":
            codes = to_bfloat16(array)
            if not np.isfinite(from_bfloat16(codes)).all():
                raise InputError(f"{path}: {name} holds {np.abs(array).max()}, beyond bfloat16; save it as float32")
            tagged[name] = "BF16", codes
    _write(path, _encode(tagged, metadata))


def load_weights(path: Path) -> tuple[dict[str, F32], dict[str, str]]:
    """What ``save_weights`` wrote, float32 (bfloat16 widens exactly), read-only, by ascending name; and its metadata.

    Raises InputError for a file that is missing, truncated, damaged or not written by qsim, and for arrays that are
    no finite float32 or bfloat16.
    """
    tagged, metadata = _decode(path)
    weights = {name: frozen(from_bfloat16(a)) if tag == "BF16" else a for name, (tag, a) in tagged.items()}
    for name, array in weights.items():
        _finite(str(path), name, array)
    return weights, metadata


def require(
    arrays: Mapping[str, AnyArray], shapes: Mapping[str, tuple[int, ...]], *, source: str = "the checkpoint"
) -> None:
    """Raise one InputError that lists every name that is missing, unexpected, or of another shape than ``shapes``."""
    shared = sorted(set(arrays) & set(shapes))
    wrong = [
        f"{name} is {list(arrays[name].shape)} and should be {list(shapes[name])}"
        for name in shared
        if tuple(arrays[name].shape) != tuple(shapes[name])
    ]
    problems = {
        "missing": sorted(set(shapes) - set(arrays)),
        "unexpected": sorted(set(arrays) - set(shapes)),
        "of another shape": wrong,
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
        raise InputError(f"{source} does not fit the model; {listed}")


# ---- the cache ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Weights, and where they came from. hit: read from ``path``; else made. path: None where nothing was kept.

    note: "" unless a file could not be used or written, and then why.
    """

    arrays: Mapping[str, F32]
    path: Path | None
    hit: bool
    note: str


def _canonical(key: Mapping[str, object]) -> str:
    """One text for one key: JSON with sorted names; UsageError for what JSON cannot hold."""
    return _json(_plain("key", key)).decode()


def _plain(where: str, value: object) -> object:
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise UsageError(f"{where} has the name {wrong[0]!r}; names in a key are strings")
        return {name: _plain(f"{where}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{index}]", inner) for index, inner in enumerate(value)]
    if isinstance(value, float) and not np.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold; leave it out or write it as a string")
    if value is not None and type(value) not in (bool, int, float, str):
        raise UsageError(f"{where} is {value!r}; a key holds None, bool, int, float, str, lists and mappings of them")
    return value


def cache_file(key: Mapping[str, object], *, label: str = "weights", folder: Path | None = None) -> Path:
    """Where weights of this key are kept: the label and the sha256 of the canonical JSON of format and key."""
    short = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40] or "weights"
    digest = hashlib.sha256(f"{FORMAT} {_canonical(key)}".encode()).hexdigest()
    return (cache_dir() / "weights" if folder is None else folder) / f"{short}-{digest}.safetensors"


def cached(
    key: Mapping[str, object],
    make: Callable[[], Mapping[str, F32]],
    *,
    folder: Path | None = None,
    label: str = "weights",
) -> Cached:
    """Weights from the cache, or made and kept for the next time; the arrays are read-only and by ascending name.

    key: everything that the weights depend on, in JSON values, a tuple counting as a list: sizes, steps, seeds, sha256
    of the text. (A BLAS sum depends on the machine as well.) folder: default ``cache_dir() / "weights"``. A file that
    is damaged, or of another key, is made again and ``note`` says so; a folder that cannot be written is done without.
    Processes that make the same weights at once all succeed, and the last rename stands.
    Raises UsageError for a key that is not JSON, InputError where ``make`` gives weights that are not finite float32.
    """
    path, text = cache_file(key, label=label, folder=folder), _canonical(key)
    notes = []
    if os.path.lexists(path):
        try:
            arrays, metadata = load_weights(path)
            if metadata.get("key") == text:
                return Cached(arrays=MappingProxyType(arrays), path=path, hit=True, note="")
            notes.append(f"{path}: holds weights of another key; made again")
        except InputError as error:
            notes.append(f"{error}; made again")
    made = {name: frozen(np.array(array, order="C")) for name, array in sorted(make().items())}
    for name, array in made.items():
        _finite(label, name, array)
    kept: Path | None = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(path, made, metadata={"key": text})
    except (OSError, OutputError) as error:
        kept = None
        notes.append(f"not kept: {error}")
    return Cached(arrays=MappingProxyType(made), path=kept, hit=False, note="; ".join(notes))
