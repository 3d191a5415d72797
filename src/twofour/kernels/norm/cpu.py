"""LayerNorm and RMSNorm in float32 on the CPU: rows of norm.inc, called through raw pointers."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError

_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
_LIBRARY.define("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred=True) -> Tensor")


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

    Args:
        x: float32 (..., width).
        weight: float32 (width,) or None.
        bias: float32 (width,) or None.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm, which takes the mean as 0.

    Raises:
        KernelError: The operands do not fit.
    """
    if torch.compiler.is_compiling():
        return torch.ops.twofour.norm(x, weight, bias, eps, centred)
    return _norm(x, weight, bias, eps, centred)


def norm_in_place(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    """Do as `norm` and leave the answer in `x`, which must be contiguous: no memory is written that was not just read.

    Raises:
        KernelError: The operands do not fit.
    """
    return _norm(x, weight, bias, eps, centred, into=x if x.is_contiguous() else None)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True, into: Tensor | None = None
) -> Tensor:
    if x.dtype is not torch.float32 or not x.is_cpu or x.ndim == 0:
        raise _unfit("x", x, "float32 (..., width) on cpu")
    width = x.size(-1)
    for role, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and (
            operand.dtype is not torch.float32 or operand.shape != (width,) or not operand.is_contiguous()
        ):
            raise _unfit(role, operand, f"float32 ({width},)")
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.float32) if into is None else into
    native.extension().norm(
        native.best_row("norm"),
        x.data_ptr(),
        width,
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // width if width else 0,
        width,
        eps,
        centred,
        native.threads(),
    )
    return y


def _unfit(role: str, operand: Tensor, wanted: str) -> KernelError:
    return KernelError(
        "an operand of a normalisation does not fit",
        got=f"{role} of {operand.dtype} {tuple(operand.shape)} on {operand.device}",
        wanted=wanted,
    )


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("norm", _norm, "CPU")
torch.library.register_fake("twofour::norm", _fake, lib=_LIBRARY)
