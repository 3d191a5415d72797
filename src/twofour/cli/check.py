"""`twofour check`: is what was promised as sparse really sparse?"""

from __future__ import annotations

from typing import Annotated

import typer

from twofour import legality
from twofour.cli import source as sources
from twofour.cli.screen import JsonFile, print_table, progress, say, write
from twofour.legality import Report

BROKEN = 1


def check(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model or the weights to check.")],
    expect: Annotated[
        str | None, typer.Option(metavar="PATTERN", help='Take PATTERN, for example "2:4", as promised everywhere.')
    ] = None,
    runtimes: Annotated[bool, typer.Option("--runtimes", help="Also print the verdict of each runtime.")] = False,
    json: JsonFile = None,
) -> None:
    """Say per weight whether it is sparse as promised, along the right axis. Exit: 0 kept, 1 broken, 2 unreadable."""
    with progress(f"checking {source}"):
        report = _report(sources.resolve(source), expect)
    show(report, runtimes)
    write(json, {"source": source, **report.to_dict()})
    if not report.ok:
        raise typer.Exit(BROKEN)


def show(report: Report, runtimes: bool = False) -> None:
    """Print the verdict of each runtime where asked for, then the report, whose last line is its verdict."""
    if runtimes:
        fits = [(found.name, fit) for found in report.layers for fit in found.fits]
        head = ("weight", "runtime", "types", "aligned", "ready", "reason")
        words = {True: "yes", False: "no"}
        rows = [(name, f.runtime, f.dtypes, words[f.aligned], words[f.ready], f.reason) for name, f in fits]
        print_table("", head, rows)
    say(str(report))


def _report(source: sources.Source, expect: str | None) -> Report:
    if source.kind != "file":
        return legality.check(source.model(), expect=expect or source.promise() or None)
    weights = source.weights()
    # Packed whole numbers (int8, int4) are weights too; their zeros are the same in floating point.
    tensors = {name: t.float() if name in weights.packed else t for name, t in weights.tensors.items()}
    return legality.check_weights(tensors, expect=expect or weights.promise or None, axes=weights.axes)
