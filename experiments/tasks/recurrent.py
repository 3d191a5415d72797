"""The protocol of a recurrent task: a task whose network has a width."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

from tasks.base import Task


class Recurrent(Task):
    """A network with recurrent layers, which are pruned, and others, which stay dense.

    Attributes:
        width: Of the recurrent layer.
        larger: Width of the net that is pruned to the dense one's parameters.
    """

    pretrained = False
    skip = ("head",)
    width: int
    larger: int

    @abstractmethod
    def network(self, seed: int, width: int | None = None) -> nn.Module:
        """Random weights that follow from `seed`; `width` in place of the task's own."""

    def parameters(self, width: int) -> int:
        """All parameters of a dense network."""
        return sum(parameter.numel() for parameter in self.network(0, width).parameters())

    def prunable(self, width: int) -> int:
        """Those that are pruned: the weights of the recurrent layers, without their biases."""
        layers = [module for module in self.network(0, width).modules() if isinstance(module, nn.RNNBase)]
        return sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.ndim == 2)
