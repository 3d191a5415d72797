"""The dense product as torch does it by default (MKL for float32 on x86)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.operands import plain_bias, require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import pages
from twofour.packing import Packed, dense_of


@dataclass(frozen=True)
class PlainMatmul(Kernel):
    """torch.nn.functional.linear on the weight as it is."""

    looks_up: ClassVar[bool] = True

    def is_own(self, dtype: torch.dtype) -> bool:
        """Whether torch runs it anyway: always, where this computes what the layer does."""
        return True

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight (out, in), contiguous and not the caller's own: what he does to his later must not show."""
        return Prepared(self, pages.copy(dense_of(weight)))

    def rows(self, prepared: Prepared, places: Tensor, width: int) -> Tensor:
        """Return rows of the weight; see `Kernel.rows`. A place that is none is torch's IndexError."""
        return embedding(places, prepared.tensor)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        require_memory(x)
        y = torch.nn.functional.linear(x, weight.tensor, plain_bias(bias, problem.rows))
        return problem.finish(y, other)


PLAIN = PlainMatmul("dense_matmul_f32_linear__torch", "dense_matmul", "dense", "float32", "cpu", "any", "dense")
