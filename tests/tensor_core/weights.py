"""Random matrices that obey an element type's pattern, some chunks with fewer non-zeros than it allows."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from twofour.tensor_core import ELEMENTS, Element

NAMES = sorted(ELEMENTS)
FEW = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def numbers(kind: Element, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Whole numbers from -3 (0 for unsigned types) to 3: every type holds them and every order of summing is exact."""
    low = 0 if kind.name.startswith("u") else -3
    return torch.randint(low, 4, shape, generator=generator).to(torch.float32).to(kind.dtype)


def bits(kind: Element, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any bits at all, infinities and NaN among them."""
    return kind.from_raw(torch.randint(0, 1 << min(kind.bits, 31), shape, generator=generator))


def sparse(kind: Element, rows: int, columns: int, seed: int, fill: float = 0.8, full: bool = False) -> Tensor:
    """A matrix of `kind` (rows, columns) with random kept units; `full`: no kept value is zero."""
    generator = torch.Generator().manual_seed(seed)
    units = kind.chunk // kind.unit
    order = torch.rand(rows, columns // kind.chunk, units, generator=generator).argsort(-1)
    keep = (order < kind.kept // kind.unit).repeat_interleave(kind.unit, -1).view(rows, columns)
    if not full:
        keep &= torch.rand(rows, columns, generator=generator) < fill
    values = kind.raw(numbers(kind, (rows, columns), generator))
    one = kind.raw(torch.ones(1).to(kind.dtype))
    values = torch.where(values == 0, one, values) if full else values
    return kind.from_raw(values * keep)
