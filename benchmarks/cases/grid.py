"""Grid: a Linear compiled with one example token count, measured at all of them against the best dense kernel.

What users see: `compile` has to serve the counts it was not shown, with its Python around it. An A/A run in each cell
says how much of a difference means something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

import twofour
from cases import dense
from cases.linear import Layer, baseline, own_dense
from cases.records import machine_line
from cases.shapes import Shape
from twofour import measure
from twofour.kernels.problem import Problem
from twofour.measure import Record, geometric_mean

COMPILED = "compiled"
ALLOWED = 0.05
"""A cell is slower when it exceeds both this and its own A/A noise."""


def cells(
    shapes: Sequence[Shape], tokens: Sequence[int], threads: Sequence[int], example: int, dtype: str
) -> list[dict[str, object]]:
    """List the cells: all of one shape together, so that it is compiled once."""
    return [
        {
            "case": "grid",
            "dtype": dtype,
            "shape": shape.text,
            "name": shape.name,
            "threads": count,
            "example": example,
            "tokens": number,
        }
        for shape in shapes
        for count in threads
        for number in tokens
    ]


class Bench:
    """Measures cells, keeping the compiled layer of the shape it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at: tuple[object, ...] = ()
        self.layer: Layer | None = None
        self.compiled: nn.Module | None = None

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        dtype, threads = str(cell["dtype"]), int(str(cell["threads"]))
        rows, columns = map(int, str(cell["shape"]).split("x"))
        torch.set_num_threads(threads)
        if self.at != (rows, columns, dtype, threads):
            self.layer = Layer.of(Shape(str(cell["name"]), rows, columns), dtype)
            self.compiled = _compile(self.layer, int(str(cell["example"])), dtype)
            self.at = (rows, columns, dtype, threads)
        assert self.layer and self.compiled
        return _measure(self.layer, self.compiled, cell, self.seconds)


def _compile(layer: Layer, example: int, dtype: str) -> nn.Module:
    model = nn.Linear(layer.shape.columns, layer.shape.rows)
    with torch.no_grad():
        model.weight.copy_(layer.weight)
        model.bias.copy_(layer.bias)
    return twofour.compile(
        twofour.prune(model, "2:4", eligibility="any"), torch.randn(example, layer.shape.columns), dtype
    )


def _measure(layer: Layer, compiled: nn.Module, cell: dict[str, object], seconds: float) -> Record:
    dtype, threads = str(cell["dtype"]), int(str(cell["threads"]))
    x = torch.randn(int(str(cell["tokens"])), layer.shape.columns, generator=torch.Generator().manual_seed(1))
    own = x.bfloat16() if dtype == "bfloat16" and _takes_bfloat16(compiled, x) else x
    with torch.inference_mode():
        candidates: dict[str, list[Callable[[], Any]]] = dense.candidates(
            dtype, layer.weight, layer.bias, x, partial(layer.copies, 1)
        )
        for kernel in own_dense(dtype):
            (weight,) = layer.copies(1, kernel.layout, partial(kernel.prepare, layer.weight))
            candidates[kernel.name] = [partial(kernel.run, x, weight, layer.bias, Problem(layer.shape.rows))]
        candidates = {name: candidates[name] for name in baseline(dtype, candidates)}
        return measure.compare(
            {**candidates, COMPILED: partial(compiled, own)},
            baseline=tuple(candidates),
            seconds=seconds,
            threads=threads,
            clock="thread" if threads == 1 else "wall",
            pin=threads == 1,
            noise=True,
            meta=cell,
        )


def _takes_bfloat16(compiled: nn.Module, x: torch.Tensor) -> bool:
    try:
        with torch.inference_mode():
            return compiled(x[:1].bfloat16()).dtype == torch.bfloat16
    except twofour.errors.TwofourError:
        return False


def slower(record: Record) -> float | None:
    """Return by how much the compiled layer is slower than the best dense kernel, or None within the allowance."""
    excess = 1 / record.ratio(COMPILED) - 1
    return excess if excess > max(ALLOWED, record.noise or 0.0) else None


def show(records: Sequence[Record], console: Console) -> None:
    """Print the geometric mean and every cell that is slower than dense."""
    ratios = [record.ratio(COMPILED) for record in records]
    worst = [(record, found) for record in records if (found := slower(record)) is not None]
    console.print(
        f"\n{len(records)} cells, one example token count {records[0].meta['example']}: best dense / compiled, "
        f"geometric mean {geometric_mean(ratios):.2f}, smallest {min(ratios):.2f}; "
        f"{len(worst)} slower than dense beyond {ALLOWED:.0%} and the A/A noise",
        highlight=False,
        soft_wrap=True,
    )
    for record, found in worst:
        console.print(
            f"  {record.meta['shape']} at {record.meta['tokens']} tokens, {record.threads} threads: {found:.1%} slower "
            f"than {record.fastest(record.baseline)}, noise {record.noise or 0:.1%}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
