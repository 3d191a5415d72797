"""The call of the GPU's product with a weight of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.block_matmul.cuda.rows import BlockRows
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.native import gpu
from twofour.shapes import Float

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
"""What inputs may be; the kernel rounds them to the weight's type."""


def multiply(
    x: Float[Tensor, "tokens in"],
    weight: BlockRows,
    bias: Float[Tensor, " out"] | None = None,
    epilogue: Epilogue = PLAIN_EPILOGUE,
    other: Float[Tensor, "tokens out"] | None = None,
    *,
    block_tokens: int | None = None,
) -> Float[Tensor, "tokens out"]:
    """Return epilogue(x @ W.T + bias) by the Triton kernel; inputs are rounded to the weight's type.

    Args:
        x: Inputs in float32, bfloat16 or float16 on the weight's device; the answer has their type.
        weight: From `block_rows`.
        bias: float32 (out,) or None.
        epilogue: What happens to the product.
        other: Its second operand, or None.
        block_tokens: Tokens of a program, a power of two from 16. Default: 16 up to 16 tokens, else 64.

    Raises:
        KernelError: Triton cannot run here, or the inputs do not fit the weight.
    """
    if (reason := gpu.unavailable(triton=True)) is not None:
        raise KernelError(
            "the GPU's kernel of blocks cannot run",
            got=reason,
            wanted="a GPU, or Triton's interpreter",
            remedy="multiply by the CPU's rows: `twofour.kernels.matmul`",
        )
    if x.ndim != 2 or x.shape[1] != weight.shape[1] or x.device != weight.values.device:
        raise KernelError(
            "the inputs do not fit the weight",
            got=f"{tuple(x.shape)} on {x.device}",
            wanted=f"(tokens, {weight.shape[1]}) on {weight.values.device}",
            remedy="reshape the inputs to two axes, on the weight's device",
        )
    _require(x, weight, bias, block_tokens)
    epilogue.require(other, (len(x), weight.shape[0]))
    y = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    from twofour.kernels.block_matmul.cuda.rows_triton import launch  # imports Triton

    rounded = x.to(weight.values.dtype).contiguous()
    bias = None if bias is None else bias.float().contiguous()
    other = None if other is None else other.contiguous()
    launch(rounded, weight, bias, other, y, epilogue, block_tokens or (16 if len(x) <= 16 else 64))
    return y


def _require(x: Tensor, weight: BlockRows, bias: Tensor | None, block_tokens: int | None) -> None:
    device, out = weight.values.device, weight.shape[0]
    if x.dtype not in INPUTS:
        raise KernelError(
            "the inputs have a dtype that the GPU's kernel of blocks does not read",
            got=str(x.dtype),
            wanted=", ".join(map(str, INPUTS)),
            remedy="x.float()",
        )
    if bias is not None and (bias.shape != (out,) or bias.device != device):
        raise KernelError(
            "the bias does not fit the weight",
            got=f"{tuple(bias.shape)} on {bias.device}",
            wanted=f"({out},) on {device}",
            remedy="one number for each output, on the weight's device",
        )
    if block_tokens is not None and (block_tokens < 16 or block_tokens & (block_tokens - 1)):
        raise KernelError(
            "block_tokens is impossible",
            got=str(block_tokens),
            wanted="a power of two from 16",
            remedy="leave it out",
        )
