"""Layers of low bits: Linear and Conv2d under a class of ours, whose sums are whole numbers times scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional

from twofour.errors import QuantizationError
from twofour.layers import CARRIED, put_over, take_off
from twofour.native.surroundings import by_operators, has_tangent, no_autocast
from twofour.quantization import trained
from twofour.quantization.carried import BUFFERS, STEPS, LowBits, over
from twofour.quantization.reference import integer_product
from twofour.quantization.stamps import has_changed, stamp_of
from twofour.quantization.straight_through import valued

EXACT = 1 << 24
"""Whole numbers below it are exact in float32."""

PRODUCTS = 32
"""Products at most in which a layer adds up its groups: a traced graph has the operators of each."""


class LowBitLinear(nn.Linear):
    """A Linear of low bits: (..., in) -> (..., out)."""

    def extra_repr(self) -> str:
        """Return what a Linear says of itself, and its widths."""
        return f"{super().extra_repr()}, {self.__dict__[CARRIED].said}"

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of rounded inputs times rounded weights, scaled, plus the bias."""
        answer = _by_kernels(self, input)
        return _answer(self, input, input.shape[-1]) if answer is None else answer


class LowBitConv2d(nn.Conv2d):
    """A Conv2d of low bits: (images, channels, height, width) -> (images, out, height, width), or one image."""

    def extra_repr(self) -> str:
        """Return what a Conv2d says of itself, and its widths."""
        return f"{super().extra_repr()}, {self.__dict__[CARRIED].said}"

    def forward(self, input: Tensor) -> Tensor:
        """Return the same for every place of an image; what it is padded with is exactly zero.

        The answer lies in memory as the input does, whatever computes it: averages over places add in the order of
        memory, and a model may `view` what it gets.
        """
        answer = _by_kernels(self, input)
        answer = _answer(self, input, math.prod(self.weight.shape[1:])) if answer is None else answer
        if self.training:
            return answer
        last = input.ndim == 4 and not input.is_contiguous()
        last = last and input.is_contiguous(memory_format=torch.channels_last)
        return answer.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


Layer = LowBitLinear | LowBitConv2d


def _by_kernels(module: Layer, x: Tensor) -> Tensor | None:
    """Return what a compiled model runs in place of floats outside training, None where it runs nothing."""
    held: LowBits = module.__dict__[CARRIED]
    return held.runs(module, x) if held.runs is not None and not module.training and not held.whole else None


def _answer(module: Layer, x: Tensor, count: int) -> Tensor:
    """Return (sum) * (input scale * weight scale) + bias, the order in which kernels compute it, in x's dtype."""
    held: LowBits = module.__dict__[CARRIED]
    _require_floats(x)
    _require_backward(module, held, x)
    _require_steps(module, held)
    if module.training and not (held.whole or held.group or _is_followed(x)):
        return _trained(module, held, x)
    weight, scales = held.weight(module)
    image = isinstance(module, nn.Conv2d)
    if held.group:
        y = _of_groups(module, held, x.float(), weight, scales)
        return (y if module.bias is None else y + module.bias.float()).to(x.dtype)
    if held.widths.inputs is None:
        y = _product(module, x.float(), weight)
        scale = scales
    else:
        levels, scale = held.input(module, x.float())
        y = _sum(module, held, levels, weight, count)
    axes = (-1, 1, 1) if image else (-1,)
    scale = scales.view(axes) if held.widths.inputs is None else scale * scales.view(axes)
    y = y * scale
    return (y if module.bias is None else y + module.bias.float().view(axes)).to(x.dtype)


def _trained(module: Layer, held: LowBits, x: Tensor) -> Tensor:
    """Return the same of a layer that is trained, in bfloat16 where autocast says so: see trained.py."""
    dtype = trained.computing_type(x)
    weight, scales = trained.weight(held, module, dtype)
    axes = (-1, 1, 1) if isinstance(module, nn.Conv2d) else (-1,)
    token = None
    if held.widths.inputs is None:
        levels = x.to(dtype)
    elif held.static:
        token, least, most = held.learned_range(module, x)
        levels = trained.levels(x, token, held.round(), least, most, dtype)
    else:
        levels, token = held.input(module, x.float())
        levels = levels.to(dtype)
    sums = _product(module, levels, weight)
    factor = scales.view(axes) if token is None else token * scales.view(axes)
    bias = None if module.bias is None else module.bias.float().view(axes)
    return trained.scaled(sums, factor, bias, x.dtype if dtype is torch.float32 else dtype)


def _is_followed(x: Tensor) -> bool:
    """Tell whether a call goes by its operators alone: traced, inside a transform of torch.func, on shapes alone."""
    return x.is_meta or by_operators() or peek_interpreter_stack() is not None or has_tangent(x)


def _require_floats(x: Tensor) -> None:
    if not x.is_floating_point():
        raise QuantizationError(
            "a layer of low bits rounds its inputs itself",
            got=f"an input of {x.dtype}",
            wanted="floats",
            remedy="convert it first: x.float()",
        )


def _require_backward(module: Layer, held: LowBits, x: Tensor) -> None:
    """Refuse derivatives by a transform of torch.func or in forward mode: those past rounding are for `backward` alone.

    Raises:
        QuantizationError: Such a transform or a tangent follows the input or a tensor of the layer.
    """
    if is_compiling():  # what follows there is differentiated as it was written, by backward
        return
    forward = forward_ad._current_level >= 0
    if peek_interpreter_stack() is not None and (forward or torch.is_grad_enabled()):
        got = "a transform of torch.func around the layer"
    elif forward and any(has_tangent(t) for t in (x, *module._parameters.values()) if t is not None):
        got = "a tensor with a tangent (torch.autograd.forward_ad)"
    else:
        return
    raise QuantizationError(
        "the gradients of a layer of low bits pass by its rounding, which torch.func and forward mode do not",
        got=got,
        wanted="loss.backward() or torch.autograd.grad, or torch.no_grad() where values alone are asked for",
        remedy="take the derivative with torch.autograd.grad(loss, tensors)",
        layer=held.name or None,
    )


