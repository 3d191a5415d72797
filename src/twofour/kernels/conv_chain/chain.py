"""Convolutions in a row as one native call, by strips of rows: what is between them never exists whole (README.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.conv import ConvKernel, ConvProblem, Images, PreparedConv, channels_last, require_image
from twofour.kernels.problem import MaybeTensor

STRIP_BYTES = 512 << 10
"""What the rows of a strip take, in an L2 of 1 MB: all that its convolutions read and write but for weights."""


@dataclass(frozen=True)
class Link:
    """One convolution of a chain: y = activation(conv(x, W) + bias + other).

    Attributes:
        kernel: What convolves; it has a `native_convolution`.
        weight: In its layout.
        bias: float32 (out,) or None.
        problem: The geometry, and the activation.
    """

    kernel: ConvKernel
    weight: PreparedConv
    bias: MaybeTensor
    problem: ConvProblem


@dataclass(frozen=True)
class ConvChain:
    """Convolutions of which each reads what the one before it writes.

    Attributes:
        links: The convolutions, the first one first.
    """

    links: tuple[Link, ...]

    def sizes(self, images: Images) -> list[Images]:
        """Return the sizes of the input and of each answer: images, height, width.

        Raises:
            KernelError: An image is smaller than the kernel of its convolution.
        """
        found = [images]
        for link in self.links:
            count, height, width = found[-1]
            found.append((count, *link.problem.geometry.output(height, width)))
        return found

    def refuses(self, images: Images) -> str | None:
        """Return why not: a row of an answer that reads zeros alone."""
        sizes = self.sizes(images)
        for link, (_, height, _), (_, rows, _) in zip(self.links, sizes[:-1], sizes[1:], strict=True):
            g = link.problem.geometry
            if g.before[0] > (g.kernel[0] - 1) * g.dilation[0] or (rows - 1) * g.stride[0] - g.before[0] >= height:
                return "rows of an answer read zeros alone"
        return None

    def strip_rows(self, images: Images) -> int:
        """Return how many rows of the last answer a strip has, so that what is read and written stays in L2."""
        sizes, geometries = self.sizes(images), [link.problem.geometry for link in self.links]
        channels = [geometries[0].in_channels, *(geometry.out_channels for geometry in geometries)]
        each = [4 * c * height * width for c, (_, height, width) in zip(channels, sizes, strict=True)]
        rows = sizes[-1][1]
        strips = -(-sum(each) // STRIP_BYTES)
        return -(-rows // min(strips, rows))

    def run(self, x: Tensor, others: Sequence[MaybeTensor] = (), rows: int | None = None) -> Tensor:
        """Convolve.

        Args:
            x: float32 (images, in_channels, height, width), any strides; channels last is not copied.
            others: For each convolution float32 of its answer's shape, or None.
            rows: Of the last answer in a strip; all of all images in one without it.

        Returns:
            float32 (images, out_channels, height, width) in torch.channels_last.

        Raises:
            KernelError: An operand does not fit.
        """
        geometries = [link.problem.geometry for link in self.links]
        require_image(x, geometries[0], None)
        sizes = self.sizes((x.shape[0], x.shape[2], x.shape[3]))
        others = list(others) or [None] * len(self.links)
        for geometry, other, (count, high, wide) in zip(geometries, others, sizes[1:], strict=True):
            _require_other(other, (count, geometry.out_channels, high, wide))
        numbers = [self._numbers(link, size) for link, size in zip(self.links, sizes[1:], strict=True)]
        count, high, wide = sizes[-1]
        y = torch.empty(
            (count, geometries[-1].out_channels, high, wide),
            dtype=torch.float32, memory_format=torch.channels_last, device="cpu",
        )  # fmt: skip
        native.extension().conv_chain(
            [link.kernel.native_convolution for link in self.links],
            self.links[0].kernel.image(x, geometries[0]),
            [link.weight.tensor for link in self.links],
            [link.bias for link in self.links],
            [None if other is None else channels_last(other) for other in others],
            y,
            numbers,
            rows or high,
            native.threads(),
        )
        return y

    def reference(self, x: Tensor, others: Sequence[MaybeTensor] = ()) -> Tensor:
        """Return the same in plain torch, one convolution after the other."""
        for link, other in zip(self.links, list(others) or [None] * len(self.links), strict=True):
            g, weight = link.problem.geometry, link.weight.restore()
            dense = weight if isinstance(weight, Tensor) else weight.unpack()
            dense, bias = dense.to(x.dtype), None if link.bias is None else link.bias.to(x.dtype)
            x = torch.nn.functional.pad(x, (g.before[1], g.after[1], g.before[0], g.after[0]))
            x = torch.conv2d(x, dense, bias, g.stride, 0, g.dilation, g.groups)
            x = link.problem.epilogue.apply(x if other is None else x + other)
        return x

    def _numbers(self, link: Link, size: Images) -> list[int]:
        """Return what the native call is told of a convolution."""
        g, (_, height, width) = link.problem.geometry, size
        axes = zip(g.kernel, g.stride, g.before, g.dilation, strict=True)
        return [
            *(g.groups, link.problem.epilogue.codes[0], g.out_channels, height, width),
            *(number for axis in axes for number in axis),
        ]


def _require_other(other: MaybeTensor, shape: tuple[int, ...]) -> None:
    if other is not None and (tuple(other.shape) != shape or other.dtype is not torch.float32 or not other.is_cpu):
        raise KernelError(
            "the operands of a convolution do not fit",
            got=f"other of {other.dtype} {tuple(other.shape)} on {other.device}",
            wanted=f"torch.float32 {shape} on cpu",
            remedy="give each convolution of a chain a second operand of its answer's shape, or None",
        )
