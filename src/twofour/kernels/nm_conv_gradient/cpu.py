"""The native data gradient of a convolution: rows of nm_conv_gradient.inc and their call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared, rows_of
from twofour.kernels.conv import ConvProblem, Geometry, Images, too_many_taps
from twofour.kernels.nm_matmul import to_layout
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Packed, layout_head


@dataclass(frozen=True)
class DataGradient(ConvProblem):
    """What is computed: dL/dx of a convolution.

    Attributes:
        images: Images, height and width of x.
    """

    images: Images = field(kw_only=True)

    @classmethod
    def at(cls, geometry: Geometry, images: Images) -> DataGradient:
        """Return the problem of a convolution whose input has these images."""
        return cls(geometry.in_channels, geometry=geometry, images=images)


@dataclass(frozen=True)
class ConvGradient(Kernel):
    """One row of nm_conv_gradient.inc.

    Pruned positions are skipped: an infinity or NaN in the weight reaches dL/dx through kept values alone.
    """

    index: int

    def cannot(self, geometry: Geometry) -> str | None:
        """Return why this kernel takes no convolution of this geometry, or None when it does."""
        if geometry.groups > 1:
            return f"{geometry.groups} groups of channels: the kernels take one"
        if geometry.out_channels % 4:
            return f"{geometry.out_channels} output channels: a multiple of 4 is wanted"
        if not geometry.symmetric:
            return f"uneven padding {geometry.before} and {geometry.after}"
        return too_many_taps(geometry) or self.unavailable()

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return dL/dz (pixels, out), packed canonically, in this row's layout."""
        assert isinstance(weight, Packed), type(weight)
        return Prepared(self, to_layout(weight, self.layout))

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Return dL/dx.

        Args:
            x: The convolution's weight, float32 (out, in, height, width) on the CPU, any strides.
            weight: dL/dz, (images * pixels, out): what `prepare` or `nm_gradient_packed` returned.
            bias: None.
            problem: A `DataGradient`.
            other: None.

        Returns:
            float32 (images, in, height, width) in torch.channels_last.

        Raises:
            KernelError: The bytes are no dL/dz of this convolution, or the weight does not fit.
        """
        assert bias is None and other is None and isinstance(problem, DataGradient), self.name
        geometry, (images, *size) = problem.geometry, problem.images
        shape = (images, geometry.in_channels, *size)
        dx = torch.empty(shape, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        output = geometry.output(*size)
        if not native.extension().nm_conv_gradient(self.index, weight.tensor, x, dx, *axes, output, native.threads()):
            raise KernelError(
                f"{self.name} was given bytes made for another kernel",
                got=f"a buffer that starts with {layout_head(weight.tensor)[:48]!r}",
                wanted=f"layout {self.layout!r} of a gradient ({images} x {output}, {geometry.out_channels})",
                remedy="pack dL/dz with nm_gradient_packed",
            )
        return dx


def conv_gradient_rows() -> list[ConvGradient]:
    """Return the rows of nm_conv_gradient.inc in their order there."""
    return rows_of(ConvGradient, "nm_conv_gradient")
