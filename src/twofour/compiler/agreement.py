"""Does an engine compute what the layers do: relative differences of outputs, and how large they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofour.compiler.layer import CompiledLinear
from twofour.packing import Packed, encodings

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Computing type -> relative difference beyond which a graph does not compute what the layers do: fusion changes the
order of sums and leaves out roundings, which bfloat16 and whole numbers magnify."""

NOISE = 1e-3
"""Size of an output, as a part of the largest output, below which its error is taken relative to that part."""


def agreement(fast: nn.Module, dtype: str, leaves: Sequence[Any], run: Callable[[], Sequence[Any]]) -> float:
    """Return the relative difference from the layers beyond which an engine is not used.

    Where inputs are rounded, other roundings cost as much: in int8 what the layers lose to the same weights on exact
    activations is allowed on top.

    Args:
        fast: The model with compiled layers.
        dtype: Its computing type.
        leaves: The example.
        run: Runs the layers on it; returns the output's leaves.
    """
    tensors = [leaf for leaf in (*leaves, *fast.parameters()) if isinstance(leaf, Tensor)]
    low = dtype != "float32" or any(leaf.dtype in (torch.bfloat16, torch.float16) for leaf in tensors)
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
                    weight = held.unpack() if isinstance(held, Packed) else held
                    return F.linear(x.float(), weight.float(), layer.bias).to(x.dtype)

                object.__setattr__(layer, "forward", forward)
                stack.callback(object.__delattr__, layer, "forward")
        yield


def distance(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest relative difference of output leaves; infinite where shapes or whole numbers differ.

    NaN and infinities must stand where they are wanted, and count as equal there.
    A leaf smaller than `NOISE` of the largest one is compared with that, so that what cancels to nearly zero counts as
    zero.
    """
    pairs = [(got, wanted) for got, wanted in zip(found, want, strict=True) if isinstance(wanted, Tensor)]
    if any(got.shape != wanted.shape or not (is_real(wanted) or torch.equal(got, wanted)) for got, wanted in pairs):
        return math.inf
    if any(is_real(wanted) and not _finite_alike(got, wanted) for got, wanted in pairs):
        return math.inf
    finite = [(got[(at := wanted.isfinite())], wanted[at]) for got, wanted in pairs if is_real(wanted)]
    real = [(got.double(), wanted.double()) for got, wanted in finite if wanted.numel()]
    sizes = [float(wanted.square().mean()) ** 0.5 for _, wanted in real]
    least = NOISE * max(sizes, default=0.0)
    errors = [float((got - wanted).square().mean()) ** 0.5 for got, wanted in real]
    ratios = [error / (max(size, least) or 1.0) for error, size in zip(errors, sizes, strict=True)]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf


def _finite_alike(got: Tensor, wanted: Tensor) -> bool:
    """Tell whether NaN, inf and -inf stand in the same places."""
    odd = [torch.where(leaf.isfinite(), 0.0, leaf.double()).nan_to_num(2.0, 1.0, -1.0) for leaf in (got, wanted)]
    return torch.equal(*odd)


def is_real(leaf: Any) -> bool:
    """Tell whether an output is a tensor of rounded numbers, which no other engine computes to the last bit."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
