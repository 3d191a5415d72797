"""A layer of low bits while it is trained: its whole numbers in the type of mixed precision, few passes over memory.

Outside training, and where something follows a call operator by operator, layers compute as layer.py has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from twofour import native
from twofour.errors import QuantizationError
from twofour.native.surroundings import is_autocast
from twofour.quantization.carried import TINY, WEIGHT_SCALE, LowBits

HELD = 1 << 17
"""Values of a piece on a CPU: half a megabyte in float32, which a second cache holds."""


HALVES = ("avx512_bf16", "amx")
"""What a CPU multiplies bfloat16 with; others emulate it, and float32 is faster there."""


def computing_type(x: Tensor) -> torch.dtype:
    """Return the type in which whole numbers are multiplied: bfloat16 where autocast has it and the device too.

    Every level is exact there, of 8 bits less their zero point too: whole numbers up to 256 are. Sums are rounded to it
    as they leave a product, like those of float layers. In float16 sums could exceed what it holds.
    """
    device = x.device.type
    if not is_autocast(device) or torch.get_autocast_dtype(device) is not torch.bfloat16:
        return torch.float32
    return torch.bfloat16 if device != "cpu" or any(map(native.supports, HALVES)) else torch.float32


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, rounded: Callable[[Tensor], Tensor], least: Any, most: Any, dtype: Any
    ) -> Tensor:
        ctx.save_for_backward(x, step, least, most)
        ctx.rounded = rounded
        factor, low, high = _numbers(1 / step, least, most)
        levels = torch.empty_like(x, dtype=dtype, memory_format=layout_of(x))
        for part, into in _pieces(x, levels):
            into.copy_(rounded(_times(part, factor)).clamp_(low, high))
        return levels

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, step, least, most = ctx.saved_tensors
        _require_first(gradients[0])
        factor, low, high = _numbers(1 / step, least, most)
        upstream = gradients[0].contiguous(memory_format=layout_of(x))
        found = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        sums = list[Tensor]()
        for part, above, into in _pieces(x, upstream, x if found is None else found):
            scaled, above = _times(part, factor), above.float()
            inside = scaled.clamp(low, high).eq_(scaled)  # one between the levels, else zero
            away = ctx.rounded(scaled).clamp_(low, high).addcmul_(scaled, inside, value=-1)
            sums.append(torch.dot(away, above))
            if found is not None:
                into.copy_(inside.mul_(above).mul_(factor))
        return found, torch.stack(sums).sum() / step if sums else torch.zeros_like(step), *(None,) * 4


class _Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        whole, scale = torch.empty_like(rows, dtype=dtype), rows.new_empty(len(rows))
        for part, into, mean in _runs(rows, whole, scale):
            into.copy_(_signs(part))
            torch.mean(part.abs(), 1, out=mean)
        scale.clamp_(min=TINY)
        ctx.save_for_backward(rows, scale)
        ctx.mark_non_differentiable(scale)
        return whole, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale = ctx.saved_tensors
        _require_first(gradients[0])
        found = torch.empty_like(rows)
        for part, of, above, into in _runs(rows, scale, gradients[0], found):
            above = above.float()
            mean = (_signs(part) * above).sum(1).div_(of * rows.shape[1]).mul_(of > TINY)
            torch.mul(part.abs().le_(1), above, out=into).addcmul_(part.sign(), mean.unsqueeze(1))
        return found, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, scale: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
        ctx.save_for_backward(whole, scale)
        return whole.to(dtype, memory_format=layout, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, scale = ctx.saved_tensors
        _require_first(gradients[0])
        of_whole = gradients[0].float()
        sums = (of_whole * whole).sum(tuple(range(1, whole.ndim)))
        return of_whole, torch.where(scale != 0, sums / scale, 0.0), None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype, ctx.bias = sums.dtype, None if bias is None else bias.shape
        return _scaled(sums, factor, bias, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factor,), (upstream,) = ctx.saved_tensors, gradients
        _require_first(gradients[0])
        of_sums, of_bias = _scaled(upstream, factor, None, ctx.dtype), None
        if ctx.bias is not None:
            before = upstream.ndim - len(ctx.bias)
            over = [axis for axis in range(upstream.ndim) if axis < before or ctx.bias[axis - before] == 1]
            of_bias = upstream.sum(over, dtype=torch.float32).view(ctx.bias) if over else upstream.float()
        return of_sums, None, of_bias, None


def levels(
    x: Tensor, step: Tensor, rounded: Callable[[Tensor], Tensor], least: Tensor, most: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return x * (1 / step), rounded and cut, in a type that holds every level; gradients pass between levels alone.

    The gradient of the step is that of both its places, here and where it multiplies the product of the levels: with
    dL/dlevels = g it is the sum of g (level - x / step) / step between the levels, of g level / step beyond them (Esser
    et al. 2020, equation 3). Nothing is kept for the backward pass but x.

    Args:
        x: Floats of any shape.
        step: float32 ().
        rounded: What makes whole numbers of float32.
        least: The least level, float32 ().
        most: The greatest.
        dtype: Of the answer.
    """
    return cast(Tensor, _Stepped.apply(x.contiguous(memory_format=layout_of(x)), step, rounded, least, most, dtype))


