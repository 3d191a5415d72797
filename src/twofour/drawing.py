"""Figures as files: matplotlib found or asked for, the same numbers give the same file, a whole file or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofour.errors import TwofourError
from twofour.files import replacing

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "twofour",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}
FORMATS = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
"""What may be drawn, and the metadata that leave the date out: the same numbers draw the same file."""


@contextmanager
def drawn(
    path: str | os.PathLike[str], size: tuple[float, float], kind: type[TwofourError], numbers: str
) -> Iterator[Any]:
    """Give a matplotlib figure to draw on and write it to `path` afterwards.

    Args:
        path: File to write, .svg, .png or .pdf.
        size: Width and height in inches.
        kind: The error to raise.
        numbers: Where the numbers stand that would have been drawn, for whoever has no matplotlib.

    Raises:
        TwofourError: Of `kind`: matplotlib is not installed, or the file cannot be written.
    """
    matplotlib = require_matplotlib(kind, numbers)
    target = require_format(path, kind)
    with matplotlib.rc_context(SETTINGS):
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        yield figure
        try:
            with replacing(target) as temporary:
                figure.savefig(temporary, format=target.suffix[1:], metadata=FORMATS[target.suffix])
        except OSError as error:
            raise _undrawn(kind, target, str(error)) from error


def require_matplotlib(kind: type[TwofourError], numbers: str) -> Any:
    """Return the library that draws; raises `kind`, which names where else the `numbers` stand, without it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise kind(
            "drawing needs matplotlib, which is not installed",
            got=str(error),
            wanted="matplotlib 3",
            remedy=f'pip install "twofour[figures]"; the figures are also in {numbers}',
        ) from error
    return matplotlib


def require_format(path: str | os.PathLike[str], kind: type[TwofourError]) -> Path:
    """Return the path of a figure; raises `kind` where its name is none of one."""
    target = Path(path)
    if target.suffix not in FORMATS:
        raise _undrawn(kind, target, f"a name that ends in {target.suffix!r}")
    return target


def require_drawn(path: str | os.PathLike[str] | None, kind: type[TwofourError], numbers: str) -> None:
    """Refuse, before any long work, what could not be drawn in the end; None is nothing to draw.

    Raises:
        TwofourError: Of `kind`: the name is none of a figure, or matplotlib is not installed.
    """
    if path is not None:
        require_format(path, kind)
        require_matplotlib(kind, numbers)


def _undrawn(kind: type[TwofourError], target: Path, got: str) -> TwofourError:
    wanted = "a .svg, .png or .pdf in a folder that may be written to"
    return kind(f"{target} cannot be drawn", got=got, wanted=wanted, remedy="choose another path")
