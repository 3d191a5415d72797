"""One product as it is called, and the source of its operand that may be sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from twofour.kernels import Kernel, Prepared
from twofour.kernels.nm_conv_gradient import DataGradient
from twofour.training.sparse_linear import implementations


class Convolution(NamedTuple):
    """What the data gradient of a convolution is, beside the product that it is for each tap.

    Attributes:
        weight: (out, in, [taps]).
        problem: Its geometry and images.
        last: Whether the images are channels-last, as the answer is to be.
    """

    weight: Tensor
    problem: DataGradient
    last: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """What a choice depends on beside the sizes of the product."""
        return self.problem.geometry, self.problem.images[1:], self.last

    def multiply(self, kernel: Kernel, packed: Prepared) -> Tensor:
        """Return dL/dx (images, in, [pixels]) by a row of `kernels.nm_conv_gradient`."""
        weight = self.weight if self.weight.ndim == 4 else self.weight.unsqueeze(2)
        found = kernel.run(weight, packed, None, self.problem)
        return found if self.weight.ndim == 4 else found.squeeze(2)


class Call(NamedTuple):
    """One product, A B^T + bias: of one layer in one step.

    Attributes:
        product: One of `PRODUCTS`.
        a: X (..., in) of "forward"; dZ (samples, tokens, out) of "data"; dZ^T (out, tokens) of "weight".
        b: W (out, in), W^T (in, out), X^T (in, tokens).
        bias: (out,) or None.
        dtype: Of the answer; None: that of `a`.
        dense: Name -> exact implementation, of a and b, the first torch's own; None: those of `implementations`.
        obstacle: Why this call in particular has no sparse operand, or "".
        convolution: What the product is of, where it is of a convolution: then b may have the taps in any order.
    """

    product: str
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    dense: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None
    obstacle: str = ""
    convolution: Convolution | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """What a choice depends on in the calls of one layer's product."""
        return self.a.shape, self.a.dtype, self.a.device, self.b.dtype, self.obstacle, *self.kind

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells products of the same sizes apart."""
        return () if self.convolution is None else self.convolution.kind

    def implementations(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """Return the dense implementations by name, the first torch's own."""
        if self.dense is not None:
            return self.dense
        return {name: partial(implementations.multiply, name, bias=self.bias) for name in implementations.names(self.a)}


class Source:
    """Where a product gets its operands from; this one leaves both as they are.

    Attributes:
        same: Whether a sparse product gives the dense ones' numbers.
        pruned_where: Where the operand was pruned last, for the plan; "" where none is.
    """

    same: ClassVar[bool] = True
    pruned_where: str = ""

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """Return the rows that can multiply by the sparse operand, and why there are none: "" where none is meant."""
        return [], ""

    def takes(self, kernel: Kernel, call: Call) -> bool:
        """Whether a row that was chosen can run this call; else the best dense implementation does."""
        return True

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return a and b for a dense implementation."""
        return call.a, call.b

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return the sparse operand in a row's layout."""
        raise NotImplementedError(kernel.name)

    def multiply(self, kernel: Kernel, packed: Prepared, call: Call) -> Tensor:
        """Return the product, with A as `packed` returned it; leading axes are flattened."""
        return kernel.run_columns(call.b.t(), packed, call.a.shape[:-1].numel(), call.dtype)

    def exact(self, call: Call) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None:
        """Return the exact implementations of the product "weight" by name; None: the dense ones."""
        return None

    def forget_layouts(self) -> None:
        """Drop what was laid out for kernels that multiply no longer."""

    def trial(self) -> Self:
        """Return what is used once for measuring: the training must not see that it was."""
        return copy.copy(self)


EXACT = Source()
"""Of a product whose operands are dense."""