def _require_steps(module: Layer, held: LowBits) -> None:
    """Refuse steps that scale nothing, looked at once for all that they become; while they are trained, nothing is.

    Raises:
        QuantizationError: One is zero, NaN or infinite, or a zero point is no level.
    """
    if module.training or by_operators() or peek_interpreter_stack() is not None:  # values cannot be asked for there
        return
    if has_changed(held.sound, module):
        stamp = stamp_of(module)
        if not any(tensor is not None and tensor.is_meta for tensor, _ in stamp):
            held.require_steps(module)
        held.sound = stamp


def _of_groups(module: Layer, held: LowBits, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the sums of each group of inputs, times its scale, added up in float32, times the scale of the token.

    With float inputs, and in training, the weight is what its whole numbers stand for; gradients are always its own.
    """
    if held.widths.inputs is None:
        return _product(module, x, weight * over(scales, weight))
    levels, token = held.input(module, x)
    y = None
    if held.whole or not module.training:
        y = _exact_groups(held, levels.detach(), weight.detach(), scales.detach())
    if y is None or (torch.is_grad_enabled() and not held.whole):
        floats = _product(module, levels, weight * over(scales, weight))
        y = floats if y is None else valued(floats, y)
    return y * token


def _exact_groups(held: LowBits, levels: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the sums of each group of inputs (..., in), exact, times its scale, added up in float32: (..., out).

    Few groups at a time: all of them at once take tokens * out * groups values.
    """
    tokens = levels.reshape(-1, scales.shape[1], held.group).transpose(0, 1)
    parts = weight.view(*scales.shape, held.group).permute(1, 2, 0)
    lost = tokens.isnan().any(-1).any(0)
    step = -(-len(parts) // PRODUCTS)
    y = torch.zeros(tokens.shape[1], len(weight), dtype=torch.float32, device=levels.device)
    with no_autocast(levels.device.type):
        for first in range(0, len(parts), step):
            a, b = tokens[first : first + step], parts[first : first + step]
            if held.whole:
                sums = (a.nan_to_num(0).long() @ b.long()).float()
            else:
                sums = a @ b if _largest(held, held.group) < EXACT else (a.double() @ b.double()).float()
            for part in (sums * scales.t()[first : first + step].unsqueeze(1)).unbind():
                y = y + part  # one after the other, as kernels add them up
    return y.masked_fill(lost.unsqueeze(1), torch.nan).view(*levels.shape[:-1], len(weight))


def _largest(held: LowBits, count: int) -> int:
    """Return the greatest magnitude of a sum of so many products."""
    inputs, weights = held.widths.inputs, held.widths.weights
    assert inputs is not None
    largest = weights.largest_code if held.shifted else max(map(abs, weights.bounds))
    return count * largest * inputs.alpha * inputs.largest_code


def _sum(module: Layer, held: LowBits, levels: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return the sums, exact outside training: in float32 where that holds them, else in float64."""
    if held.whole:
        return integer_product(module, levels, weight)
    if module.training or (_largest(held, count) < EXACT and _adds_products(module, levels)):
        return _product(module, levels, weight)
    return _product(module, levels.double(), weight.double()).float()


def _adds_products(module: Layer, x: Tensor) -> bool:
    """Tell whether torch makes float32 sums of products alone, which are exact where float32 holds them.

    Without oneDNN its convolutions may be NNPACK's, on a GPU cuDNN's, whose fast algorithms (Winograd, FFT) are not.
    """
    if not isinstance(module, nn.Conv2d) or by_operators():
        return True
    return not x.is_cuda and (not x.is_cpu or bool(torch.backends.mkldnn.enabled))


def _product(module: Layer, x: Tensor, weight: Tensor) -> Tensor:
    with no_autocast(x.device.type):
        if isinstance(module, nn.Conv2d):
            return module._conv_forward(x, weight, None)
        return functional.linear(x, weight)


def give_low_bits(module: nn.Module, held: LowBits, steps: Mapping[str, Tensor]) -> None:
    """Let a Linear or Conv2d compute in low bits by these steps from now on; `take_low_bits` undoes it."""
    add_steps(module, steps)
    kind = LowBitConv2d if isinstance(module, nn.Conv2d) else LowBitLinear
    put_over(module, _subclass(type(module), kind), held)


def add_steps(module: nn.Module, steps: Mapping[str, Tensor]) -> None:
    """Add steps to a layer by their names: those that are learned as parameters."""
    for name, step in steps.items():
        if name in BUFFERS:
            module.register_buffer(name, step)
        else:
            module.register_parameter(name, nn.Parameter(step))


def take_low_bits(module: nn.Module) -> None:
    """Let a layer compute in floats again, on its weight as it is; its steps go."""
    take_off(module)
    for name in STEPS:
        (module._buffers if name in BUFFERS else module._parameters).pop(name, None)


@cache
def _subclass(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return `kind` where it stands on `base`, else both together: a user's own subclass stays one."""
    return kind if kind.__bases__[-1] is base else type(f"LowBit{base.__name__}", (kind, base), {})
