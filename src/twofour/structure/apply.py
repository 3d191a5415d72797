"""AxisChanges: new orders of coupled channels, applied to every tensor of a model that holds them, and undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from twofour.errors import PermutationError
from twofour.layers import is_masked
from twofour.structure.coupling import Group, Place


class AxisChanges:
    """Changes the axes of a model's tensors in place, group by group, and remembers how to change them back.

    A group holds every place of its channels (`coupling.trace`), so that what the model computes stays what it was
    after each `apply`. `undo` works as long as no tensor has changed its shape.

    Example:
        >>> changes = AxisChanges(model)
        >>> group = trace(model, arguments, weights).groups[0]
        >>> changes.apply(group, torch.stack([torch.randperm(group.size) for _ in range(group.blocks)]))
        >>> changes.undo()
    """

    def __init__(self, model: nn.Module, beside: dict[str, Tensor] | None = None) -> None:
        """Watch a model.

        Args:
            model: Its parameters and buffers are changed in place.
            beside: Values of tensors by their names, of their shapes, such as scores: replaced by changed ones.
        """
        self._tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._beside = {} if beside is None else beside
        self._done: list[tuple[Place, Tensor]] = []

    @torch.no_grad()
    def apply(self, group: Group, orders: Tensor) -> None:
        """Put the channels of a group in new orders.

        Args:
            group: The channels and all their places.
            orders: (blocks, size), new position -> old channel.
        """
        for place in group.places:
            tensor = self._tensors[place.name].detach()
            new = place.moved(tensor, orders)
            self._done.append((place, orders))  # tensor by tensor: an interruption may come between two of one group
            tensor.copy_(new)
        for place in group.places:
            if place.name in self._beside:
                self._beside[place.name] = place.moved(self._beside[place.name], orders)

    @torch.no_grad()
    def undo(self) -> None:
        """Put every tensor back, once; the values beside them stay changed."""
        while self._done:
            place, orders = self._done.pop()
            tensor = self._tensors[place.name].detach()
            tensor.copy_(place.moved(tensor, orders.argsort(dim=1)))

    def of_copy(self, model: nn.Module) -> AxisChanges:
        """Return the changes that a copy of the model carries, to undo them there alone."""
        copied = AxisChanges(model)
        copied._done = list(self._done)
        return copied


def require_nothing_beside(model: nn.Module, groups: Iterable[Group]) -> None:
    """Refuse what a change would leave behind: masks, and buffers as large as a changed weight that no forward uses.

    Raises:
        PermutationError: There is one.
    """
    moved = {place.name for group in groups for place in group.places}
    for name in moved:
        layer, _, attribute = name.rpartition(".")
        module = model.get_submodule(layer)
        tensor = getattr(module, attribute)
        buffers = {f"{layer}.{other}".lstrip("."): buffer for other, buffer in module.named_buffers(recurse=False)}
        same = [
            n for n, buffer in buffers.items() if n not in moved and tensor.ndim > 1 and buffer.shape == tensor.shape
        ]
        if is_masked(module) or same:
            unused = f"`{same[0]}`, as large as the weight and unused by the forward" if same else ""
            raise PermutationError(
                f"the channels cannot be permuted: a {'mask' if is_masked(module) else 'buffer'} would be left behind",
                got=f"`{name}`, whose module is masked" if is_masked(module) else unused,
                wanted="a dense model without masks",
                remedy="permute before pruning, or twofour.masks.detach(model) first",
                layer=name,
            )
