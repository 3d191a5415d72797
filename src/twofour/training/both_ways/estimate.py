"""An unbiased 2:4 estimate of the gradient, which makes the weight gradient sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from twofour.kernels import Kernel, Prepared
from twofour.kernels.nm_sddmm import nm_sddmm, row_for
from twofour.kernels.nm_unbiased import nm_unbiased, nm_unbiased_reference, packed_bytes
from twofour.packing import Packed, kept
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.sparse_linear import Call, Source, Workspace, implementations


class Estimate(Source):
    """The source of "weight": dZ^T, 2:4 along the tokens, by Chmiel et al. 2022 (arXiv 2203.10991).

    Attributes:
        weight: The layer's weight: while it has no mask the gradient is exact.
        seed: 32 bits, of this layer.
        workspace: What the estimate is packed into.
        wanted: Whether there are estimates; else every weight gradient is exact.
        calls: Estimates so far; with `seed` it seeds the next one.
    """

    same = False

    def __init__(self, weight: MaskedWeight, seed: int, workspace: Workspace, *, wanted: bool) -> None:
        self.weight, self.seed, self.workspace, self.wanted, self.calls = weight, seed, workspace, wanted, 0

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """See `Source.kernels`."""
        if not self.wanted:
            return [], "exact"
        if call.obstacle:
            return [], call.obstacle
        found = implementations.gradient_kernels(call.a.dtype, call.a.device)
        return implementations.fitting(found, call.a, call.a)

    def takes(self, kernel: Kernel, call: Call) -> bool:
        """Whether the layer's mask is in force and the kernel packs so many tokens."""
        out, tokens = call.a.shape
        fours = tokens > 0 and tokens % 4 == 0
        return fours and self.weight.takes(kernel, call) and not kernel.refill_refuses(out, tokens)

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return the next estimate: on a GPU by plain torch and `refill`."""
        self.calls += 1
        seed = (self.seed + self.calls * 0x9E3779B1) & 0xFFFFFFFF
        gradient = call.a.t()
        if implementations.on_gpu(gradient.device):
            return kernel.refill(kernel.blank(gradient), nm_unbiased_reference(gradient, seed).t())
        tokens, out = gradient.shape
        buffer = self.workspace.buffer(packed_bytes(out, tokens, gradient.dtype))
        return Prepared(kernel, nm_unbiased(gradient, seed, gradient.dtype, buffer))

    def multiply(self, kernel: Kernel, packed: Prepared, call: Call) -> Tensor:
        """Return the product, with A as `packed` returned it, of what the parameter holds."""
        dense, places = super().multiply(kernel, packed, call), self.weight.places
        return dense if places is None else kept.gather(places, dense)

    def exact(self, call: Call) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None:
        """See `Source.exact`: of kept values the product at their places, and dense ones to gather them from."""
        if (places := self.weight.places) is None:
            return None
        dense = {name: partial(_gathered, places, name) for name in implementations.names(call.a)}
        here = call.a.is_cpu and call.a.dtype in SAMPLED
        return {**dense, row_for(call.a.dtype).name: partial(_sampled, places)} if here else dense


SAMPLED = (torch.float32, torch.bfloat16)
"""Computing types of the sampled product."""


def _gathered(places: Packed, name: str, a: Tensor, b: Tensor) -> Tensor:
    return kept.gather(places, implementations.multiply(name, a, b))


def _sampled(places: Packed, a: Tensor, b: Tensor) -> Tensor:
    return nm_sddmm(a.t(), b.t(), places)
