"""CuTe layouts, shape:stride, read from what CuTe itself printed (cute_layouts.txt), and evaluated."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
Tree = int | tuple["Tree", ...]


@dataclass(frozen=True)
class Layout:
    """A function of nested coordinates: the sum of each coordinate times its stride, the first the fastest."""

    shape: Tree
    stride: Tree

    def offsets(self) -> Tensor:
        """Offsets of all coordinates, one axis for each mode at the top: int64 (size of mode 0, size of mode 1, ..)."""
        assert isinstance(self.shape, tuple) and isinstance(self.stride, tuple)
        modes = [_flat(shape, stride) for shape, stride in zip(self.shape, self.stride, strict=True)]
        total = torch.zeros((), dtype=torch.int64)
        for mode in modes:
            total = total.unsqueeze(-1) + mode
        return total


def layouts() -> dict[str, Layout]:
    """Every layout in cute_layouts.txt by its name."""
    return dict(read(line) for line in (FOLDER / "cute_layouts.txt").read_text().splitlines())


def read(line: str) -> tuple[str, Layout]:
    """Read "name shape:stride"; CuTe writes static numbers with an underscore in front."""
    name, text = line.split(" ", 1)
    shape, stride = re.sub(r"_(\d)", r"\1", text).split(":")
    return name, Layout(ast.literal_eval(shape), ast.literal_eval(stride))


def _flat(shape: Tree, stride: Tree) -> Tensor:
    if isinstance(shape, int):
        assert isinstance(stride, int)
        return torch.arange(shape) * stride
    assert isinstance(stride, tuple)
    total = torch.zeros(1, dtype=torch.int64)
    for part_shape, part_stride in zip(shape, stride, strict=True):
        part = _flat(part_shape, part_stride)
        total = (total.unsqueeze(0) + part.unsqueeze(1)).flatten()
    return total
