"""The recurrent layers of a graph hold their prepared weights, which the operator reads out of its operands each time.

A replay makes their native calls, where it would call the operator, which is Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.graph.base import calls, place
from twofour.kernels.recurrent import HeldLayers

RECURRENT = "recurrent layers hold their weights"
"""What the plan calls the rewrite."""

_READ = 5
"""Operands that a call brings: the input, its batch, sizes, state and memory; the others describe the layer."""


class RecurrentCall(nn.Module):
    """The recurrent layers of one operator inside a graph.

    Args:
        layers: What they compute, and with which weights.
    """

    label = "recurrent"

    def __init__(self, layers: HeldLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, batch: int, *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the states of all steps, the last ones and memories; see `twofour.kernels.recurrent.recurrent`."""
        return self.layers(x, batch, *given)


def place_recurrent(module: fx.GraphModule) -> int:
    """Replace every operator of recurrent layers by a layer that holds the weights it was given; returns how many.

    Args:
        module: The graph; it is changed.
    """
    found = calls(module.graph, torch.ops.twofour.recurrent.default)
    for index, node in enumerate(found):
        weights, biases, dispatch, cell, numbers = (_held(module, one) for one in node.args[_READ:])
        layers = HeldLayers(weights, biases, dispatch, cell, numbers)
        node.args = node.args[:_READ]
        place(module, node, f"recurrent_{index}", RecurrentCall(layers))
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return len(found)


def _held(module: fx.GraphModule, given: Any) -> Any:
    """Return an argument with the tensors that its nodes read."""
    if isinstance(given, fx.Node):
        return getattr(module, str(given.target))
    return [_held(module, one) for one in given] if isinstance(given, list | tuple) else given
