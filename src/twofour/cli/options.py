"""Options that several commands share, and the texts of SHAPE and AXIS."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from twofour.errors import SourceError, one_of
from twofour.measure.machine import free_memory_bytes

Globs = list[str] | None
Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")]
Skip = Annotated[Globs, typer.Option(metavar="GLOB", help="Leave these layers dense.")]
DenseModel = Annotated[str, typer.Argument(metavar="SOURCE", help="The dense model.")]
SampleShape = Annotated[
    str | None, typer.Option("--input", metavar="SHAPE", help="Shape of one sample of real numbers, 3x224x224.")
]
Embeddings = Annotated[
    str | None, typer.Option("--embeddings", metavar="TYPE", help="Keep tables of embeddings in bfloat16 or int8.")
]
Smooth = Annotated[
    bool, typer.Option("--smooth", help="Smooth outliers on the data before int8 rounds them, where that errs less.")
]

LARGEST = 2**63 - 1
"""Bytes that torch can count."""


def require_room(*sizes: int, item: int, virtual: bool = False) -> None:
    """Refuse an example of sizes that memory does not hold.

    Args:
        sizes: Its axes, the batch first.
        item: Bytes of a value.
        virtual: It has no values (meta device): torch only has to count its bytes.

    Raises:
        SourceError: It does not fit.
    """
    need, free = math.prod(sizes) * item, LARGEST if virtual else free_memory_bytes() or LARGEST
    if need > free:
        raise SourceError(
            "the input is larger than memory",
            got=f"{' x '.join(map(str, sizes))}: {_gigabytes(need)} GB; {_gigabytes(free)} GB "
            + ("are what an address reaches" if virtual else "are free"),
            wanted="the input of one forward pass",
            remedy="give the shape of one sample, such as --input 3x224x224 or --length 128, and a smaller --batch",
        )


def _gigabytes(count: int) -> str:
    return f"{count // 10**9}" if count >= 10**10 else f"{count / 1e9:.3g}"


def counts_of(text: str, separator: str, what: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers from 1 in the text of an option.

    Raises:
        typer.BadParameter: It is no `what`.
    """
    try:
        counts = tuple(int(part) for part in text.split(separator))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} is no {what}", param_hint=option)
    return counts


def shape_of(given: str | None) -> tuple[int, ...] | None:
    """Return the sizes in a text such as 3x224x224; as `counts_of`."""
    return None if given is None else counts_of(given, "x", "shape such as 3x224x224", "--input")


def axis_of(text: str) -> tuple[str, int]:
    """Return the glob and the axis of an option such as --axis 1 or --axis "GLOB=0".

    Raises:
        SourceError: The axis is neither 0 nor 1.
    """
    glob, _, axis = text.rpartition("=")
    remedy = '1 or "GLOB=1" for a Linear or a convolution, 0 or "GLOB=0" for Hugging Face\'s Conv1D'
    one_of(f"--axis {text} cannot be read", axis, ("0", "1"), SourceError, remedy)
    return glob or "*", int(axis)
