"""Mask: how long the 2:4 mask of a weight takes, against copying the weight and against torch.topk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cases.shapes import Shape
from twofour import measure, patterns
from twofour.measure import Record

MASK, COPY, CLONE, TOPK = "2:4 mask", "copy_", "clone", "torch.topk"


def cells(shapes: Sequence[Shape], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells."""
    return [
        {"case": "mask", "dtype": "float32", "shape": shape.text, "name": shape.name, "threads": count}
        for shape in shapes
        for count in threads
    ]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns = map(int, str(cell["shape"]).split("x"))
        threads = int(str(cell["threads"]))
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        out, pattern = torch.empty_like(weight), patterns.parse("2:4")
        assert torch.equal(by_topk(weight), pattern.project(weight, absolute=True)), "the masks differ"
        with torch.inference_mode():
            return measure.compare(
                {
                    MASK: lambda: pattern.project(weight, absolute=True),
                    COPY: lambda: out.copy_(weight),
                    CLONE: lambda: weight.clone(),
                    TOPK: lambda: by_topk(weight),
                },
                baseline=COPY,
                seconds=self.seconds,
                threads=threads,
                clock="thread" if threads == 1 else "wall",
                pin=threads == 1,
                meta=cell,
            )


def by_topk(weight: Tensor) -> Tensor:
    """The mask as it is commonly written: the two largest |w| of each group of four, with torch.topk."""
    groups = weight.abs().view(-1, 4)
    keep = torch.zeros_like(groups, dtype=torch.bool)
    return keep.scatter_(1, groups.topk(2, dim=1).indices, True).view(weight.shape)
