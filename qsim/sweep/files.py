"""Files that a study names: found, and tied to their bytes by a digest. Reads nothing out of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from qsim.errors import InputError
from qsim.sweep.allowed import shown

BUILTIN = "builtin"
_CHUNK = 1 << 20


class Found(NamedTuple):
    """A file as cells hold it ("builtin" or an absolute path), and the sha256 of its bytes."""

    name: str
    digest: str


def find(key: str, given: str, *, base: Path, builtin: Path, kinds: str) -> Found:
    """The file that ``key`` gives; a relative path starts at ``base``. InputError, naming ``kinds`` of files that
    would do, where it cannot be read."""
    try:
        path = builtin if given == BUILTIN else base / Path(given).expanduser()
    except RuntimeError as error:  # ~name of a user who is not there
        raise InputError(f"{key}: {shown(given)} cannot be found: {error}") from error
    try:
        digest = digest_of(path)
        return Found(BUILTIN if given == BUILTIN else str(path.resolve()), digest)
    except (OSError, ValueError) as error:  # a ValueError: a null byte in the name
        raise InputError(
            f"{key}: {shown(given)} cannot be read at {str(path)!r} "
            f"({getattr(error, 'strerror', None) or error}); "
            f'give {kinds}, or "{BUILTIN}"'
        ) from error


def digest_of(path: Path) -> str:
    """sha256 of a file's bytes, as hex digits; OSError where it cannot be read."""
    digest = hashlib.sha256()
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is a device or a pipe, no file")
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
