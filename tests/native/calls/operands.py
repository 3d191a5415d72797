"""What the calls of native operations are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.packing import layout_header

Call = tuple[str, Callable[..., Any], list[Any]]

EXT = native.extension()


def header(dtype: str, layout: str, rows: int, columns: int, size: int) -> Tensor:
    """Return a buffer of a layout, to be written."""
    head = torch.frombuffer(bytearray(layout_header("2:4", dtype, layout, rows, columns)), dtype=torch.uint8)
    return torch.cat([head, torch.zeros(size, dtype=torch.uint8)])


def sparse(rows: int, columns: int) -> Tensor:
    """Return a 2:4 weight."""
    return torch.randn(rows, columns) * (torch.arange(columns) % 4 < 2)
