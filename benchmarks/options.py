"""Options that commands of the suite share, and what they do with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import linear as linear_case
from cases import records
from cases.columns import headed
from twofour.errors import DataError
from twofour.measure import Record

DTYPES = tuple(linear_case.BYTES)
DtypeOption = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; several, comma separated.")]
ShapesOption = Annotated[str, typer.Option("--shapes", help="A file in benchmarks/shapes, or a path.")]
ThreadsOption = Annotated[str, typer.Option(help="Thread counts, comma separated.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Where the records go: a file or a folder.")
]
RecordOption = Annotated[bool, typer.Option("--record", help="Keep the records in benchmarks/records, in git.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Keep the cells that FILE has already.")]
SecondsOption = Annotated[float, typer.Option(help="Time box of one cell, in seconds.")]


def measured(
    cells: list[dict[str, object]],
    bench: Callable[[dict[str, object]], Record],
    path: Path,
    resume: bool,
    show: Callable[[Sequence[Record], Console], None],
) -> None:
    """Measure the cells that the file lacks, save after each, and show them."""
    show(records.run(cells, bench, path, resume), console())
    console().print(f"records: {path}", highlight=False)


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], path: Path) -> None:
    """Print a table of text and where its record is."""
    table = headed(heads)
    for row in rows:
        table.add_row(*row)
    console().print(table)
    console().print(f"record: {path}", highlight=False)


def place(given: Path | None, name: str, tracked: bool) -> Path:
    """Return where records go: a directory that was given, a file, or the default."""
    path = records.default_path(name, tracked)
    return path if given is None else given / path.name if given.is_dir() else given


def dtypes(text: str, path: Path | None) -> list[str]:
    """Return the types of a comma-separated list.

    Raises:
        DataError: One is not known, or several are to go into one file.
    """
    found = text.split(",")
    if len(found) > 1 and path is not None and not path.is_dir():
        raise DataError("several dtypes do not go into one file", got=str(path), wanted="a folder, or one dtype")
    for name in found:
        if name not in DTYPES:
            raise DataError(f"the dtype {name!r} is not known", got=text, wanted=f"some of {', '.join(DTYPES)}")
    return found


def numbers(text: str) -> list[int]:
    """Return the numbers of a comma-separated list."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of positive whole numbers")
    return [int(part) for part in parts]


def console() -> Console:
    """Return a console that is wide where nobody sees its edge."""
    return Console(width=None if sys.stdout.isatty() else 200)
