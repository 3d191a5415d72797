"""What a kernel is asked to do with its operands: one object from the layer to the native call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.quantization import DYNAMIC, Quantization

MaybeTensor = Tensor | None
"""A bias, or a second operand."""


@dataclass(frozen=True)
class Problem:
    """A product y = epilogue(x @ W.T + bias).

    Attributes:
        rows: Rows of W: the outputs.
        epilogue: What happens to the product before it is stored.
        quantization: Rows in whole numbers: the input's range, and the dtype of the answer.
    """

    rows: int
    epilogue: Epilogue = PLAIN_EPILOGUE
    quantization: Quantization = DYNAMIC

    def finish(self, y: Tensor, other: Tensor | None) -> Tensor:
        """Return the epilogue of a product in plain torch, for rows that cannot do it while they store."""
        return y if self.epilogue.plain else self.epilogue.apply(y, other)
