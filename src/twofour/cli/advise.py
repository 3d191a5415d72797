"""`twofour advise`: measured per layer, which pattern will go faster on this machine, and why none."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from twofour import compiler, measure
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, say, write
from twofour.cli.options import DenseModel, Skip, counts_of
from twofour.compiler import Advice, AdviceRow
from twofour.compiler.advice import verdict_of
from twofour.compiler.advise import PATTERNS
from twofour.layers.grouped import grouped


def advise(
    source: DenseModel,
    pattern: Annotated[
        list[str] | None,
        typer.Option(help=f"Pattern to measure; may be given several times. [default: {' '.join(PATTERNS)}]"),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Token counts (batch times sequence length; steps of an LSTM), comma separated."
        ),
    ] = "1,8,128",
    skip: Skip = None,
    width: Annotated[
        list[str] | None,
        typer.Option(help="Low bits to measure too, such as w2a2 or w1.58a8; may be given several times."),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help="Inputs that share a scale in these low bits, such as 32, 64 or 128.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's default when left out.")] = None,
    json: JsonFile = None,
) -> None:
    """Measure per layer what patterns would bring on this machine: best dense kernel against best one of each."""
    tokens = tuple(dict.fromkeys(counts_of(batch, ",", "list of positive whole numbers such as 1,8,128", "--batch")))
    if threads is not None:
        measure.require_threads(threads)
        torch.set_num_threads(threads)
    with progress(f"reading {source}"):
        model = sources.resolve(source).model()
    with progress("measuring") as advance:
        options = {"tokens": tokens, "skip": skip or (), "widths": width or (), "group": group, "progress": advance}
        advice = compiler.advise(model, patterns=pattern or PATTERNS, **options)
    show(advice)
    write(json, {"source": source, **advice.to_dict(), "machine": measure.machine()})


def show(advice: Advice) -> None:
    """Print one row for all layers that are alike, then the sum of all layers at each token count."""
    layers: dict[str, list[AdviceRow]] = {}
    for row in advice.rows:
        layers.setdefault(row.layer, []).append(row)
    head = ("layer", "count", "shape", *(f"{count} token{'s'[: count > 1]}" for count in advice.tokens), "verdict")
    cells = [
        ("x".join(map(str, rows[0].shape)), *(_cell(advice, name, count) for count in advice.tokens), verdict_of(rows))
        for name, rows in layers.items()
    ]
    print_table(
        f"each cell: best dense ms, then how many times as fast with {', '.join(advice.patterns)}",
        head,
        [(group.pattern, group.count, *cells[group.members[0]]) for group in grouped(list(layers), cells)],
        right=range(3, 3 + len(advice.tokens)),
    )
    if advice.skipped:
        print_table("", ("left dense", "count", "reason"), advice.left_dense())
    for count in advice.tokens:
        say(advice.summary(count))
    threads = "1 thread" if advice.threads == 1 else f"{advice.threads} threads"
    say(f"measured with {threads}, {advice.isa} kernels, on {measure.machine()['cpu']}")


def _cell(advice: Advice, layer: str, tokens: int) -> str:
    rows = advice.of(layer, tokens)
    ratios = (f"{rows[name].ratio:.2f}x" if name in rows else "-" for name in advice.patterns)
    return " ".join((f"{min(row.dense_ms for row in rows.values()):.3f}", *ratios))
