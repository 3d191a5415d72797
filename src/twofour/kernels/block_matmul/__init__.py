"""y = x @ W.T + bias with W of R x C blocks most of which are zero: reference and native kernels."""

from twofour.kernels.block_matmul.cpu import BlockMatmul, block_rows
from twofour.kernels.block_matmul.layout import from_layout, to_layout
from twofour.kernels.block_matmul.pointwise import BlockConv, pointwise_block_rows
from twofour.kernels.block_matmul.reference import block_matmul_reference

__all__ = [
    "BlockConv",
    "BlockMatmul",
    "block_matmul_reference",
    "block_rows",
    "from_layout",
    "pointwise_block_rows",
    "to_layout",
]
