"""Mask: how long the 2:4 mask of a weight takes, alone and with packing, against copying it and against torch.topk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cases.shapes import Shape
from twofour import measure, native, patterns
from twofour.errors import MeasureError
from twofour.kernels.nm_compress import nm_compress_reference
from twofour.measure import Record

# copy_ writes to memory in use; clone to fresh memory, as mask and compress do.
MASK, COMPRESS, COPY, CLONE, TOPK = "2:4 mask", "2:4 compress", "copy_", "clone", "torch.topk"


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
        verify(weight)
        with torch.inference_mode():
            return measure.compare(
                {
                    MASK: lambda: pattern.project(weight, absolute=True),
                    COMPRESS: lambda: compress(weight),
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


def compress(weight: Tensor) -> tuple[int, Tensor, Tensor]:
    """Mask and pack in one pass, into fresh memory, as `twofour.packing` does: dropped, values, indices."""
    (rows, columns), extension = weight.shape, native.extension()
    values, indices = torch.empty(rows, columns // 2), torch.empty(rows, (columns + 7) // 8, dtype=torch.uint8)
    row = native.best("nm_compress").index
    dropped = extension.nm_compress(row, weight, values, indices, native.threads())
    return dropped, values, indices


def verify(weight: Tensor) -> None:
    """Refuse to time a mask or a packed weight that is wrong.

    Raises:
        MeasureError: The masks differ, or compress is not its reference.
    """
    masks_agree = torch.equal(by_topk(weight), patterns.parse("2:4").project(weight, absolute=True))
    (dropped, *packed), (expected, *reference) = compress(weight), nm_compress_reference(weight)
    same = dropped == expected and all(map(torch.equal, packed, reference))
    for name, right in ((MASK, masks_agree), (COMPRESS, same)):
        if not right:
            raise MeasureError(
                f"{name} is wrong and is not timed",
                got=f"another result at {tuple(weight.shape)}",
                wanted="that of torch.topk and of nm_compress_reference",
            )


def by_topk(weight: Tensor) -> Tensor:
    """The mask as it is commonly written: the two largest |w| of each group of four, with torch.topk."""
    groups = weight.abs().view(-1, 4)
    keep = torch.zeros_like(groups, dtype=torch.bool)
    return keep.scatter_(1, groups.topk(2, dim=1).indices, True).view(weight.shape)
