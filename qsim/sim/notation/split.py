"""Takes a line apart at blanks, commas or plus signs that stand outside quotes and brackets. Knows no word."""

from __future__ import annotations

from typing import NamedTuple

from qsim.sim.notation.model import Wrong

_CLOSES = {"(": ")", "[": "]"}


class Piece(NamedTuple):
    """A part of a line, and where it begins (columns count from 1)."""

    text: str
    column: int


class Misplaced(Exception):  # noqa: N818 - a note to the reader, which knows the line
    """Quotes or brackets that do not fit, with their column."""

    def __init__(self, column: int, because: str) -> None:
        """Where, and what is wrong."""
        super().__init__(because)
        self.column = column


def without_comment(line: str) -> str:
    """The line up to a # outside quotes."""
    inside = False
    for at, sign in enumerate(line):
        if sign == '"' and not (inside and _escaped(line, at)):
            inside = not inside
        elif sign == "#" and not inside:
            return line[:at]
    return line


def _escaped(line: str, at: int) -> bool:
    """True where an odd number of backslashes stands before ``at``."""
    head = line[:at]
    return (len(head) - len(head.rstrip("\\"))) % 2 == 1


def split(text: str, column: int, at: str) -> list[Piece]:
    """The parts between signs of ``at``, blanks around them taken off; between blanks no part is empty."""
    pieces, start, inside, open_ = [], 0, False, list[tuple[str, int]]()
    for i, sign in enumerate(text):
        if sign == '"' and not (inside and _escaped(text, i)):
            inside = not inside
            quote = i
        elif inside:
            continue
        elif sign in _CLOSES:
            open_.append((_CLOSES[sign], i))
        elif sign in _CLOSES.values():
            if not open_ or open_[-1][0] != sign:
                raise Misplaced(column + i, f'found "{sign}", which closes nothing')
            open_.pop()
        elif sign in at and not open_:
            pieces.append((start, text[start:i]))
            start = i + 1
    if inside:
        raise Misplaced(column + quote, "these quotes do not end on their line")
    if open_:
        raise Misplaced(column + open_[-1][1], f'this bracket has no "{open_[-1][0]}" on its line')
    pieces.append((start, text[start:]))
    found = [Piece(part.strip(), column + begin + len(part) - len(part.lstrip())) for begin, part in pieces]
    return [piece for piece in found if piece.text] if " " in at else found


def parts(text: str, at: str) -> list[str]:
    """The texts of ``split``, for words within a word."""
    try:
        return [piece.text for piece in split(text, 1, at)]
    except Misplaced as error:
        raise Wrong(str(error)) from error
