"""A text as bytes, checked and hashed: the built-in excerpt or any file. Draws nothing and knows no model."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qsim._paths import sample_text
from qsim.arrays import U8, frozen
from qsim.errors import InputError

BUILTIN = "builtin"
VOCABULARY = 256
"""The values of a byte: every file is a text, in any encoding or none."""

TEXT_SHA256 = "dca06515bc7c8e65739b9ccc7cb3e0bf84a6c9227904610b45e9d7b72fada1a2"
"""Of the built-in excerpt: help topics of CPython 3.11.7 (qsim/training/data/PROVENANCE.md)."""

MAX_BYTES = 2**32 - 1
"""The longest text: a place in it is drawn with 32-bit products (``batches``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text. data: uint8 [bytes], read-only; sha256: of these bytes, in hex; name: "builtin" or the file's name.

    Two texts are equal where name and sha256 are.
    """

    name: str
    data: U8 = field(repr=False, compare=False)
    sha256: str


def open_text(source: str, *, at_least: int = 1) -> Text:
    """The built-in excerpt ("builtin") or the bytes of the file ``source`` (a path; ``~`` is the home folder).

    ``at_least``: how many bytes the caller needs (``batches.bytes_needed``). Raises InputError for a file that is
    missing, a folder or a device, unreadable, empty, shorter than that or longer than MAX_BYTES, and where the
    built-in text is not the one that was shipped.
    """
    path = sample_text() if source == BUILTIN else Path(source).expanduser() if source else None
    if path is None:
        raise InputError('workload.text is ""; give a file, or "builtin" for the text that ships with qsim')
    payload = _read(path)
    if len(payload) < max(at_least, 1):
        raise InputError(
            f"{path}: {len(payload)} bytes, and at least {max(at_least, 1)} are needed; give a longer text"
        )
    digest = hashlib.sha256(payload).hexdigest()
    if source == BUILTIN and digest != TEXT_SHA256:
        raise InputError(f"{path}: sha256 is {digest}, not {TEXT_SHA256}; install qsim again, the text was changed")
    name = BUILTIN if source == BUILTIN else path.name
    return Text(name=name, data=frozen(np.frombuffer(payload, np.uint8)), sha256=digest)


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise InputError(f"{path} is {kind}; give a file of text")
        if found.st_size > MAX_BYTES:
            raise InputError(f"{path}: {found.st_size} bytes, and a text may have {MAX_BYTES}; cut it")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); give a file of text, or builtin") from error
