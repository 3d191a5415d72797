"""What can run the three products of a Linear in training here: dense implementations, and rows of the kernel table.

Dense ones are torch's own and oneDNN's, which reorders the weight inside the call or before it, in every step since the
weights move: in float32 torch's default goes to MKL, which on one AMD CPU takes twice oneDNN's time. Sparse ones are
the rows whose layout can be refilled; on a GPU the libraries' 16-bit rows, which pack anew. Each prepares what it needs
inside the call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels import Kernel, available
from twofour.kernels.base import widest
from twofour.kernels.nm_unbiased.cpu import LAYOUTS

TORCH, ONEDNN, REORDERED = "torch", "onednn", "onednn reordered"
DTYPES = (torch.float32, torch.bfloat16)


def on_gpu(device: torch.device) -> bool:
    """Whether the implementations are those of a GPU."""
    return device.type == "cuda"


def types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the types in which there are sparse rows: on a GPU those of 16 bits."""
    return (torch.bfloat16, torch.float16) if on_gpu(device) else DTYPES


def weight_kernels(dtype: torch.dtype, tokens: int, device: torch.device) -> list[Kernel]:
    """Return the rows that can multiply by a weight whose values change: those of the best instruction set here."""
    name = str(dtype).removeprefix("torch.")
    rows = available("nm_matmul", "cuda" if on_gpu(device) else "cpu")
    found = [row for row in rows if row.dtype == name and row.refills]
    return widest([row for row in found if row.serves(tokens)])


def gradient_kernels(dtype: torch.dtype, device: torch.device) -> list[Kernel]:
    """Return the rows that can multiply by a packed gradient: a pruned one, or an unbiased estimate."""
    found = weight_kernels(dtype, 1 << 20, device)
    return found if on_gpu(device) else [kernel for kernel in found if kernel.layout == LAYOUTS[dtype]]


def fitting(kernels: list[Kernel], rows: int, columns: int, operand: Tensor) -> tuple[list[Kernel], str]:
    """Return those of `kernels` that pack a matrix of these sizes, and why there are none for `operand`'s type."""
    if not kernels:
        here = "this GPU" if on_gpu(operand.device) else operand.device.type
        return [], f"no 2:4 kernel for {str(operand.dtype).removeprefix('torch.')} on {here}"
    refused = [kernel.refill_refuses(rows, columns) for kernel in kernels]
    left = [kernel for kernel, reason in zip(kernels, refused, strict=True) if reason is None]
    return left, next((reason for reason in refused if reason), "")


def forward(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return X W^T + bias by a dense implementation; x (..., in), weight (out, in), both of one dtype."""
    if name == TORCH:
        return functional.linear(x, weight, bias)
    flat = matrix(x)
    y = _onednn(flat, _reordered(weight, len(flat)) if name == REORDERED else weight, bias)
    return y.view(*x.shape[:-1], len(weight))


def data_gradient(name: str, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return dZ W (tokens, in) by a dense implementation; gradient (..., out), weight (out, in)."""
    gradient = gradient.flatten(0, -2)
    if name == TORCH:
        return gradient @ weight
    turned = weight.t().contiguous()
    return _onednn(gradient, _reordered(turned, len(gradient)) if name == REORDERED else turned)


def weight_gradient(name: str, gradient: Tensor, x: Tensor) -> Tensor:
    """Return dZ^T X by a dense implementation; gradient (tokens, out), x (tokens, in)."""
    if name == TORCH:
        return gradient.t() @ x
    turned = x.t().contiguous()
    if name == REORDERED:
        return _onednn(gradient.t().contiguous(), _reordered(turned, gradient.shape[1]))
    return _onednn(gradient.t(), turned)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _reordered(weight: Tensor, rows: int) -> Tensor:
    """Return a weight in the order that oneDNN multiplies by fastest: the copy is worth its time at many tokens."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def names(operand: Tensor) -> tuple[str, ...]:
    """Return the names of the dense implementations that take an operand."""
    fits = operand.is_cpu and not on_gpu(operand.device) and operand.dtype in DTYPES
    return (TORCH, ONEDNN, REORDERED) if fits and torch.backends.mkldnn.is_available() else (TORCH,)


def matrix(x: Tensor) -> Tensor:
    """Return x (..., columns) as (tokens, columns), without gaps or repetitions."""
    return x.reshape(-1, x.shape[-1]).contiguous()
