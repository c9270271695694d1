"""Tables that fit the room there is: columns that do not stand side by side go below. Knows no study, cuts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2
"""Spaces between two columns."""
KEY = 32
"""What a key takes at most, however wide the table."""


class Column(NamedTuple):
    """A heading of any number of lines, and a cell for each row. A word on the left, a number on the right."""

    heading: str
    cells: Sequence[str]
    left: bool = False

    @property
    def width(self) -> int:
        """Columns of text that it needs to stay on one line a row."""
        from rich.cells import cell_len

        return max(cell_len(line) for text in (self.heading, *self.cells) for line in text.split("\n"))


def packed(title: str, keys: Sequence[Column], columns: Sequence[Column], *, width: int) -> Iterator[Table]:
    """As few tables as hold all columns in their order; each begins with the keys.

    width: columns of text there are. A key is wrapped beyond ``key_room(width)``; a column that does not fit beside the
    keys alone is wrapped at its spaces. Cells are plain text: brackets in them are no markup.
    """
    used = sum(min(key.width, key_room(width)) + GAP for key in keys)
    rest = max(1, width - used)
    parts: list[list[Column]] = [[]]
    left = rest
    for column in columns:
        if parts[-1] and column.width > left:
            parts.append([])
            left = rest
        parts[-1].append(column)
        left -= column.width + GAP
    for number, part in enumerate(parts):
        more = f" ({number + 1} of {len(parts)})" if len(parts) > 1 else ""
        yield _table(title + more, [*((key, key_room(width)) for key in keys), *((column, rest) for column in part)])


def key_room(width: int) -> int:
    """Columns of text for a key, where a table has so many."""
    return max(8, min(width // 3, KEY))


def _table(title: str, columns: Sequence[tuple[Column, int]]) -> Table:
    """columns: each with the width that it may take."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title), title_justify="left", show_edge=False, pad_edge=False, box=None, padding=(0, GAP, 0, 0)
    )
    lines = max(column.heading.count("\n") for column, _ in columns)
    for column, most in columns:
        fits = column.width <= most
        table.add_column(
            Text("\n" * (lines - column.heading.count("\n")) + column.heading),
            justify="left" if column.left or not fits else "right",  # lines of a list begin below each other
            no_wrap=fits,
            overflow="fold",
            width=min(column.width, most),
        )
    for cells in zip(*(column.cells for column, _ in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lists of words as lines in which the n-th words of all rows stand below each other, right-justified."""
    longest = max(map(len, rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(longest)]
    return [" ".join(word.rjust(w) for word, w in zip(row, widths, strict=False)) for row in rows]
