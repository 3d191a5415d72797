"""Activations, their gradients and gates on the CPU: rows of activation.inc."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.native.surroundings import plain

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


def gated_activation(x: Tensor, name: str, behind: bool = False) -> Tensor:
    """Return activation(first half) * second half of each row: the gate of an MLP whose two products are one.

    Args:
        x: float32 or bfloat16 (.., 2 * width) on the CPU.
        name: As in `activation`.
        behind: The second half is what is activated.

    Returns:
        (.., width) of x's dtype, contiguous, rounded once.

    Raises:
        KernelError: The operands do not fit.
    """
    (x,) = plain("a gate", x)
    if x.dtype not in DTYPES or x.ndim == 0 or x.shape[-1] % 2 or name not in ACTIVATIONS or name == "none":
        raise KernelError(
            "a gate does not fit",
            got=f"{name!r} of {x.dtype} {tuple(x.shape)}",
            wanted=f"one of {', '.join(list(ACTIVATIONS)[1:])} of float32 or bfloat16 (.., 2 * width)",
        )
    x = x if x.is_contiguous() else x.contiguous()
    answer = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device="cpu")
    code, row = list(ACTIVATIONS).index(name), native.best("activation").index
    native.extension().gated_activation(row, code, x, answer, behind, native.threads())
    return answer


def _run(name: str, x: Tensor, upstream: Tensor | None) -> Tensor:
    assert x.dtype in DTYPES and x.is_cpu, (x.dtype, x.device)
    answer = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    code, row = list(ACTIVATIONS).index(name), native.best("activation").index
    native.extension().activation(row, code, x.contiguous(), upstream, answer, native.threads())
    return answer
