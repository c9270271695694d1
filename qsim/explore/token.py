"""A token: one run of one space and the rule it is held against, as a word that can be copied. Runs nothing.

Layout, for good: ``x<semantics>~<space>~<run>~<invariant>~<checksum>``. The checksum covers all before it, so a token
of older semantics is told from one that was changed on its way. Every character is unreserved in a URL.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass

from qsim.errors import UsageError
from qsim.explore.runs import Choices
from qsim.explore.space import Space, space_of
from qsim.sim import RULES

SEMANTICS = 1
"""Raise it when a space and its choices come to mean other events; a pinned digest in the tests says when."""
LARGEST = 1_000_000
"""Choices of one run: a forged token must not fill the memory."""

_PART = re.compile(r"(?P<worker>\d{1,4})(?:x(?P<count>\d{1,9}))?")
_SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A run of ``space`` (it may stop before the threads end) and the id of the invariant to look at."""

    space: Space
    choices: Choices
    invariant: str

    def __post_init__(self) -> None:
        if self.invariant not in RULES:
            raise UsageError(f'token: invariant "{self.invariant}" is unknown; known: {", ".join(RULES)}')

    def text(self) -> str:
        """The token in one word: ``token_of`` reads it back."""
        body = f"x{SEMANTICS}~{self.space.text()}~{_coded(self.choices)}~{self.invariant}"
        return f"{body}~{_checksum(body)}"


def token_of(text: str) -> Token:
    """The token that ``Token.text`` wrote.

    Raises UsageError where it is none, was changed or cut short, or was made by other semantics.
    """
    text = text.strip()
    body, _, mark = text.rpartition("~")
    head = re.match(r"x(\d{1,6})~", text)
    shown = f"{text[:_SHOWN]}{'...' * (len(text) > _SHOWN)}"
    if head is None:
        raise UsageError(f'token "{shown}" is none: it starts with x{SEMANTICS}~; copy it whole from "explore"')
    if mark != _checksum(body):
        raise UsageError(
            f'token "{shown}" was changed or cut short: it ends in "{mark[:_SHOWN]}", its text gives '
            f'{_checksum(body)}; copy it whole from "explore"'
        )
    if int(head[1]) != SEMANTICS:
        raise UsageError(
            f'token "{shown}" was made by semantics {head[1]} of the explorer, this qsim has {SEMANTICS}: the same '
            f'choices may mean other events; run "explore" again'
        )
    words = text.split("~")
    if len(words) != 5:
        raise UsageError(f'token "{shown}" has {len(words)} parts, expected 5; copy it whole from "explore"')
    token = Token(space=space_of(words[1]), choices=_decoded(words[2]), invariant=words[3])
    if token.text() != text:
        raise UsageError(f'token "{shown}" is not in its plain form, which is {token.text()}')
    return token


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:8]


def _coded(choices: Choices) -> str:
    parts = ((worker, len(list(group))) for worker, group in itertools.groupby(choices))
    return "-".join(f"{worker}x{count}" if count > 1 else str(worker) for worker, count in parts)


def _decoded(text: str) -> Choices:
    choices: list[int] = []
    for at, part in enumerate(text.split("-") if text else ()):
        found = _PART.fullmatch(part)
        if found is None:
            raise UsageError(f'token: part {at} of the run is "{part}"; expected a worker, or worker x pieces, as 0x2')
        count = int(found["count"] or 1)
        if len(choices) + count > LARGEST:
            raise UsageError(f"token: the run has more than {LARGEST:,} choices at part {at}; use a shorter run")
        choices += [int(found["worker"])] * count
    return tuple(choices)
