"""LayerNorm and RMSNorm on the CPU, float32 or bfloat16 in and out: rows of norm.inc, called through raw pointers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch.compiler import is_compiling

from twofour import native
from twofour.errors import KernelError

_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
_LIBRARY.define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred=True, ScalarType? dtype=None) -> Tensor"
)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""dtypes of input and answer, as the table calls them; all arithmetic is float32."""


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

    Args:
        x: float32 or bfloat16 (..., width).
        weight: float32 (width,) or None.
        bias: float32 (width,) or None.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm, which takes the mean as 0.
        dtype: That of the answer, float32 or bfloat16; None: x's.

    Raises:
        KernelError: The operands do not fit.
    """
    if is_compiling() or _is_tracing():
        return torch.ops.twofour.norm(x, weight, bias, eps, centred, dtype)
    return _norm(x, weight, bias, eps, centred, dtype)


def norm_in_place(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    """Do as `norm` and leave the answer in `x`, which must be contiguous: no memory is written that was not just read.

    Raises:
        KernelError: The operands do not fit.
    """
    return _norm(x, weight, bias, eps, centred, into=x if x.is_contiguous() else None)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool = True,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> Tensor:
    if x.dtype not in DTYPES or not x.is_cpu or x.ndim == 0:
        raise _unfit("x", x, "float32 or bfloat16 (..., width) on cpu")
    dtype = dtype or x.dtype
    if dtype not in DTYPES:
        raise KernelError(
            "a normalisation cannot answer in this dtype", got=str(dtype), wanted="torch.float32 or torch.bfloat16"
        )
    width = x.size(-1)
    for role, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and not _fits(operand, width):
            raise _unfit(role, operand, f"float32 ({width},)")
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype) if into is None else into
    native.extension().norm(
        native.best_row("norm", DTYPES[x.dtype]),
        x.data_ptr(),
        width,
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        dtype is torch.bfloat16,
        x.numel() // width if width else 0,
        width,
        eps,
        centred,
        native.threads(),
    )
    return y


def _fits(operand: Tensor, width: int) -> bool:
    alike = operand.dtype is torch.float32 and operand.shape == (width,)
    return alike and operand.is_cpu and operand.is_contiguous()


def _unfit(role: str, operand: Tensor, wanted: str) -> KernelError:
    return KernelError(
        "an operand of a normalisation does not fit",
        got=f"{role} of {operand.dtype} {tuple(operand.shape)} on {operand.device}",
        wanted=wanted,
    )


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


_LIBRARY.impl("norm", _norm, "CPU")
torch.library.register_fake("twofour::norm", _fake, lib=_LIBRARY)
