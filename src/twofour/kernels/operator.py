"""`twofour::linear`: the registered operator of a compiled layer, for torch.compile and torch.export.

In eager mode `linear` is called directly; the registered operator costs a few microseconds a call more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.dispatch import DispatchTable, read_dispatch
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization
from twofour.kernels.registration import below_autograd, register
from twofour.native import gpu

# The table of kernels is called `ladder` in exported programs, which store the names of arguments.
_SCHEMA = (
    "linear(Tensor x, Tensor[] weights, Tensor? bias, str ladder, int out_features, "
    'str activation="none", str combine="none", Tensor? other=None, float? x_scale=None, int x_zero=0, '
    'int bits=8, str levels="unsigned") -> Tensor'
)


def linear(
    x: Tensor,
    weights: Sequence[Prepared],
    bias: Tensor | None,
    dispatch: DispatchTable,
    problem: Problem,
    other: Tensor | None = None,
) -> Tensor:
    """Return epilogue(x @ W.T + bias) by the dispatch table's kernel for this many tokens.

    Args:
        x: (..., in), float32 or the kernels' dtype.
        weights: The weight prepared in each of `dispatch.layouts`.
        bias: float32 (out,) or None.
        dispatch: Kernels by token count.
        problem: Rows of W, the range of x, and what happens to the product.
        other: Its second operand, (..., out).

    Returns:
        (..., out) in x's dtype.
    """
    if x.ndim == 2:  # the common case, spared views: a microsecond of the ten that a small layer takes
        kernel, layout = dispatch.at(x.size(0))
        return kernel.run(x, weights[layout], bias, problem, other)
    flat = x.reshape(-1, x.shape[-1])
    other = None if other is None else other.reshape(-1, problem.rows)
    kernel, layout = dispatch.at(len(flat))
    return kernel.run(flat, weights[layout], bias, problem, other).view(*x.shape[:-1], problem.rows)


def _linear(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    dispatch: str,
    out_features: int,
    activation: str = "none",
    combine: str = "none",
    other: Tensor | None = None,
    x_scale: float | None = None,
    x_zero: int = 0,
    bits: int = 8,
    levels: str = "unsigned",
) -> Tensor:
    steps = read_dispatch(dispatch, Kernel)
    _require(x, bias, steps, out_features)
    problem = _problem(out_features, activation, combine, Quantization(x_scale, x_zero, bits=bits, levels=levels))
    problem.epilogue.require(other, (*x.shape[:-1], out_features))
    return linear(x, steps.gather(weights, (out_features, x.shape[-1])), bias, steps, problem, other)


@lru_cache(maxsize=1024)
def _problem(out_features: int, activation: str, combine: str, quantization: Quantization) -> Problem:
    return Problem(out_features, Epilogue(activation, combine), quantization)


def _require(x: Tensor, bias: Tensor | None, dispatch: DispatchTable, out_features: int) -> None:
    """Refuse operands whose memory a kernel would misread: it is handed addresses, not tensors."""
    places = (dispatch.device, "cpu") if gpu.interpreted() else (dispatch.device,)
    for role, tensor, dtypes in (("x", x, dispatch.reads), ("bias", bias, (torch.float32,))):
        if tensor is not None and (tensor.dtype not in dtypes or tensor.device.type not in (*places, "meta")):
            raise KernelError(
                "an operand of a compiled layer does not fit",
                got=f"{role} of {tensor.dtype} on {tensor.device}",
                wanted=f"{' or '.join(map(str, dtypes))} on {dispatch.device}",
                remedy=convert(tensor, dtypes, dispatch.device),
            )
    if x.ndim == 0 or (bias is not None and tuple(bias.shape) != (out_features,)):
        raise KernelError(
            "an operand of a compiled layer does not fit",
            got=f"x of shape {tuple(x.shape)}, bias of shape {None if bias is None else tuple(bias.shape)}",
            wanted=f"x (..., in), bias ({out_features},)",
            remedy="pass the bias of the layer that the weights belong to",
        )


_PLAINLY = ("none", "none", None, None, 0, 8, "unsigned")
"""Arguments from `activation` on of a product that is stored as it is."""


def _no_gradient(x: Tensor, *arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        weights, bias, dispatch, out_features, *after = arguments
        steps = read_dispatch(dispatch, Kernel)
        if steps.device != "cuda" or any(given != left for given, left in zip(after, _PLAINLY, strict=False)):
            raise inference_only()
        return through_packed(x, steps.gather(weights, (out_features, x.shape[-1])), bias, steps, out_features)
    with below_autograd():
        return torch.ops.twofour.linear(x, *arguments)


class _ThroughPacked(torch.autograd.Function):
    """The product, and the gradient of its input; the weight does not learn."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Sequence[Prepared],
        bias: Tensor | None,
        dispatch: DispatchTable,
        out_features: int,
    ) -> Tensor:
        ctx.weights, ctx.dispatch, ctx.sizes = weights, dispatch, (out_features, x.shape[-1])
        with torch.no_grad():
            return linear(x.detach(), weights, bias, dispatch, Problem(out_features))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        kernel, layout = ctx.dispatch.at(gradient.numel() // gradient.shape[-1])
        weight = kernel.dense(ctx.weights[layout], *ctx.sizes).to(gradient.dtype)
        return gradient @ weight, None, None, None, None


def through_packed(
    x: Tensor, weights: Sequence[Prepared], bias: Tensor | None, dispatch: DispatchTable, out_features: int
) -> Tensor:
    """Return `linear` on a GPU with a gradient for its input: dX = dY W, with W opened for the backward pass alone."""
    return cast(Any, _ThroughPacked).apply(x, weights, bias, dispatch, out_features)


def _fake(x: Tensor, weights: list[Tensor], bias: Tensor | None, dispatch: str, out_features: int, *_: Any) -> Tensor:
    _require(x, bias, read_dispatch(dispatch, Kernel), out_features)
    return x.new_empty(*x.shape[:-1], out_features)


def convert(x: Tensor, dtypes: Sequence[torch.dtype], device: str = "cpu") -> str:
    """Say what to do with an operand on another device or of another dtype than `dtypes`."""
    if x.device.type != device:
        return f"move the input to the {device.upper().replace('CUDA', 'GPU')}: x.{device}()"
    plainly = f"convert the input: x.to({dtypes[0]}), outside of autocast"
    return f'{plainly}, or compile the model with dtype="bfloat16"' if x.dtype is torch.bfloat16 else plainly


def inference_only() -> KernelError:
    """Build the error for a gradient asked of a compiled layer."""
    return KernelError(
        "a compiled layer was asked for a gradient",
        got="an input that requires a gradient, with gradients enabled, or that has a tangent",
        wanted="inference: compiled models hold packed weights and do not train",
        remedy="call it under torch.inference_mode(), or train the masked model and compile again",
    )


register(_SCHEMA, _fake, CompositeExplicitAutograd=_linear, Autograd=_no_gradient)
