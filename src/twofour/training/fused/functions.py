"""Functions of torch that are served, each by an autograd function whose two passes are native.

The answers are torch's within its rounding. A second derivative is torch's of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.kernels.activation import activation, activation_gradient
from twofour.kernels.attention import attention, attention_dropped, attention_gradient, reference, side_by_side
from twofour.kernels.epilogue import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
"""Of the operands; arithmetic is float32."""


class Call(NamedTuple):
    """A call that is served.

    Attributes:
        name: Of the function.
        form: What the time depends on, as text: a {} for each of `sizes`.
        sizes: Numbers of rows and keys, which change from batch to batch.
        operands: Those that may have gradients, in the computing type.
        ours: Operands -> answer.
        theirs: The same by torch.
        always: Whether ours is never slower, so that there is nothing to measure.
    """

    name: str
    form: str
    sizes: tuple[int, ...]
    operands: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    always: bool = False

    def about(self) -> tuple[int, ...]:
        """Return the sizes to the nearest power of two."""
        return tuple(1 << round(math.log2(size)) for size in self.sizes)

    def __str__(self) -> str:
        return f"{self.name} {self.form.format(*self.about())}"


class Left(NamedTuple):
    """A call that could be served but for one thing, and is torch's.

    Attributes:
        call: The function and that thing.
        why: The reason.
    """

    call: str
    why: str


class Activation(torch.autograd.Function):
    """y = activation(z), and dL/dz in one pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, name: str) -> Tensor:
        """Return the answer; a key of `kernels.epilogue.ACTIVATIONS` says which."""
        ctx.save_for_backward(z)
        ctx.name = name
        return activation(z, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the input's gradient."""
        (z,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *torch.autograd.grad(ACTIVATIONS[ctx.name](z), z, gradients[0], create_graph=True), None
        return activation_gradient(gradients[0], z, ctx.name), None


class Attention(torch.autograd.Function):
    """softmax(scale q k^T + mask) v, and its three gradients in one call, which computes the scores anew.

    Which weights dropout clears follows from a seed, so that no mask of them is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool, drop: float
    ) -> Tensor:
        """Return the answer, (batch, heads, queries, value width) in the order of (batch, queries, heads, width)."""
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.causal = scale, causal
        if not drop:
            ctx.dropout = 0.0, 0
            return attention(q, k, v, mask, scale, causal)
        ctx.dropout = drop, int(torch.randint(1 << 32, (), device="cpu"))
        return attention_dropped(q, k, v, mask, scale, causal, *ctx.dropout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q, k, v, mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            own = q.view_as(q), k.view_as(k), v.view_as(v)  # they may be one tensor, or depend on one another
            drop, seed = ctx.dropout
            options = {"scale": ctx.scale, "causal": ctx.causal, "dropout": drop, "seed": seed}
            y = reference(own[0], own[1], own[2], mask, **options)
            of = [t for t, has in zip(own, wanted, strict=True) if has]
            found = iter(torch.autograd.grad(y, of, gradients[0], create_graph=True))
            return *(next(found) if has else None for has in wanted), *[None] * 4
        made = attention_gradient(q, k, v, gradients[0], mask, ctx.scale, ctx.causal, *ctx.dropout)
        return *(t if has else None for t, has in zip(made, wanted, strict=True)), *[None] * 4


class Parts(torch.autograd.Function):
    """The parts of a tensor along an axis, views of it: gradients that stand side by side are joined as they are.

    Those of attention do where queries, keys and values are parts of one product. Torch copies them, and the layer
    before copies what that made.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, axis: int, size: int) -> tuple[Tensor, ...]:
        """Return parts of `size` along an axis; of 0, the slices without it."""
        ctx.axis, ctx.size = axis, size
        return t.split(size, axis) if size else t.unbind(axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the whole."""
        joined = None if torch.is_grad_enabled() else side_by_side(gradients)
        if joined is None:
            return (torch.cat if ctx.size else torch.stack)(gradients, ctx.axis), None, None
        whole = joined.movedim(0, ctx.axis)
        return whole.flatten(ctx.axis, ctx.axis + 1) if ctx.size else whole, None, None


def _unbind(input: Tensor, dim: int = 0) -> Call | None:
    return _parts(input, dim, 0)


def _split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Call | None:
    size = split_size_or_sections
    if not -tensor.ndim <= dim < tensor.ndim:
        return None
    if not isinstance(size, int):
        if sum(size) != tensor.shape[dim]:
            return None
        size = size[0] if len(set(size)) == 1 else 0
    whole = size > 0 and tensor.shape[dim] % size == 0
    return _parts(tensor, dim, size) if whole else None


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> Call | None:
    whole = -input.ndim <= dim < input.ndim and chunks > 0 and input.shape[dim] % chunks == 0
    return _parts(input, dim, input.shape[dim] // chunks) if whole else None


def _parts(t: Tensor, axis: int, size: int) -> Call | None:
    if not plain(t) or not t.requires_grad or t.grad_fn is None or not -t.ndim <= axis < t.ndim:
        return None
    axis %= t.ndim
    ours = partial(_cut, axis=axis, size=size)
    return Call("parts", "", (), (t,), ours, ours, always=True)


def _cut(t: Tensor, *, axis: int, size: int) -> Any:
    return Parts.apply(t, axis, size)


def _gelu(input: Tensor, approximate: str = "none") -> Call | None:
    return _activated(input, {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate))


def _silu(input: Tensor, inplace: bool = False) -> Call | None:
    return None if inplace else _activated(input, "silu")


def _activated(z: Tensor, name: str | None) -> Call | None:
    if name is None or not plain(z) or not z.requires_grad or not z.is_contiguous():
        return None
    width = z.shape[-1] if z.ndim else 1
    form, rows = f"{{}} x {width}, {_type(z)}", z.numel() // width
    return Call(name, form, (rows,), (z,), lambda z: cast(Tensor, Activation.apply(z, name)), ACTIVATIONS[name])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call | Left | None:
    q, k, v = (_computed(t) for t in (query, key, value))
    if not (plain(q, k, v) and any(t.requires_grad for t in (q, k, v))):
        return None
    if not 0 <= dropout_p < 1:
        return None
    if q.ndim != 4:
        return Left(f"attention of {q.ndim} axes", "the native passes take (batch, heads, tokens, width)")
    batch, heads, queries, width = q.shape
    key_heads, keys, value_width = (*k.shape[1:3], v.shape[-1]) if k.ndim == v.ndim == 4 else (0, 0, 0)
    if (tuple(k.shape), tuple(v.shape)) != ((batch, key_heads, keys, width), (batch, key_heads, keys, value_width)):
        return None
    if key_heads != heads and (not enable_gqa or heads % key_heads):
        return None
    mask, seen = attn_mask, (batch, heads, queries, keys)
    if mask is not None:
        if is_causal or not _takes(mask, seen):
            return None
        mask = mask if mask.dtype is torch.bool else mask.float()
    given = {"mask": mask, "scale": scale, "causal": is_causal, "drop": float(dropout_p)}
    ours, theirs = partial(_run_attention, **given), partial(_torch_attention, **given)
    form = f"{{}} x {heads} x {{}} x {width}, {_type(q)}, {{}} keys"
    form += "" if key_heads == heads else f" in {key_heads} heads"
    form += "" if value_width == width else f" of {width} and {value_width}"
    form += ", causal" if is_causal else "" if mask is None else ", masked"
    form += ", dropout" if dropout_p else ""
    return Call("attention", form, (batch, queries, keys), (q, k, v), ours, theirs)


def _run_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None, causal: bool, drop: float
) -> Tensor:
    return cast(Tensor, Attention.apply(q, k, v, mask, scale, causal, drop))


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None, causal: bool, drop: float
) -> Tensor:
    mask = mask if mask is None or mask.dtype is torch.bool else mask.to(q.dtype)
    options = {"dropout_p": drop, "is_causal": causal, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return functional.scaled_dot_product_attention(q, k, v, mask, **options)


def _type(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _computed(t: Tensor) -> Tensor:
    """Return an operand in the type that autocast has attention computed in."""
    if not torch.is_autocast_enabled("cpu") or t.dtype is torch.float64:
        return t
    return t.to(torch.get_autocast_dtype("cpu"))


def plain(*tensors: Tensor) -> bool:
    """Whether kernels can read operands: plain ones on the CPU, of one type that is served, none of them empty."""
    return all(
        isinstance(t, Tensor)
        and type(t) in (Tensor, nn.Parameter)
        and t.is_cpu
        and t.layout is torch.strided
        and not t.is_nested
        and not t.is_neg()
        and t.dtype in DTYPES
        and t.dtype is tensors[0].dtype
        and t.numel() > 0
        for t in tensors
    )


def _takes(mask: Tensor, shape: Sequence[int]) -> bool:
    """Whether a mask without a gradient can be read: bool, or added to the scores."""
    plain = type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided and not mask.requires_grad
    if not plain or not (mask.dtype is torch.bool or mask.dtype in DTYPES) or mask.ndim > len(shape):
        return False
    ends = zip(reversed(mask.shape), reversed(shape), strict=False)
    return all(size in (1, full) for size, full in ends) and math.prod(mask.shape) > 0


SERVED: Mapping[Callable[..., Any], Callable[..., Call | Left | None]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.gelu: _gelu,
    functional.silu: _silu,
    Tensor.unbind: _unbind,
    torch.unbind: _unbind,
    Tensor.split: _split,
    torch.split: _split,
    Tensor.chunk: _chunk,
    torch.chunk: _chunk,
}
"""Function of torch -> what makes a call of its arguments, or says why it is not served, or None."""
