"""LayerNorm and RMSNorm on the CPU, float32 or bfloat16 in and out: rows of norm.inc."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.registration import register
from twofour.native.surroundings import by_operators, followed, plain

_SCHEMA = "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred=True, ScalarType? dtype=None) -> Tensor"

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""dtypes of input and answer, as the table calls them; all arithmetic is float32."""


@dataclass(frozen=True)
class RowNorm:
    """A normalisation of each row, without its input.

    Attributes:
        weight: float32 (width,) or None.
        bias: float32 (width,) or None.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm.
        scale: Of its answer in bytes, as of `norm_to_bytes`.
        zero: Likewise.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = True
    scale: float = 1.0
    zero: int = 0


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
    if by_operators():
        with followed():
            return torch.ops.twofour.norm(x, weight, bias, eps, centred, dtype)
    x, weight, bias = plain("a normalisation", x, weight, bias)
    return _norm(x, weight, bias, eps, centred, dtype)


def norm_in_place(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    """Do as `norm` and leave the answer in `x`, which must be contiguous: no memory is written that was not just read.

    Raises:
        KernelError: The operands do not fit.
    """
    return _norm(x, weight, bias, eps, centred, into=x if x.is_contiguous() else None)


def norm_to_bytes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    scale: float,
    zero: int,
    dtype: torch.dtype | None = None,
    keep: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor] | Tensor:
    """Do as `norm` and answer bytes besides: what int8 products of a static range read.

    Args:
        x: As in `norm`.
        weight: As in `norm`.
        bias: As in `norm`.
        eps: As in `norm`.
        centred: As in `norm`.
        scale: Of the bytes, round(y / scale) + zero within 0 ... 255, of y in float32; a NaN is 0.
        zero: 0 ... 255, the byte that stands for 0.
        dtype: As in `norm`.
        keep: Whether y is wanted too.
        in_place: Whether y may stand where x was, if that is contiguous and of y's dtype.

    Returns:
        y, as `norm` answers it, and uint8 of its shape; without `keep` these alone.

    Raises:
        KernelError: The operands do not fit.
    """
    x, weight, bias = plain("a normalisation", x, weight, bias)
    x = _fitting(x, weight, bias, dtype)
    y = None
    if keep:
        there = in_place and x.is_contiguous() and dtype in (None, x.dtype)
        y = x if there else torch.empty(x.shape, dtype=dtype or x.dtype, device="cpu")
    x = x.contiguous()
    whole = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    row = native.best("norm", dtype=DTYPES[x.dtype]).index
    native.extension().norm_to_bytes(row, x, weight, bias, y, whole, eps, centred, scale, zero, native.threads())
    return whole if y is None else (y, whole)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool = True,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> Tensor:
    x = _fitting(x, weight, bias, dtype).contiguous()
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device="cpu") if into is None else into
    native.extension().norm(
        native.best("norm", dtype=DTYPES[x.dtype]).index, x, weight, bias, y, eps, centred, native.threads()
    )
    return y


def _fitting(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Return x, or refuse operands that do not fit."""
    if x.dtype not in DTYPES or not x.is_cpu or x.ndim == 0:
        raise _unfit("x", x, "float32 or bfloat16 (..., width) on cpu")
    if dtype is not None and dtype not in DTYPES:
        raise KernelError(
            "a normalisation cannot answer in this dtype", got=str(dtype), wanted="torch.float32 or torch.bfloat16"
        )
    width = x.size(-1)
    for role, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and not _fits(operand, width):
            raise _unfit(role, operand, f"float32 ({width},)")
    return x


def _fits(operand: Tensor, width: int) -> bool:
    alike = operand.dtype is torch.float32 and operand.shape == (width,)
    return alike and operand.is_cpu


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


register(_SCHEMA, _fake, CPU=_norm)
