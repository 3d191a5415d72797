"""Operands of the sweeps: weights and inputs by their sizes, memory full of NaN, outputs between guards."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from twofour import native
from twofour.patterns import parse

EPSILON = torch.finfo(torch.float32).eps
THREADS = (1, 2)
HALVES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 4), (5, 12), (193, 8), (16, 64), (17, 68), (33, 260), (96, 32), (72, 112), (385, 132), (400, 4)]
EXT = native.extension()


@cache
def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@cache
def sparse(out: int, columns: int, seed: int = 0) -> Tensor:
    weight = random(out, columns, seed=seed)
    return weight * parse("2:4").project(weight, absolute=True)


def amid_nan(values: Tensor) -> Tensor:
    """Return equal rows, each with NaN before and behind it."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 24), float("nan")).to(values.dtype)
    wide[..., 8:-16] = values
    return wide[..., 8:-16]


class Guarded:
    """An output between bytes that must stay as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._bytes = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        start = 64 + -self._bytes.data_ptr() % 64
        self._inside = slice(start, start + size)
        self.view = self._bytes[self._inside].view(dtype).view(shape)

    def checked(self) -> Tensor:
        outside = self._bytes.clone()
        outside[self._inside] = 0xFF
        assert (outside == 0xFF).all(), "written outside of the answer"
        return self.view


def with_ties(count: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(seed)).float()
