"""What the kernels of a layer are timed on: its sizes, the tokens, and what it does to its product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.dense_matmul import group_of
from twofour.kernels.problem import Problem
from twofour.packing import Packed


@dataclass(frozen=True, eq=False)
class Case:
    """What is measured: one layer at one token count.

    Attributes:
        problem: Rows of the weight, the input's range, what the layer does to its product.
        columns: Inputs.
        bias: float32 (out,) or None.
        tokens: Rows of the input.
        activations: dtype of the input.
    """

    problem: Problem
    columns: int
    bias: Tensor | None
    tokens: int
    activations: torch.dtype

    def text(self, dtype: str, weight: Packed | Tensor | BitWeight) -> str:
        """Name the case for the cache: a dense weight in a file's groups is the one in floats that became it."""
        problem, epilogue = self.problem, self.problem.epilogue
        ranged = "" if problem.quantization.dynamic else "/static"
        answers = problem.quantization.y_dtype
        ranged += "" if answers is None else f"-{answers}".replace("torch.", "")
        pattern = f"/{weight.header.pattern}" if isinstance(weight, Packed) and weight.header.sparse else ""
        pattern = f"/{weight.pattern}" if isinstance(weight, BitWeight) and weight.pattern != "dense" else pattern
        grouped = weight if isinstance(weight, BitWeight) else weight.header if isinstance(weight, Packed) else None
        dense = (
            isinstance(weight, Packed) and not weight.header.sparse and weight.header.group == group_of(self.columns)
        )
        group = f"/g{grouped.group}" if grouped is not None and grouped.group and not dense else ""
        group += "z" if isinstance(weight, Packed | BitWeight) and weight.zeros is not None else ""
        held = str(self.activations).removeprefix("torch.")
        parts = f"{problem.rows}x{self.columns}{'+bias' if self.bias is not None else ''}@{self.tokens}"
        return f"{parts}{pattern}/{dtype}{ranged}{group}/{held}/{epilogue.activation}/{epilogue.combine}"

    def operands(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Return random input, and the epilogue's second operand where it has one."""
        generator = torch.Generator().manual_seed(0)
        features = (self.columns,) if self.problem.epilogue.combine == "none" else (self.columns, self.problem.rows)
        x, *others = (
            torch.randn(self.tokens, size, generator=generator, dtype=torch.float32, device="cpu") for size in features
        )
        if self.activations is torch.uint8:
            return tuple(t.to(device) for t in (as_bytes(x), *(other.to(self._second) for other in others)))
        return tuple(t.to(device, self.activations) for t in (x, *others))

    @property
    def _second(self) -> torch.dtype:
        """What a product of bytes combines with: the answer's dtype, float32 where that is whole."""
        answer = self.problem.quantization.y_dtype
        return answer if answer is not None and answer.is_floating_point else torch.float32


def as_bytes(x: Tensor) -> Tensor:
    """Return numbers of about -4 ... 4 as uint8 around 128: an input of whole numbers to time a product on."""
    return (x * 32 + 128).round().clamp(0, 255).to(torch.uint8)
