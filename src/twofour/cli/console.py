"""What the commands print: tables and results to stdout, progress and errors to stderr, JSON to a file."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twofour.errors import MeasureError, SourceError, TwofourError
from twofour.files import LARGEST_LIST, read_json
from twofour.progress import Progress

# Without a terminal rich assumes 80 columns and would cut the tables that scripts read.
PIPED_WIDTH = 200

_OF_MODELS = ("model_type", "architectures", "weight_map", "added_tokens", "tokenizer_class")
"""What the JSON files beside a model's weights hold at their top, and no report does."""


def _replaceable(path: Path | None) -> Path | None:
    """Refuse, before any work, to write a report over a file that is no report: SOURCE itself is the likely one."""
    try:
        if path is None or not path.is_file() or not path.stat().st_size:
            return path
    except OSError:  # a name that no file can have: writing it says so
        return path
    try:
        content = read_json(path, LARGEST_LIST)
    except (OSError, ValueError):
        got = "a file that holds no JSON"
    else:
        known = next((key for key in _OF_MODELS if key in content), "") if isinstance(content, dict) else "a list"
        if not known:
            return path
        got = "a JSON list" if known == "a list" else f"a JSON file of a model: it has `{known}`"
    raise SourceError(
        f"--json {path} exists already and is not overwritten",
        got=got,
        wanted="a new file, or an earlier report",
        remedy="choose another --json",
    )


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.", callback=_replaceable),
]


Advance = Callable[[int, int, str], None]
"""Tells the progress bar how many steps are done, how many there are, and what comes next."""


class _Output(Console):
    """Standard output: once its reader is gone (`| head`), the rest is dropped and the command goes on."""

    def on_broken_pipe(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def output() -> Console:
    """Return the console for results."""
    return _Output(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


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


class ToStderr(logging.Handler):
    """Prints what a stage logs as a line of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        warn(record.getMessage())


def write(path: Path | None, content: object) -> None:
    """Write `content` where `--json` asks for it.

    Raises:
        SourceError: The file cannot be written.
    """
    if path is not None:
        from twofour import measure  # with torch, a second and a half that a help page does not wait for

        try:
            measure.write_json(path, measure.without_nan(content))
        except (MeasureError, OSError) as error:
            raise SourceError(
                f"--json {path} cannot be written",
                got=(error.got if isinstance(error, MeasureError) else None) or str(error),
                wanted="the path of a new or old file, in a folder that can be written to",
                remedy="choose another --json",
            ) from error
        errors().print(Text(f"wrote {path}"), soft_wrap=True)


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Show how far a step is: a bar with the time left on a terminal, plain lines elsewhere."""
    with Progress() as shown:
        shown.begin(title)
        yield shown.move


@contextmanager
def remedies_of_options(remedies: Mapping[str, str]) -> Iterator[None]:
    """Let an error that passes through name options: the remedy whose key stands in its own, which names arguments."""
    try:
        yield
    except TwofourError as error:
        said = error.remedy or ""
        error.remedy = next((remedy for key, remedy in remedies.items() if key in said), error.remedy)
        raise
