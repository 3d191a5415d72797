"""The compiled convolution: a weight prepared for one measured kernel, and nothing that trains."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from twofour.compiler.unpacked import WeightedLayer
from twofour.errors import KernelError
from twofour.kernels import find_convolution
from twofour.kernels.conv import ConvProblem, Geometry, Images
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.dense_conv import ONEDNN_CONV
from twofour.kernels.nm_conv import from_conv_layout
from twofour.kernels.operator import inference_only
from twofour.layers import obstacle
from twofour.native.surroundings import STRANGE, by_operators, followed, has_tangent, unreadable
from twofour.packing import Packed, pack


class PreparedConv:
    """A weight in one kernel's layout; immutable, so copies of a model share it.

    oneDNN's opaque tensors cannot be deep-copied or pickled: copying shares them, pickling goes through dense ones.

    Args:
        kernel: Name of the kernel.
        geometry: Of the convolution.
        tensor: What the kernel's `prepare` returned.
        dimensions: 1 for a Conv1d, 2 for a Conv2d.
        images: What `prepare` was told of the input.
    """

    def __init__(
        self, kernel: str, geometry: Geometry, tensor: Tensor, dimensions: int = 2, images: Images | None = None
    ) -> None:
        self.kernel, self.geometry, self.tensor, self.dimensions = kernel, geometry, tensor, dimensions
        self.images = images
        self._other: tuple[Images, Tensor] | None = None

    def fitting(self, images: Images) -> Tensor:
        """Return the weight for an input: oneDNN's is reordered for one of another size, and the last such one kept."""
        if images == self.images or not self.tensor.is_mkldnn:
            return self.tensor
        other = self._other
        if other is None or other[0] != images:
            other = images, ONEDNN_CONV.prepare(self.tensor.to_dense(), self.geometry, images)
            self._other = other
        return other[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedConv:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        plain = self.tensor.to_dense() if self.tensor.is_mkldnn else self.tensor
        return _unpickle, (self.kernel, self.geometry, plain, self.dimensions, self.images)

    @property
    def nbytes(self) -> int:
        """Bytes of the layout, without a dense one that a later call with other images may add."""
        return self.tensor.numel() * self.tensor.element_size()

    def source(self) -> Packed | Tensor:
        """Return the weight (out, in / groups, [height,] width), in its canonical packed form where it is packed."""
        if self.tensor.dtype is torch.uint8:
            packed = from_conv_layout(self.tensor, self.geometry)
            return packed if self.dimensions == 2 else pack(packed.unpack().squeeze(2), packed.header.pattern, axis=1)
        dense = self.tensor.to_dense() if self.tensor.is_mkldnn else self.tensor
        return dense.contiguous() if self.dimensions == 2 else dense.squeeze(2).contiguous()


def _unpickle(kernel: str, geometry: Geometry, plain: Tensor, dimensions: int, images: Images | None) -> PreparedConv:
    opaque = kernel == ONEDNN_CONV.name
    tensor = ONEDNN_CONV.prepare(plain, geometry, images) if opaque else plain
    return PreparedConv(kernel, geometry, tensor, dimensions, images)


class CompiledConv(WeightedLayer):
    """A Conv1d or Conv2d for inference on one measured kernel, with what follows it done in the same pass.

    Args:
        name: Name of the layer in its model, for messages.
        prepared: The weight in its kernel's layout.
        bias: float32 (out,) or None.
        activation: A key of `epilogue.ACTIVATIONS`.
        images: The input its kernel was chosen for; it runs every other size too.
    """

    prepared: PreparedConv

    def __init__(
        self,
        name: str,
        prepared: PreparedConv,
        bias: Tensor | None,
        activation: str = "none",
        images: Images = (0, 0, 0),
    ) -> None:
        super().__init__()
        self.name = name
        self.prepared = prepared
        self.dimensions = prepared.dimensions
        self.activation = activation
        self.images = images
        self.bias = None if bias is None else nn.Parameter(bias.detach().float().clone(), requires_grad=False)

    @cached_property
    def problem(self) -> ConvProblem:
        """What the kernel is asked."""
        return ConvProblem.of(self.geometry, self.activation)

    @property
    def geometry(self) -> Geometry:
        """Sizes of the convolution."""
        return self.prepared.geometry

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Return activation(conv(x, W) + bias + other).

        Args:
            x: float32 ([images,] in, [height,] width), any strides; channels last is not copied.
            other: float32 of the output's shape, or None.

        Returns:
            float32 ([images,] out, [height,] width), channels last.

        Raises:
            KernelError: Shape, dtype or device of an operand do not fit, or a gradient is asked for.
        """
        if not isinstance(x, Tensor) or x.is_nested or not self.dimensions < x.ndim < self.dimensions + 3:
            raise self._unfit(x)
        single, missing = x.ndim == self.dimensions + 1, 2 - self.dimensions
        x = x.unsqueeze(0) if single else x
        if missing:
            x, other = x.unsqueeze(2), None if other is None else other.unsqueeze(-2)
        if single and other is not None:
            other = other.unsqueeze(0)
        y = self._image(x, other)
        y = y.squeeze(2) if missing else y
        return y.squeeze(0) if single else y

    def _image(self, x: Tensor, other: Tensor | None) -> Tensor:
        prepared = self.prepared
        if by_operators():
            return self._by_operator(x, other)
        try:
            if (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x):
                raise inference_only()
            x = x.resolve_neg()
            run = find_convolution(prepared.kernel).run
            weight = prepared.fitting((x.shape[0], x.shape[2], x.shape[3]))
            return run(x, weight, self.bias, self.problem, other)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        except STRANGE as error:
            if unreadable(x) is None:
                raise
            raise self._unfit(x) from error

    def _by_operator(self, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the answer of the registered operator, which whatever follows the call sees."""
        prepared = self.prepared
        numbers = to_numbers(prepared.geometry)
        arguments = x, prepared.tensor, self.bias, prepared.kernel, numbers, self.activation, other
        if is_compiling():
            return torch.ops.twofour.conv(*arguments)
        with followed():
            return torch.ops.twofour.conv(*arguments)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        geometry = self.geometry
        taps = geometry.kernel if self.dimensions == 2 else geometry.kernel[1:]
        return geometry.out_channels, geometry.in_channels // geometry.groups, *taps

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.geometry}, bias={self.bias is not None}, kernel={self.prepared.kernel}"

    def _unfit(self, x: Tensor) -> KernelError:
        image = "([images,] channels, width)" if self.dimensions == 1 else "([images,] channels, height, width)"
        got, remedy = unreadable(x) or (
            f"{x.dtype} {tuple(x.shape)}",
            "reshape the input to images; a single one needs no first axis",
        )
        return KernelError(
            "the input of a compiled layer does not fit",
            got=got,
            wanted=f"torch.float32 {image}",
            remedy=remedy,
            layer=self.name,
        )


