"""`twofour::linear`: the registered operator of a compiled layer, for torch.compile and torch.export.

In eager mode `linear` is called directly; the registered operator costs a few microseconds a call more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.ladder import Ladder, read

_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor[] weights, Tensor? bias, str ladder, int out_features) -> Tensor")


def linear(x: Tensor, weights: list[Tensor], bias: Tensor | None, ladder: Ladder, out_features: int) -> Tensor:
    """Return x @ W.T + bias by the ladder's kernel for this many tokens.

    Args:
        x: float32 (..., in).
        weights: The weight prepared in each of `ladder.layouts`.
        bias: float32 (out,) or None.
        ladder: Kernels by token count.
        out_features: Rows of W.

    Returns:
        float32 (..., out).
    """
    if x.ndim == 2:  # the common case, spared two views: a microsecond of the ten that a small layer takes
        kernel, layout = ladder.at(x.size(0))
        return kernel.run(x, weights[layout], bias, out_features)
    flat = x.reshape(-1, x.shape[-1])
    kernel, layout = ladder.at(len(flat))
    return kernel.run(flat, weights[layout], bias, out_features).view(*x.shape[:-1], out_features)


def _linear(x: Tensor, weights: list[Tensor], bias: Tensor | None, ladder: str, out_features: int) -> Tensor:
    _require(x, bias, out_features)
    steps = read(ladder)
    sizes = [weight.numel() * weight.element_size() for weight in weights]
    needed = [kernel.least_bytes(out_features, x.shape[-1]) for kernel in steps.by_layout.values()]
    if len(sizes) != len(needed) or any(size < least for size, least in zip(sizes, needed, strict=True)):
        raise KernelError(
            "the weights of twofour::linear do not fit its ladder",
            got=f"{len(sizes)} weights of {sizes} bytes",
            wanted=f"layouts {', '.join(steps.by_layout)} of at least {needed} bytes",
        )
    return linear(x, weights, bias, steps, out_features)


def _require(x: Tensor, bias: Tensor | None, out_features: int) -> None:
    """Refuse operands whose memory a kernel would misread: it is handed addresses, not tensors."""
    for role, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and (tensor.dtype != torch.float32 or tensor.device.type not in ("cpu", "meta")):
            raise KernelError(
                "an operand of a compiled layer does not fit",
                got=f"{role} of {tensor.dtype} on {tensor.device}",
                wanted="torch.float32 on cpu",
                remedy="convert the input, and leave compiled layers out of autocast",
            )
    if x.ndim == 0 or (bias is not None and tuple(bias.shape) != (out_features,)):
        raise KernelError(
            "an operand of a compiled layer does not fit",
            got=f"x of shape {tuple(x.shape)}, bias of shape {None if bias is None else tuple(bias.shape)}",
            wanted=f"x (..., in), bias ({out_features},)",
        )


def _no_gradient(x: Tensor, weights: list[Tensor], bias: Tensor | None, ladder: str, out_features: int) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        raise inference_only()
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.twofour.linear(x, weights, bias, ladder, out_features)


def _fake(x: Tensor, weights: list[Tensor], bias: Tensor | None, ladder: str, out_features: int) -> Tensor:
    _require(x, bias, out_features)
    return x.new_empty(*x.shape[:-1], out_features)


def inference_only() -> KernelError:
    """Build the error for a gradient asked of a compiled layer."""
    return KernelError(
        "a compiled layer was asked for a gradient",
        got="an input that requires a gradient, with gradients enabled",
        wanted="inference: compiled models hold packed weights and do not train",
        remedy="call it under torch.inference_mode(), or train the masked model and compile again",
    )


# Not "CPU" alone: a list that holds an oneDNN-blocked weight dispatches to MkldnnCPU.
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _no_gradient, "Autograd")
torch.library.register_fake("twofour::linear", _fake, lib=_LIBRARY)
