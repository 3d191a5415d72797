# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""Starting the Triton kernels of few tokens; imports Triton, so it is imported where one is started."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofour.kernels.cuda import Configuration
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul.cuda.few_tokens_triton import few_tokens, one_to_four_tokens, summed
from twofour.native import gpu

_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_SUMMED_ROWS = 1024
"""Outputs that one program of the second kernel adds up."""


def _kernel_for(tensor_cores: bool, tokens: int) -> tuple[Any, int, torch.dtype]:
    """Return the kernel, the tokens of its block, and as what it reads the bits of inputs."""
    if tensor_cores:
        return few_tokens, 16 if tokens <= 16 else 32, torch.int16
    return one_to_four_tokens, min(4, triton.next_power_of_2(tokens)), torch.int64


def launch(
    configuration: Configuration,
    x: Tensor,
    parts: tuple[Tensor, ...],
    group: int,
    bias: Tensor | None,
    other: Tensor | None,
    y: Tensor,
    epilogue: Epilogue,
    kind: torch.dtype,
) -> None:
    """Fill y with epilogue(x @ W.T + bias).

    Args:
        configuration: (rows, groups, split, warps, stages, whether tensor cores multiply).
        x: (tokens, in) of `kind`, contiguous, at a multiple of 16 bytes.
        parts: Values, positions, and for int4 scales and zero points.
        group: Inputs that share a scale, or 0.
        bias: float32 (out,) or None.
        other: Second operand of the epilogue, (tokens, out), contiguous, or None.
        y: (tokens, out), contiguous.
        epilogue: What happens to the product.
        kind: Type that is multiplied in.
    """
    block, groups, split, warps, stages, tensor_cores = configuration
    values, codes, *scaled = parts
    assert values.shape[1] % (groups * split) == 0, (values.shape, configuration)
    steps = values.shape[1] // (groups * split)
    tokens, rows = y.shape
    partial = torch.empty(split, tokens, rows, dtype=torch.float32, device=y.device) if split > 1 else y
    kernel, block_tokens, bits = _kernel_for(bool(tensor_cores), tokens)
    grid = (triton.cdiv(rows, block), split, triton.cdiv(tokens, block_tokens))
    has_bias, bias, other = bias is not None, y if bias is None else bias, y if other is None else other
    after: dict[str, Any] = {"BIAS": has_bias, "ACTIVATION": epilogue.activation, "COMBINE": epilogue.combine}
    kernel[grid](
        *(x.view(-1).view(bits), values, codes, *(*scaled, values, values)[:2], bias, other, y, partial),
        *(tokens, rows, x.shape[1] // 4, values.shape[1], scaled[0].shape[1] if scaled else 0, steps),
        DTYPE=_KINDS[kind],
        GROUP=group,
        PARTIAL=split > 1,
        ZEROS=len(scaled) > 1,
        TOKENS=block_tokens,
        ROWS=block,
        GROUPS=groups,
        INTERPRETED=steps if gpu.interpreted() else 0,
        num_warps=warps,
        num_stages=stages,
        **after,
    )
    if split > 1:
        grid = (triton.cdiv(rows, _SUMMED_ROWS), tokens)
        summed[grid](partial, bias, other, y, tokens, rows, SPLIT=split, ROWS=_SUMMED_ROWS, **after)
