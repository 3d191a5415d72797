"""A gradient that is pruned on the fly, which makes the data gradient sparse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from twofour.kernels import Kernel, Prepared, find
from twofour.kernels.nm_conv_gradient import ConvGradient
from twofour.kernels.nm_gradient import packed_bytes, refuses
from twofour.training import randomness
from twofour.training.sdgp.rule import Rule, packed, pruned, pruned_through
from twofour.training.sparse_linear import Call, LinearProducts, Source, Workspace, implementations

OWN_PASS = "a pass of its own"


@dataclass(frozen=True)
class _Made:
    """What the backward pass of an activation has left for the layer before it.

    Attributes:
        source: Of that layer.
        gradient: dL/dz, (samples, pixels, channels), which stays alive, so that its address is no other tensor's.
        version: Of it when it was made.
        kernel: The row that its pruned form is packed for, or None: it is dense.
        pruned: Packed, or of the gradient's shape; None where a hook may write to the gradient past its version.
        activation: What it came through.
    """

    source: PrunedGradient
    gradient: Tensor
    version: int
    kernel: Kernel | None
    pruned: Tensor | None
    activation: str

    def is_of(self, source: PrunedGradient, gradient: Tensor) -> bool:
        """Whether a source is given this very gradient, unchanged."""
        mine = self.gradient
        return (
            self.source is source
            and mine.data_ptr() == gradient.data_ptr()
            and (mine.shape, mine.stride(), mine.dtype) == (gradient.shape, gradient.stride(), gradient.dtype)
            and self.version == gradient._version
        )


class PrunedGradient(Source):
    """The source of "data": dL/dz, pruned by a rule, whichever implementation multiplies by it.

    The n-th backward pass of a layer draws from a stream that follows from (seed, position in the model, n) alone:
    recomputing a forward pass does not advance it, and every process that has the seed draws the same.

    Attributes:
        rule: How it is pruned.
        parts: Groups of the convolution, which groups of channels may not straddle.
        seed: Of the random modes.
        position: Of the layer among the pruned ones.
        convolution: Whether dL/dz is (N, C, [spatial]), not (..., C).
        workspace: What it is packed into.
        why_dense: Why no call of this layer has a 2:4 kernel, whatever its size, or None.
        draws: Backward passes that have drawn.
        pruned_where: Where the last one was pruned, for the plan; "" before.
    """

    def __init__(
        self,
        rule: Rule,
        parts: int,
        seed: int,
        position: int,
        workspace: Workspace,
        why_dense: str | None,
        *,
        convolution: bool = False,
    ) -> None:
        self.rule, self.parts, self.seed, self.position, self.convolution = rule, parts, seed, position, convolution
        self.workspace, self.why_dense, self.draws, self.pruned_where = workspace, why_dense, 0, ""

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
        taps: tuple[list[Kernel], str] = [], ""
        if call.convolution is not None:
            geometry = call.convolution.problem.geometry
            taps = implementations.conv_gradient_kernels(geometry, gradient.dtype, gradient.device)
            if not geometry.pointwise:
                return taps
        found = implementations.gradient_kernels(gradient.dtype, gradient.device)
        products, why = implementations.fitting(found, gradient, gradient)
        return [*products, *taps[0]], why

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the pruned gradient, of the gradient's shape, and the weight."""
        return self.prune(call.a), call.b

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return what `prune` returns, packed: the same choices."""
        gradient, rows = call.a, call.a.shape[:-1].numel()
        if implementations.on_gpu(gradient.device):
            return kernel.refill(kernel.blank(gradient), self.prune(gradient).reshape(rows, -1).contiguous())
        if (made := self._left(gradient, kernel)) is not None:
            return Prepared(kernel, made)
        buffer = self.workspace.buffer(packed_bytes(rows, gradient.shape[-1], gradient.dtype))
        return Prepared(kernel, packed(gradient, self.rule, generator=self._generator(gradient.device), out=buffer))

    def multiply(self, kernel: Kernel, packed: Prepared, call: Call) -> Tensor:
        """Return dL/dx: a matrix of rows; of a convolution the images, in the memory format of x."""
        convolution = call.convolution
        if isinstance(kernel, ConvGradient):
            assert convolution is not None, kernel.name
            found = convolution.multiply(kernel, packed)
        else:
            found = super().multiply(kernel, packed, call)
            if convolution is None:
                return found
            images, *size = convolution.problem.images
            pixels = size if convolution.weight.ndim == 4 else size[1:]
            found = found.view(images, *pixels, -1).movedim(-1, 1)
        return found if convolution.last else found.contiguous()

    def prune(self, gradient: Tensor) -> Tensor:
        """Return the pruned dL/dz, (samples, pixels, channels)."""
        if (made := self._left(gradient, None)) is not None:
            return made
        return pruned(gradient, self.rule, parts=self.parts, generator=self._generator(gradient.device))

    def takes_through(self, z: Tensor) -> bool:
        """Whether the gradient of a layer's output can be pruned where an activation's backward pass makes it."""
        rows = self._rows(z)
        whole = rows.shape[-1] // self.parts % 4 == 0
        return self.rule.native and whole and rows.is_contiguous() and refuses(rows) is None and rows.numel() > 0

    def through(
        self, products: LinearProducts, upstream: Tensor, at: Tensor, activation: str, *, hooked: bool = False
    ) -> Tensor:
        """Return dL/dz of y = activation(z) and leave it pruned, as the layer's data gradient is about to want it.

        Before it is known how that runs, and where a hook waits for dL/dz, nothing is pruned here: the layer does it.

        Args:
            products: Of the layer that has returned z.
            upstream: dL/dy.
            at: z, of its shape; of "relu" y.
            activation: A key of `kernels.epilogue.ACTIVATIONS`.
            hooked: Whether z has hooks: through `data` or `numpy()` they may change dL/dz without a trace.
        """
        given, at = self._rows(upstream), self._rows(at)
        choice = products.settled("data", at)
        kernel = find(choice.kernel) if choice is not None and choice.sparse and not hooked else None
        size = packed_bytes(at.shape[:-1].numel(), at.shape[-1], at.dtype) if kernel is not None else 0
        gradient, kept = pruned_through(
            given,
            at,
            activation,
            self.rule if choice is not None and not hooked else None,
            generator=self._generator(at.device, count=False),
            out=self.workspace.buffer(size) if kernel is not None else None,
        )
        if choice is not None:
            self.workspace.leave(_Made(self, gradient, gradient._version, kernel, kept, activation))
        pixels = gradient.view(upstream.movedim(1, -1).shape if self.convolution else upstream.shape)
        return pixels.movedim(-1, 1) if self.convolution else pixels

    def _left(self, gradient: Tensor, kernel: Kernel | None) -> Tensor | None:
        """Return what an activation has left of this gradient, counted as drawn, or None: it is to be pruned."""
        made = cast(_Made | None, self.workspace.take())
        if made is None or made.source is not self:
            self.pruned_where = f"{OWN_PASS}: no activation module made it"
        elif made.pruned is None:
            self.pruned_where = f"{OWN_PASS}: a hook may change what {made.activation} made"
        elif made.kernel is not kernel or not made.is_of(self, gradient):
            self.pruned_where = f"{OWN_PASS}: {made.activation} made another one: a sum, or changed since"
        else:
            self.pruned_where = f"where {made.activation} made it"
            self.draws += self.rule.draws
            return made.pruned
        return None

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return (samples, pixels, channels) of a tensor of the layer's output: the axes that it is pruned along."""
        if self.convolution:
            return tensor.movedim(1, -1).flatten(1, -2)
        *samples, tokens, channels = (1, *tensor.shape) if tensor.ndim == 1 else tensor.shape
        return tensor.reshape(math.prod(samples), tokens, channels)

    def _generator(self, device: torch.device, *, count: bool = True) -> torch.Generator | None:
        if not self.rule.draws:
            return None
        seed = randomness.derive(self.seed, self.draws, f"gradient of layer {self.position}")
        self.draws += count
        return torch.Generator(device).manual_seed(seed)
