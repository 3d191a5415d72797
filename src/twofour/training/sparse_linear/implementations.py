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
from twofour.kernels.conv import Geometry
from twofour.kernels.nm_conv_gradient import conv_gradient_rows
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


def conv_gradient_kernels(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> tuple[list[Kernel], str]:
    """Return the rows that sum a convolution's data gradient over its taps, and why there are none."""
    name = str(dtype).removeprefix("torch.")
    rows = [row for row in conv_gradient_rows() if row.dtype == name] if device.type == "cpu" else []
    if not rows:
        return [], f"no 2:4 kernel for a convolution in {name} on {device.type}"
    refused = [row.cannot(geometry) for row in rows]
    left = [row for row, reason in zip(rows, refused, strict=True) if reason is None]
    return list(widest(left)), "" if left else next(reason for reason in refused if reason)


def fitting(kernels: list[Kernel], packed: Tensor, a: Tensor) -> tuple[list[Kernel], str]:
    """Return those of `kernels` that can pack (..., columns), and why there are none for the type of A."""
    if not kernels:
        here = "this GPU" if on_gpu(a.device) else a.device.type
        return [], f"no 2:4 kernel for {str(a.dtype).removeprefix('torch.')} on {here}"
    refused = [kernel.refill_refuses(packed.shape[:-1].numel(), packed.shape[-1]) for kernel in kernels]
    left = [kernel for kernel, reason in zip(kernels, refused, strict=True) if reason is None]
    return left, next((reason for reason in refused if reason), "")


def multiply(name: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return A B^T + bias by a dense implementation; a (..., columns), b (rows, columns) -> (..., rows)."""
    if name == TORCH or not a.numel():  # oneDNN takes no empty operand
        return functional.linear(a, b, bias if bias is None else bias.to(a.dtype))  # a parameter's own under autocast
    flat, b = a.reshape(-1, a.shape[-1]), b.contiguous()
    if name == REORDERED:
        # The order that oneDNN multiplies by fastest: the copy is worth its time at many tokens.
        flat = flat.contiguous()
        b = torch.ops.mkldnn._reorder_linear_weight(b, len(flat))
    y = torch.ops.mkldnn._linear_pointwise(flat, b, bias, "none", [], "")
    return y.view(*a.shape[:-1], -1)


def names(operand: Tensor) -> tuple[str, ...]:
    """Return the names of the dense implementations that take an operand."""
    fits = operand.is_cpu and not on_gpu(operand.device) and operand.dtype in DTYPES
    return (TORCH, ONEDNN, REORDERED) if fits and torch.backends.mkldnn.is_available() else (TORCH,)
