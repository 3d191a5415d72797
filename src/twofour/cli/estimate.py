"""`twofour estimate`: predicted per layer, what 2:4 would bring on a machine that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from twofour import hardware
from twofour.cli import data as inputs
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, remedies_of_options, say, write
from twofour.cli.options import DenseModel, SampleShape, Skip, require_room, shape_of
from twofour.drawing import require_drawn
from twofour.errors import HardwareError
from twofour.hardware import Estimate, Row, StepRow, TrainingEstimate
from twofour.hardware.estimate import TWO_FOUR
from twofour.hardware.machine import SPARSE_DTYPES
from twofour.hardware.passes import OPTIMIZER, OPTIMIZERS

REMEDIES = {
    "give tokens=": "--input SHAPE for real numbers, --length for token ids, --data for inputs of any form; without "
    "any its Linear layers alone are priced, on --batch rows",
    "training=True)": "--input SHAPE, --length N or --data DATA, and --batch",
}


LENGTH = 128
"""Tokens of a text of --data at most."""


Training = Annotated[bool, typer.Option("--training", help="A training step: three products a layer, all passes.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw roofline and speed-up (.svg, .png, .pdf); matplotlib.")
]
Optimizer = Annotated[
    str | None, typer.Option(help=f"Of a training step: {', '.join(OPTIMIZERS)}; {OPTIMIZER} if none is named.")
]


def estimate(
    source: DenseModel,
    machine: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(hardware.MACHINES)}.")],
    batch: Annotated[int, typer.Option(min=1, help="Samples; rows of each linear layer where no input is known.")] = 1,
    given: SampleShape = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample, where the model takes token ids.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Inputs as for `twofour prune`, two samples of which are taken.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Computing type: {', '.join(SPARSE_DTYPES)}.")] = "bfloat16",
    skip: Skip = None,
    pattern: Annotated[
        str, typer.Option(metavar="PATTERN", help="2:4, 2:4+25%, or blocks from 16 x 16 on: block:32x32@0.9.")
    ] = TWO_FOUR,
    training: Training = False,
    optimizer: Optimizer = None,
    plot: Plot = None,
    json: JsonFile = None,
) -> None:
    """Predict per layer and for the whole model the time on a GPU that is not here, dense and sparse. Nothing runs."""
    found = hardware.machine(machine)
    shape = shape_of(given)
    _require_one(shape, length, data)
    _require_step(training, optimizer, plot)
    with progress(f"reading {source}"):
        origin = sources.resolve(source)
        model = origin.model()
    if data is None:
        example = _example(model, batch, shape, length)
    else:
        example, _ = inputs.traced(model, origin, None, LENGTH, data, what="A model is followed with its input")
    with remedies_of_options(REMEDIES):
        options: dict[str, Any] = {"dtype": dtype, "skip": skip or (), "pattern": pattern}
        options |= {"tokens": batch if example is None else None, "training": training, "optimizer": optimizer}
        result: Estimate | TrainingEstimate = hardware.estimate(model, example, machine=found, **options)
    show_step(result) if isinstance(result, TrainingEstimate) else show(result)
    if plot is not None:
        hardware.plot(found, plot, dtype=dtype, rows=result if isinstance(result, Estimate) else None)
    write(json, {"source": source, "batch": batch, **result.to_dict()})


def _require_step(training: bool, optimizer: str | None, plot: Path | None) -> None:
    """Refuse what a training step has not, or it alone has, and a figure that could not be drawn.

    Raises:
        typer.BadParameter: A training step is to be drawn, or there is none and an optimiser is named.
        HardwareError: The figure's name is none, or matplotlib is missing.
    """
    require_drawn(plot, HardwareError, "the file of --json")
    if training and plot is not None:
        raise typer.BadParameter("a training step is not drawn", param_hint="--plot")
    if optimizer is not None and not training:
        raise typer.BadParameter("an optimiser is of a training step: add --training", param_hint="--optimizer")


def _require_one(shape: tuple[int, ...] | None, length: int | None, data: str | None) -> None:
    """Refuse more than one form of input.

    Raises:
        typer.BadParameter: There is more than one.
    """
    if shape is not None and length is not None:
        raise typer.BadParameter("a model takes real numbers or token ids, not both", param_hint="--length")
    if data is not None and (shape or length):
        raise typer.BadParameter("the samples of --data have sizes of their own", param_hint="--data")


def show(result: Estimate) -> None:
    """Print one line per distinct product, then the whole model."""
    low = any(row.width for row in result.rows)
    widths = ("low bits ms",) if low else ()
    head = ("layer", "times", "M x N x K", "dense ms", "bound", *widths, f"{result.pattern} ms", "bound", "ratio", "")
    right = (1, 2, 3, 5, 6, 8) if low else (1, 2, 3, 5, 7)
    print_table("each product, predicted", head, [_cells(rows, low) for rows in result.grouped()], right=right)
    if result.other_ms:
        say(f"everything else, as traffic to memory with nothing fused: {result.other_ms:.3f} ms")
    if not result.traced:
        say("no input was given (--input, --length, --data): each linear layer was taken once, nothing else was")
        if result.left_out:
            say(f"left out of all figures: {', '.join(result.left_out)}")
    if result.loses:
        say(f"sparse does not pay in: {', '.join(result.loses)}")
    say(result.summary())


def show_step(result: TrainingEstimate) -> None:
    """Print each layer's products, the parts of the dense step, the sparse ones, and the whole step."""
    head = ("layer", "product", "times", "M x N x K", "dense ms", "W 2:4 ms", "dZ 2:4 ms", "passes ms", "")
    lines = [_step_cells(rows) for rows in result.grouped()]
    print_table("each product of a training step, predicted", head, lines, right=(2, 3, 4, 5, 6, 7))
    parts = [(name, f"{ms:.3f}", f"{result.shares[name]:.1%}") for name, ms in result.parts.items()]
    print_table("the dense step", ("part", "ms", "share"), parts, right=(1, 2))
    sparse = [
        (
            v.name,
            f"{v.best_ms:.3f}",
            f"{v.pass_ms:.3f}",
            f"{v.saved:.1%}",
            f"{len(v.taken)} of {v.fits}",
            f"{v.every_ms:.3f}",
        )
        for v in result.variants
    ]
    titles = ("sparse where that wins", "ms", "passes ms", "saved", "products", "all of them, ms")
    print_table("the sparse step", titles, sparse, right=(1, 2, 3, 4, 5))
    for note in result.notes:
        say(note)
    say(result.summary())


