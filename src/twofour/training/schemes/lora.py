"""Masked LoRA: adapters on a sparse model whose sum with the weight keeps the mask, so that they merge into 2:4.

LoRA is Hu et al. 2021 (arXiv 2106.09685): w + (alpha / rank) B A with B = 0 at the start. Plain adapters on a sparse
weight merge into a dense one; here the product is masked: w + mask * (alpha / rank) B A.
"""

from __future__ import annotations

import logging
import math
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import TrainingError, cut
from twofour.masks import Mask
from twofour.training.schemes.base import Scheme, require_free
from twofour.training.schemes.slots import Slot, parametrise_all, tied

_log = logging.getLogger("twofour.training")


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
    if type(rank) is not int or rank < 1:
        raise TrainingError(
            "the rank is impossible",
            got=f"rank={rank!r}",
            wanted="a whole number, at least 1",
            remedy="rank=8 is usual",
        )
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha < math.inf:
        raise TrainingError(
            "the scale of the adapters is impossible",
            got=f"alpha={alpha!r}",
            wanted="a finite number over 0: the merged weight is w + mask * (alpha / rank) B A",
            remedy="alpha=16.0 is usual",
        )
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        raise TrainingError(
            "the seed is impossible",
            got=f"seed={seed!r}",
            wanted="a whole number of 64 bits",
            remedy="leave it out for 0",
        )
    found = _adaptable(model, layers)
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


def _adaptable(model: nn.Module, layers: str) -> dict[str, Mask]:
    """Return the masks whose weights get an adapter."""
    if not isinstance(layers, str):
        raise TrainingError(
            "`layers` is no glob",
            got=cut(repr(layers), 80),
            wanted='one text, such as "encoder.*"',
            remedy='leave it out for every masked layer: "*"',
        )
    listed = {name: mask for name, mask in masks.of(model).items() if fnmatchcase(mask.layer, layers)}
    shared = tied(model)
    ties = [name for name, mask in listed.items() if id(mask.parameter) in shared]
    for name in ties:
        _log.info("`%s` gets no adapter: it is tied to another, which would go without", name)
    found = {name: mask for name, mask in listed.items() if name not in ties}
    if ties and not found:
        raise TrainingError(
            "there is nothing to adapt: every masked weight that fits is tied to another",
            got=f"layers={layers!r}, which fits {', '.join(f'`{name}`' for name in ties)}",
            wanted="a masked weight that stands in one place: an adapter on a tied one would cut it from the others",
            remedy="name layers that are not tied, or untie the weight: "
            "layer.weight = torch.nn.Parameter(layer.weight.detach().clone()), before twofour.prune",
        )
    if not found:
        raise TrainingError(
            "there is nothing to adapt",
            got=f"{len(masks.of(model))} masks, layers={layers!r}",
            wanted="a model from twofour.prune with masked layers that fit the glob",
            remedy='twofour.prune(model, "2:4") first',
        )
    return found


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


class LoRA(Scheme):
    """The adapters."""

    def __init__(self, model: nn.Module, found: dict[str, Mask], rank: int, alpha: float, seed: int) -> None:
        super().__init__(model)
        self.layers = tuple(found)
        self._masks = masks.state_dict(model)
        self._trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self._slots = [Slot(mask.module, mask.attribute) for mask in found.values()]
        generator = torch.Generator().manual_seed(seed)
        adapters = []
        for mask in found.values():
            weight = mask.parameter
            adapters.append(_Adapter(weight, mask.keep, rank, alpha / rank, generator))
        # A parametrised weight has no parameter of its own for a mask to hold; it is frozen, so nothing moves it.
        masks.detach(model)
        model.requires_grad_(False)
        parametrise_all(self._slots, adapters)
        self._begin("LoRA", [mask.module for mask in found.values()])
        self._adapters = adapters

    def parameters(self) -> list[nn.Parameter]:
        """The adapters' factors: what the optimiser is to train."""
        return [parameter for adapter in self._adapters for parameter in (adapter.a, adapter.b)]

    def finish(self) -> nn.Module:
        """Merge the adapters into the weights, which stay as sparse as they were; see `Scheme.finish`."""
        return self._take_off(merge=True)

    def remove(self) -> nn.Module:
        """Drop the adapters; the weights are those from before. See `Scheme.remove`."""
        return self._take_off(merge=False)

    def _take_off(self, *, merge: bool) -> nn.Module:
        self._end()
        for slot in self._slots:
            slot.restore(parametrised=merge)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trainable[name])
        masks.load_state_dict(self.model, self._masks)
        return self.model
