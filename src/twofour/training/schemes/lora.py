"""Masked LoRA: adapters on a sparse model whose sum with the weight keeps the mask, so that they merge into 2:4.

LoRA is Hu et al. 2021 (arXiv 2106.09685): w + (alpha / rank) B A with B = 0 at the start. Plain adapters on a sparse
weight merge into a dense one; here the product is masked: w + mask * (alpha / rank) B A.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor, nn

from twofour.errors import TrainingError, integer_from
from twofour.masks import Mask
from twofour.training.schemes.base import require_free
from twofour.training.schemes.over_masks import OverMasks, fitting


def attach(model: nn.Module, *, rank: int = 8, alpha: float = 16.0, layers: str = "*", seed: int = 0) -> LoRA:
    """Freeze a masked model and put trainable adapters on its masked weights.

    Build the optimiser afterwards, from `scheme.parameters()`.

    Args:
        model: A model from `twofour.prune`.
        rank: Rank of each adapter, at most the smaller side of its weight as a matrix.
        alpha: The adapter's product is scaled by alpha / rank.
        layers: Glob of the layers that get one; weights that are tied to others are left out, with a log line.
        seed: Of the random first factor.

    Raises:
        TrainingError: The model has no masks, no layer fits the glob or all that do are tied, another scheme is
            attached, or rank, alpha or seed is impossible.
    """
    require_free(model)
    integer_from(1, "the rank is impossible", TrainingError, "rank=8 is usual", rank=rank)
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha < math.inf:
        raise TrainingError(
            "the scale of the adapters is impossible",
            got=f"alpha={alpha!r}",
            wanted="a finite number over 0: the merged weight is w + mask * (alpha / rank) B A",
            remedy="alpha=16.0 is usual",
        )
    integer_from(-(2**63), "the seed is impossible", TrainingError, "leave it out for 0", 2**64 - 1, seed=seed)
    found = fitting(model, layers, lambda _: None, verb="adapt", wanted="a masked layer")
    _require_low(found, rank)
    return LoRA(model, found, rank, alpha, seed)


def _require_low(found: dict[str, Mask], rank: int) -> None:
    """Refuse a rank that no product of the adapter's factors can have."""
    sides = {name: min(mask.keep.shape[0], mask.keep[0].numel()) for name, mask in found.items()}
    least = min(sides, key=sides.__getitem__)
    if rank > sides[least]:
        raise TrainingError(
            "the rank is larger than the weight's smaller side, which no product can exceed",
            got=f"rank={rank} for a weight {tuple(found[least].keep.shape)}",
            wanted=f"at most {sides[least]}",
            remedy=f"rank={min(8, sides[least])}, or `layers` without this one",
            layer=least,
        )


class _Adapter(nn.Module):
    keep: Tensor

    def __init__(self, weight: Tensor, keep: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        out, size = weight.shape[0], weight[0].numel()
        first = torch.empty(rank, size, dtype=torch.float32, device="cpu")
        # kaiming_uniform_ with a = sqrt(5), as the authors' code initialises A: uniform within 1 / sqrt(inputs).
        first.uniform_(-1 / math.sqrt(size), 1 / math.sqrt(size), generator=generator)
        self.a = nn.Parameter(first.to(weight))
        self.b = nn.Parameter(torch.zeros(out, rank, dtype=weight.dtype, device=weight.device))
        self.register_buffer("keep", keep.clone(), persistent=False)
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """Frozen sparse weight -> sparse weight with the adapter."""
        return weight + (self.scale * (self.b @ self.a)).view_as(weight).masked_fill(~self.keep, 0)


class LoRA(OverMasks):
    """The adapters."""

    def __init__(self, model: nn.Module, found: dict[str, Mask], rank: int, alpha: float, seed: int) -> None:
        self._trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        self._adapters = [_Adapter(mask.parameter, mask.keep, rank, alpha / rank, generator) for mask in found.values()]
        super().__init__(model, "LoRA", found, self._adapters)
        model.requires_grad_(False)
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        """The adapters' factors: what the optimiser is to train."""
        return [parameter for adapter in self._adapters for parameter in (adapter.a, adapter.b)]

    def finish(self) -> nn.Module:
        """Merge the adapters into the weights, which stay as sparse as they were; see `Attachment.finish`."""
        return self._take_off(parametrised=True)

    def remove(self) -> nn.Module:
        """Drop the adapters; the weights are those from before. See `Attachment.remove`."""
        return self._take_off(parametrised=False)

    def _take_off(self, *, parametrised: bool) -> nn.Module:
        model = super()._take_off(parametrised=parametrised)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._trainable[name])
        return model