def weight(held: LowBits, module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `LowBits.weight` does, whole numbers in a type, laid out as the weight is.

    Scales have the gradient of `tied` by way of the whole numbers. Of signs nothing is kept for the backward pass but
    the weight.
    """
    given, encoding = module._parameters.get("weight"), held.widths.weights
    if given is None or encoding.name != "b1" or module._buffers.get(WEIGHT_SCALE) is not None:
        whole, scale = held.weight(module)
        return tied(whole, scale, dtype, layout_of(whole if given is None else given)), scale
    last = layout_of(given) is torch.channels_last
    laid = given.permute(0, 2, 3, 1) if last else given
    rows = laid.float().reshape(1 if held.per_tensor else len(given), -1)  # in the order of memory
    whole, scale = cast(tuple[Tensor, Tensor], _Signs.apply(rows, dtype))
    whole = whole.view(laid.shape)
    return whole.permute(0, 3, 1, 2) if last else whole, scale.expand(len(given))


def tied(whole: Tensor, scale: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    """Return whole numbers in another type, through whose gradient the scale of their products gets its own.

    Of y = product(x, whole) * scale, dL/dscale is the sum over a row of dL/dwhole * whole, divided by the scale: the
    same number as the sum of dL/dy * product over all tokens, of which nothing is kept then. A step of the weight has
    its gradient from the same dL/dwhole, so that their difference, small at many bits, is not one of two roundings.

    Args:
        whole: (out, ...).
        scale: What an output's sums are multiplied with, (out,).
        dtype: Of the answer.
        layout: Of the answer in memory.
    """
    return cast(Tensor, _Tied.apply(whole, scale, dtype, layout))


def scaled(sums: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return sums * factor + bias in float32, rounded to a type; the factor's gradient is that of `levels` and `tied`.

    Args:
        sums: Of a product.
        factor: float32, of a shape that spreads over the sums.
        bias: Float, of a shape that does, or None.
        dtype: Of the answer.
    """
    return cast(Tensor, _Columns.apply(sums, factor, bias, dtype))


def _require_first(gradient: Tensor) -> None:
    """Refuse to differentiate a gradient, or to make several at once: it is written by numbers.

    Raises:
        QuantizationError: `create_graph=True`, or `is_grads_batched=True`, which vectorised Jacobians have.
    """
    several = is_legacy_batchedtensor(gradient) or is_functorch_wrapped_tensor(gradient)
    if several or torch.is_grad_enabled():
        raise QuantizationError(
            "a gradient of a layer of low bits in training mode has no derivative, and is made one at a time",
            got="a batch of gradients" if several else "backward(create_graph=True), or grad of a grad",
            wanted="first derivatives",
            remedy="model.eval() for it: layers then compute one operator at a time",
        )


def layout_of(x: Tensor) -> torch.memory_format:
    """Return how a tensor lies in memory, as torch's convolutions see it: images of one channel by their strides."""
    last = x.ndim == 4 and x.stride(1) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _numbers(*values: Tensor) -> tuple[Any, ...]:
    """Return values as numbers where nothing has to be waited for."""
    return tuple(value.item() for value in values) if values[0].is_cpu else values


def _in_line(x: Tensor) -> Tensor:
    """Return values in the order of memory."""
    return (x.permute(0, 2, 3, 1) if layout_of(x) is torch.channels_last else x).view(-1)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same places of tensors that lie alike; on a CPU so few that a cache holds them for several passes."""
    lines = [_in_line(x) for x in tensors]
    step = HELD if lines[0].is_cpu else max(lines[0].numel(), 1)
    yield from zip(*(line.split(step) for line in lines), strict=True) if lines[0].numel() else ()


def _runs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of tensors, on a CPU so few that a cache holds them through several passes."""
    rows = tensors[0]
    step = max(1, HELD // max(rows.shape[1], 1)) if rows.is_cpu else max(len(rows), 1)
    yield from zip(*(tensor.split(step) for tensor in tensors), strict=True)


def _signs(values: Tensor) -> Tensor:
    """Return 1 where a value is zero or more, of either sign, else -1."""
    return torch.where(values < 0, -1.0, 1.0)


def _times(part: Tensor, factor: Any) -> Tensor:
    return part.to(torch.float32, copy=True).mul_(factor)


def _scaled(values: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return values * factor + bias in float32 in a type, piece by piece where it is narrower."""
    if values.dtype is torch.float32 and dtype is torch.float32:
        found = values * factor
        return found if bias is None else found.add_(bias)
    found = torch.empty_like(values, dtype=dtype)
    if not values.numel():
        return found
    step = max(1, HELD // values[0].numel()) if values.is_cpu and values.ndim > 1 else max(len(values), 1)
    for at in range(0, len(values), step):
        some = slice(at, at + step)
        part = _times(values[some], _part(factor, values, some))
        found[some].copy_(part if bias is None else part.add_(_part(bias, values, some)))
    return found


def _part(spread: Tensor, values: Tensor, some: slice) -> Tensor:
    """Return what stands over a part of values, of something that spreads over all: of one image, outputs are cut."""
    return spread if spread.ndim < values.ndim or len(spread) == 1 else spread[some]
