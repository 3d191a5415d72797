"""What the kernels of a layer are timed on: its sizes, the tokens, and what it does to its product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.epilogue import Epilogue
from twofour.packing import Packed


@dataclass(frozen=True, eq=False)
class Case:
    """What is measured: one layer at one token count."""

    rows: int
    columns: int
    bias: Tensor | None
    tokens: int
    activations: torch.dtype
    epilogue: Epilogue

    def text(self, dtype: str, weight: Packed | Tensor) -> str:
        """Name the case for the cache."""
        group = f"/g{weight.header.group}" if isinstance(weight, Packed) and weight.header.group else ""
        group += "z" if isinstance(weight, Packed) and weight.zeros is not None else ""
        held = str(self.activations).removeprefix("torch.")
        parts = f"{self.rows}x{self.columns}{'+bias' if self.bias is not None else ''}@{self.tokens}"
        return f"{parts}/{dtype}{group}/{held}/{self.epilogue.activation}/{self.epilogue.combine}"

    def operands(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Return random input, and the epilogue's second operand where it has one."""
        generator = torch.Generator().manual_seed(0)
        features = (self.columns,) if self.epilogue.combine == "none" else (self.columns, self.rows)
        drawn = (
            torch.randn(self.tokens, size, generator=generator, dtype=torch.float32, device="cpu") for size in features
        )
        return tuple(x.to(device, self.activations) for x in drawn)
