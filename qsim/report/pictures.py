"""Pictures as files: whole or not at all, marked with what they show. Draws nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qsim.errors import OutputError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blank(size: tuple[float, float], *, what: str, layout: Literal["constrained"] | None = None) -> Figure:
    """An empty figure of so many inches at 110 dpi; UsageError where the extra ``plot`` is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise UsageError(f'{what} needs {error.name}; install "qsim[plot]"') from error
    fig = NewFigure(figsize=size, dpi=110, layout=layout)
    FigureCanvasAgg(fig)
    return fig


def is_whole(path: Path, mark: str) -> bool:
    """True where ``path`` is a complete PNG that was drawn with this mark."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    return mark.encode() in data and data.endswith(b"IEND\xaeB`\x82")


def write_picture(fig: Figure, path: Path, *, mark: str) -> None:
    """Write a PNG; the file appears whole or not at all. OutputError where it cannot be written.

    mark: a digest of what is drawn, kept in the file's metadata for ``is_whole``.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        fig.savefig(part, format="png", metadata={"Software": None, "Comment": mark})
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
