"""Shapes of real models, read from benchmarks/shapes/*.txt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofour.errors import DataError

FOLDER = Path(__file__).resolve().parent.parent / "shapes"
CONVOLUTIONS = ("resnet50.txt",)
"""Lists with columns of their own, read by `read_convolutions`."""


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


@dataclass(frozen=True)
class Convolution:
    """A Conv2d that keeps the size over its stride: weight (out, in, kernel, kernel), input (height, width)."""

    name: str
    rows: int
    columns: int
    kernel: int
    stride: int
    height: int
    width: int

    @property
    def text(self) -> str:
        """The geometry as text, "64x64x3x3/1 @56x56"."""
        weight = f"{self.rows}x{self.columns}x{self.kernel}x{self.kernel}"
        return f"{weight}/{self.stride} @{self.height}x{self.width}"

    @property
    def work(self) -> int:
        """Multiplications of one image, dense."""
        pixels = -(-self.height // self.stride) * -(-self.width // self.stride)
        return self.rows * self.columns * self.kernel**2 * pixels


def read(name: str) -> list[Shape]:
    """Read a list of shapes: lines `name out in`, # starts a comment.

    Raises:
        DataError: There is no such list, or a line is malformed.
    """
    return [Shape(name, *sizes) for name, *sizes in _lines(name, "name out in")]


def read_convolutions(name: str) -> list[Convolution]:
    """Read a list of convolutions: lines `name out in kernel stride height width`.

    Raises:
        DataError: There is no such list, or a line is malformed.
    """
    return [Convolution(name, *sizes) for name, *sizes in _lines(name, "name out in kernel stride height width")]


def _lines(name: str, columns: str) -> list[tuple[Any, ...]]:
    path = Path(name) if Path(name).is_file() else FOLDER / name
    if not path.is_file():
        known = ", ".join(sorted(entry.name for entry in FOLDER.glob("*.txt")))
        raise DataError(f"there is no list of shapes {name!r}", got=str(path), wanted=f"one of {known}, or a path")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != len(columns.split()) or not all(word.isdigit() for word in words[1:]):
            raise DataError(f"{path}:{number} is malformed", got=line, wanted=columns)
        found.append((words[0], *map(int, words[1:])))
    return found


def read_all() -> list[Shape]:
    """Return the Linear shapes of every list in benchmarks/shapes, each once."""
    found: dict[str, Shape] = {}
    for path in sorted(FOLDER.glob("*.txt")):
        if path.name not in CONVOLUTIONS:
            found |= {shape.text: shape for shape in read(path.name) if shape.text not in found}
    return list(found.values())
