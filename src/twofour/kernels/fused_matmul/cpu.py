"""A product with the norms beside it, or two in a row by strips, as one native call: nothing between exists whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.epilogue import ACTIVATIONS, PLAIN_EPILOGUE, Epilogue
from twofour.kernels.norm import DTYPES, RowNorm
from twofour.kernels.norm import norm as normalise
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_input, quantize_output
from twofour.packing import dense_of

_NO_NORM = (-1, None, None, 0.0, False)


@dataclass(frozen=True)
class Factor:
    """One of the products: y = x @ W.T + bias.

    Attributes:
        kernel: A row with a `native_product`.
        weight: W as it reads it, dense or packed.
        bias: float32 (rows,) or None.
        rows: Rows of W.
        quantization: int8: the range of x, and of y where that is uint8.
    """

    kernel: Kernel
    weight: Prepared
    bias: MaybeTensor
    rows: int
    quantization: Quantization = DYNAMIC

    @property
    def place(self) -> int:
        """Its kernel's place among the native products."""
        place = self.kernel.native_product
        assert place is not None, self.kernel
        return place

    @property
    def operands(self) -> tuple[Tensor, MaybeTensor]:
        """What it multiplies by, and its bias."""
        return self.weight.tensor, self.bias

    def dense(self) -> Tensor:
        """Return W: float32 (rows, in)."""
        weight = self.weight.restore()
        return dense_of(weight).float()

    def product(self, x: Tensor) -> Tensor:
        """Return x @ W.T + bias in float32, of x as a static range has it."""
        if not self.quantization.dynamic:
            q, scale, zero = quantize_input(x, self.quantization)
            x = scale * (q.float() - zero)
        return torch.nn.functional.linear(x, self.dense(), self.bias)


@dataclass(frozen=True)
class FusedMatmul:
    """y = epilogue(act(x W1^T + b1) [* (x Wg^T + bg)] W2^T + b2), the MLP of a transformer, or epilogue(x W2^T + b2).

    Attributes:
        first: W1, (hidden, in), or None.
        gate: Wg, (hidden, in), or None.
        last: W2, (out, hidden), or (out, in) without `first`.
        activation: Of the first product: a key of `epilogue.ACTIVATIONS`.
        epilogue: Of the last one.
    """

    first: Factor | None
    gate: Factor | None
    last: Factor
    activation: str = "none"
    epilogue: Epilogue = PLAIN_EPILOGUE

    def run(
        self,
        x: Tensor,
        other: MaybeTensor = None,
        before: RowNorm | None = None,
        after: RowNorm | None = None,
        *,
        keep: bool = False,
        whole: Tensor | None = None,
        real: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Compute; see `reference`.

        Args:
            x: (tokens, in), any row stride: float32, or bfloat16 where every kernel reads it; `other` is too. Or uint8
                of a static range: then `other` and the answer are of the last product's answer to that.
            other: (tokens, out) where the epilogue needs one.
            before: Normalisation of x's rows, which the products read.
            after: Normalisation of the answer's rows.
            keep: Whether the answer is wanted beside its norm; else the norm is left in its place.
            whole: uint8 (tokens, out) that takes the norm as bytes, by the scale and zero point of `after`.
            real: Whether the norm itself is wanted; it must be without `whole`.

        Returns:
            The answer, and its norm; the same tensor without `after`, unless `keep` or without `real`.

        Raises:
            KernelError: An operand does not fit, or a weight was prepared for another kernel.
        """
        self.epilogue.require(other, (x.shape[0], self.last.rows))
        x, other = together(x), None if other is None else together(other)
        between = x.dtype if self.first is None else self.first.quantization.answer(x.dtype)
        y = torch.empty(x.shape[0], self.last.rows, dtype=self.last.quantization.answer(between), device="cpu")
        normed = torch.empty_like(y) if after is not None and keep and real else y
        parts = self.first, self.gate, self.last
        ranged = (self.last if self.first is None else self.first).quantization, self.last.quantization
        native.extension().fused_matmul(
            *(-1 if part is None else part.place for part in parts),
            *(x, *(one for part in parts for one in ((None, None) if part is None else part.operands)), y),
            *(0 if self.first is None else self.first.rows, list(ACTIVATIONS).index(self.activation)),
            *(*self.epilogue.codes, other),
            *_of(before, x.dtype),
            *_of(after, y.dtype),
            normed if after is not None and real else None,
            *(*(one.codes for one in ranged), self.first is not None and between is torch.uint8),
            *(whole, 1.0, 0) if after is None else (whole, after.scale, after.zero),
            native.threads(),
        )
        return y, normed

    def reference(
        self, x: Tensor, other: MaybeTensor = None, before: RowNorm | None = None, after: RowNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same in plain torch, float32, one operator after the other; static ranges round as they do."""
        read = x if before is None else normalise(x, before.weight, before.bias, before.eps, before.centred)
        if self.first is not None:
            between = ACTIVATIONS[self.activation](self.first.product(read))
            between = between if self.gate is None else between * self.gate.product(read)
            read = quantize_output(between, self.first.quantization)
        y = self.epilogue.apply(self.last.product(read), other)
        return y, y if after is None else normalise(y, after.weight, after.bias, after.eps, after.centred)


def _of(norm: RowNorm | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a normalisation of rows of a dtype as the native call takes it.

    Raises:
        KernelError: The rows are bytes.
    """
    if norm is not None and dtype is torch.uint8:
        raise KernelError(
            "a fused product does not normalise bytes",
            got="before= and x of torch.uint8",
            wanted="x of torch.float32 or torch.bfloat16",
            remedy="hand over the bytes of the norm's answer, without before=",
        )
    if norm is None or dtype not in DTYPES:  # of another dtype the call refuses x
        return _NO_NORM
    row = native.best("norm", dtype=DTYPES[dtype]).index
    return row, norm.weight, norm.bias, norm.eps, norm.centred
