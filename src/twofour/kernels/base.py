"""The protocol of a kernel: one row of the table, which says where it runs, prepares a weight and multiplies by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from twofour import native
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.packing import Packed


@dataclass(frozen=True)
class Row(ABC):
    """What is said of every implementation of every operation.

    Attributes:
        name: `<operation>_<pattern>_<dtype>_<design>__<hardware>`; hardware stands after the double underscore.
        operation: What it computes: "nm_matmul", "dense_matmul", "nm_conv" or "dense_conv".
        pattern: Pattern of the weights it takes, "any" for every N:M, "dense" for none.
        dtype: Computing type.
        device: "cpu" or "cuda".
        isa: Instruction set it needs (`native.supports`), "any" when torch chooses; of the GPU its least architecture.
        layout: Order of the weight's bytes; kernels of one layout share a prepared weight.
    """

    name: str
    operation: str
    pattern: str
    dtype: str
    device: str
    isa: str
    layout: str

    @property
    def sparse(self) -> bool:
        """Whether it leaves out the weights that the pattern prunes."""
        return self.pattern != "dense"

    def unavailable(self) -> str | None:
        """Return why this kernel cannot run here and now, or None when it can."""
        return None if self.isa == "any" else native.unavailable(self.isa)


@dataclass(frozen=True)
class Kernel(Row):
    """One implementation of a product."""

    def refuses(self, packed: Packed) -> str | None:
        """Return why this kernel cannot multiply by `packed`, or None when it can."""
        if self.pattern not in ("any", packed.header.pattern):
            return f"takes {self.pattern} weights, not {packed.header.pattern}"
        if self.dtype != packed.header.dtype:
            return f"computes in {self.dtype}, the weight is {packed.header.dtype}"
        return self.unavailable()

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return how many bytes a prepared weight of this size has at least."""
        return 4 * out_features * in_features

    def remark(self, in_features: int) -> str:
        """Return what this kernel does differently for a weight of this width, for the plan; "" where nothing."""
        return ""

    @abstractmethod
    def prepare(self, weight: Packed | Tensor) -> Tensor:
        """Return the weight in this kernel's layout: canonical form for sparse kernels, (out, in) for dense ones."""

    def restore(self, prepared: Tensor) -> Packed | Tensor:
        """Return the inverse of `prepare`: canonical form for sparse kernels, (out, in) for dense ones."""
        dense = prepared.to_dense() if prepared.is_mkldnn else prepared
        columns = getattr(prepared, "columns", None)  # a row that widens its weight notes what it was given
        return dense if columns is None else dense[:, :columns]

    @abstractmethod
    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        epilogue: Epilogue = PLAIN_EPILOGUE,
        other: Tensor | None = None,
    ) -> Tensor:
        """Return epilogue(x @ W.T + bias).

        Args:
            x: (tokens, in), float32 or this row's dtype.
            weight: What `prepare` returned.
            bias: float32 (out,) or None.
            out_features: Rows of W.
            epilogue: What happens to the product before it is stored.
            other: Second operand of the epilogue, (tokens, out) in x's dtype.

        Returns:
            (tokens, out) in x's dtype.
        """
