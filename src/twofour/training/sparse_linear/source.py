"""One product as it is called, and the source of its operand that may be sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from twofour.kernels import Kernel
from twofour.training.sparse_linear import implementations
from twofour.training.sparse_linear.implementations import matrix, names


class Call(NamedTuple):
    """One product of one layer in one step.

    Attributes:
        product: One of `PRODUCTS`.
        left: X (..., in) of "forward"; dZ, (samples, tokens, out) of "data" and (tokens, out) of "weight".
        right: W (out, in) of "forward" and "data"; X (tokens, in) of "weight".
        dense: Name -> dense implementation, of left and right.
        bias: Of "forward", (out,) or None.
        dtype: Of the answer; None: that of `left`.
        obstacle: Why this call in particular has no sparse operand, or "".
    """

    product: str
    left: Tensor
    right: Tensor
    dense: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    obstacle: str = ""

    @property
    def tokens(self) -> int:
        """Rows of `left`."""
        return self.left.numel() // self.left.shape[-1]


def forward_call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Call:
    """Return the call of X W^T + bias; x (..., in)."""
    dense = {name: partial(implementations.forward, name, bias=bias) for name in names(x)}
    return Call("forward", x, weight, dense, bias)


def data_gradient_call(gradient: Tensor, weight: Tensor) -> Call:
    """Return the call of dZ W; gradient (..., out)."""
    # The last axis but one stands for the pixels of a convolution, those before it for the samples.
    left = gradient.reshape(-1, gradient.shape[-2] if gradient.ndim > 1 else 1, gradient.shape[-1])
    return Call("data", left, weight, {name: partial(implementations.data_gradient, name) for name in names(left)})


def weight_gradient_call(gradient: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Call:
    """Return the call of dZ^T X, answered in `dtype`; gradient (..., out), x (..., in)."""
    dense = {name: partial(implementations.weight_gradient, name) for name in names(gradient)}
    return Call("weight", matrix(gradient), matrix(x), dense, dtype=dtype)


class Source:
    """Where a product gets its operands from; this one leaves both as they are.

    Attributes:
        same: Whether a sparse product gives the dense ones' numbers.
    """

    same: ClassVar[bool] = True

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """Return the rows that can multiply by the sparse operand, and why there are none: "" where none is meant."""
        return [], ""

    def takes(self, kernel: Kernel, call: Call) -> bool:
        """Whether a row that was chosen can run this call; else the best dense implementation does."""
        return True

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return left and right for a dense implementation."""
        return call.left, call.right

    def packed(self, kernel: Kernel, call: Call) -> Tensor:
        """Return the sparse operand in a row's layout."""
        raise NotImplementedError(kernel.name)

    def multiply(self, kernel: Kernel, packed: Tensor, call: Call) -> Tensor:
        """Return the product of what `packed` returned and the other operand; leading axes may be flattened."""
        raise NotImplementedError(kernel.name)

    def trial(self) -> Self:
        """Return what is used once for measuring: the training must not see that it was."""
        return copy.copy(self)


EXACT = Source()
"""Of a product whose operands are dense."""
