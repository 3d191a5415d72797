"""The three products of a Linear in training, in every way that they can run here: Y = X W^T, dX = dZ W, dW = dZ^T X.

Dense ways are torch's own and oneDNN's, which reorders the weight inside the call or before it, in every step since the
weights move: in float32 torch's default goes to MKL, which on one AMD CPU takes twice oneDNN's time. Sparse ways are
the rows of the kernel table whose layout can be refilled; on a GPU the libraries' 16-bit rows, which pack anew. Each
prepares what it needs inside the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels import Kernel, available
from twofour.kernels.base import widest
from twofour.kernels.nm_unbiased.cpu import LAYOUTS

_CPU = torch.device("cpu")
TORCH, ONEDNN, REORDERED = "torch", "onednn", "onednn reordered"
DTYPES = (torch.float32, torch.bfloat16)
DENSE = (TORCH, ONEDNN, REORDERED)
"""Names of the dense ways."""


def on_gpu(device: torch.device) -> bool:
    """Whether the ways are those of a GPU."""
    return device.type == "cuda"


def types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the types in which there are sparse ways: on a GPU those of 16 bits."""
    return (torch.bfloat16, torch.float16) if on_gpu(device) else DTYPES


def sparse_kernels(dtype: torch.dtype, tokens: int, device: torch.device = _CPU) -> list[Kernel]:
    """Return the rows that can multiply by a weight whose values change: those of the best instruction set here."""
    name = str(dtype).removeprefix("torch.")
    rows = available("nm_matmul", "cuda" if on_gpu(device) else "cpu")
    found = [row for row in rows if row.dtype == name and row.refills]
    return widest([row for row in found if row.serves(tokens)])


def estimate_kernels(dtype: torch.dtype, device: torch.device = _CPU) -> list[Kernel]:
    """Return the rows that can multiply by a packed gradient: a pruned one, or an unbiased estimate."""
    found = sparse_kernels(dtype, 1 << 20, device)
    return found if on_gpu(device) else [kernel for kernel in found if kernel.layout == LAYOUTS[dtype]]


def forward(way: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return X W^T + bias by a dense way; x (tokens, in), weight (out, in), both of one dtype."""
    if way == TORCH:
        return functional.linear(x, weight, bias)
    return _onednn(x, _reordered(weight, len(x)) if way == REORDERED else weight, bias)


def data_gradient(way: str, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return dZ W by a dense way; gradient (tokens, out), weight (out, in)."""
    if way == TORCH:
        return gradient @ weight
    turned = weight.t().contiguous()
    return _onednn(gradient, _reordered(turned, len(gradient)) if way == REORDERED else turned)


def weight_gradient(way: str, gradient: Tensor, x: Tensor) -> Tensor:
    """Return dZ^T X by a dense way; gradient (tokens, out), x (tokens, in)."""
    if way == TORCH:
        return gradient.t() @ x
    turned = x.t().contiguous()
    if way == REORDERED:
        return _onednn(gradient.t().contiguous(), _reordered(turned, gradient.shape[1]))
    return _onednn(gradient.t(), turned)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _reordered(weight: Tensor, rows: int) -> Tensor:
    """Return a weight in the order that oneDNN multiplies by fastest: the copy is worth its time at many tokens."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def names(operand: Tensor) -> tuple[str, ...]:
    """Return the names of the dense ways that take an operand."""
    fits = operand.is_cpu and not on_gpu(operand.device) and operand.dtype in DTYPES
    return DENSE if fits and torch.backends.mkldnn.is_available() else (TORCH,)


def dense_ways(call: Callable[[str], Tensor], operand: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return what `measure.compare` takes: each dense way of one product of an operand, by name."""
    return {name: (lambda name=name: call(name)) for name in names(operand)}
