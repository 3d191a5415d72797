"""What every row of the table that runs on an NVIDIA GPU shares: where it runs, and which of its ways it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import gpu

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Computing types of 16 bits."""

Configuration = tuple[int, ...]
"""One way of running a row at a shape, such as (algorithm, split of the inputs, mode of the split)."""


@dataclass(frozen=True)
class CudaKernel(Kernel):
    """A product on the GPU.

    Attributes:
        capability: Least compute capability.
        triton: Whether it is written in Triton.
    """

    capability: tuple[int, int] = (8, 0)
    triton: bool = False

    def unavailable(self) -> str | None:
        """Return why this kernel cannot run here and now, or None when it can."""
        return gpu.unavailable(self.capability, triton=self.triton)

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """What an input may be; float32 is rounded to the row's type on the way in."""
        return torch.float32, *HALVES.values()

    def configurations(self, rows: int, columns: int, tokens: int) -> Sequence[Configuration]:
        """Return the ways worth trying for this product; empty where there is one way."""
        return ()

    def run_as(
        self,
        way: Configuration,
        x: Tensor,
        weight: Prepared,
        bias: MaybeTensor,
        problem: Problem,
        other: MaybeTensor = None,
    ) -> Tensor:
        """Do what `run` does in one of `configurations`."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight (rows, columns) that a prepared one stands for, on its device: for gradients and files."""


_biases = cast("MutableMapping[Tensor, tuple[tuple[int, torch.dtype, int], Tensor]]", WeakTensorKeyDictionary())


def held_bias(bias: Tensor | None, size: int, dtype: torch.dtype) -> Tensor | None:
    """Return a bias in `dtype`, padded with zeros to `size`; kept while it lives, or each call would convert it."""
    if bias is None:
        return None
    wanted = size, dtype, bias._version if not bias.is_inference() else 0
    known = _biases.get(bias)
    if known is None or known[0] != wanted:
        known = wanted, functional.pad(bias.detach(), (0, size - len(bias))).to(dtype)
        _biases[bias] = known
    return known[1]


def padded(x: Tensor, tokens: int, columns: int) -> Tensor:
    """Return x (tokens, in), contiguous, its sizes padded with zeros to multiples of `tokens` and to `columns`."""
    more = -len(x) % tokens, columns - x.shape[1]
    return functional.pad(x, (0, more[1], 0, more[0])) if any(more) else x.contiguous()


def rounded_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below `size`."""
    return -(-size // multiple) * multiple
