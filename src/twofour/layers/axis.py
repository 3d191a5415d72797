"""Where a product sums: the axis of a weight along which the groups of a pattern lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """The axis of a weight that a product sums over.

    Attributes:
        axis: That axis: 1 of (out, in / groups, [spatial]) and of stacked gates, 0 of a transposed convolution's
            (in, out / groups, [spatial]) and of Hugging Face's Conv1D (in, out).
        parts: How many reductions the axis holds one after the other: the groups of a transposed convolution, else 1.
    """

    axis: int = 1
    parts: int = 1

    def length(self, shape: tuple[int, ...]) -> int:
        """Return how many values one output sums over, at one kernel position."""
        return shape[self.axis] // self.parts

    def last(self, tensor: Tensor) -> Tensor:
        """View a tensor of the weight's shape as (out, [spatial], in); with parts it is a copy."""
        if self.parts == 1:
            return tensor.movedim(self.axis, -1)
        apart = torch.unflatten(tensor, self.axis, (self.parts, -1))
        return apart.movedim((self.axis, self.axis + 1), (0, -1)).flatten(0, 1)

    def restore(self, tensor: Tensor) -> Tensor:
        """Undo `last`: a view, with parts a copy."""
        if self.parts == 1:
            return tensor.movedim(-1, self.axis)
        apart = torch.unflatten(tensor, 0, (self.parts, -1)).movedim((0, -1), (self.axis, self.axis + 1))
        return apart.flatten(self.axis, self.axis + 1)

    def stored(self, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the coordinates in the weight, of `shape`, of an index into `last`'s view."""
        part, row = divmod(index[0], shape[1 - self.axis]) if self.parts > 1 else (0, index[0])
        place = [row, *index[1:-1]]
        place.insert(self.axis, part * self.length(shape) + index[-1])
        return tuple(place)
