"""`twofour advise`: measured per layer, will 2:4 go faster on this machine, and why not."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from twofour import compiler, measure
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, say, write
from twofour.cli.options import DenseModel, Skip, counts_of
from twofour.compiler import Advice, AdviceRow
from twofour.compiler.advise import WORTH
from twofour.compiler.grouped import grouped


def advise(
    source: DenseModel,
    batch: Annotated[
        str, typer.Option(metavar="LIST", help="Token counts (batch times sequence length), comma separated.")
    ] = "1,8,128",
    skip: Skip = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's default when left out.")] = None,
    json: JsonFile = None,
) -> None:
    """Measure per layer what 2:4 would bring on this machine: best dense kernel against best sparse one."""
    tokens = tuple(dict.fromkeys(counts_of(batch, ",", "list of positive whole numbers such as 1,8,128", "--batch")))
    if threads is not None:
        measure.require_threads(threads)
        torch.set_num_threads(threads)
    with progress(f"reading {source}"):
        model = sources.resolve(source).model()
    with progress("measuring") as advance:
        advice = compiler.advise(model, tokens=tokens, skip=skip or (), progress=advance)
    show(advice)
    write(json, {"source": source, **advice.to_dict(), "machine": measure.machine()})


def show(advice: Advice) -> None:
    """Print one row for all layers that are alike, then the sum of all layers at each token count."""
    layers: dict[str, list[AdviceRow]] = {}
    for row in advice.rows:
        layers.setdefault(row.layer, []).append(row)
    head = ("layer", "count", "shape", *(f"{count} token{'s'[: count > 1]}" for count in advice.tokens), "verdict")
    cells = [
        (
            "x".join(map(str, rows[0].shape)),
            *(f"{row.dense_ms:.3f} {row.sparse_ms:.3f} {row.ratio:.2f}x" for row in rows),
            _verdict(rows),
        )
        for rows in layers.values()
    ]
    print_table(
        "each cell: best dense ms, best 2:4 ms, ratio, of one layer",
        head,
        [(group.pattern, group.count, *cells[group.members[0]]) for group in grouped(list(layers), cells)],
        right=range(3, 3 + len(advice.tokens)),
    )
    if advice.skipped:
        print_table("", ("left dense", "count", "reason"), advice.left_dense())
    for count in advice.tokens:
        dense, best = advice.total(count)
        say(
            f"{count} tokens: these layers take {dense:.3f} ms dense, {best:.3f} ms with the better of dense and 2:4 "
            f"in each: {dense / best:.2f}x"
        )
    say(f"measured with {advice.threads} threads, {advice.isa} kernels, on {measure.machine()['cpu']}")


def _verdict(rows: list[AdviceRow]) -> str:
    """Say one sentence for the layer when its token counts agree, else one per token count."""
    faster = [str(row.tokens) for row in rows if row.ratio >= WORTH]
    if len(faster) == len(rows):
        return "2:4 is faster"
    if len(rows) == 1 or not faster:
        return rows[0].verdict if len(rows) == 1 else "dense stays: 2:4 is nowhere faster"
    return f"2:4 is faster at {', '.join(faster)}, dense elsewhere"
