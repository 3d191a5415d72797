"""Check: how many bytes of a file a second of one core examines, each dtype, legal and dense, along either axis."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

import twofour
from cases.columns import headed
from cases.table import machine_line
from twofour import measure, patterns
from twofour.checker import Report
from twofour.checkpoints import Checkpoint
from twofour.errors import MeasureError
from twofour.measure import Record

CHECK, READ, TORCH = "check", "read", "torch"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
CONTENTS = ("2:4", "dense", "2:4 along axis 0", "2:4 convolution")
TENSORS = 2
"""Tensors of a file: one of 16.8 million values each."""


def cells(dtypes: Sequence[str], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells."""
    return [
        {"case": "check", "dtype": dtype, "model": content, "threads": count}
        for dtype in dtypes
        for content in CONTENTS
        for count in threads
    ]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell: the whole of `twofour.check` on a file that is in the page cache."""
        content, threads = str(cell["model"]), int(str(cell["threads"]))
        tensor = values(content).to(DTYPES[str(cell["dtype"])])
        axes = {"*": 0 if content == "2:4 along axis 0" else 1}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            save_file({f"{i}.weight": tensor.clone() for i in range(TENSORS)}, path)
            opened = Checkpoint.open(path)
            verify(twofour.check(path, axes=axes), content)
            calls = {
                CHECK: lambda: twofour.check(path, axes=axes),
                READ: lambda: [entry.bytes().clone() for entry in opened.entries.values()],
            }
            if cell["dtype"] not in ("float8_e4m3fn", "int8"):
                calls[TORCH] = lambda: [by_torch(opened.read(name), axes["*"]) for name in opened.entries]
            with torch.inference_mode():
                return measure.compare(
                    calls,
                    baseline=READ,
                    seconds=self.seconds,
                    threads=threads,
                    clock="thread" if threads == 1 else "wall",
                    pin=threads == 1,
                    meta={**cell, "bytes": opened.nbytes},
                )


def values(content: str) -> Tensor:
    """Return float32 values of one tensor."""
    shape = (2048, 912, 3, 3) if content == "2:4 convolution" else (4096, 4096)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20
    if content == "dense":
        return weight
    axis = 0 if content == "2:4 along axis 0" else 1
    last = weight.movedim(axis, -1).contiguous()
    keep = patterns.parse("2:4").project(last, absolute=True)
    return torch.where(keep, last, 0.0).movedim(-1, axis).contiguous()


def by_torch(weight: Tensor, axis: int) -> tuple[int, int]:
    """Count the legal groups and the zeros in plain torch: a part of what check says."""
    nonzero = weight.movedim(axis, -1) != 0
    legal = nonzero.unflatten(-1, (-1, 4)).sum(-1, dtype=torch.uint8) <= 2
    return int(legal.sum()), int(nonzero.sum())


def verify(report: Report, content: str) -> None:
    """Refuse to time a check that is wrong.

    Raises:
        MeasureError: It calls a legal weight broken or a dense one legal.
    """
    if len(report.layers) != TENSORS or any(found.legal != (content != "dense") for found in report.layers):
        raise MeasureError(
            "check is wrong and is not timed", got=report.summary, wanted=f"{TENSORS} weights that are {content}"
        )


def show(records: Sequence[Record], console: Console) -> None:
    """Print a table."""
    heads = "dtype", "content", "threads", "check GB/s", "copy GB/s", "groups and zeros in torch GB/s"
    table = headed(heads, words=2)
    for record in records:
        size = float(str(record.meta["bytes"])) / 1e9
        speeds = [f"{size / record.median(n):.2f}" if n in record.timings else "-" for n in (CHECK, READ, TORCH)]
        table.add_row(str(record.meta["dtype"]), str(record.meta["model"]), str(record.threads), *speeds)
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
