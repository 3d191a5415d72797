"""What each layer runs: for each of its three products a kernel or a dense implementation, the times, the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PRODUCTS = ("forward", "data", "weight")
"""The products of a Linear in training: Y = X W^T, dX = dZ W, dW = dZ^T X."""


@dataclass(frozen=True)
class Choice:
    """How one product runs.

    Attributes:
        kernel: Name of the row of the kernel table, or of the dense implementation ("torch", "onednn").
        sparse: Whether it is a 2:4 kernel.
        reason: Why.
        dense: The best dense implementation, taken where the kernel cannot be: before a mask is in force, say.
        dense_ms: Its time, milliseconds; None where nothing was measured.
        sparse_ms: Time of the best 2:4 kernel with packing included; None where there is none or nothing was measured.
        kept_ms: Time of the product at kept places alone, which is exact; None where there is none.
    """

    kernel: str
    sparse: bool
    reason: str
    dense: str = "torch"
    dense_ms: float | None = None
    sparse_ms: float | None = None
    kept_ms: float | None = None

    @property
    def ms(self) -> float | None:
        """Time of what runs; None where nothing was measured."""
        return self.sparse_ms if self.sparse else self.dense_ms if self.kernel == self.dense else self.kept_ms

    def __str__(self) -> str:
        known = ("dense", self.dense_ms), ("2:4", self.sparse_ms), ("kept places", self.kept_ms)
        times = [f"{name} {ms:.2f}" for name, ms in known if ms is not None]
        return f"{self.kernel} ({', '.join([*times, self.reason])})"


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        name: Name of the layer.
        shape: (out, in).
        tokens: Rows of the input that was measured; 0 before there was one.
        dtype: Computing type.
        choices: Product (of `PRODUCTS`) -> how it runs.
        pruned: Where its gradient was pruned last; "" where none is.
    """

    name: str
    shape: tuple[int, int]
    tokens: int
    dtype: str
    choices: Mapping[str, Choice]
    pruned: str = ""

    @property
    def dense_ms(self) -> float:
        """Time of the best dense implementations of the three products together; 0 where nothing was measured."""
        return sum(choice.dense_ms or 0.0 for choice in self.choices.values())

    @property
    def chosen_ms(self) -> float:
        """Time of what was chosen together, packing included."""
        return sum(choice.ms or 0.0 for choice in self.choices.values())


@dataclass(frozen=True)
class Plan:
    """What `attach` chose.

    Attributes:
        layers: The layers with sparse weights.
        skipped: Layers that stay as they are -> the reason.
        functions: Functions between the layers, by shape -> what runs them, and why; those that were called
            and served, or left to torch for a reason that is named, and modules whose functions no mode sees.
    """

    layers: tuple[LayerPlan, ...]
    skipped: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            out, columns = layer.shape
            size = f", {layer.tokens} tokens, {layer.dtype}" if layer.tokens else ""
            lines.append(f"{layer.name}  {out} x {columns}{size}")
            lines += [f"  {product:<8} {choice}" for product, choice in layer.choices.items()]
            lines += [f"  pruned   {layer.pruned}"] if layer.pruned else []
        lines += [f"{name}  dense: {reason}" for name, reason in self.skipped.items()]
        lines += [f"{call}  {choice}" for call, choice in self.functions.items()]
        return "\n".join(lines)
