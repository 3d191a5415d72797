"""How a layer is made to call the pruned products: its class becomes a subclass of itself, as `parametrize` does.

A hook cannot tell the input's gradient from the weight's, since both come from one dL/dz, and two products with
detached operands would compute twice. A subclass overrides one method and patches nothing: the module, its
parameters, hooks, buffers and state dict stay the same objects, `isinstance` holds, and copies and pickles work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.layers import CARRIED, is_hugging_face_conv1d, put_over
from twofour.training.sdgp.products import convolution, linear
from twofour.training.sdgp.state import State


def _exact(x: Tensor) -> bool:
    """Whether nobody asks for the input's gradient: evaluation, inference, or a first layer."""
    return not (torch.is_grad_enabled() and x.requires_grad)


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast would, outside of the function: it then saves the small copies, not the large originals."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(operand: Tensor) -> Tensor:
        return operand if operand.dtype is torch.float64 else operand.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)


class SdgpLinear(nn.Linear):
    """A Linear whose input gradient is computed from a pruned dL/dz."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), as `nn.Linear`."""
        if _exact(input):
            return super().forward(input)
        x, weight, bias = _as_autocast(input, self.weight, self.bias)
        return linear(x, weight, bias, self.__dict__[CARRIED].number)


class _Convolution(nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _exact(input):
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        padded, padding = _padded(self, input)
        whole = padded.ndim == weight.ndim
        x, w, b = _as_autocast(padded if whole else padded.unsqueeze(0), weight, bias)
        number = self.__dict__[CARRIED].number
        y = convolution(x, w, b, number, list(self.stride), padding, list(self.dilation), self.groups)
        return y if whole else y.squeeze(0)


class SdgpConv1d(_Convolution, nn.Conv1d):
    """A Conv1d whose input gradient is computed from a pruned dL/dz."""


class SdgpConv2d(_Convolution, nn.Conv2d):
    """A Conv2d whose input gradient is computed from a pruned dL/dz."""


def _padded(conv: nn.modules.conv._ConvNd, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return input and symmetric zero padding that amount to the layer's padding."""
    around: Sequence[int] = conv._reversed_padding_repeated_twice
    low, high = around[::2], around[1::2]
    if conv.padding_mode == "zeros" and list(low) == list(high):
        return x, list(reversed(low))
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, list(around), mode=mode), [0] * len(low)


@cache
def _of(base: type[nn.Module], hugging_face: bool) -> type[nn.Module]:
    """Make the subclass of a user's own subclass, which keeps the layer's forward."""
    if hugging_face:
        return type(f"Sdgp{base.__name__}", (_HuggingFace, base), {"__module__": __name__})
    ours = next(kind for kind in (SdgpLinear, SdgpConv1d, SdgpConv2d) if issubclass(base, kind.__bases__[-1]))
    return ours if ours.__bases__[-1] is base else type(f"Sdgp{base.__name__}", (ours, base), {"__module__": __name__})


class _HuggingFace:
    """Forward of Hugging Face's Conv1D, whose weight is (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        if _exact(x):
            return super().forward(x)  # type: ignore[misc]
        x, weight, bias = _as_autocast(x, self.weight, self.bias)  # type: ignore[attr-defined]
        return linear(x, weight.t(), bias, self.__dict__[CARRIED].number)


def put_on(module: nn.Module, state: State) -> None:
    """Let the layer compute its input gradient from a pruned dL/dz."""
    put_over(module, _of(type(module), is_hugging_face_conv1d(module)), state)


def is_on(module: nn.Module) -> bool:
    """Whether `put_on` was called and `take_off` was not."""
    return isinstance(module.__dict__.get(CARRIED), State)


def on_top(module: nn.Module) -> bool:
    """Whether no other class was put over ours since, by a parametrisation for instance."""
    own = type(module).__dict__.get("__module__") == __name__
    return own and issubclass(type(module), (SdgpLinear, _Convolution, _HuggingFace))
