"""The product with a weight in BSR, block by block, on a GPU: its operands and a plain reference.

y = x W^T, where each row of blocks of W meets only the inputs of the blocks it keeps: R C multiplications a kept block
and token, none for the others. One program makes the R outputs of a row of blocks for a tile of tokens, so that no two
write one place and a run repeats bit for bit. Each kept block is one product of tensor cores, (tokens, C) by (C, R), in
bfloat16 or float16 with sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.native import gpu
from twofour.packing import Packed
from twofour.patterns import Block
from twofour.shapes import Float, Int32

SIDES = (16, 32, 64, 128)
"""Sides of blocks: powers of two, as Triton's tiles are, from the 16 on that an instruction of tensor cores takes."""

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A weight of blocks as the kernel reads it.

    Attributes:
        values: The kept blocks, (blocks, R, C), zero outside the weight.
        starts: Where each row of blocks begins among them, and their number.
        columns: The column of each block.
        pattern: What the weight obeys.
        shape: (out, in).
    """

    values: Float[Tensor, "blocks r c"]
    starts: Int32[Tensor, " pointers"]
    columns: Int32[Tensor, " blocks"]
    pattern: Block
    shape: tuple[int, int]

    @property
    def of_part(self) -> int:
        """Outputs of each of the equal parts that no block reaches over."""
        return self.shape[0] // self.pattern.parts


def block_rows(packed: Packed, device: torch.device | None = None) -> BlockRows:
    """Take a packed weight apart, whose indices were checked when it was read; values go to the device.

    Args:
        packed: Of a pattern of blocks with sides of 16, 32, 64 or 128, in bfloat16 or float16; no convolution's.
        device: Where the product runs. Default: `gpu.device()`.

    Raises:
        KernelError: It is of another pattern, side or type.
    """
    header, rule = packed.header, packed.header.parsed()
    whole = isinstance(rule, Block) and rule.r in SIDES and rule.c in SIDES and len(header.shape) == 2
    if not whole or not isinstance(rule, Block) or packed.values.dtype not in DTYPES:
        raise KernelError(
            "the GPU's kernel of blocks cannot read a weight",
            got=f"{header.pattern} in {packed.values.dtype}",
            wanted=f"blocks of {', '.join(map(str, SIDES))} by the same in bfloat16 or float16, of a linear layer",
            remedy='twofour.packing.pack(weight, "block:32x32@0.9", dtype="bfloat16")',
        )
    device = gpu.device() if device is None else device
    rows = rule.parts * -(-(header.rows // rule.parts) // rule.r)
    starts, columns = packed.indices[: rows + 1], packed.indices[rows + 1 :]
    values = packed.values.view(-1, rule.r, rule.c)
    held = (values.to(device), starts.to(device).contiguous(), columns.to(device).contiguous())
    return BlockRows(*held, rule, (header.rows, header.reduction))


def multiply_reference(x: Float[Tensor, "tokens in"], weight: BlockRows) -> Float[Tensor, "tokens out"]:
    """Return x @ W.T in the type of `x`: all kept blocks at once, then a sum over each row of blocks."""
    (out, reduction), rule = weight.shape, weight.pattern
    rows = len(weight.starts) - 1
    across = -(-reduction // rule.c)
    padded = torch.nn.functional.pad(x, (0, across * rule.c - reduction)).view(len(x), across, rule.c)
    products = torch.einsum("tbc,brc->tbr", padded[:, weight.columns.long()], weight.values.to(x.dtype))
    row = torch.arange(rows, device=x.device).repeat_interleave(weight.starts.long().diff())
    sums = products.new_zeros(len(x), rows, rule.r).index_add_(1, row, products)
    return sums.view(len(x), rule.parts, -1)[:, :, : weight.of_part].reshape(len(x), out)
