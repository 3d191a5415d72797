"""Group: channels of several weights that move together, where they stand, and how to move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Place:
    """Where the channels of a group stand in one parameter or buffer.

    Attributes:
        name: Name of the tensor in the model.
        axis: Its axis that holds the channels.
        index: (size of the axis) which channel stands there, -1 where none of the group does.
        stride: (size of the axis) how far the next channel is.
        block: One entry per axis of the tensor that tells blocks apart: (axis, (its size) number to add).
    """

    name: str
    axis: int
    index: Tensor
    stride: Tensor
    block: tuple[tuple[int, Tensor], ...] = ()

    def blocks(self, ndim: int) -> Tensor:
        """Return the number of the block of each value, of a shape that broadcasts to the tensor's."""
        total = torch.zeros([1] * ndim, dtype=torch.long, device="cpu")
        for axis, numbers in self.block:
            total = total + along(numbers, axis, ndim)
        return total

    def moved(self, tensor: Tensor, orders: Tensor) -> Tensor:
        """Return the tensor with its channels in other orders.

        Args:
            tensor: Of the shape of the place's own.
            orders: (blocks, size), new position -> old channel.

        Example:
            A Linear after `flatten` of 3 channels with 2 pixels each reads columns c0p0 c0p1 c1p0 c1p1 c2p0 c2p1:
            index 0 0 1 1 2 2, stride 2 everywhere. The order (2, 0, 1) takes column 0 from 0 + (2 - 0) * 2 = 4.
        """
        index, stride = along(self.index, self.axis, tensor.ndim), along(self.stride, self.axis, tensor.ndim)
        # A channel stands `stride` behind the one before it, so the channel `old` that belongs at a place holding
        # `index` is (old - index) * stride away from it. Places of other groups (-1) stay where they are.
        here = along(torch.arange(len(self.index), device="cpu"), self.axis, tensor.ndim)
        old = orders[self.blocks(tensor.ndim), index.clamp(min=0)]
        # Blocks (heads, groups of a convolution) have an order each; `blocks` broadcasts to the tensor's shape, so the
        # sources may differ from row to row, which `gather` along one axis allows.
        source = torch.where(index < 0, here, here + (old - index) * stride).to(tensor.device)
        return tensor.gather(self.axis, source.expand_as(tensor))


def along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """View (size,) values so that they lie along one axis of `ndim`."""
    return values.view([-1 if index == axis else 1 for index in range(ndim)])


def some(names: Sequence[str]) -> str:
    """Return the first of several names and how many follow."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


@dataclass(frozen=True, eq=False)
class Group:
    """Channels that move together: an order of them changes no output when all places take it.

    Attributes:
        size: How many channels; an order is one of these.
        blocks: How many orders the group takes, each of its own: heads of an attention, groups of a convolution.
        places: Every parameter and buffer that holds the channels.
        consumers: Names of the prunable weights whose products sum over the channels.
        stream: Whether several layers add to the channels: a residual stream.
        normalised: The operator that divides by, or averages, all of the channels, "" where none does: without some of
            them it computes something else.
    """

    size: int
    blocks: int
    places: tuple[Place, ...]
    consumers: tuple[str, ...]
    stream: bool = False
    normalised: str = ""

    @property
    def name(self) -> str:
        """A short description for tables."""
        return some(self.consumers)

    @property
    def producers(self) -> tuple[str, ...]:
        """Names of the other tensors that move along."""
        return tuple(dict.fromkeys(place.name for place in self.places if place.name not in self.consumers))

    def places_of(self, name: str) -> list[Place]:
        """Return where the channels stand in one tensor."""
        return [place for place in self.places if place.name == name]


@dataclass(frozen=True)
class Refusal:
    """Channels that keep their order.

    Attributes:
        consumers: Names of the prunable weights that sum over them.
        size: How many channels.
        reason: Why they may not move.
    """

    consumers: tuple[str, ...]
    size: int
    reason: str


@dataclass(frozen=True, eq=False)
class Extent:
    """An axis of a value inside a module's forward, whose size the forward may say as a number.

    Attributes:
        module: Name of the module.
        size: Channels along the axis.
        index: Number of a group -> (size,) which of its channels stands there, -1 where none does.
        counted: Whether it is a number of groups, which is the size of no axis.
    """

    module: str
    size: int
    index: dict[int, Tensor]
    counted: bool = False


@dataclass(frozen=True)
class Coupling:
    """What moves together in a model, and what may not move.

    Attributes:
        groups: Channels that may be put in another order, or that may be cut, in the order of the model's weights.
        refused: Channels that may not, with the reason.
        unused: Names of parameters that the example's forward did not use: what couples them is unknown.
        extents: Of `channels`: the axes that the modules' forwards handle.
    """

    groups: tuple[Group, ...]
    refused: tuple[Refusal, ...]
    unused: tuple[str, ...] = field(default=())
    extents: tuple[Extent, ...] = ()
