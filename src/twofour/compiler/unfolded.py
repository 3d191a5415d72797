"""A convolution's weight out of the one that its normalisation was folded into: to the bit, from two bits a number.

The folded weight is W' = s W, rounded. Where the product of two mantissas is 2 or more, W' has one bit less of W than W
has, so that W' / s, rounded, is W or its neighbour. Which of them is kept in two bits of each number that is not zero,
where any is not W itself: a sixteenth of a dense weight in float32 in place of all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.compiler.conv import CompiledConv
from twofour.compiler.prepared import PreparedWeights
from twofour.kernels.base import Prepared
from twofour.packing import dense_of, has_form, packed_rule

SHIFTS = (0, 2, 4, 6)
"""Of the codes of four numbers in a byte."""


@dataclass(frozen=True)
class Unfolded:
    """The weight of a convolution as the model has it.

    Attributes:
        folded: The weight that runs.
        scale: float64 (out,), what the normalisation multiplied it by; None where there was none.
        codes: 1 more than the numbers in the last place between W' / s and W, four a byte; None: all are 1.
    """

    folded: PreparedWeights
    scale: Tensor | None
    codes: Tensor | None

    @classmethod
    def of(cls, layer: CompiledConv, folded: PreparedWeights, scale: Tensor | None) -> Unfolded | None:
        """Return the weight of a layer out of a folded one, None where that would not be the same."""
        kernels = *layer.prepared.kernels, *folded.kernels
        rule = None if layer.pattern is None else packed_rule(layer.pattern)
        sparse = [kernel for kernel in kernels if kernel.sparse]
        if any(kernel.dtype != "float32" for kernel in kernels) or any(kernel.form is None for kernel in sparse):
            return None
        if sparse and (rule is None or not has_form(rule, "float32")):
            return None
        want, near = dense_of(layer.prepared.source()).float(), cls(folded, scale, None).source()
        kept = want != 0
        if want.shape != near.shape or not torch.equal(near != 0, kept):
            return None
        off = want[kept].view(torch.int32) - near[kept].view(torch.int32)
        if off.numel() and int(off.abs().max()) > 1:
            return None
        return cls(folded, scale, _packed(off + 1) if off.any() else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return 0 if self.codes is None else self.codes.nbytes

    def source(self) -> Tensor:
        """Return the dense weight (out, in / groups, [height,] width)."""
        dense = dense_of(self.folded.source()).contiguous()
        if self.scale is None:
            return dense
        near = (dense.double() / self.scale.view(-1, *[1] * (dense.ndim - 1))).float()
        if self.codes is not None:
            kept = near != 0
            off = _unpacked(self.codes, int(kept.sum())) - 1
            near[kept] = (near[kept].view(torch.int32) + off).view(torch.float32)
        return near

    def stored(self) -> Tensor:
        """Return what `source` does."""
        return self.source()

    def layout(self, name: str) -> Prepared | None:
        """Return the folded weight where nothing was multiplied."""
        return self.folded.layout(name) if self.scale is None else None


def _packed(codes: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -len(codes) % 4)).view(-1, 4)
    return sum((padded[:, i] << shift for i, shift in enumerate(SHIFTS)), torch.zeros_like(padded[:, 0]))


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return torch.stack([packed >> shift & 3 for shift in SHIFTS], 1).flatten()[:count].int()
