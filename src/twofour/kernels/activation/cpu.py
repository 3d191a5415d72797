"""Activations and their gradients on the CPU: rows of activation.inc."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.epilogue import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
"""What they are computed of, in float32, and answered in."""


def activation(x: Tensor, name: str) -> Tensor:
    """Return what `kernels.epilogue.ACTIVATIONS` does of x: off by a relative 1e-6 in float32.

    Args:
        x: float32 or bfloat16 of any shape, on the CPU.
        name: A key of `ACTIVATIONS` other than "none"; "gelu" is the erf form.

    Returns:
        The same shape and dtype, contiguous.
    """
    return _run(name, x, None)


def activation_gradient(upstream: Tensor, at: Tensor, name: str) -> Tensor:
    """Return dL/dx of y = activation(x).

    Derivatives are off by at most 3e-7 (torch's tanh form of GELU: 9e-7), that of relu by nothing. At infinite x they
    are the limits, 1 and 0, where torch's are NaN but for relu; that of its tanh form of GELU is NaN at large finite x
    too, 1e30 for one.

    Args:
        upstream: dL/dy, of x's shape and dtype.
        at: x; of "relu", y serves as well.
        name: As in `activation`.

    Returns:
        The same shape and dtype, contiguous.
    """
    return _run(name, at, upstream.contiguous())


def _run(name: str, x: Tensor, upstream: Tensor | None) -> Tensor:
    assert x.dtype in DTYPES and x.is_cpu, (x.dtype, x.device)
    answer = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    code, row = list(ACTIVATIONS).index(name), native.best("activation").index
    native.extension().activation(row, code, x.contiguous(), upstream, answer, native.threads())
    return answer
