"""The product with a weight of blocks in plain torch, block by block: what the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.packing import Packed
from twofour.patterns import Block
from twofour.shapes import Float


def block_matmul_reference(
    x: Float[Tensor, "*tokens in"], packed: Packed, bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*tokens out"]:
    """Return x @ W.T + bias, the sum of the products of the kept blocks alone.

    Args:
        x: (..., in), a floating dtype.
        packed: Weight (out, in) of blocks, its values real or whole numbers with scales.
        bias: (out,) or None.

    Returns:
        (..., out) in the dtype of `x`. An input that is not finite reaches the outputs of the blocks kept at its place.
    """
    header, rule = packed.header, packed.header.parsed()
    assert isinstance(rule, Block), rule
    out, reduction = header.rows, header.reduction
    _, down, _, across = rule.grid((out, reduction))
    of_part = out // rule.parts
    dense = packed.unpack().to(x.dtype)
    y = x.new_zeros(*x.shape[:-1], out)
    for number in map(int, packed.positions()):
        row, column = divmod(number, across)
        part, row = divmod(row, down)
        first, left = part * of_part + row * rule.r, column * rule.c
        rows = slice(first, min(first + rule.r, (part + 1) * of_part))
        columns = slice(left, min(left + rule.c, reduction))
        y[..., rows] += torch.nn.functional.linear(x[..., columns], dense[rows, columns])
    return y if bias is None else y + bias
