"""`twofour report`: what a command left as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour import report as pages
from twofour.cli.console import JsonFile, progress, say, write
from twofour.report.page import SECTIONS

PAGE = "report.html"


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A folder of optimize, demo or prune, or with records; or a JSON file of them, check or finetune.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page.", show_default=f"{PAGE} in the folder, or beside the file"),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Write one self-contained page about a run: quality, times, sizes, layers, masks, curves, machine."""
    with progress(f"reading {run}"):
        found = pages.read(run)
        target = pages.write(found, out or (run if run.is_dir() else run.parent) / PAGE)
    say(f"wrote {target}")
    sections = [name for name, _, make in SECTIONS if make(found)]
    write(json, {"run": str(run), "out": str(target), "title": found.title, "sections": sections})
