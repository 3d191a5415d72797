"""Shapes of real models, read from benchmarks/shapes/*.txt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twofour.errors import DataError

FOLDER = Path(__file__).resolve().parent.parent / "shapes"


@dataclass(frozen=True)
class Shape:
    """A Linear layer: weight (out, in)."""

    name: str
    rows: int
    columns: int

    @property
    def text(self) -> str:
        """The shape as text, "3072x768"."""
        return f"{self.rows}x{self.columns}"


def read(name: str) -> list[Shape]:
    """Read a list of shapes: lines `name out in`, # starts a comment.

    Raises:
        DataError: There is no such list, or a line is malformed.
    """
    path = Path(name) if Path(name).is_file() else FOLDER / name
    if not path.is_file():
        known = ", ".join(sorted(entry.name for entry in FOLDER.glob("*.txt")))
        raise DataError(f"there is no list of shapes {name!r}", got=str(path), wanted=f"one of {known}, or a path")
    shapes = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or not (words[1].isdigit() and words[2].isdigit()):
            raise DataError(f"{path}:{number} is malformed", got=line, wanted="name out in")
        shapes.append(Shape(words[0], int(words[1]), int(words[2])))
    return shapes
