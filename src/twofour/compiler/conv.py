"""The compiled convolution: a weight prepared for one measured kernel, and nothing that trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twofour.compiler.layer import MeasuredLayer, PreparedWeights
from twofour.errors import KernelError
from twofour.kernels.base import FLOATS
from twofour.kernels.conv import ConvProblem, Geometry, Images
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.operator import inference_only
from twofour.native.surroundings import STRANGE, by_operators, from_autocast, has_tangent, unreadable
from twofour.packing import Packed, dense_of


class CompiledConv(MeasuredLayer):
    """A Conv1d or Conv2d for inference on one measured kernel, with what follows it done in the same pass.

    Args:
        name: Name of the layer in its model, for messages.
        problem: The geometry, and what follows.
        dispatch: Its kernel.
        prepared: The weight in that kernel's layout.
        bias: float32 (out,) or None.
        images: The input its kernel was chosen for; it runs every other size too.
        dimensions: 1 for a Conv1d, 2 for a Conv2d.
    """

    problem: ConvProblem

    def __init__(
        self,
        name: str,
        problem: ConvProblem,
        dispatch: DispatchTable,
        prepared: PreparedWeights,
        bias: Tensor | None,
        images: Images = (0, 0, 0),
        dimensions: int = 2,
    ) -> None:
        super().__init__(name, problem, dispatch, prepared, bias)
        self.images = images
        self.dimensions = dimensions
        self.in_order = False

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """Types of inputs."""
        return FLOATS if self.weight_dtype is torch.bfloat16 else FLOATS[:1]

    @property
    def geometry(self) -> Geometry:
        """Sizes of the convolution."""
        return self.problem.geometry

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return activation(conv(input, W) + bias + other).

        Args:
            input: float32 ([images,] in, [height,] width), any strides; channels last is not copied. What autocast made
                is widened. Of a weight in bfloat16 also bfloat16, which is widened and answered. In int8 with a static
                range also uint8, rounded by it.
            other: float32 of the output's shape, or None.

        Returns:
            ([images,] out, [height,] width), channels last; in the order of a contiguous input if `in_order`. float32,
            but of what hands on bytes.

        Raises:
            KernelError: Shape, dtype or device of an operand do not fit, or a gradient is asked for.
        """
        x = input  # torch's name of it, by which a model may call its layer
        if self.weight_dtype is torch.bfloat16 and isinstance(x, Tensor) and x.dtype is torch.bfloat16:
            return self.forward(x.float(), None if other is None else other.float()).bfloat16()
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
        y = y.squeeze(0) if single else y
        return y.contiguous() if self.in_order and input.is_contiguous() else y

    def _image(self, x: Tensor, other: Tensor | None) -> Tensor:
        if by_operators():
            return self._by_operator(*_widened(x, other))
        try:
            if (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x):
                raise inference_only()
            x = x.resolve_neg()
            _, ((run, weight, _),) = self.prepared.bound(self.dispatch_text)
            return run(x, weight, self.bias, self.problem, other)
        except KernelError as error:
            made = _widened(x, other)
            if made[0] is x and made[1] is other:
                raise error.for_layer(self.name) from None
            return self._image(*made)
        except STRANGE as error:
            if unreadable(x) is None:
                raise
            raise self._unfit(x) from error

    def stored(self) -> Packed | Tensor:
        """Return the weight as it is prepared, narrowed again where the model's was in bfloat16: to the bit."""
        held = super().stored()
        if self.weight_dtype is not torch.bfloat16 or self.dispatch.kernels[0].dtype != "float32":
            return held
        return dense_of(held).bfloat16()

    def _operator(self, x: Tensor, other: Tensor | None) -> tuple[Any, tuple[Any, ...]]:
        (weight,), (kernel,) = self.prepared.tensors, self.dispatch.names
        ranged = self.problem.quantization
        options = self.problem.activation, other, ranged.x_scale, ranged.x_zero
        return torch.ops.twofour.conv, (x, weight, self.bias, kernel, to_numbers(self.geometry), *options)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        geometry = self.geometry
        taps = geometry.kernel if self.dimensions == 2 else geometry.kernel[1:]
        return geometry.out_channels, geometry.in_channels // geometry.groups, *taps

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.geometry}, bias={self.bias is not None}, kernel={self.dispatch.names[0]}"

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


def _widened(x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return operands in float32 where autocast made them in another type."""
    made, added = from_autocast(x, FLOATS[:1]), from_autocast(other, FLOATS[:1])
    return x if made is None else made, other if added is None else added


def images_of(x: Tensor, module: nn.Module) -> Images:
    """Return images, height and width of a convolution's input ([images,] channels, [height,] width)."""
    dimensions = 1 if isinstance(module, nn.Conv1d) else 2
    sizes = x.shape[-dimensions:]
    return x.shape[0] if x.ndim == dimensions + 2 else 1, sizes[0] if dimensions == 2 else 1, sizes[-1]


def answer_in_order(model: nn.Module) -> bool:
    """Have convolutions answer in the memory order of their input, as torch's do; tell whether that is new to any.

    A copy each: for models that `view` what a convolution answers, which another order does not allow.
    """
    found = [module for module in model.modules() if isinstance(module, CompiledConv) and not module.in_order]
    for module in found:
        module.in_order = True
    return bool(found)
