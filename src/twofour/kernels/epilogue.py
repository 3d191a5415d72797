"""What happens to a product before it is stored: an activation, then a sum or product with another tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from twofour.errors import KernelError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
"""Name -> the function in torch, in the order of `Activation` in epilogue.h. "gelu" is the erf form."""

COMBINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, _: y,
    "add": torch.add,
    "multiply": torch.mul,
}
"""Name -> the function in torch, in the order of `Combine` in epilogue.h."""


@dataclass(frozen=True)
class Epilogue:
    """y = activation(x W^T + bias), then y + other or y * other; `other` has the shape of y.

    "add" serves residual connections, "multiply" the gated MLP: silu(gate(x)) * up(x).

    Attributes:
        activation: A key of `ACTIVATIONS`.
        combine: A key of `COMBINES`.
        known: The activations there are.
    """

    known: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = ACTIVATIONS

    activation: str = "none"
    combine: str = "none"

    def __post_init__(self) -> None:
        for given, known in ((self.activation, self.known), (self.combine, COMBINES)):
            if given not in known:
                raise KernelError(
                    "there is no such epilogue",
                    got=repr(given),
                    wanted=f"one of {', '.join(known)}",
                    remedy='take "none" and compute the rest in torch',
                )

    @property
    def plain(self) -> bool:
        """Whether the product is stored as it is."""
        return self.activation == "none" and self.combine == "none"

    @cached_property
    def codes(self) -> tuple[int, int]:
        """The values of `Activation` and `Combine` in epilogue.h."""
        return list(self.known).index(self.activation), list(COMBINES).index(self.combine)

    def apply(self, y: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the epilogue of a product in plain torch: the reference.

        Args:
            y: x W^T + bias.
            other: Tensor of y's shape where `combine` needs one.
        """
        self.require(other, tuple(y.shape))
        y = self.known[self.activation](y)
        return y if other is None else COMBINES[self.combine](y, other)

    def require(self, other: Tensor | None, shape: tuple[int, ...]) -> None:
        """Refuse an `other` that is missing, superfluous or of another shape than the product.

        Raises:
            KernelError: As above.
        """
        if (other is None) != (self.combine == "none") or (other is not None and tuple(other.shape) != shape):
            raise KernelError(
                "the second operand of an epilogue does not fit",
                got="none" if other is None else f"a tensor of shape {tuple(other.shape)}",
                wanted="none" if self.combine == "none" else f"a tensor of shape {shape} to {self.combine}",
                remedy="expand `other` to the product's shape" if other is not None else "pass `other`",
            )


PLAIN_EPILOGUE = Epilogue()
"""The product stored as it is."""
