"""`twofour explain`: what compile makes of a model's graph, in words and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twofour import compiler, measure
from twofour.cli import data as inputs
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, say, write
from twofour.cli.options import Embeddings, SampleShape
from twofour.compiler import Plan
from twofour.drawing import require_drawn
from twofour.errors import SourceError
from twofour.graph.plot import readable


def explain(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model, dense or sparse.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the graph before and after (.svg, .png, .pdf); matplotlib."),
    ] = None,
    given: SampleShape = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sample, where the model takes token ids.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Inputs as for `twofour prune`, two samples of which are taken.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Computing type: float32, bfloat16, int8 or int4.")] = "float32",
    embeddings: Embeddings = None,
    rules: Annotated[str, typer.Option(help="Rules of algebra: exact or close (docs/rewriting.md).")] = "exact",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's default when left out.")] = None,
    json: JsonFile = None,
) -> None:
    """Say what compile makes of a model's graph: calls, bytes, rewrites, engine; draw it before and after."""
    if threads is not None:
        measure.require_threads(threads)
        torch.set_num_threads(threads)
    require_drawn(out, SourceError, "the file of --json")
    found = sources.resolve(source)
    with progress(f"reading {source}"):
        model = found.model()
    example, _ = inputs.traced(
        model, found, given, length, data, what="A graph is captured by running the model", batch=batch
    )
    fast: Any = compiler.compile(model, example, dtype, embeddings=embeddings, graph=True, rules=rules)
    plan: Plan = fast.plan
    show(plan)
    if out is not None:
        plan.draw(out)
        say(f"drawn: {out}")
    write(json, {"source": source, **plan.to_dict(), "machine": measure.machine()})


def show(plan: Plan) -> None:
    """Print calls by operator before and after, then what the plan says of the graph."""
    if (report := plan.account) is None:
        say("the model has no weights that compile serves, so no graph was captured")
        return
    for name, outline in report.outlines.items():
        title = f"{name}: {outline.computing} calls, {readable(outline.nbytes)} written"
        print_table(
            title, ("operator", "calls"), [(label, str(count)) for label, count in outline.counts()], right=(1,)
        )
    for line in report.lines():
        say(line)
