"""Permutation: how long the search for an order of the channels takes, and how much of the loss the order wins back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from twofour import measure
from twofour.errors import MeasureError
from twofour.measure import Record
from twofour.structure.permutation import Permutation, reference, search

GOLDEN = "128x64"
SHAPES = f"{GOLDEN},384x1536,1024x1024,4096x4096"
WINDOWS, ESCAPES, THREE, DEFAULT = "windows of 8", "100 escapes", "windows of 12", "default"
PUBLISHED = {WINDOWS: 0.355, THREE: 0.366}
"""Efficacy in apex permutation_tests/README; its swaps with 1000 escapes reach 0.360."""


def cells(shapes: Sequence[str], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells."""
    return [{"case": "permutation", "shape": shape, "threads": count} for shape in shapes for count in threads]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        shape, threads = str(cell["shape"]), int(str(cell["threads"]))
        scores, found = matrix(shape), dict[str, Permutation]()
        candidates = {DEFAULT: keeping(found, DEFAULT, lambda: search(scores, "2:4"))}
        if shape == GOLDEN:
            candidates = {
                WINDOWS: keeping(found, WINDOWS, lambda: search(scores, "2:4", escapes=0)),
                ESCAPES: keeping(found, ESCAPES, lambda: search(scores, "2:4", escapes=100)),
                THREE: keeping(found, THREE, lambda: search(scores, "2:4", escapes=0, window=12)),
            }
        meta = dict(cell)
        record = measure.compare(
            candidates,
            baseline=next(iter(candidates)),
            seconds=self.seconds,
            repeats=20 if scores.numel() < 1 << 22 else 2,
            warmup=0,
            threads=threads,
            clock="thread" if threads == 1 else "wall",
            pin=threads == 1,
            meta=meta,
        )
        for name, result in found.items():
            verify(scores, result, PUBLISHED.get(name, 0.0) if shape == GOLDEN else 0.0)
            meta[f"efficacy of {name}"] = round(result.efficacy, 4)
        return measure.Record(**{**vars(record), "meta": meta})


def keeping(found: dict[str, Permutation], name: str, call: Callable[[], Permutation]) -> Callable[[], None]:
    """Return a call that keeps its result."""

    def run() -> None:
        found[name] = call()

    return run


def matrix(shape: str) -> Tensor:
    """Return the golden matrix, or normal values with channels and rows of uneven sizes, as weights have."""
    rows, columns = map(int, shape.split("x"))
    if shape == GOLDEN:
        np.random.seed(1)
        return torch.from_numpy(np.random.rand(rows, columns)).float()
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    scale = (normal(rows, 8) @ normal(8, columns) / 6 + 0.4 * normal(1, columns)).exp()
    return (normal(rows, columns) * scale).abs()


def verify(scores: Tensor, found: Permutation, least: float) -> None:
    """Refuse a result that is no permutation, that keeps something else than it says, or too little.

    Raises:
        MeasureError: It is so.
    """
    whole = torch.equal(found.order.sort().values, torch.arange(scores.shape[1]))
    kept = reference.kept(scores[:, found.order].numpy(), 2, 4)
    if not whole or abs(kept - found.after) > 1e-6 * kept or found.efficacy < least - 6e-4:
        raise MeasureError(
            "the permutation is wrong and its time is not kept",
            got=f"efficacy {found.efficacy:.4f}, {kept} kept",
            wanted=f"an order of all columns that keeps {found.after}, efficacy {least}",
        )


def show(records: Sequence[Record], console: Console) -> None:
    """Print a table."""
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(("rows x channels", "threads", "search", "seconds", "efficacy")):
        table.add_column(name, justify="left" if index in (0, 2) else "right")
    for record in records:
        for name in record.timings:
            efficacy = float(str(record.meta[f"efficacy of {name}"]))
            row = str(record.meta["shape"]), str(record.threads), name, f"{record.median(name):.4g}", f"{efficacy:.1%}"
            table.add_row(*row)
    console.print(table)