def _step_cells(rows: Sequence[StepRow]) -> tuple[str, ...]:
    row = rows[0]
    size = f"{row.m:g} x {row.n:g} x {row.k:g}" + (f" ({row.batch})" if row.batch > 1 else "")
    ways = [row.way("W"), row.way("dZ")]
    sparse = [f"{way.ms:.4f}" if way is not None else "-" for way in ways]
    spent = ", ".join(f"{way.pass_ms:.4f}" for way in ways if way is not None) or "-"
    reasons = dict.fromkeys(f"{way.operand}: {way.reason}" for way in row.sparse if way.reason)
    return (row.layer, row.product, str(len(rows)), size, f"{row.dense_ms:.4f}", *sparse, spent, "; ".join(reasons))


def _cells(rows: Sequence[Row], low: bool) -> tuple[str, ...]:
    row = rows[0]
    widths = ("-" if row.low_bits_ms is None else f"{row.low_bits_ms:.4f} {row.width}",) if low else ()
    size = f"{row.m} x {row.n} x {row.k}" + (f" ({row.batch})" if row.batch > 1 else "")
    sparse = ("-", "-", "-", row.reason)
    if row.sparse_ms is not None and row.sparse_bound is not None and row.ratio is not None:
        verdict = "" if row.wins else "dense stays faster" if row.ratio < 1 else "too close to tell"
        sparse = (f"{row.sparse_ms:.4f}", row.sparse_bound, f"{row.ratio:.2f}x", verdict)
    return (row.layer, str(len(rows)), size, f"{row.dense_ms:.4f}", row.bound, *widths, *sparse)


def _example(model: nn.Module, batch: int, shape: tuple[int, ...] | None, length: int | None) -> Any:
    sizes = (batch, *(shape or (length or 1,)))
    require_room(*sizes, item=8, virtual=True)
    if shape is not None:
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return torch.empty((batch, *shape), dtype=kind, device="meta")
    return None if length is None else torch.empty((batch, length), dtype=torch.int64, device="meta")
