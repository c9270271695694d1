"""Text and checkpoint of a training study: found, and tied to their bytes. Reads no word and no weight."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from qsim import _paths
from qsim.errors import InputError
from qsim.sweep.files import BUILTIN, digest_of, find
from qsim.sweep.training.schema import TrainingConfig
from qsim.training.config import SCRATCH, TRAINED, DataParams, steps_of

_KINDS = {"text": "a file", "checkpoint": f'a checkpoint that qsim wrote, "{SCRATCH}", "{TRAINED}1000"'}


def builtin(what: str) -> Path:
    """Where the text or the checkpoint that ships with qsim lies."""
    return _paths.sample_text() if what == "text" else _paths.sample_checkpoint()


def with_files(config: TrainingConfig, *, folder: Path, overridden: Set[str]) -> TrainingConfig:
    """The study with every text and checkpoint found. A relative path starts at ``folder``, and where its key was
    overridden at the working folder. InputError where a file cannot be read."""
    paths: dict[tuple[str, str], str] = {}
    digests: dict[tuple[str, str], str] = {}
    for key, what, given in config.given_files():
        if what == "checkpoint" and (given == SCRATCH or given.startswith(TRAINED)):
            paths[key, given] = given
            if given != SCRATCH:
                steps_of(given)
            continue
        base = Path.cwd() if key in overridden else folder
        found = find(key, given, base=base, builtin=builtin(what), kinds=_KINDS[what])
        paths[key, given] = found.name
        digests[what, found.name] = found.digest
    return config.with_files(paths, digests)


def require_unchanged(data: DataParams) -> None:
    """InputError where a file has other bytes than when the study was read, or is gone."""
    for what, given, digest in (
        ("text", data.text, data.text_digest),
        ("checkpoint", data.checkpoint, data.checkpoint_digest),
    ):
        if not digest:
            continue
        path = builtin(what) if given == BUILTIN else Path(given)
        try:
            same = digest_of(path) == digest
        except OSError as error:
            raise InputError(f"workload.{what}: {path} cannot be read any more: {error.strerror}") from error
        if not same:
            raise InputError(f"{path}: changed since the study was read; run the sweep again with another --out")
