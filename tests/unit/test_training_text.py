"""Texts and the batches drawn from them: pinned places, no order, no window across the border."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsim import _paths
from qsim.errors import InputError, UsageError
from qsim.philox import Purpose
from qsim.training import text as text_module
from qsim.training.batches import Part, batch, batches, bounds, bytes_needed, window_starts
from qsim.training.text import MAX_BYTES, TEXT_SHA256, Text, open_text


def text_of(payload: bytes) -> Text:
    return Text(name="made", data=np.frombuffer(payload, np.uint8), sha256=hashlib.sha256(payload).hexdigest())


RAMP = text_of(bytes(i % 251 for i in range(1000)))
DRAW: dict[str, Any] = {"step": 5, "microbatch": 2, "worker": 1, "batch": 4, "context": 4}
NOISE = text_of(np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes())
PLACES = {NOISE.data[i : i + 4].tobytes(): i for i in range(997)}
"""Where in NOISE four bytes stand."""


def places(tokens: Any) -> list[int]:
    return [PLACES[row.astype(np.uint8).tobytes()] for row in tokens.reshape(-1, tokens.shape[-1])]


# ---- texts ----------------------------------------------------------------------------------------------


def test_a_file_of_any_bytes_is_a_text_and_named_without_its_folder(tmp_path: Path) -> None:
    payload = bytes(range(256)) + b"\x00\xff\r\n"
    (tmp_path / "raw.bin").write_bytes(payload)
    text = open_text(str(tmp_path / "raw.bin"), at_least=260)
    assert payload == text.data.tobytes()
    assert ("raw.bin", hashlib.sha256(payload).hexdigest(), np.dtype(np.uint8)) == (
        text.name,
        text.sha256,
        text.data.dtype,
    )
    assert not text.data.flags.writeable


def test_the_home_folder_is_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_bytes(b"abc")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert b"abc" == open_text("~/t").data.tobytes()


def test_texts_are_equal_by_name_and_hash() -> None:
    assert text_of(b"ab") == text_of(b"ab")
    assert text_of(b"ab") != text_of(b"ba")
    assert 1 == len({text_of(b"ab"), text_of(b"ab")})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", r"none: cannot be read \(No such file or directory\); give a file"),
        ("folder", r"folder is a folder; give a file of text"),
        ("empty", r"empty: 0 bytes, and at least 10 are needed; give a longer text"),
        ("short", r"short: 9 bytes, and at least 10 are needed"),
        ("pipe", r"pipe is no regular file"),
        ("a\0b", r"cannot be read \(.*null"),
        ("x" * 300, r"cannot be read \(File name too long\)"),
        ("short/below", r"cannot be read \(Not a directory\)"),
        ("huge", rf"huge: {2**32} bytes, and a text may have {2**32 - 1}; cut it"),
    ],
)
def test_a_file_that_is_no_text_is_an_input_error(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 9)
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**32)  # sparse
    with pytest.raises(InputError, match=message):
        open_text(str(tmp_path / name), at_least=10)


def test_an_empty_name_and_an_empty_file_are_errors_whatever_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'^workload\.text is ""'):
        open_text("")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="at least 1 are needed"):
        open_text(str(tmp_path / "empty"), at_least=0)


def test_a_file_that_may_not_be_read_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "t").write_bytes(b"abc")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"t: cannot be read \(Permission denied\)"):
        open_text(str(tmp_path / "t"))


def test_a_built_in_text_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = bytearray(_paths.sample_text().read_bytes())
    payload[50_000] ^= 1
    (tmp_path / "topics.txt").write_bytes(payload)
    monkeypatch.setattr(text_module, "sample_text", lambda: tmp_path / "topics.txt")
    with pytest.raises(InputError, match=f"not {TEXT_SHA256}; install qsim again"):
        open_text("builtin")


# ---- places ---------------------------------------------------------------------------------------------


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


@pytest.mark.parametrize(
    ("part", "site", "first", "count", "expected"),
    [("train", 0, 0, 896, [855, 537, 243, 228]), ("held_out", 1, 900, 96, [968, 932, 943, 952])],
)
def test_windows_start_where_integers_say(part: str, site: int, first: int, count: int, expected: list[int]) -> None:
    """900 bytes of 1000 to train on: 900 - 4 places for a window of 4 bytes and the next; step 5, microbatch 2."""
    words = [w for block in (0, 1) for w in philox((block, 5, 2 << 16 | 1, 9 << 24 | site << 8), (7, 0))]
    by_hand = [first + ((words[2 * i] << 32 | words[2 * i + 1]) * count >> 64) for i in range(4)]
    assert expected == by_hand
    tokens, targets = batch(RAMP, seed=7, part=part, **DRAW)
    assert [[(s + t) % 251 for t in range(4)] for s in expected] == tokens.tolist()
    assert [[(s + t) % 251 for t in range(1, 5)] for s in expected] == targets.tolist()
    assert {np.dtype(np.int64)} == {tokens.dtype, targets.dtype}
    assert not tokens.flags.writeable
    assert not targets.flags.writeable


def test_the_purpose_of_batches_has_its_number() -> None:
    assert 9 == Purpose.BATCHES.value


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 89_671, 2**31 + 1, MAX_BYTES])
def test_a_place_is_the_floor_of_word_times_count(count: int) -> None:
    rng = np.random.default_rng(count)
    words = rng.integers(0, 2**32, 400, dtype=np.uint32)
    step = -(-(2**64) // count)  # the first word of place 1, and the word before it
    for at, word in ((0, 0), (2, 2**64 - 1), (4, step % 2**64), (6, (step - 1) % 2**64)):
        words[at : at + 2] = word >> 32, word & 0xFFFFFFFF
    expected = [(int(h) << 32 | int(low)) * count >> 64 for h, low in words.reshape(-1, 2)]
    assert expected == window_starts(words, count).tolist()
    assert [0, count - 1] == expected[:2]


def test_places_are_spread_evenly() -> None:
    """Chi-square of 32,000 places in 100 classes; 180.8 is exceeded once in a million, 45.8 undershot as rarely."""
    tokens, _ = batches(NOISE, range(40), step=3, batch=800, context=4)
    found = places(tokens)
    assert (0, 895) == (min(found), max(found))  # 896 places, 36 draws for each
    edges = [896 * i // 100 for i in range(101)]
    counts, _ = np.histogram(found, bins=edges)
    due = np.diff(edges) * (len(found) / 896)
    assert 45.8 < float(((counts - due) ** 2 / due).sum()) < 180.8


@pytest.mark.parametrize("context", [1, 4, 99])
def test_no_window_and_no_target_crosses_the_border(context: int) -> None:
    """Training bytes are 0, held-out bytes 1: a window across would hold both."""
    text = text_of(b"\0" * 900 + b"\1" * 100)
    for part, value in ((Part.TRAIN, 0), (Part.HELD_OUT, 1)):
        for array in batches(text, (1, 2), step=0, batch=500, context=context, part=part):
            assert {value} == set(array.reshape(-1).tolist())


def test_both_parts_are_drawn_to_their_last_byte() -> None:
    for part, first, last in (("train", 0, 899), ("held_out", 900, 999)):
        assert (first, last + 1) == bounds(NOISE, part)
        tokens, targets = batch(NOISE, seed=0, step=0, batch=4000, context=4, part=part)
        found = places(tokens)
        assert (first, last - 4) == (min(found), max(found))
        assert {NOISE.data[p + 1 : p + 5].tobytes() for p in found} == {
            row.astype(np.uint8).tobytes() for row in targets
        }


# ---- identity -------------------------------------------------------------------------------------------


def test_a_sequence_depends_on_its_index_alone() -> None:
    few, many = (batch(NOISE, seed=3, step=9, batch=size, context=4)[0] for size in (3, 50))
    assert few.tolist() == many[:3].tolist()
    longer = batch(NOISE, seed=3, step=9, batch=50, context=4)[0]
    assert many.tolist() == longer.tolist()


def test_batches_do_not_depend_on_the_order_in_which_they_are_drawn() -> None:
    at = [(step, microbatch) for step in range(4) for microbatch in range(3)]
    forth, back = (
        {(s, m): batch(NOISE, seed=1, step=s, microbatch=m, batch=2, context=4)[0].tolist() for s, m in order}
        for order in (at, at[::-1])
    )
    assert forth == back
    assert len(at) == len({str(tokens) for tokens in forth.values()})


@pytest.mark.parametrize("field", ["seed", "step", "microbatch", "worker", "part"])
def test_every_field_gives_another_batch(field: str) -> None:
    one: dict[str, Any] = {"seed": 1, "step": 1, "microbatch": 1, "worker": 1, "part": "train"}
    other = one | {field: "held_out" if field == "part" else 2}
    drawn = [places(batch(NOISE, batch=8, context=4, **fields)[0]) for fields in (one, other)]
    assert drawn[0] != drawn[1]
    if field == "part":  # nor are they one draw seen through two parts
        shares = [[p / 896 for p in drawn[0]], [(p - 900) / 96 for p in drawn[1]]]
        assert max(abs(a - b) for a, b in zip(*shares, strict=True)) > 0.1


def test_replicas_are_the_batches_of_their_seeds() -> None:
    seeds = (4, 2**64 - 1, 0)
    tokens, targets = batches(NOISE, seeds, **DRAW)
    assert (3, 4, 4) == tokens.shape == targets.shape
    assert tokens.flags.c_contiguous
    for r, seed in enumerate(seeds):
        one = batch(NOISE, seed=seed, **DRAW)
        assert (one[0].tolist(), one[1].tolist()) == (tokens[r].tolist(), targets[r].tolist())
    assert (0, 4, 4) == batches(NOISE, (), **DRAW)[0].shape


def test_the_first_batch_of_the_built_in_text_is_known() -> None:
    tokens, _ = batch(open_text("builtin"), seed=0, step=0, batch=2, context=24)
    assert [b"literal   ::= bytesprefi", b"ches the exception. An\ne"] == [
        bytes(row.astype(np.uint8)) for row in tokens
    ]


# ---- limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 4, 64])
def test_the_shortest_text_is_enough_and_one_byte_less_is_not(context: int) -> None:
    size = bytes_needed(context)
    assert 10 * (context + 1) == size
    for part in Part:
        tokens, _ = batch(text_of(b"x" * size), seed=0, step=0, batch=2, context=context, part=part)
        assert (2, context) == tokens.shape
    message = rf"^text made: its part held_out has {context} bytes, .* takes {context + 1}; a text of {size} bytes"
    with pytest.raises(InputError, match=message):
        batch(text_of(b"x" * (size - 1)), seed=0, step=0, batch=2, context=context, part="held_out")
    with pytest.raises(InputError, match="its part train has 1 bytes"):
        batch(text_of(b"x"), seed=0, step=0, batch=2, context=context)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "batch 0 is too small"),
        ({"batch": 2.0}, "batch 2.0 is no integer"),
        ({"batch": 2**24 + 1}, "batch 16777217 is above 16777216; use more microbatches"),
        ({"context": 0}, "context 0 is too small"),
        ({"step": 2**32}, "step 4294967296 does not fit its 32 bits"),
        ({"step": -1}, "step -1 does not fit"),
        ({"microbatch": 2**16}, "microbatch 65536 does not fit its 16 bits"),
        ({"worker": -1}, "worker -1 does not fit"),
        ({"seed": 2**64}, "seed 18446744073709551616 is outside"),
        ({"part": "test"}, 'part "test" of a text is unknown; use one of train, held_out'),
    ],
)
def test_a_number_that_does_not_fit_is_a_usage_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch(NOISE, **({"seed": 0} | DRAW | changed))
