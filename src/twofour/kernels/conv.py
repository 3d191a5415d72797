"""The protocol of a convolution: its geometry, and a row of the table that prepares a weight and runs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour import native
from twofour.errors import KernelError, PackingError
from twofour.kernels import epilogue
from twofour.kernels.base import FLOATS, Prepared, Row
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.operands import require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Packed, dense_of, pack
from twofour.patterns import Pattern

Pair = tuple[int, int]

Images = tuple[int, int, int]
"""Images, height and width of an input."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**epilogue.ACTIVATIONS, "relu6": functional.relu6}
"""What a convolution does to a sum before it stores it, in the order of `conv_activation` in conv_images.h."""


SCATTERED = "oneDNN is left out channels last: in groups with dilation and stride it can end the process"
"""What a plan says of a convolution that is `Geometry.scattered`."""


@dataclass(frozen=True)
class Geometry:
    """What a Conv1d or Conv2d does to sizes; a Conv1d is a Conv2d over images of height 1.

    Attributes:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel: Taps (height, width).
        stride: (height, width).
        before: Zeros (above, left of) the image.
        after: Zeros (below, right of) it.
        dilation: (height, width).
        groups: Groups of channels.
    """

    in_channels: int
    out_channels: int
    kernel: Pair
    stride: Pair = (1, 1)
    before: Pair = (0, 0)
    after: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d) -> Geometry:
        """Read the geometry of a layer that pads with zeros."""
        assert module.padding_mode == "zeros", module.padding_mode
        kernel, stride, dilation = (_pair(size, 1) for size in (module.kernel_size, module.stride, module.dilation))
        if module.padding == "same":  # torch puts the odd zero behind
            total = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
            before = (total[0] // 2, total[1] // 2)
            after = (total[0] - before[0], total[1] - before[1])
        else:
            before = after = (0, 0) if isinstance(module.padding, str) else _pair(module.padding, 0)
        return cls(module.in_channels, module.out_channels, kernel, stride, before, after, dilation, module.groups)

    @property
    def columns(self) -> int:
        """Inputs that one output sums over."""
        return self.in_channels // self.groups * self.kernel[0] * self.kernel[1]

    @property
    def pointwise(self) -> bool:
        """Whether the convolution is a product over channels, pixel by pixel."""
        ones, zeros = (1, 1), (0, 0)
        sizes = (self.kernel, self.stride, self.before, self.after)
        return sizes == (ones, ones, zeros, zeros) and self.groups == 1

    @property
    def scattered(self) -> bool:
        """Whether groups, dilation and stride come together.

        oneDNN's channels-last convolution has then ended the process on a CPU with AMX (torch 2.13: 32 -> 68 channels
        in 4 groups, 5 x 1 taps, stride 1 x 2, padding 0 x 1, dilation 1 x 3, an image of 5 x 1); its plain one had not.
        """
        return self.groups > 1 and max(self.dilation) > 1 and max(self.stride) > 1

    @property
    def symmetric(self) -> bool:
        """Whether as many zeros stand before the image as behind it."""
        return self.before == self.after

    def sizes(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the size (height, width) of the output of an image: whole numbers, or symbols while tracing."""
        found = [
            (size + self.before[i] + self.after[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i, size in enumerate((height, width))
        ]
        return found[0], found[1]

    def output(self, height: int, width: int) -> Pair:
        """Return the size (height, width) of the output of an image.

        Raises:
            KernelError: The image is smaller than the kernel.
        """
        found = self.sizes(height, width)
        if min(found) < 1:
            raise KernelError(
                "the image is smaller than the kernel of the convolution",
                got=f"{height} x {width} pixels, kernel {self.kernel}, dilation {self.dilation}",
                wanted="at least one output pixel",
                remedy="give the model larger images",
            )
        return found


@dataclass(frozen=True)
class ConvEpilogue(Epilogue):
    """The epilogue of a convolution: the activations of products, and ReLU6."""

    known: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = ACTIVATIONS


@dataclass(frozen=True)
class ConvProblem(Problem):
    """A convolution: a problem with a geometry. Its second operand is added before the activation.

    Attributes:
        geometry: Sizes of the convolution.
    """

    geometry: Geometry = field(kw_only=True)

    @classmethod
    def of(cls, geometry: Geometry, activation: str = "none") -> ConvProblem:
        """Return the problem of activation(conv(x, W) + bias + other)."""
        return cls(geometry.out_channels, ConvEpilogue(activation), geometry=geometry)

    @property
    def activation(self) -> str:
        """A key of `ACTIVATIONS`."""
        return self.epilogue.activation


@dataclass(frozen=True, eq=False)
class PreparedConv(Prepared):
    """The weight of a convolution as a row reads it.

    Attributes:
        geometry: Of the convolution.
        images: What `prepare` was told of the input.
        shape: Of the weight, (out, in / groups, [height,] width).
        fitted: The weight for other images, where a row keeps one.
    """

    geometry: Geometry = field(kw_only=True)
    images: Images | None = None
    shape: tuple[int, ...] = ()
    fitted: dict[Images, Tensor] = field(default_factory=lambda: {}, repr=False)

    def again(self, weight: Packed | Tensor) -> PreparedConv:
        """Return another weight, prepared as this one is; one of a pattern that its zeros do not say is of the same."""
        if isinstance(weight, Tensor) and self.kernel.sparse and self.kernel.form is None:
            held = self.restore()
            weight = pack(weight, held.header.parsed(), axis=1) if isinstance(held, Packed) else weight
        return self.kernel.prepare(weight, self.geometry, self.images)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.tensor.is_mkldnn:
            return self.kernel.prepare, (self.restore(), self.geometry, self.images)
        return super().__reduce_ex__(protocol)


@dataclass(frozen=True)
class ConvKernel(Row):
    """One implementation of y = activation(conv(x, W) + bias + other), channels last.

    Attributes:
        lead: How many times as fast as others it must be where it is measured alone, to be so inside a model.
        close: Whether its error is larger than a sum's, so that it is chosen only where such rows are asked for.
    """

    lead: ClassVar[float] = 1.0
    close: ClassVar[bool] = False

    def takes(self, pattern: Pattern) -> bool:
        """Whether it multiplies by weights that obey a pattern along their input channels."""
        return self.form is not None and pattern.within(self.form)

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why this kernel cannot run a convolution of this geometry, or None when it can."""
        return self.unavailable()

    def takes_planes(self, geometry: Geometry) -> bool:
        """Whether it reads a contiguous image, its channels apart, as well as one in torch.channels_last."""
        return False

    def image(self, x: Tensor, geometry: Geometry) -> Tensor:
        """Return an image as it reads it: itself, or a copy in torch.channels_last."""
        return x if self.takes_planes(geometry) and x.is_contiguous() else channels_last(x)

    @property
    def native_convolution(self) -> int | None:
        """Its place among the convolutions that a chain runs inside; None where torch runs it."""
        return native.convolutions().get(self.name)

    def prepare(self, weight: Packed | Tensor, geometry: Geometry, images: Images | None = None) -> PreparedConv:
        """Return the weight (out, in / groups, [height,] width) in this kernel's layout.

        Args:
            weight: Packed, or dense with its zeros.
            geometry: Of the convolution.
            images: The input it is prepared for, where the layout depends on it; every other one is served too.

        Raises:
            PackingError: A sparse kernel is given a weight that is not 2:4 along axis 1.
        """
        dense = dense_of(weight)
        image = dense.float() if dense.ndim == 4 else dense.float().unsqueeze(2)
        tensor = self.reorder(image, geometry, images)
        return PreparedConv(self, tensor, geometry=geometry, images=images, shape=tuple(dense.shape))

    @abstractmethod
    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return a float32 weight (out, in / groups, height, width) in this kernel's layout; see `prepare`."""

    def restore(self, prepared: PreparedConv) -> Packed | Tensor:
        """Return the inverse of `prepare`: canonical form for sparse kernels, dense for the others."""
        dense = prepared.tensor.to_dense() if prepared.tensor.is_mkldnn else prepared.tensor
        return dense.contiguous().view(prepared.shape)

    @abstractmethod
    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Return activation(conv(x, W) + bias + other), as residual networks have it.

        Args:
            x: float32 (images, in_channels, height, width), any strides; channels last is not copied.
            weight: What `prepare` returned.
            bias: float32 (out_channels,) or None.
            problem: The geometry that `prepare` was given, and what happens to the sum before it is stored; rows in
                whole numbers: the input's range and the answer's dtype.
            other: float32 of the output's shape, or None.

        Returns:
            float32 (images, out_channels, height, width) in torch.channels_last.

        Raises:
            KernelError: `x` or `other` does not fit.
        """


def require_packed(weight: Packed | Tensor, kind: str, example: str) -> Packed:
    """Return a packed weight; refuse a dense one, for rows that read the forms of many patterns.

    Args:
        weight: Of a convolution.
        kind: What such weights are.
        example: Text of a pattern.

    Raises:
        PackingError: It is not packed, as its zeros do not say which pattern is meant.
    """
    if not isinstance(weight, Packed):
        raise PackingError(
            f"a convolution with a weight of {kind} needs it packed",
            got=f"a dense {weight.dtype} {tuple(weight.shape)}",
            wanted="a packed weight, whose header names its pattern",
            remedy=f'packing.pack(weight, "{example}", axis=1)',
        )
    return weight


def too_many_taps(geometry: Geometry) -> str | None:
    """Return why native kernels do not take so large a kernel, or None when they do (conv_axis.h, kConvTaps)."""
    most = native.extension().conv_taps
    return f"the kernel {geometry.kernel} has more than {most} taps an axis" if max(geometry.kernel) > most else None


def channels_last(x: Tensor) -> Tensor:
    """Return a tensor (images, channels, height, width) with channels densest, itself if it is."""
    return x.contiguous(memory_format=torch.channels_last)


def require_image(
    x: Tensor,
    geometry: Geometry,
    other: Tensor | None,
    reads: Sequence[torch.dtype] = FLOATS[:1],
    adds: Sequence[torch.dtype] = FLOATS[:1],
) -> Pair:
    """Refuse operands whose memory a kernel would misread; return the output's size.

    Args:
        x: (images, in_channels, height, width).
        geometry: Of the convolution.
        other: Of the output's shape, or None.
        reads: What `x` may be.
        adds: What `other` may be.

    Raises:
        KernelError: Shape, dtype or device of `x` or `other` do not fit.
    """
    if x.ndim != 4 or x.dtype not in reads or not x.is_cpu or x.shape[1] != geometry.in_channels:
        raise _unfit(
            f"x of {x.dtype} {tuple(x.shape)} on {x.device}", f"(images, {geometry.in_channels}, h, w)", *reads
        )
    require_memory(x)  # before `channels_last`, which copies
    size = geometry.output(x.shape[2], x.shape[3])
    shape = (x.shape[0], geometry.out_channels, *size)
    if other is not None and (tuple(other.shape) != shape or other.dtype not in adds or not other.is_cpu):
        raise _unfit(f"other of {other.dtype} {tuple(other.shape)} on {other.device}", str(shape), *adds)
    return size


def finish(y: Tensor, activation: str, other: Tensor | None) -> Tensor:
    """Return activation(y + other) in plain torch; `y` is a fresh result and is changed."""
    y = y if other is None else y.add_(other)
    if activation == "relu6":
        return y.clamp_(0.0, 6.0)
    return y.relu_() if activation == "relu" else ACTIVATIONS[activation](y)


def padded(x: Tensor, geometry: Geometry) -> tuple[Tensor, Pair]:
    """Return the image and the padding left to do, the image padded where torch's own convolution cannot."""
    if geometry.symmetric:
        return x, geometry.before
    (top, left), (bottom, right) = geometry.before, geometry.after
    return functional.pad(x, (left, right, top, bottom)), (0, 0)


def _pair(sizes: tuple[int, ...] | str, fill: int) -> Pair:
    assert not isinstance(sizes, str), sizes
    return (fill, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


_REMEDY = "convert the operand (x.float(), x.cpu()), or give it the channels the convolution was built for"


def _unfit(got: str, wanted: str, *dtypes: torch.dtype) -> KernelError:
    wanted = f"{' or '.join(map(str, dtypes))} {wanted} on cpu"
    return KernelError("the operands of a convolution do not fit", got=got, wanted=wanted, remedy=_REMEDY)
