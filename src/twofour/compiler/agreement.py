"""How far an engine may be from the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofour.compiler.layer import CompiledLinear
from twofour.measure.distance import distance
from twofour.packing import dense_of, encodings

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Computing type -> relative difference beyond which a graph does not compute what the layers do: fusion changes the
order of sums and leaves out roundings, which bfloat16 and whole numbers magnify."""


def has_halves(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among `values` is of 16 bits, so that roundings left out show."""
    return any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in values)


def agreement(
    fast: nn.Module, dtype: str, leaves: Sequence[Any], run: Callable[[], Sequence[Any]], between: Iterable[Any] = ()
) -> float:
    """Return the relative difference from the layers beyond which an engine is not used.

    Where inputs are rounded, other roundings cost as much: in int8 what the layers lose to the same weights on exact
    activations is allowed on top.

    Args:
        fast: The model with compiled layers.
        dtype: Its computing type.
        leaves: The example.
        run: Runs the layers on it; returns the output's leaves.
        between: Tensors that the model's operators hand to each other.
    """
    low = dtype != "float32" or has_halves((*leaves, *fast.parameters(), *between))
    allowed = AGREEMENT[torch.bfloat16 if low else torch.float32]
    if not encodings.get(dtype).rounds_inputs:
        return allowed
    with _on_exact_activations(fast):
        exact = run()
    lost = distance(run(), exact)
    return allowed + (lost if math.isfinite(lost) else 0.0)


@contextmanager
def _on_exact_activations(model: nn.Module) -> Iterator[None]:
    """Let compiled Linears multiply activations as they are by their weights, opened, inside."""
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, CompiledLinear):

                def forward(x: Tensor, layer: CompiledLinear = layer) -> Tensor:
                    held = layer.prepared.source()
                    weight = dense_of(held)
                    return F.linear(x.float(), weight.float(), layer.bias).to(x.dtype)

                object.__setattr__(layer, "forward", forward)
                stack.callback(object.__delattr__, layer, "forward")
        yield
