"""What learned thresholds stand on: masks of gates, hard forward and soft backward, and tensors times them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twofour.structure.coupling.group import along
from twofour.structure.shrink.widths import widths_of
from twofour.training.schemes.gated import LEAST, Gated

START = -2.5
"""Where thresholds begin, in standard deviations of a layer's gates from their mean: below nearly all of them."""

HOT, COLD = 1.0, 0.05
"""Temperature of the sigmoid at the beginning and at the end, in the same units."""


def temperature(done: float) -> float:
    """Return the temperature after a share of the steps, falling by the same factor in each."""
    return HOT * (COLD / HOT) ** done


class Threshold:
    """The mask of the gates of one group: 1 above a threshold that is trained, 0 below it, for their readers.

    Attributes:
        gated: The gates.
        value: The threshold, in standard deviations of the gates from their mean.
        temperature: Of the sigmoid that gradients pass through.
        kept: (size,) 0 and 1 once it is settled.
    """

    def __init__(self, gated: Gated) -> None:
        device = gated.held[0][0].device
        self.gated, self.least = gated, widths_of(gated.size, 1, LEAST)[-1]
        self.value = torch.full((), START, dtype=torch.float32, device=device, requires_grad=True)
        self.temperature = HOT
        self.kept: Tensor | None = None

    @torch.no_grad()
    def deviations(self) -> Tensor:
        """Return (size,) how far each gate is from their mean; of tied ones the root of the mean square counts."""
        held = self.gated.held
        total = held[0][0].new_zeros(self.gated.size)
        for parameter, index in held:
            here = (index >= 0).nonzero().flatten()
            total.index_add_(0, index[here], parameter[here].square())
        sizes = (total / len(held)).sqrt()
        return (sizes - sizes.mean()) / sizes.std(correction=0).clamp_min(1e-6)

    def mask(self) -> Tensor:
        """Return (size,) 0 and 1, with the sigmoid's gradient to the threshold; the largest stay wherever it is."""
        if self.kept is not None:
            return self.kept
        over = self.deviations() - self.value
        soft = (over / self.temperature).sigmoid()
        hard = (over > 0).to(soft.dtype)
        hard[over.topk(self.least).indices] = 1
        return soft + (hard - soft).detach()


class Shut(nn.Module):
    """A parametrisation: a tensor times the mask of its channels.

    Args:
        threshold: Which are open.
        axis: Axis of the tensor along which they stand.
        index: (size of the axis) which channel, -1 where none.
    """

    index: Tensor

    def __init__(self, threshold: Threshold, axis: int, index: Tensor) -> None:
        super().__init__()
        self.threshold, self.axis = threshold, axis
        self.register_buffer("index", index, persistent=False)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor with zeros for channels that are closed."""
        mask = self.threshold.mask().to(tensor.dtype)
        factor = torch.where(self.index < 0, torch.ones_like(mask[:1]), mask[self.index.clamp(min=0)])
        return tensor * along(factor, self.axis, tensor.ndim)
