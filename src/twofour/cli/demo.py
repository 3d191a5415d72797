"""`twofour demo`: the whole pipeline on real data in one to four minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour import demo as pipeline
from twofour.cli.console import JsonFile, write


def demo(
    data: Annotated[str, typer.Option(help='"digits" or "fashion-mnist" (folder in TWOFOUR_DATA).')] = "digits",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results; new or empty.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the weights and the data order.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, with a network too small to judge.")] = False,
    json: JsonFile = None,
) -> None:
    """Train, prune, train again, compile, measure and save on real data; one table, with a dense control beside."""
    summary = pipeline.demo(data, out=out, seed=seed, quick=quick)
    write(json, summary.to_dict())
