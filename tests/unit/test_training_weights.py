"""Checkpoints bit for bit, damage of every kind refused, and a cache that trusts no half file."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from qsim.arrays import F32, AnyArray, same_bits
from qsim.errors import InputError, OutputError, UsageError
from qsim.training.weights import (
    Cached,
    cache_file,
    cached,
    from_bfloat16,
    load_arrays,
    load_weights,
    require,
    save_arrays,
    save_weights,
    to_bfloat16,
)

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["float32", "float64", "int32", "int64", "uint8", "uint32", "uint64"]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def words(*values: int) -> F32:
    """float32 values by their bits."""
    return np.array(values, np.uint32).view(np.float32)


WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3) - np.float32(2.5), "b": f32(-0.0, 1e-45)}


def same(expected: Mapping[str, AnyArray], actual: Mapping[str, AnyArray]) -> bool:
    return set(expected) == set(actual) and all(same_bits(expected[name], actual[name]) for name in expected)


def forged(path: Path, header: dict[str, Any], data: bytes, *, metadata: dict[str, str] | None = None) -> Path:
    """A file whose digest is right, whatever else it says."""
    header = {**header, "__metadata__": {"qsim.format": "1"} | (metadata or {})}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    header["__metadata__"]["qsim.sha256"] = hashlib.sha256(text + data).hexdigest()
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


# ---- bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_every_bit_pattern_comes_back(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    raw = np.random.default_rng(len(shape)).integers(0, 256, np.dtype(name).itemsize * int(np.prod(shape)), np.uint8)
    array = raw.view(name).reshape(shape)
    save_arrays(tmp_path / "x", {"a": array})
    loaded, metadata = load_arrays(tmp_path / "x")
    assert same_bits(array, loaded["a"])
    assert not loaded["a"].flags.writeable
    assert {} == metadata


def test_nan_payloads_infinities_and_the_sign_of_zero_come_back(tmp_path: Path) -> None:
    single = words(0x7F800001, 0xFFC12345, 0x7F800000, 0x80000000, 1)
    double = np.array([0x7FF0000000000001, 0xFFF8123456789ABC, 1 << 63], np.uint64).view(np.float64)
    save_arrays(tmp_path / "x", {"f": single, "d": double})
    assert same({"f": single, "d": double}, load_arrays(tmp_path / "x")[0])


def test_strides_and_byte_order_of_the_caller_leave_no_trace(tmp_path: Path) -> None:
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    save_arrays(tmp_path / "x", {"cut": wide[::2, ::-3], "turned": wide.T, "swapped": wide.astype(">f4")})
    expected = {"cut": wide[::2, ::-3], "turned": wide.T, "swapped": wide}
    assert same({n: np.array(a, order="C") for n, a in expected.items()}, load_arrays(tmp_path / "x")[0])


def test_one_set_of_arrays_gives_one_sequence_of_bytes(tmp_path: Path) -> None:
    metadata = {"z": "1", "key": "ä\n", "": ""}
    save_weights(tmp_path / "a", WEIGHTS, metadata=metadata)
    save_weights(tmp_path / "b", dict(reversed(WEIGHTS.items())), metadata=dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    digest = "60d6bc378f6f3c718a2c0b498adf907e1636438808c32c10f87c0191ed9c4952"
    assert digest == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    loaded, found = load_weights(tmp_path / "a")
    assert (["b", "w"], metadata) == (list(loaded), found)
    assert same(WEIGHTS, loaded)


def test_another_reader_of_safetensors_reads_the_file(tmp_path: Path) -> None:
    save_weights(tmp_path / "x", WEIGHTS, metadata={"step": "7"})
    with safe_open(tmp_path / "x", framework="np") as opened:
        assert "7" == opened.metadata()["step"]
        assert same(WEIGHTS, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - no mapping
    assert 0 == (8 + struct.unpack("<Q", (tmp_path / "x").read_bytes()[:8])[0]) % 8


# ---- bfloat16 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "code"),
    [
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # a tie: to even, down
        (0x3F818000, 0x3F82),  # a tie: to even, up
        (0x3F808001, 0x3F81),
        (0x3F817FFF, 0x3F81),
        (0x3FFF8000, 0x4000),  # the carry is the next binade
        (0x80000000, 0x8000),
        (0x00008001, 0x0001),  # subnormal
        (0x7F7F7FFF, 0x7F7F),  # the last that stays finite
        (0x7F7F8000, 0x7F80),  # 2^128 - 2^119
        (0xFF7FFFFF, 0xFF80),
        (0x7F800000, 0x7F80),
    ],
)
def test_bfloat16_is_rounded_to_nearest_even(word: int, code: int) -> None:
    assert [code] == to_bfloat16(words(word)).tolist()


def test_bfloat16_agrees_with_ml_dtypes_in_both_directions() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    assert x.astype(ml_dtypes.bfloat16).view(np.uint16).tolist() == to_bfloat16(x).tolist()
    codes = np.arange(1 << 16, dtype=np.uint16)
    assert same_bits(codes.view(ml_dtypes.bfloat16).astype(np.float32), from_bfloat16(codes))
    assert np.isnan(from_bfloat16(to_bfloat16(words(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)))).all()


def test_bfloat16_keeps_the_shape_of_a_scalar() -> None:
    codes = to_bfloat16(np.array(1.5, np.float32))
    assert ((), 0x3FC0) == (codes.shape, int(codes))
    assert ((), 1.5) == (from_bfloat16(codes).shape, float(from_bfloat16(codes)))


def test_weights_saved_as_bfloat16_come_back_widened(tmp_path: Path) -> None:
    x = {"w": np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32), "s": np.array(1.1, np.float32)}
    save_weights(tmp_path / "x", x, dtype="bfloat16")
    with safe_open(tmp_path / "x", framework="np") as opened:
        assert "BF16" == opened.get_slice("w").get_dtype()
    expected = {name: a.astype(ml_dtypes.bfloat16).astype(np.float32) for name, a in x.items()}
    loaded, _ = load_weights(tmp_path / "x")
    assert same(expected, loaded)
    assert not loaded["w"].flags.writeable
    with pytest.raises(InputError, match="s is bfloat16; read the file with load_weights"):
        load_arrays(tmp_path / "x")


def test_a_weight_beyond_bfloat16_is_refused_and_no_file_is_left(tmp_path: Path) -> None:
    save_weights(tmp_path / "x", {"w": words(0x7F7F7FFF)}, dtype="bfloat16")
    with pytest.raises(InputError, match=r"y: w holds 3\.39617\d*e\+38, beyond bfloat16; save it as float32"):
        save_weights(tmp_path / "y", {"w": words(0xFF7F8000)}, dtype="bfloat16")
    assert ["x"] == os.listdir(tmp_path)


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_weights_that_are_not_finite_are_refused_in_and_out(value: float, text: str, tmp_path: Path) -> None:
    arrays = {"w": f32(1, 2, value, value).reshape(2, 2)}
    message = rf"x: w holds {text} at \[1, 0\]; weights must be finite"
    with pytest.raises(InputError, match=message):
        save_weights(tmp_path / "x", arrays)
    assert [] == os.listdir(tmp_path)
    save_arrays(tmp_path / "x", arrays)
    with pytest.raises(InputError, match=message):
        load_weights(tmp_path / "x")


def test_weights_of_another_dtype_are_refused_in_and_out(tmp_path: Path) -> None:
    wide: Any = {"w": np.zeros(2)}
    for attempt in (lambda: save_weights(tmp_path / "x", wide), lambda: load_weights(tmp_path / "x")):
        with pytest.raises(InputError, match="x: w is float64; weights are float32 or bfloat16"):
            attempt()
        save_arrays(tmp_path / "x", wide)


@pytest.mark.parametrize(
    ("arrays", "metadata", "message"),
    [
        ({"a": np.zeros(1, np.float16)}, {}, "array 'a' is float16; a checkpoint holds float32, float64, int32"),
        ({"a": np.array(["x"])}, {}, "array 'a' is <U1"),
        ({"a": np.array([None])}, {}, "array 'a' is object"),
        ({"__metadata__": np.zeros(1)}, {}, 'an array cannot be named "__metadata__"'),
        ({1: np.zeros(1)}, {}, "array name 1 is no string"),
        ({"\ud800": np.zeros(1)}, {}, "half a surrogate pair"),
        ({}, {"a": 1}, "metadata 'a' 1 is no string"),
        ({}, {"a": "\udc00"}, "half a surrogate pair"),
        ({}, {"qsim.x": ""}, 'metadata key "qsim.x": keys that begin with qsim. are'),
    ],
)
def test_what_a_file_cannot_hold_is_a_usage_error(arrays: Any, metadata: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        save_arrays(tmp_path / "x", arrays, metadata=metadata)
    assert [] == os.listdir(tmp_path)


def test_an_unknown_dtype_of_weights_is_a_usage_error(tmp_path: Path) -> None:
    other: Any = "float16"
    with pytest.raises(UsageError, match='dtype "float16" of weights is unknown; use float32 or bfloat16'):
        save_weights(tmp_path / "x", WEIGHTS, dtype=other)


def test_every_changed_byte_and_every_cut_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_weights(path, WEIGHTS, metadata={"key": "v"})
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError, match="x: "):
            load_weights(path)
        path.write_bytes(whole[:at])
        with pytest.raises(InputError, match=r"x: cannot be read as \.safetensors"):
            load_weights(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="x: "):
        load_weights(path)
    path.write_bytes(whole)
    assert same(WEIGHTS, load_weights(path)[0])


def test_damage_that_the_container_cannot_see_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_weights(path, WEIGHTS, metadata={"step": "100"})
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole.replace(b'"100"', b'"101"')):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="x: damaged, its bytes are not those that were written"):
            load_weights(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, r"not a checkpoint that this qsim reads \(no qsim.format in it\); write it with save_weights"),
        ({"format": "pt"}, "no qsim.format in it"),
        ("null", "no qsim.format in it"),
        ({"qsim.format": "2"}, "its format is 2"),
        ({"qsim.format": "1"}, "damaged"),
    ],
)
def test_a_foreign_file_is_an_input_error(metadata: Any, message: str, tmp_path: Path) -> None:
    header: dict[str, Any] = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    head = json.dumps(header if metadata is None else {**header, "__metadata__": metadata}).encode()
    head = head.replace(b'"null"', b"null")
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 4)
    with pytest.raises(InputError, match=message):
        load_weights(tmp_path / "x")


@pytest.mark.parametrize("payload", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + b"\0" * 40, b"{}", b"\xff" * 64])
def test_a_file_of_another_kind_is_an_input_error_and_nothing_in_it_runs(payload: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(payload)
    with pytest.raises(InputError, match=r"x: cannot be read as \.safetensors"):
        load_arrays(tmp_path / "x")


@pytest.mark.parametrize(
    ("kind", "shape", "size", "reason"),
    [("F16", [2], 4, "F16 is no dtype that qsim writes"), ("F32", [0, 2**62, 2**62], 0, "")],
)
def test_a_forged_array_is_an_input_error(kind: str, shape: list[int], size: int, reason: str, tmp_path: Path) -> None:
    path = forged(tmp_path / "x", {"a": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}, b"\0" * size)
    with pytest.raises(InputError, match=rf"x: cannot be read as \.safetensors \({reason}"):
        load_arrays(path)


@pytest.mark.parametrize("extra", [b"1e999", b"NaN", b"9" * 5000, b"[" * 5000 + b"]" * 5000, b'"\\ud800"'])
def test_a_header_that_python_cannot_write_again_is_an_input_error(extra: bytes, tmp_path: Path) -> None:
    head = (
        b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"more":%s},"__metadata__":{"qsim.format":"1"}}' % extra
    )
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(InputError, match="x: "):
        load_weights(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no such file; give a"),
        ("folder", "no such file; give a"),
        ("pipe", "no such file; give a"),  # reading it would wait for ever
        ("a\0b", "no such file|cannot be read"),
        ("n" * 300, "no such file|cannot be read"),
    ],
)
def test_a_path_that_is_no_file_is_an_input_error(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=message):
        load_weights(tmp_path / name)


def test_require_lists_everything_at_once() -> None:
    arrays = {"a": np.zeros((2, 3)), "b": np.zeros(2), "x": np.zeros(1), "s": np.zeros(())}
    require(arrays, {"a": (2, 3), "b": (2,), "x": (1,), "s": ()})
    with pytest.raises(InputError) as caught:
        require(arrays, {"a": (3, 2), "b": (2, 1), "z": (1,), "y": (1,), "s": ()}, source="w.safetensors")
    assert (
        "w.safetensors does not fit the model; missing: y, z; unexpected: x; of another shape: "
        "a is [2, 3] and should be [3, 2], b is [2] and should be [2, 1]"
    ) == str(caught.value)


# ---- writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none/x", "file/x", "folder", "n" * 300, "a\0b"])
def test_a_place_that_cannot_be_written_is_an_output_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        save_weights(tmp_path / name, WEIGHTS)
    assert ["file", "folder"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_older_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save_weights(tmp_path / "x", WEIGHTS)
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(OutputError, match=r"x: cannot be written .*No space left"):
            save_weights(tmp_path / "x", {"w": f32(1)})
    assert ["x"] == os.listdir(tmp_path)
    assert same(WEIGHTS, load_weights(tmp_path / "x")[0])


def test_what_a_killed_process_of_this_number_left_is_stepped_around(tmp_path: Path) -> None:
    left = tmp_path / f".qsim-{os.getpid()}-0.tmp"
    left.write_bytes(b"half")
    save_weights(tmp_path / "x", WEIGHTS)
    assert (b"half", [left.name, "x"]) == (left.read_bytes(), sorted(os.listdir(tmp_path)))


# ---- the cache ------------------------------------------------------------------------------------------

KEY: dict[str, object] = {"layers": 8, "lr": 2e-3, "sizes": (64, 128), "text": {"sha256": "ab"}, "bias": None}


def counted(weights: Mapping[str, F32]) -> tuple[Callable[[], Mapping[str, F32]], list[int]]:
    calls: list[int] = []

    def make() -> Mapping[str, F32]:
        calls.append(1)
        return weights

    return make, calls


def test_a_hit_gives_the_bits_and_the_order_of_the_miss(tmp_path: Path) -> None:
    make, calls = counted(WEIGHTS)
    miss, hit = (cached(KEY, make, folder=tmp_path / "new" / "folder", label="Pre-trained, L 8!") for _ in range(2))
    assert (1, False, True, "", "") == (len(calls), miss.hit, hit.hit, miss.note, hit.note)
    assert same(WEIGHTS, miss.arrays)
    assert same(WEIGHTS, hit.arrays)
    assert ["b", "w"] == list(miss.arrays) == list(hit.arrays)
    assert not any(a.flags.writeable for record in (miss, hit) for a in record.arrays.values())
    assert all(a.flags.writeable for a in WEIGHTS.values())
    assert miss.path == hit.path == cache_file(KEY, label="Pre-trained, L 8!", folder=tmp_path / "new" / "folder")
    assert miss.path is not None
    canonical = '1 {"bias":null,"layers":8,"lr":0.002,"sizes":[64,128],"text":{"sha256":"ab"}}'
    assert f"pre-trained-l-8-{hashlib.sha256(canonical.encode()).hexdigest()}.safetensors" == miss.path.name


def test_a_key_is_its_content_in_any_order_and_type_of_mapping() -> None:
    turned = MappingProxyType(dict(reversed(KEY.items())) | {"sizes": [64, 128]})
    assert cache_file(KEY) == cache_file(turned)
    others = [KEY | {"layers": 8.0}, KEY | {"lr": 3e-3}, KEY | {"bias": False}, KEY | {"more": 1}, {}]
    assert 6 == len({cache_file(k) for k in (KEY, *others)})
    assert "weights" == cache_file(KEY).parent.name
    assert cache_file(KEY, label="÷").name.startswith("weights-")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"a": {"b": [1, np.float32(1)]}}, r"key\.a\.b\[1\] is np\.float32\(1\.0\); a key holds None, bool"),
        ({"a": float("nan")}, r"key\.a is nan, which JSON cannot hold"),
        ({"a": [-float("inf")]}, r"key\.a\[0\] is -inf"),
        ({"a": {1: 2}}, r"key\.a has the name 1; names in a key are strings"),
        ({"a": {1}}, r"key\.a is \{1\}"),
        ({"a": Path("x")}, r"key\.a is PosixPath"),
    ],
)
def test_a_key_that_is_not_json_is_a_usage_error(key: Any, message: str, tmp_path: Path) -> None:
    make, calls = counted(WEIGHTS)
    with pytest.raises(UsageError, match=message):
        cached(key, make, folder=tmp_path)
    assert ([], []) == (calls, os.listdir(tmp_path))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x80]))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_key(path: Path) -> None:
    save_weights(path, {"w": f32(9)}, metadata={"key": "{}"})


def _not_finite(path: Path) -> None:
    save_arrays(path, {"w": f32(np.nan)}, metadata={"key": "{}"})


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _other_key, _not_finite, _dangling])
def test_a_file_that_cannot_be_trusted_is_made_again_and_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    make, calls = counted(WEIGHTS)
    path = cached(KEY, make, folder=tmp_path).path
    assert path is not None
    damage(path)
    again = cached(KEY, make, folder=tmp_path)
    assert (False, path, 2) == (again.hit, again.path, len(calls))
    assert again.note.startswith(f"{path}: ")
    assert again.note.endswith("; made again")
    assert same(WEIGHTS, again.arrays)
    third = cached(KEY, make, folder=tmp_path)
    assert (True, "", 2) == (third.hit, third.note, len(calls))
    assert same(WEIGHTS, third.arrays)


def test_without_a_folder_weights_are_kept_in_the_cache_of_qsim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSIM_CACHE_DIR", str(tmp_path))
    path = cached(KEY, counted(WEIGHTS)[0]).path
    assert path is not None
    assert [path] == list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("name", ["file/below", "folder"])
def test_a_folder_that_cannot_be_written_is_done_without(name: str, tmp_path: Path) -> None:
    make, calls = counted(WEIGHTS)
    (tmp_path / "file").touch()
    folder = tmp_path / name
    if name == "folder":
        cache_file(KEY, folder=folder).mkdir(parents=True)  # no file can be renamed to a folder
    got = [cached(KEY, make, folder=folder) for _ in range(2)]
    assert [(False, None), (False, None)] == [(record.hit, record.path) for record in got]
    assert all("not kept: " in record.note for record in got)
    assert 2 == len(calls)
    assert same(WEIGHTS, got[1].arrays)


def test_a_full_disk_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    record = cached(KEY, counted(WEIGHTS)[0], folder=tmp_path)
    assert (False, None, []) == (record.hit, record.path, os.listdir(tmp_path))
    assert "not kept: " in record.note
    assert "No space left" in record.note


@pytest.mark.parametrize("folder", ["new", "file/below"])
def test_weights_that_no_run_can_use_are_not_kept(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"warm: w holds nan at \[0\]"):
        cached(KEY, counted({"w": f32(np.nan)})[0], folder=tmp_path / folder, label="warm")
    assert ["file"] == os.listdir(tmp_path)


def test_what_make_raises_comes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def make() -> Mapping[str, F32]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(KEY, make, folder=tmp_path)
    assert [] == os.listdir(tmp_path)


# ---- processes ------------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from qsim.training.weights import cached
folder = Path(sys.argv[1])
def make():
    return {"w": np.arange(100_000, dtype=np.float32)}
"""
KILLED = """
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
os.%s = kill
cached({"a": 1}, make, folder=folder)
"""
TOGETHER = """
def meet():  # both are here before either writes
    (folder / sys.argv[2]).touch()
    while not ((folder / "one").exists() and (folder / "two").exists()):
        time.sleep(0.001)
    return make()
record = cached({"a": 1}, meet, folder=folder / "kept")
print(record.hit, record.path is not None, record.note, float(record.arrays["w"].sum()))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + script, *arguments],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _kept(folder: Path) -> Cached:
    return cached({"a": 1}, lambda: {"w": f32(1)}, folder=folder)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_killed_in_the_middle_leaves_nothing_that_is_read(moment: str, tmp_path: Path) -> None:
    process = start(KILLED % moment, str(tmp_path))
    assert ("", "") == process.communicate(timeout=60)
    assert -signal.SIGKILL == process.returncode
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".tmp")
    record = _kept(tmp_path)
    assert (False, "") == (record.hit, record.note)
    assert [1.0] == record.arrays["w"].tolist()
    assert _kept(tmp_path).hit


def test_two_processes_that_make_the_same_weights_both_succeed(tmp_path: Path) -> None:
    running = [start(TOGETHER, str(tmp_path), name) for name in ("one", "two")]
    said = [process.communicate(timeout=60) for process in running]
    total = float(np.arange(100_000, dtype=np.float32).sum())
    assert [(f"False True  {total}\n", "")] * 2 == said
    (name,) = os.listdir(tmp_path / "kept")
    assert name.endswith(".safetensors")
    record = _kept(tmp_path / "kept")
    assert record.hit
    assert same({"w": np.arange(100_000, dtype=np.float32)}, record.arrays)