def conv_refusal(module: nn.Module) -> str | None:
    """Return why a convolution cannot be replaced, or None when it can."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return f"no packed kernel for {type(module).__name__} yet"
    if module.padding_mode != "zeros":
        return f"padding_mode {module.padding_mode!r}: the kernels pad with zeros"
    if reason := obstacle(module):
        return reason
    if module.weight.dtype is not torch.float32 or type(module.weight) is not nn.Parameter or not module.weight.numel():
        return unread(module.weight, "float32")
    return None


def unread(weight: Tensor, dtype: str) -> str:
    """Say that no kernel of a computing type takes a weight, and what to do where its dtype is why."""
    other = weight.is_floating_point() and weight.dtype is not torch.float32 and weight.numel()
    remedy = "; convert the model first: model.float()" if other else ""
    if other and weight.dtype is torch.bfloat16 and weight.ndim == 2:
        remedy += ', or pass dtype="bfloat16"'
    return f"its weight is {weight.dtype} of shape {tuple(weight.shape)}: no {dtype} kernel takes it{remedy}"


def images_of(x: Tensor, module: nn.Module) -> Images:
    """Return images, height and width of a convolution's input ([images,] channels, [height,] width)."""
    dimensions = 1 if isinstance(module, nn.Conv1d) else 2
    sizes = x.shape[-dimensions:]
    return x.shape[0] if x.ndim == dimensions + 2 else 1, sizes[0] if dimensions == 2 else 1, sizes[-1]


def image_weight(weight: Tensor) -> Tensor:
    """Return a weight (out, in / groups, [height,] width) as a Conv2d has it."""
    return weight.detach() if weight.ndim == 4 else weight.detach().unsqueeze(2)
