"""A gradient that is pruned on the fly, which makes the data gradient sparse."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels import Kernel, Prepared
from twofour.kernels.nm_gradient import packed_bytes, refuses
from twofour.training import randomness
from twofour.training.sdgp.rule import Rule, packed, pruned
from twofour.training.sparse_linear import Call, Source, Workspace, implementations


class PrunedGradient(Source):
    """The source of "data": dL/dz, pruned by a rule, whichever implementation multiplies by it.

    The n-th backward pass of a layer draws from a stream that follows from (seed, position in the model, n) alone:
    recomputing a forward pass does not advance it, and every process that has the seed draws the same.

    Attributes:
        rule: How it is pruned.
        parts: Groups of the convolution, which groups of channels may not straddle.
        seed: Of the random modes.
        position: Of the layer among the pruned ones.
        workspace: What it is packed into.
        why_dense: Why no call of this layer has a 2:4 kernel, whatever its size, or None.
        draws: Backward passes that have drawn.
    """

    def __init__(
        self, rule: Rule, parts: int, seed: int, position: int, workspace: Workspace, why_dense: str | None
    ) -> None:
        self.rule, self.parts, self.seed, self.position = rule, parts, seed, position
        self.workspace, self.why_dense, self.draws = workspace, why_dense, 0

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """See `Source.kernels`."""
        gradient, on_gpu = call.a, implementations.on_gpu(call.a.device)
        why = self.why_dense or (None if on_gpu else refuses(gradient))
        if why is None and call.b.dtype != gradient.dtype:
            why = f"a weight of {call.b.dtype} with a gradient of {gradient.dtype}"
        if why is None and not gradient.numel():
            why = "an empty batch"
        if why := why or call.obstacle:
            return [], why
        found = implementations.gradient_kernels(gradient.dtype, gradient.device)
        return implementations.fitting(found, gradient, gradient)

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the pruned gradient, of the gradient's shape, and the weight."""
        return self.prune(call.a), call.b

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return what `prune` returns, packed: the same choices."""
        gradient, rows = call.a, call.a.shape[:-1].numel()
        if implementations.on_gpu(gradient.device):
            return kernel.refill(kernel.blank(gradient), self.prune(gradient).reshape(rows, -1).contiguous())
        buffer = self.workspace.buffer(packed_bytes(rows, gradient.shape[-1], gradient.dtype))
        return Prepared(kernel, packed(gradient, self.rule, generator=self._generator(gradient.device), out=buffer))

    def prune(self, gradient: Tensor) -> Tensor:
        """Return the pruned dL/dz, (samples, pixels, channels)."""
        return pruned(gradient, self.rule, parts=self.parts, generator=self._generator(gradient.device))

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if not self.rule.draws:
            return None
        seed = randomness.derive(self.seed, self.draws, f"gradient of layer {self.position}")
        self.draws += 1
        return torch.Generator(device).manual_seed(seed)
