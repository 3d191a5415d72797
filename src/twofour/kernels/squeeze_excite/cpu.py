"""Squeeze-and-excite on the CPU: rows of squeeze_excite.inc."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.conv import channels_last
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.operands import require_memory
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.squeeze_excite.reference import GATES


@dataclass(frozen=True)
class SqueezeExcite:
    """What scales the channels of an image: gate(expand^T activation(reduce mean + reduce_bias) + expand_bias).

    Attributes:
        reduce: float32 (squeezed, channels).
        reduce_bias: float32 (squeezed,) or None.
        expand: float32 (squeezed, channels), contiguous: the second product's weight, transposed.
        expand_bias: float32 (channels,) or None.
        activation: A key of `epilogue.ACTIVATIONS`.
        gate: A key of `GATES`.
    """

    reduce: Tensor
    reduce_bias: MaybeTensor
    expand: Tensor
    expand_bias: MaybeTensor
    activation: str = "silu"
    gate: str = "sigmoid"

    def __call__(self, x: Tensor) -> Tensor:
        """Return every channel of every image times its scale, which comes from the means of that image's channels.

        Args:
            x: float32 (images, channels, height, width), any strides; channels last is not copied.

        Returns:
            The same shape in torch.channels_last.

        Raises:
            KernelError: `x` does not fit.
        """
        if x.ndim != 4 or x.dtype is not torch.float32 or not x.is_cpu or x.shape[1] != self.reduce.shape[1]:
            raise KernelError(
                "the input of squeeze-and-excite does not fit",
                got=f"x of {x.dtype} {tuple(x.shape)} on {x.device}",
                wanted=f"torch.float32 (images, {self.reduce.shape[1]}, height, width) on cpu",
                remedy="convert the input (x.float(), x.cpu()), or give it the channels of the weights",
            )
        require_memory(x)  # before `channels_last`, which copies
        x = channels_last(x)
        y = torch.empty(x.shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
        weights = self.reduce, self.reduce_bias, self.expand, self.expand_bias
        codes = Epilogue(self.activation).codes[0], list(GATES).index(self.gate)
        row = native.best("squeeze_excite", dtype="float32")
        native.extension().squeeze_excite(row.index, x, *weights, y, *codes, native.threads())
        return y
