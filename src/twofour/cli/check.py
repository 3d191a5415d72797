"""`twofour check`: is what was promised as sparse really sparse?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from twofour import checker
from twofour.checker import RULES, Report
from twofour.cli import source as sources
from twofour.cli.console import Advance, JsonFile, print_table, progress, say, write
from twofour.cli.options import Globs, axis_of
from twofour.errors import SourceError

BROKEN = 1
FILES = "a .safetensors file, a folder or an .onnx file"


def check(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The model or the weights to check; an .onnx file too.")
    ],
    expect: Annotated[
        str | None, typer.Option(metavar="PATTERN", help='Take PATTERN, for example "2:4", as promised everywhere.')
    ] = None,
    include: Annotated[
        Globs, typer.Option(metavar="GLOB", help="Look at these weights of a file or folder only.")
    ] = None,
    axis: Annotated[
        Globs,
        typer.Option(metavar="AXIS", help='Reduction axis of a bare file\'s weights: 1, 0 or "GLOB=0".'),
    ] = None,
    runtimes: Annotated[bool, typer.Option("--runtimes", help="Also print the verdict of each runtime.")] = False,
    json: JsonFile = None,
) -> None:
    """Say per weight whether it is sparse as promised, along the right axis. Exit: 0 kept, 1 broken, 2 unreadable."""
    with progress(f"checking {source}") as advance:
        report = _report(source, expect, include or (), dict(map(axis_of, axis or ())), advance)
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
        print_table("", ("runtime", "types", "source of its rule"), [(r.runtime, r.dtypes, r.source) for r in RULES])
    say(str(report))


def _report(source: str, expect: str | None, include: Sequence[str], axes: dict[str, int], advance: Advance) -> Report:
    path = Path(source)
    if path.suffix != ".onnx" or path.is_dir():
        found = sources.resolve(source, FILES)
        if found.kind == "function":
            if include or axes:
                raise SourceError(
                    "--include and --axis are for files of weights",
                    got=source,
                    wanted=FILES,
                )
            return checker.check(found.model(), expect=expect, progress=advance)
        assert found.path is not None, found
        path = found.path
    return checker.check(path, expect=expect, include=include, axes=axes, progress=advance)
