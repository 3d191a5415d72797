"""Products with weights of blocks on a GPU; not a row of the table: no GPU has run them yet."""

from twofour.kernels.block_matmul.cuda.multiply import multiply
from twofour.kernels.block_matmul.cuda.rows import BlockRows, block_rows, multiply_reference

__all__ = ["BlockRows", "block_rows", "multiply", "multiply_reference"]
