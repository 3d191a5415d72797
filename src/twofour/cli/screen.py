"""What the commands print: tables and results to stdout, progress and errors to stderr, JSON to a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from twofour import measure
from twofour.errors import MeasureError, SourceError, TwofourError

# Without a terminal rich assumes 80 columns and would cut the tables that scripts read.
PIPED_WIDTH = 200

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")]


class Advance(Protocol):
    """Tells the progress bar that `done` of `total` steps are done and what comes next."""

    def __call__(self, done: int, total: int, what: str = "") -> None:
        """Move the bar."""
        ...


def output() -> Console:
    """Return the console for results."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def errors() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPED_WIDTH, highlight=False)


def print_error(error: TwofourError) -> None:
    """Print an error in its own form: what, got, wanted, try."""
    kind = type(error).__name__
    errors().print(Text.assemble((f"{kind}: ", "bold red"), str(error)), soft_wrap=True)


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table; the columns in `right` are aligned to the right. Cells are plain text, never markup."""
    if title:  # a table's own title is wrapped to the table's width
        say(title)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    output().print(table)


def say(text: str) -> None:
    """Print a plain line to stdout, never wrapped, so that scripts can read it."""
    output().print(Text(text), soft_wrap=True)


def warn(text: str) -> None:
    """Print a plain line to stderr."""
    errors().print(Text(text), soft_wrap=True)


def write(path: Path | None, content: object) -> None:
    """Write `content` where `--json` asks for it.

    Raises:
        SourceError: The file cannot be written.
    """
    if path is not None:
        try:
            measure.write_json(path, without_nan(content))
        except (MeasureError, OSError) as error:
            raise SourceError(
                f"--json {path} cannot be written",
                got=(error.got if isinstance(error, MeasureError) else None) or str(error),
                wanted="the path of a new or old file, in a folder that can be written to",
                remedy="choose another --json",
            ) from error
        errors().print(Text(f"wrote {path}"), soft_wrap=True)


def without_nan(content: Any) -> Any:
    """Return JSON-ready values with NaN and infinities as text, since JSON has no numbers for them."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Show a spinner, and a bar with the time left once the number of steps is known."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {what}".rstrip())

        yield advance
