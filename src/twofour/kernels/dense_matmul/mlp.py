"""Two dense float32 products in a row as one native call, by strips: what is between them never exists whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.float32_rows import Float32Matmul
from twofour.kernels.dense_matmul.native_dense import foreign
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.norm import RowNorm
from twofour.kernels.norm import norm as normalise
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor

_NO_NORM = (-1, None, None, 0.0, False)


@dataclass(frozen=True)
class Mlp:
    """y = combine(act(x W1^T + b1) [* (x Wg^T + bg)] W2^T + b2, other): the MLP of a transformer, gated or not.

    Attributes:
        kernel: What multiplies: all weights are in its layout.
        first: W1, (hidden, in).
        gate: Wg, (hidden, in), or None.
        last: W2, (out, hidden).
        hidden: Rows of W1.
        rows: Rows of W2.
        activation: Of the first product: a key of `epilogue.ACTIVATIONS`.
        combine: Of the last one with its second operand: a key of `epilogue.COMBINES`.
        biases: float32 (hidden,), (hidden,) and (out,), or None each.
    """

    kernel: Float32Matmul
    first: Prepared
    gate: Prepared | None
    last: Prepared
    hidden: int
    rows: int
    activation: str
    combine: str
    biases: tuple[MaybeTensor, MaybeTensor, MaybeTensor]

    def run(
        self,
        x: Tensor,
        other: MaybeTensor = None,
        before: RowNorm | None = None,
        after: RowNorm | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute; see `reference`.

        Args:
            x: float32 (tokens, in), any row stride.
            other: float32 (tokens, out) where `combine` needs one.
            before: Normalisation of x's rows, which the products read.
            after: Normalisation of the answer's rows.
            keep: Whether the answer is wanted beside its norm; else the norm is left in its place.

        Returns:
            The answer, and its norm; the same tensor without `after` or unless `keep`.

        Raises:
            KernelError: An operand does not fit, or a weight was prepared for another kernel.
        """
        epilogue = Epilogue(combine=self.combine)
        epilogue.require(other, (x.shape[0], self.rows))
        x, other = together(x), None if other is None else together(other)
        y = torch.empty(x.shape[0], self.rows, dtype=torch.float32, device="cpu")
        normed = torch.empty_like(y) if after is not None and keep else y
        first_bias, gate_bias, last_bias = self.biases
        gate = None if self.gate is None else self.gate.tensor
        done = native.extension().dense_mlp(
            *(self.kernel.index, x, self.first.tensor, first_bias, gate, gate_bias, self.last.tensor, last_bias, y),
            *(self.hidden, list(ACTIVATIONS).index(self.activation), epilogue.codes[1], other),
            *_of(before),
            *_of(after),
            *(None if after is None else normed, native.threads()),
        )
        if not done:
            raise foreign(self.kernel, self.first.tensor, self.hidden, x.shape[1])
        return y, normed

    def reference(
        self, x: Tensor, other: MaybeTensor = None, before: RowNorm | None = None, after: RowNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same in plain torch, one operator after the other."""
        read = x if before is None else normalise(x, before.weight, before.bias, before.eps, before.centred)
        first, gate, last = (None if w is None else w.restore() for w in (self.first, self.gate, self.last))
        linear = torch.nn.functional.linear
        assert isinstance(first, Tensor) and isinstance(last, Tensor)
        between = ACTIVATIONS[self.activation](linear(read, first, self.biases[0]))
        if gate is not None:
            assert isinstance(gate, Tensor)
            between = between * linear(read, gate, self.biases[1])
        y = linear(between, last, self.biases[2])
        y = y if other is None else COMBINES[self.combine](y, other)
        return y, y if after is None else normalise(y, after.weight, after.bias, after.eps, after.centred)


def _of(norm: RowNorm | None) -> tuple[Any, ...]:
    """Return a normalisation as the native call takes it."""
    if norm is None:
        return _NO_NORM
    row = native.best("norm", dtype="float32").index
    return row, norm.weight, norm.bias, norm.eps, norm.centred
