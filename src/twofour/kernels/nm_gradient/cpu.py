"""The native pruning: a gradient in; a dense one, or a packed 2:4 operand of the data gradient out."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.nm_unbiased import LAYOUTS, with_header

MODES = ("magnitude", "rescaled", "random", "unbiased")
"""In the order of `GradientMode` in nm_gradient.h."""


def refuses(gradient: Tensor) -> str | None:
    """Return why a gradient (..., channels) cannot be pruned here, or None."""
    if not gradient.is_cpu:
        return f"on {gradient.device.type}: the kernels are for the CPU"
    if gradient.dtype not in LAYOUTS:
        return f"{str(gradient.dtype).removeprefix('torch.')}: float32 or bfloat16 is wanted"
    if gradient.shape[-1] % 4 or gradient.shape[-1] == 0:
        return f"{gradient.shape[-1]} output channels: a multiple of 4 is wanted"
    return None


def nm_gradient(gradient: Tensor, mode: str, *, eps: float = 0.0, seed: int = 0) -> Tensor:
    """Return the gradient with at most two of every four consecutive channels non-zero.

    Args:
        gradient: float32 or bfloat16 (samples, tokens, channels) on the CPU, channels a multiple of 4, any strides.
        mode: One of `MODES`, as `twofour.training.sdgp.pruned` describes them.
        eps: Added to the l1 norm that "rescaled" divides by.
        seed: 32 bits; the same seed and gradient give the same bits, whatever the instruction set and the threads.

    Returns:
        The same shape and dtype, contiguous.
    """
    out = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu")
    _prune(gradient, mode, eps, seed, out, packed=False)
    return out


def nm_gradient_packed(
    gradient: Tensor, mode: str, *, eps: float = 0.0, seed: int = 0, out: Tensor | None = None
) -> Tensor:
    """Do what `nm_gradient` does and pack the result: the left operand of dX = dZ W.

    Args:
        gradient: As in `nm_gradient`.
        mode: As in `nm_gradient`.
        eps: As in `nm_gradient`.
        seed: As in `nm_gradient`.
        out: uint8, contiguous, of at least `packed_bytes`: what is returned is its beginning.

    Returns:
        uint8: header and bytes of the layout in `LAYOUTS`, of a weight (samples * tokens, channels).
    """
    samples, tokens, columns = gradient.shape
    out = with_header(samples * tokens, columns, gradient.dtype, out)
    _prune(gradient, mode, eps, seed, out, packed=True)
    return out


def nm_gradient_through(
    upstream: Tensor,
    at: Tensor,
    activation: str,
    mode: str | None,
    *,
    eps: float = 0.0,
    seed: int = 0,
    packed: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dz of y = activation(z) and, from the same pass, the same pruned.

    The second is to the bit what `nm_gradient` or `nm_gradient_packed` makes of the first. Derivatives are off by at
    most 3e-7 (torch's tanh form of GELU: 9e-7), that of relu by nothing; they are not torch's bits, and those of two
    instruction sets may differ. At infinite z they are the limits, 1 and 0, where torch's are NaN but for relu; that of
    its tanh form of GELU is NaN at large finite z too, 1e30 for one.

    Args:
        upstream: dL/dy, float32 or bfloat16 (samples, tokens, channels) on the CPU, channels a multiple of 4.
        at: z, of the same shape and dtype; of "relu", y serves as well.
        activation: A key of `kernels.epilogue.ACTIVATIONS` other than "none".
        mode: As in `nm_gradient`; None: nothing is pruned.
        eps: As in `nm_gradient`.
        seed: As in `nm_gradient`.
        packed: Whether the second is what `nm_gradient_packed` returns.
        out: As in `nm_gradient_packed`.

    Returns:
        dL/dz, contiguous, and its pruned or packed form, or None.
    """
    assert refuses(upstream) is None and upstream.ndim == 3, (upstream.shape, upstream.dtype)
    samples, tokens, columns = upstream.shape
    gradient = torch.empty(upstream.shape, dtype=upstream.dtype, device="cpu")
    kept = None
    if mode is not None and packed:
        kept = with_header(samples * tokens, columns, upstream.dtype, out)
    elif mode is not None:
        kept = torch.empty_like(gradient)
    native.extension().nm_gradient_through(
        native.best("nm_gradient").index,
        list(ACTIVATIONS).index(activation),
        upstream.contiguous(),
        at.contiguous(),
        gradient,
        MODES.index(mode or MODES[0]),
        eps,
        seed & 0xFFFFFFFF,
        kept,
        packed,
        native.threads(),
    )
    return gradient, kept


def _prune(gradient: Tensor, mode: str, eps: float, seed: int, out: Tensor, *, packed: bool) -> None:
    assert refuses(gradient) is None and gradient.ndim == 3, (gradient.shape, gradient.dtype)
    samples, tokens, _ = gradient.shape
    across, along, beside = gradient.stride()
    if beside != 1 or (samples > 1 and across != tokens * along):
        gradient = gradient.contiguous()
    native.extension().nm_gradient(
        native.best("nm_gradient").index,
        gradient,
        MODES.index(mode),
        eps,
        seed & 0xFFFFFFFF,
        out,
        packed,
        native.threads(),
    )
