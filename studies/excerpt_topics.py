"""Makes the shipped training text from the help topics of the running Python. Reads no other file.

    python studies/excerpt_topics.py --out FILE
    python studies/excerpt_topics.py --check FILE

The text is TOPICS of pydoc_data.topics, whole and in the order given here, an empty line between them. Typography is
spelled in ASCII (SPELLING), so that one character is one byte; nothing else is changed. No two topics may share a
paragraph: many repeat each other, and a held-out part must not hold what was trained on.

--check exits 1 where FILE is not, byte for byte, what this Python's topics give: they differ by version.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TOPICS = (
    "identifiers",
    "strings",
    "objects",
    "customization",
    "attribute-access",
    "execmodel",
    "import",
    "calls",
    "assignment",
    "del",
    "return",
    "raise",
    "try",
    "with",
)
"""Topics of running prose in the order of the language reference, none part of another; about 100 kB together."""

SPELLING: dict[str, str | int | None] = {
    "\u2018": "'",  # single quotes
    "\u2019": "'",
    "\u201c": '"',  # double quotes
    "\u201d": '"',
    "\u2026": "...",  # ellipsis
    "\u2013": "-",  # en dash
    "\u2014": "--",  # em dash
    "\u00b0": "deg",  # degree sign
}
"""Every character outside ASCII that the topics hold, and how it is written."""

LONG_PARAGRAPH = 40  # characters; shorter ones ("For example:") may come again


class ExcerptError(Exception):
    """The text cannot be made from these topics."""


def excerpt(topics: Mapping[str, str]) -> bytes:
    """The text as ASCII bytes; ExcerptError for a missing topic, an unknown character or a paragraph in two topics."""
    parts: list[str] = []
    seen: dict[str, str] = {}
    for name in TOPICS:
        if name not in topics:
            raise ExcerptError(f"there is no topic {name!r} in the help of Python {platform.python_version()}")
        topic = topics[name].translate(str.maketrans(SPELLING)).strip("\n")
        if unknown := sorted({c for c in topic if not c.isascii()}):
            raise ExcerptError(f"topic {name!r} holds {unknown[0]!r}: add it to SPELLING")
        for paragraph in topic.split("\n\n"):
            first = seen.setdefault(paragraph, name)
            if first != name and len(paragraph) >= LONG_PARAGRAPH:
                raise ExcerptError(f"topics {first!r} and {name!r} share {paragraph[:40]!r}...: leave one of them out")
        parts.append(topic + "\n")
    return "\n".join(parts).encode("ascii")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 where all went well, 1 where the check failed, 2 where the text cannot be made."""
    from pydoc_data.topics import topics

    parser = argparse.ArgumentParser(description="Make the shipped training text, or check it.")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--check", type=Path, help="file to compare with")
    options = parser.parse_args(arguments)
    if options.out is None and options.check is None:
        parser.error("give --out, --check or both")
    try:
        made = excerpt(topics)
        if options.out is not None:
            options.out.write_bytes(made)
        same = options.check is None or options.check.read_bytes() == made
    except (ExcerptError, OSError) as error:
        print(f"excerpt_topics: {error}", file=sys.stderr)
        return 2
    digest = hashlib.sha256(made).hexdigest()
    print(f"Python {platform.python_version()}: {len(made)} bytes, {len(set(made))} symbols, sha256 {digest}")
    if not same:
        print(f"{options.check} holds something else")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
